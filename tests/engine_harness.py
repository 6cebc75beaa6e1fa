"""A driver of an engine by hand: it feeds events, answers `Reduce` commands, and keeps what is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from gradserver.comparison import compare
from gradserver.engine import Engine
from gradserver.engine.commands import Close, Command, Contribution, Log, Measured, Reduce, Send
from gradserver.engine.events import Disconnected, Event, Finding, NonFinite, Received, Reduced, Sifted, Stop, Tick
from gradserver.engine.policy import OnNonFinite, Policy
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import (
    JOINED,
    PORTIONED,
    WORLD_BOUND,
    ExchangeKey,
    Kind,
    Layout,
    Op,
    Operation,
    Stream,
    layout_of,
)
from gradserver.protocol.keyed import keyed_hash
from gradserver.protocol.messages import (
    Agreed,
    Failure,
    Join,
    Leave,
    Message,
    Notice,
    Propose,
    Push,
    Result,
    RoundDone,
    Scope,
    Welcome,
)
from gradserver.protocol.plan import Plan, simple_plan
from gradserver.protocol.plan_changes import extend
from gradserver.protocol.shards import share_of
from tests import receivers

Array = npt.NDArray[np.float32]
M = TypeVar("M")

TIMEOUT = 10.0
SEATS = 100
"""The connection of rank 0. It is no small number, so that no test mistakes a connection for a rank."""


Outcome = tuple[float, bytes | None]
"""Weight and payload of one slice's result."""


@dataclass
class Task:
    """One exchange, as one participant sees it."""

    key: ExchangeKey
    operation: Operation
    layout: Layout
    values: Array | None
    weight: float
    epoch: int = 0
    sent: int = 0
    answers: dict[int, Outcome] = field(default_factory=dict)
    error: GradServerError | None = None
    mates: dict[int, dict[int, Task]] = field(default_factory=dict)
    """The tasks that have pushed each slice, this one included."""

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.answers) == self.layout.count

    def first_unanswered(self) -> int:
        return next(index for index in range(self.layout.count) if index not in self.answers)


@contextmanager
def small_slices(size: int, smallest_cost: int = 1, smallest_credit: int = 0) -> Iterator[None]:
    """Make slices of ``size`` bytes instead of a mebibyte, and so small credits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.protocol.exchange.SLICE_BYTES", size)
        patch.setattr("gradserver.protocol.exchange.MIN_SLICE_COST", smallest_cost)
        patch.setattr("gradserver.protocol.slicing.ALIGNMENT", 1)
        patch.setattr("gradserver.protocol.slicing.LEAST_BYTES", 1)
        patch.setattr("gradserver.protocol.exchange.SHARED_SLICE_COST", 0)
        patch.setattr("gradserver.engine.data.traffic.SLICE_BYTES", size)
        patch.setattr("gradserver.engine.data.group.SLICE_BYTES", size)
        patch.setattr("gradserver.engine.control.registry.MIN_CREDIT_BYTES", smallest_credit)
        for cached in (layout_of, share_of):
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in (layout_of, share_of):
                cached.cache_clear()


GRAINS: Final = (0, 1, 3, 12)
"""Grains: slices are as large as they may be, or smaller."""


@contextmanager
def grain_of(seed: int) -> Iterator[int]:
    """Choose what the sizes of slices follow from, in groups that begin meanwhile."""
    grain = GRAINS[seed % len(GRAINS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradserver.engine.control.registry.grain_for", lambda *_: grain)
        yield grain


def reference(reduce: Reduce) -> bytes | tuple[bytes, ...] | NonFinite | Sifted:
    """Reduce float32 contributions in the order given, in float32, as simply as possible."""
    if reduce.spans:
        return _sifted(reduce)
    if reduce.operation.kind in PORTIONED:
        given_by = [np.frombuffer(given.payload or b"", np.uint8) for given in reduce.contributions]
        rows = [payload.reshape(reduce.world, -1) for payload in given_by]
        return tuple(b"".join(row[place].tobytes() for row in rows) for place in range(reduce.world))
    if reduce.operation.kind in JOINED:
        return b"".join(bytes(given.payload or b"")[: reduce.nbytes] for given in reduce.contributions)
    if reduce.operation.op in (Op.NONE, Op.FIRST):
        return bytes(reduce.contributions[0].payload or b"")[: reduce.nbytes]
    arrays = []
    for given in reduce.contributions:
        if given.payload is None:
            continue
        array = np.frombuffer(given.payload, np.float32, reduce.nbytes // 4)
        if reduce.nonfinite is OnNonFinite.HALT and not np.isfinite(array).all():
            element = int(np.flatnonzero(~np.isfinite(array))[0])
            return NonFinite(given.member_id, element, str(array[element]))
        arrays.append((np.float32(given.weight), array))
    total = np.float32(sum(given.weight for given in reduce.contributions))
    out = np.zeros_like(arrays[0][1])
    with np.errstate(all="ignore"):  # values that are not finite may be passed on
        for weight, array in arrays:
            out += weight * array
        return (out / total if reduce.operation.op is Op.MEAN else out).tobytes()


def hashes_of(reduce: Reduce, done: object) -> list[bytes]:
    """Return the keyed hashes of the slices of a result, if they are wanted."""
    payload = done.payload if isinstance(done, Sifted) else done
    if reduce.hashes is None or not isinstance(payload, bytes):
        return []
    whole = reduce.operation.kind in JOINED or reduce.operation.is_lossy
    step = len(payload) if whole else reduce.each * reduce.nbytes // reduce.numel
    return [keyed_hash(payload[at : at + step], reduce.hashes.key) for at in range(0, len(payload), step)]


def _sifted(reduce: Reduce) -> bytes | Sifted:
    """Reduce slice by slice, without contributions that are not finite, or without a result."""
    findings, parts = [], []
    for index, (start, stop) in enumerate(reduce.spans, reduce.slice):
        cut = slice(4 * start, 4 * stop)
        given = [c._replace(payload=None if c.payload is None else bytes(c.payload)[cut]) for c in reduce.contributions]
        bad = {c.member_id: first for c in given if (first := _first_bad(c)) is not None}
        findings += [Finding(index, rank, start + first) for rank, first in bad.items()]
        good = [c for c in given if c.member_id not in bad]
        none = bad and (reduce.nonfinite is OnNonFinite.SKIP or all(c.payload is None for c in good))
        whole = reduce._replace(spans=(), nbytes=4 * (stop - start), contributions=good)
        made = bytes(whole.nbytes) if none else reference(whole)
        assert isinstance(made, bytes)
        parts.append(made)
    payload = b"".join(parts)
    return Sifted(payload, tuple(findings)) if findings else payload


def measured(reduce: Reduce, result: bytes) -> Sequence[Measured]:
    """Compare the contributions to a mean of float32, if that is asked for."""
    if reduce.measures is None:
        return ()
    given = [(one.member_id, one.weight) for one in reduce.contributions]
    size, mean = reduce.nbytes // 4, np.frombuffer(result, np.float32)
    rows = [None if c.payload is None else np.frombuffer(c.payload, np.float32, size) for c in reduce.contributions]
    compare(reduce.measures, given, rows, mean, float(mean @ mean), True, False)
    return tuple(reduce.measures.found)


def _first_bad(given: Contribution) -> int | None:
    values = np.frombuffer(given.payload or b"", np.float32)
    return None if np.isfinite(values).all() else int(np.flatnonzero(~np.isfinite(values))[0])


@dataclass
class Harness:
    """An engine, a clock, and everything that was sent.

    With ``lazy``, `Reduce` commands pile up in ``reduces`` instead of being answered at once.
    """

    worlds: dict[str, int | Policy] = field(default_factory=dict)
    credit: int = 1 << 24
    lazy: bool = False
    now: float = 0.0
    checked: bool = True
    inbox: dict[int, list[tuple[Message, Sequence[Buffer]]]] = field(default_factory=lambda: defaultdict(list))
    nonfinite: OnNonFinite = OnNonFinite.HALT
    compares: bool = False
    """True to compare contributions, as the reducer does."""
    reduces: list[Reduce] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    logs: list[Log] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = Engine(self.worlds, self.credit, nonfinite=self.nonfinite)

    # ── events ────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: Event) -> list[Command]:
        """Hand over one event (and the reductions that it leads to). Return all commands."""
        commands = self.engine.handle(event, self.now)
        if self.checked:
            self.engine.validate()
            receivers.check(commands)
        reduces = []
        for command in commands:
            match command:
                case Send(connection, message, payloads):
                    self.inbox[connection].append((message, payloads))
                case Reduce():
                    reduces.append(command)
                case Close(connection):
                    self.closed.append(connection)
                case Log():
                    self.logs.append(command)
        if self.lazy:
            self.reduces += reduces
            return commands
        return commands + [answer for reduce in reduces for answer in self.answer(reduce)]

    def answer(self, reduce: Reduce, outcome: Buffer | NonFinite | Sifted | None = None) -> list[Command]:
        """Carry out one reduction. The result goes to the targets, and back if it is to be kept."""
        done = reference(reduce) if outcome is None else outcome
        if not isinstance(done, NonFinite | Sifted | tuple):
            for target in reduce.targets:
                memoryview(target)[: len(done)] = done
        told = done if reduce.keep or isinstance(done, NonFinite | Sifted) else None
        found = measured(reduce, done) if self.compares and isinstance(done, bytes) else ()
        return self.feed(
            Reduced(
                reduce.group,
                reduce.epoch,
                reduce.key,
                reduce.slice,
                told,
                measured=found,
                hashes=hashes_of(reduce, done),
            )
        )

    def receive(self, connection: int, message: Message, *payloads: Buffer) -> list[Command]:
        return self.feed(Received(connection, message, payloads))

    def lose(self, rank: int, reason: str = "connection reset", *, ended: bool = False) -> list[Command]:
        return self.feed(Disconnected(SEATS + rank, reason, ended))

    def leave(self, rank: int, reason: str = "done") -> list[Command]:
        """Leave. The answer that it was heard is taken out of the inbox."""
        commands = self.receive(SEATS + rank, Leave(reason))
        self.inbox[SEATS + rank] = [(m, p) for m, p in self.inbox[SEATS + rank] if not isinstance(m, Leave)]
        return commands

    def wait(self, seconds: float) -> list[Command]:
        """Let time pass, and tell the engine."""
        self.now += seconds
        return self.feed(Tick())

    def stop(self, reason: str = "a signal") -> list[Command]:
        return self.feed(Stop(reason))

    # ── members ───────────────────────────────────────────────────────────────────────────────────────

    def join(
        self,
        connection: int,
        name: str = "",
        *,
        rank: int = -1,
        world: int = 0,
        group: str = "default",
        timeout: float = TIMEOUT,
    ) -> list[Command]:
        return self.receive(connection, Join(group, name or f"worker {connection}", rank, world, timeout))

    def assemble(self, world: int, plan: Plan | None = None, group: str = "default") -> None:
        """Make a complete group: rank r is called ``wr`` and has connection SEATS + r."""
        for rank in range(world):
            self.join(SEATS + rank, f"w{rank}", rank=rank, world=world, group=group)
        self.only(range(world), Welcome)
        if plan is not None:
            self.agree(plan, world)

    def agree(self, plan: Plan, world: int) -> list[Agreed]:
        for rank in range(world):
            self.propose(rank, plan)
        return self.only(range(world), Agreed)

    def agree_beside(self, modules: Sequence[Plan], world: int) -> None:
        """Agree on a plan of several sections, one after the other."""
        for count, module in enumerate(modules):
            for rank in range(world):
                self.receive(SEATS + rank, proposal(modules, count), module.encoded)
            self.only(range(world), Agreed)

    def propose(self, rank: int, plan: Plan) -> list[Command]:
        return self.receive(SEATS + rank, Propose(plan.hash), plan.encoded)

    def epoch_of(self, rank: int, key: ExchangeKey, operation: Operation | None) -> int:
        """Return the epoch that ``rank`` gives with the first slice of an exchange, as a worker does."""
        groups = [group for group in self.engine.control.groups.values() if group.member_id_of(SEATS + rank) >= 0]
        bound = operation is not None and operation.kind in WORLD_BOUND
        return groups[0].members.epoch if groups and (bound or key.stream == Stream.TRANSFER) else 0

    def push(
        self,
        rank: int,
        key: ExchangeKey,
        payload: Buffer | Array | None = None,
        *,
        index: int = 0,
        weight: float = 1.0,
        operation: Operation | None = None,
        epoch: int | None = None,
    ) -> list[Command]:
        """One contribution to one slice, in the membership that is in force if ``epoch`` is not given."""
        if epoch is None:
            epoch = self.epoch_of(rank, key, operation)
        if isinstance(payload, np.ndarray):
            payload = payload.tobytes()
        payloads = () if payload is None else (payload,)
        return self.receive(
            SEATS + rank, Push(key, index, weight, payload is not None, operation, epoch=epoch), *payloads
        )

    # ── what was sent ─────────────────────────────────────────────────────────────────────────────────

    def sent(self, rank: int) -> list[tuple[Message, Sequence[Buffer]]]:
        """Return what came for ``rank`` since this was last called."""
        return self.inbox.pop(SEATS + rank, [])

    def only(self, ranks: Sequence[int], kind: type[M]) -> list[M]:
        """Return the one message for each of ``ranks``, which must be of this kind."""
        found: list[M] = []
        for rank in ranks:
            messages = [message for message, _ in self.sent(rank)]
            assert len(messages) == 1, (rank, messages)
            assert isinstance(messages[0], kind), (rank, messages)
            found.append(messages[0])
        return found

    def failure(self, rank: int, scope: Scope = Scope.EXCHANGE, key: ExchangeKey | None = None) -> GradServerError:
        """Return the error that ``rank`` was told, and check that it was told nothing else."""
        (failure,) = self.only([rank], Failure)
        assert failure.scope is scope
        assert failure.key == key
        return failure.exception()

    def refusal(self, connection: int) -> GradServerError:
        """Return the error that ``connection`` was refused with."""
        messages = [message for message, _ in self.inbox.pop(connection, []) if not isinstance(message, Notice)]
        assert connection in self.closed
        assert len(messages) == 1, messages
        assert isinstance(messages[0], Failure)
        assert messages[0].scope is Scope.CONNECTION
        return messages[0].exception()

    def results(self, rank: int) -> dict[tuple[ExchangeKey, int], tuple[Result, Sequence[Buffer]]]:
        """Return the results for ``rank``, by exchange and slice. Each came once, and nothing else but rounds' ends."""
        found: dict[tuple[ExchangeKey, int], tuple[Result, Sequence[Buffer]]] = {}
        for message, payloads in self.sent(rank):
            if isinstance(message, RoundDone):
                continue
            assert isinstance(message, Result), message
            assert (message.key, message.slice) not in found, "the same result twice"
            found[message.key, message.slice] = (message, payloads)
        return found

    def told(self, rank: int, kind: type[M]) -> list[M]:
        """Return all messages of this kind for ``rank``; others stay."""
        waiting = self.inbox[SEATS + rank]
        self.inbox[SEATS + rank] = [(m, p) for m, p in waiting if not isinstance(m, kind)]
        return [message for message, _ in waiting if isinstance(message, kind)]

    def array(self, rank: int) -> Array:
        """Return the payload of the one result that came for ``rank``."""
        ((result, payloads),) = self.results(rank).values()
        assert result.present
        assert len(payloads) == 1
        return np.frombuffer(payloads[0], np.float32)

    def silent(self, *ranks: int) -> bool:
        """Return whether nothing came for any of them."""
        return not any(self.inbox.get(SEATS + rank) for rank in ranks)

    # ── looking inside ────────────────────────────────────────────────────────────────────────────────

    def group(self, name: str = "default") -> dict[str, Any]:
        """Return the snapshot of one group."""
        groups: Any = self.engine.snapshot(self.now)["groups"]
        return dict(groups[name])

    def open_exchanges(self, name: str = "default") -> int:
        return len(self.engine.data.groups[name].exchanges)


def bucket(number: int, part: int = 0) -> ExchangeKey:
    return ExchangeKey(Stream.BUCKET, number, part)


def collective(number: int, part: int = 0) -> ExchangeKey:
    return ExchangeKey(Stream.COLLECTIVE, number, part)


def transfer(number: int, source: int, target: int, tag: int = 0) -> ExchangeKey:
    return ExchangeKey(Stream.TRANSFER, number, tag, source, target)


def all_reduce(numel: int, op: Op = Op.MEAN) -> Operation:
    return Operation(Kind.ALL_REDUCE, op, FLOAT32, numel)


def plan_of(*sizes: int) -> Plan:
    """Return a plan of buckets ``b0``, ``b1``, … of float32."""
    return simple_plan([(f"b{index}", size) for index, size in enumerate(sizes)], FLOAT32)


def floats(*values: float) -> Array:
    return np.array(values, np.float32)


def modules_of(sizes: Sequence[int], sections: Sequence[int] = ()) -> list[Plan]:
    """Return the plans of modules that share a worker. Each has so many of the buckets; by default one has all."""
    bounds = accumulate(sections or (len(sizes),), initial=0)
    return [plan_of(*sizes[first:stop]) for first, stop in pairwise(bounds)]


def together(modules: Sequence[Plan]) -> Plan:
    """Return the plan of a group that has agreed on one of ``modules`` after the other, before its first round."""
    return reduce(lambda plan, module: extend(plan, 0, module), modules)


def proposal(modules: Sequence[Plan], count: int) -> Propose:
    """Return a worker's proposal of one of ``modules``, after it has agreed on those before it."""
    return Propose(modules[count].hash, 0, together(modules[:count]).hash if count else "")


def part_of(operation: Operation, layout: Layout, values: Array, index: int) -> Array:
    """Return the part of ``values`` for one slice: of elements for one rank each, those of every rank's."""
    start, stop = layout.span(index)
    if operation.kind in PORTIONED:
        return np.ascontiguousarray(values.reshape(-1, layout.numel)[:, start:stop]).reshape(-1)
    return values[start:stop]
