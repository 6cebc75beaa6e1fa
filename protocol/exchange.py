"""Exchanges: what is exchanged, and how it is cut.

Every operation of gradserver, from one gradient bucket to a send, is one **exchange**. It is cut into slices. Every
participant contributes exactly one message to each slice (some of them empty), and gets exactly one result for it (some
of them empty). Operations differ in the participants that give bytes, in those that get bytes, and in what happens in
between. That is this module.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import Codec, codec_of
from gradserver.protocol.dtypes import FLOAT32, UINT8, DType
from gradserver.protocol.errors import InvalidArgumentError, UnsupportedOperationError
from gradserver.protocol.limits import MIN_SLICE_COST, SHARED_SLICE_COST, SLICE_BYTES
from gradserver.protocol.slicing import step_of

EXACT: Final = codec_of("fp32")
"""The codec without loss: the only one for types other than float32, and the default."""


class Stream(IntEnum):
    """The sequence that an exchange belongs to. Each is matched among workers by its own numbers."""

    BUCKET = 0
    """``number`` is the round, ``part`` the bucket's place in the plan."""
    COLLECTIVE = 1
    """``number`` counts the group's collectives, which all members call in the same order.

    ``part`` is the round in which it was called, and ``number`` counts those of that round. So a worker that joins
    needs to know no number.
    """
    TRANSFER = 2
    """``number`` counts the sends from ``source`` to ``target`` with tag ``part``; a state's have `STATE_TAG`."""


BUCKET: Final = Stream.BUCKET
COLLECTIVE: Final = Stream.COLLECTIVE
TRANSFER: Final = Stream.TRANSFER
"""Streams by names of their own: in a module that has one, looking it up takes a tenth of what `Stream` takes."""

STATE_TAG: Final = 1 << 61
"""The difference between the number of a transfer of state and the tag of its sends."""
ANSWER_TAG: Final = 1 << 60
"""The difference between a caller's tag and that of answers about its transfers. Callers' tags are below."""


class ExchangeKey(NamedTuple):
    """The name of one exchange within a group. Keys order as tuples, and that order is the same for every member."""

    stream: int
    number: int
    part: int = 0
    source: int = -1
    target: int = -1


AMONG_MEMBERS: Final = ExchangeKey(Stream.TRANSFER, 0, STATE_TAG - 1, 0, 0)
"""Key with which members are told that nothing more comes of what they exchange among themselves."""


def is_state(key: ExchangeKey) -> bool:
    """Return whether it is a part of the state that a member sends to a learner."""
    return key.stream == TRANSFER and key.part >= STATE_TAG


class Pool(IntEnum):
    """The credit that an exchange draws on. Pools are separate so that none can starve another into a deadlock."""

    BUCKETS = 0
    COLLECTIVES = 1
    SENDS = 2
    RECEIVES = 3


_POOLS: Final = (Pool.BUCKETS, Pool.COLLECTIVES)
"""Pools of the streams that have one for all members."""


def pool_of(key: ExchangeKey, member_id: int) -> Pool:
    """Return the pool that ``member_id`` draws on to take part in ``key``."""
    if key.stream == TRANSFER:
        return Pool.SENDS if member_id == key.source else Pool.RECEIVES
    return _POOLS[key.stream]


class Kind(IntEnum):
    """The treatment of bytes by an exchange."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    BARRIER = 4
    TRANSFER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    COMMIT = 9
    """A reduction of gradients among the members: all of one membership say that they have the result.

    It is done when every member has said so. Otherwise it is void, for all members alike.
    """


class Op(IntEnum):
    """Reduction of contributions to one. MEAN is weighted: ``sum(w·g) / sum(w)``."""

    NONE = 0
    MEAN = 1
    SUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    FIRST = 6
    """The data of the lowest rank that gives any with a weight above zero; it keeps buffers equal.

    If no rank gives any, members leave their memory as it is.
    """
    FRAMED = 7
    """Bytes that are passed on, each part behind its length (`gradserver.protocol.frames`): parts may differ in
    length."""


_MEAN, _FRAMED = Op.MEAN, Op.FRAMED


@dataclass(frozen=True, slots=True)
class Operation:
    """Everything that members must agree on before bytes meet.

    Attributes:
        kind: what is done.
        op: how contributions are reduced; NONE where nothing is.
        dtype: element type.
        numel: elements that one participant gives (in REDUCE_SCATTER, SCATTER and ALL_TO_ALL: to all together).
        root: member id of the one that broadcasts, scatters, or gathers; -1 elsewhere.
        codec: how float32 travels, there and back.
    """

    kind: Kind
    op: Op
    dtype: DType
    numel: int
    root: int = -1
    codec: Codec = EXACT

    def __hash__(self) -> int:
        """Hash some parts only. Few operations differ in the others alone, and those take longer to hash."""
        return hash((self.kind, self.op, self.numel, self.root))

    @property
    def is_lossy(self) -> bool:
        """True if the result can differ, bit by bit, from what was sent."""
        return self.codec is not EXACT

    def __str__(self) -> str:
        what = self.kind.name.lower()
        if self.op:
            what += f"({self.op.name.lower()})"
        if self.kind is Kind.BARRIER:
            return what if self.dtype == UINT8 else f"a collective of {self.dtype.name}[0]"
        of = f" of {self.dtype.name}[{self.numel}]"
        way = "to" if self.kind is Kind.GATHER else "from"
        what += of + (f" {way} rank {self.root}" if self.root >= 0 else "")
        return what + (f" as {self.codec.name}" if self.is_lossy else "")


@lru_cache(maxsize=4096)
def operation_of(kind: Kind, op: Op, dtype: DType, numel: int, root: int = -1, codec: Codec = EXACT) -> Operation:
    """Return the operation of these parts. It is always the same object, so comparing it is quick.

    Raises:
        UnsupportedOperationError: ``op`` is not defined for ``dtype``, or its result cannot travel as ``codec``.
    """
    check_reducible(op, dtype)
    check_codec(kind, op, dtype, codec)
    return Operation(kind, op, dtype, numel, root, codec)


def check_reducible(op: Op, dtype: DType) -> None:
    """Raise UnsupportedOperationError unless ``op`` is defined for ``dtype``."""
    if op is _MEAN and not dtype.is_floating:
        article = "an" if dtype.name.startswith("i") else "a"
        raise UnsupportedOperationError(
            f"the mean of {dtype.name} is not {article} {dtype.name}: use op='sum', or convert to a floating type"
        )
    if op is _FRAMED and dtype != UINT8:
        raise UnsupportedOperationError(f"parts of different lengths travel as bytes, not as {dtype.name}")
    if dtype.kind == "c" and op in (Op.MIN, Op.MAX):
        raise UnsupportedOperationError(f"complex numbers have no order: no {op.name.lower()} of {dtype.name}")


def check_codec(kind: Kind, op: Op, dtype: DType, codec: Codec) -> None:
    """Raise UnsupportedOperationError unless this can travel as ``codec``: what may be lost is known of a mean only."""
    if codec is not EXACT and (kind is not Kind.ALL_REDUCE or op is not Op.MEAN or dtype != FLOAT32):
        what = f"{kind.name.lower()}({op.name.lower()}) of {dtype.name}"
        raise UnsupportedOperationError(f"{what} cannot travel as {codec.name}: only the mean of float32 can")
    if codec is not EXACT and codec.nbytes(SLICE_BYTES // 4) > SLICE_BYTES:
        raise UnsupportedOperationError(f"{codec.name} would send more bytes than fp32: keep fewer elements")


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of an operation into slices, the same at every participant and over every channel.

    A tensor is cut into chunks and these into slices, which do not cross chunks. Most tensors have one chunk.
    REDUCE_SCATTER has one for each rank. What is shared among several shards has one for each of them.

    Attributes:
        count: number of slices; 0 for an empty tensor.
        step: elements in every slice but the last of a chunk.
        bounds: the first element of each chunk, and the number of elements.
        firsts: the first slice of each chunk, and the number of slices.
        numel: elements in all.
        itemsize: bytes in an element. One element each for every rank (SCATTER, ALL_TO_ALL) is one element together.
        replies: how many times larger a reply is than a contribution (all_gather: the world size).
        parts: how many times smaller it is (SCATTER: the world size).
        codec: how elements travel.
    """

    count: int
    step: int
    bounds: tuple[int, ...]
    firsts: tuple[int, ...]
    numel: int
    itemsize: int
    replies: int
    codec: Codec = EXACT
    parts: int = 1
    _alone: int = field(init=False, compare=False, repr=False)  # bytes of the only slice; -1 if not alone, or lossy
    _full: int = field(init=False, compare=False, repr=False)  # bytes of a slice of ``step`` elements

    def __post_init__(self) -> None:
        is_exact = self.codec is EXACT
        alone = self.numel * self.itemsize if self.count == 1 and is_exact else -1
        object.__setattr__(self, "_alone", alone)
        object.__setattr__(self, "_full", self.step * self.itemsize if is_exact else self.codec.nbytes(self.step))

    def span(self, index: int) -> tuple[int, int]:
        """Return the first element of slice ``index``, and the one behind its last."""
        if len(self.firsts) == 2:
            start = index * self.step
            return start, min(start + self.step, self.numel)
        chunk = bisect_right(self.firsts, index) - 1
        start = self.bounds[chunk] + (index - self.firsts[chunk]) * self.step
        return start, min(start + self.step, self.bounds[chunk + 1])

    def owner(self, index: int) -> int:
        """Return the chunk that slice ``index`` lies in: of REDUCE_SCATTER, the rank that gets it."""
        return 0 if len(self.firsts) == 2 else bisect_right(self.firsts, index) - 1

    def nbytes(self, index: int) -> int:
        """Return the bytes of one contribution to slice ``index``."""
        if self._alone >= 0:
            return self._alone
        start, stop = self.span(index)
        if (numel := stop - start) == self.step:
            return self._full
        return numel * self.itemsize if self.codec is EXACT else self.codec.nbytes(numel)

    def run_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of one contribution to the slices from ``start`` up to ``stop``."""
        if stop - start == 1:
            return self.nbytes(start)
        if self.codec is not EXACT or start == stop:
            return sum(self.nbytes(index) for index in range(start, stop))
        return (self.span(stop - 1)[1] - self.span(start)[0]) * self.itemsize

    def reply_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the reply to the slices from ``start`` up to ``stop``."""
        return self.run_bytes(start, stop) * self.replies // self.parts

    def run_numel(self, start: int, stop: int) -> int:
        """Return the elements of the slices from ``start`` up to ``stop``."""
        return self.span(stop - 1)[1] - self.span(start)[0] if start < stop else 0

    def cost(self, index: int) -> int:
        """Return the credit, in bytes, of slice ``index`` from push to result: the larger of the two."""
        return max(self.nbytes(index) * self.replies, MIN_SLICE_COST)

    def run_cost(self, start: int, stop: int, shared: bool, first: int = 0) -> int:
        """Return the credit for the slices from ``start`` up to ``stop``; shared memory needs next to none.

        ``first`` is the shard's first slice of the exchange.
        """
        if shared:
            return SHARED_SLICE_COST * (stop - start) + (MIN_SLICE_COST if start == first else 0)
        if stop - start == 1:  # by far the most frequent
            return self.cost(start)
        return sum(self.cost(index) for index in range(start, stop))


def unasked_cost(payload: Buffer | None) -> int:
    """Return what an unasked result takes of its receiver's backlog, in bytes, however short it is."""
    return max(MIN_SLICE_COST, 0 if payload is None else len(payload))


@lru_cache(maxsize=4096)
def layout_of(operation: Operation, world_size: int, grain: int = 0, unit: int = 1) -> Layout:
    """Cut ``operation`` among ``world_size`` participants; ``grain`` and ``unit`` as in `cut`."""
    numel = operation.numel
    if operation.kind is Kind.BARRIER:
        return Layout(count=1, step=1, bounds=(0, 0), firsts=(0, 1), numel=0, itemsize=0, replies=1)
    if operation.kind not in DIVIDED:
        return cut(operation, (0, numel), world_size if operation.kind in JOINED else 1, grain, unit)
    chunk, rest = divmod(numel, world_size)
    if rest:
        raise InvalidArgumentError(
            f"{operation.kind.name.lower()} of {numel} elements among {world_size} workers: "
            f"the first dimension must be divisible by the world size"
        )
    if operation.kind in PORTIONED:
        itemsize = operation.dtype.itemsize * world_size
        count = -(-chunk // (step := max(1, SLICE_BYTES // itemsize)))
        parts = world_size if operation.kind is Kind.SCATTER else 1
        return Layout(count, step, (0, chunk), (0, count), chunk, itemsize, 1, parts=parts)
    return cut(operation, tuple(rank * chunk for rank in range(world_size + 1)))


def cut(operation: Operation, bounds: tuple[int, ...], replies: int = 1, grain: int = 0, unit: int = 1) -> Layout:
    """Cut ``operation`` between ``bounds``, and this into slices: the largest, or whole units by ``grain``."""
    itemsize = operation.dtype.itemsize
    step = max(1, SLICE_BYTES // (itemsize * replies))
    if grain and operation.kind in SLICED:
        numel = -(-operation.numel // max(sum(start < stop for start, stop in pairwise(bounds)), 1))
        step = min(step, step_of(numel, itemsize, operation.codec if operation.is_lossy else None, grain, unit))
    counts = (-(-(stop - start) // step) for start, stop in pairwise(bounds))
    firsts = tuple(accumulate(counts, initial=0))
    return Layout(firsts[-1], step, bounds, firsts, operation.numel, itemsize, replies, operation.codec)


SLICED: Final = frozenset({Kind.ALL_REDUCE, Kind.BROADCAST})
"""Kinds with slices that follow from the group's links. Others are of many small tensors, or of a member's portions."""

JOINED: Final = frozenset({Kind.ALL_GATHER, Kind.GATHER})
"""Kinds that put all contributions one behind the other."""

PORTIONED: Final = frozenset({Kind.SCATTER, Kind.ALL_TO_ALL})
"""Kinds that give each rank another part of each slice. A slice has a portion for each rank, one behind the other."""

DIVIDED: Final = PORTIONED | {Kind.REDUCE_SCATTER}
"""Kinds that divide the elements of one contribution among all."""

ROOTED: Final = frozenset({Kind.BROADCAST, Kind.GATHER, Kind.SCATTER})
"""Kinds with bytes from one rank, or to one."""

WORLD_BOUND: Final = JOINED | DIVIDED | {Kind.COMMIT}
"""Kinds that depend on the number of participants and on their order, or that need all of them."""

PERSONAL: Final = DIVIDED | {Kind.GATHER}
"""Kinds with different bytes for different ranks: no other member can pass on a result that one lacks."""

FRAMING: Final = JOINED | PORTIONED
"""Kinds that `Op.FRAMED` is defined for."""

IN_PLACE: Final = frozenset({Kind.ALL_REDUCE, Kind.BROADCAST, Kind.TRANSFER})
"""Kinds that give each rank as many bytes as it contributes. In shared memory, each can take whole runs of slices."""

_GIVEN_BY_SOME: Final = frozenset({Kind.BROADCAST, Kind.SCATTER, Kind.TRANSFER, Kind.BARRIER})
_SENT_TO_SOME: Final = frozenset({Kind.BROADCAST, Kind.GATHER, Kind.TRANSFER, Kind.REDUCE_SCATTER, Kind.BARRIER})


def gives(operation: Operation, member_id: int, key: ExchangeKey) -> bool:
    """Return whether ``member_id`` has bytes to contribute."""
    if operation.kind not in _GIVEN_BY_SOME:
        return True
    match operation.kind:
        case Kind.BROADCAST | Kind.SCATTER:
            return member_id == operation.root
        case Kind.TRANSFER:
            return member_id == key.source
        case Kind.BARRIER:
            return False
    return True


def gets(operation: Operation, member_id: int, key: ExchangeKey, owner: int) -> bool:
    """Return whether ``member_id`` is sent bytes for a slice in the chunk of ``owner``. Both may be ranks instead."""
    if operation.kind not in _SENT_TO_SOME:
        return True
    match operation.kind:
        case Kind.BROADCAST:
            return member_id != operation.root
        case Kind.GATHER:
            return member_id == operation.root
        case Kind.TRANSFER:
            return member_id == key.target
        case Kind.REDUCE_SCATTER:
            return member_id == owner
        case Kind.BARRIER:
            return False
    return True
