"""Contributions of all workers to all rounds, as they arrive: made once more from names, round by round.

    gradients     what the generator draws
    local SGD     W - (W - v) in float32: W are the group's weights, v is what the generator draws. A worker sets its
                  own weights to W - v before it sends them
    a lossy wire  what is decoded of the contribution, plus what was lost of this worker's earlier ones. A worker that
                  joins owes nothing

Encoding and decoding are the product's (`gradserver.protocol.codecs`, which has vectors of its own). What is owed, and
for how long, is followed here. The coordinator owes, too: what was lost of the last mean is added to the next one. It
keeps that when a worker is lost, and when it is killed itself. Several data shards lose it with any of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs import seed_of
from gradserver.tools.chaos import generator, recount
from gradserver.tools.chaos.replica import Replica
from gradserver.tools.chaos.workload import Bucket, Workload

Array = npt.NDArray[Any]

NO_STEPS: Final = 1e-300
"""Weight of a contribution of local SGD without any step. It is zeros, which are not sent."""
_NEVER: Final = 1 << 62
"""Number of a round that does not come."""
_KEPT: Final = 4
"""Number of rounds in which contributions are kept: a stale one is looked for in later rounds."""
_FORGETS_SECONDS: Final = 20.0
"""Time after the loss of a data shard in which means may begin without what is owed to them."""


class Wired(NamedTuple):
    """A vector as it arrives.

    Attributes:
        values: what is decoded.
        payloads: bytes of each slice on the wire; empty if they are those of the values.
        owed: what was lost, with a lossy wire.
    """

    values: Array
    payloads: tuple[bytes, ...] = ()
    owed: Array | None = None

    def digest(self, bucket: Bucket, slices: Collection[int] | None = None) -> int:
        """Compute the ledger's digest of the vector, or of some of its slices."""
        layout, total = bucket.share.layout, 0
        for index in range(layout.count) if slices is None else slices:
            start, stop = layout.span(index)
            if not self.payloads:
                total += recount.digest(self.values[start:stop], bucket.at + 4 * start)
                continue
            assert bucket.codec is not None
            payload = np.frombuffer(self.payloads[index], np.uint8)
            for _, elements, piece in bucket.codec.blocks(stop - start):
                first, last = start + elements.start, start + elements.stop
                for part, at in bucket.codec.places(first, last, bucket.size):
                    total += recount.digest(payload[piece][part], bucket.at + at)
        return total % recount.MODULUS


def over_the_wire(bucket: Bucket, number: int, values: Array, owed: Array, slices: Collection[int]) -> Wired:
    """Encode some slices of ``values`` and of what is ``owed``. The others are zeros, and stay owed."""
    codec, layout = bucket.codec, bucket.share.layout
    assert codec is not None
    arrived, left, payloads = np.zeros(bucket.size, np.float32), owed.copy(), []
    for index in range(layout.count):
        start, stop = layout.span(index)
        if index not in slices:
            payloads.append(b"")
            continue
        given, seed = values[start:stop] + owed[start:stop], seed_of(number, bucket.part, start)
        payload = codec.encode(given, seed=seed)
        codec.decode(payload, stop - start, arrived[start:stop], seed)
        left[start:stop] = given - arrived[start:stop]
        payloads.append(bytes(payload))
    return Wired(arrived, tuple(payloads), left)


class _Life(NamedTuple):
    """The time from one joining of a worker to its loss: the round of it, and the first one that it gave something to.

    What it gave there need not count. It has made its steps, and those count with fragments that it sends later.
    """

    joined: int
    first: int


class Contributions:
    """Contributions of all workers, and what each of them owes."""

    def __init__(self, workload: Workload, replica: Replica) -> None:
        self._workload, self._replica = workload, replica
        self._joined: dict[str, list[_Life]] = {}
        """Lives of each worker, in their order."""
        self._lives: dict[str, _Life] = {}
        """Present life of each worker that has contributed."""
        self._owed: dict[tuple[str, int], Array] = {}
        """Loss of the encoding of a worker's contributions, by its name and the bucket."""
        self._made: dict[tuple[str, int, int], Wired] = {}
        """Contributions to the last rounds, by name, round and bucket."""

    def join(self, name: str, number: int) -> None:
        """Note that a worker has joined, to take part from round ``number`` on."""
        self._joined.setdefault(name, []).append(_Life(number, _NEVER))

    def give(self, name: str, number: int) -> None:
        """Note that a worker begins to contribute to round ``number``, which need not count."""
        lives = self._joined.setdefault(name, [_Life(0, _NEVER)])
        lives[-1] = lives[-1]._replace(first=min(lives[-1].first, number))

    def counts(self, name: str, number: int) -> bool:
        """Tell whether a contribution to round ``number`` has a weight."""
        return self._workload.is_local or generator.weight(self._workload.seed, name, number) > 0

    def weight(self, name: str, number: int) -> float:
        """Return the weight of a contribution. One of local SGD has all steps since this fragment was last sent."""
        workload = self._workload
        if not workload.is_local:
            return generator.weight(workload.seed, name, number)
        first = max(self._life(name, number).first, number - workload.fragments + 1)
        total = sum(generator.weight(workload.seed, name, one) for one in range(first, number + 1))
        return total or NO_STEPS

    def given(self, name: str, number: int, bucket: Bucket) -> Wired:
        """Return the contribution to a bucket of round ``number``."""
        key = name, number, bucket.part
        if key not in self._made:
            self._made[key] = self._make(name, number, bucket)
        return self._made[key]

    def end(self, number: int, names: Collection[str]) -> None:
        """End round ``number``, to which these workers have contributed. They owe what was lost."""
        for name in names:
            life = self._life(name, number)
            if self._lives.get(name) != life:
                self._owed = {key: owed for key, owed in self._owed.items() if key[0] != name}
            self._lives[name] = life
            for bucket in self._workload.buckets(number):
                made = self._made.get((name, number, bucket.part))
                if made is not None and made.owed is not None:
                    self._owed[name, bucket.part] = made.owed
        self._made = {key: made for key, made in self._made.items() if key[1] > number - _KEPT}

    def _life(self, name: str, number: int) -> _Life:
        lives = [life for life in self._joined.get(name, ()) if life.joined <= number]
        life = lives[-1] if lives else _Life(0, _NEVER)
        return life._replace(first=min(life.first, number))

    def _make(self, name: str, number: int, bucket: Bucket) -> Wired:
        seed, weight = self._workload.seed, self.weight(name, number)
        values: Array = np.concatenate([generator.values(seed, name, number, vector) for vector in bucket.vectors])
        if self._workload.is_local:
            weights = self._replica.weights(bucket.vectors)
            values = weights - (weights - values) if weight > NO_STEPS else np.zeros_like(values)
        if bucket.codec is None or weight <= NO_STEPS:
            return Wired(values)
        is_new = self._lives.get(name) != self._life(name, number)
        owed = None if is_new else self._owed.get((name, bucket.part))
        owed = np.zeros(bucket.size, np.float32) if owed is None else owed
        return over_the_wire(bucket, number, values, owed, range(bucket.share.layout.count))


class Means:
    """Means of the contributions to a round as members decode them, and what the coordinator owes."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._owed: dict[int, Array] = {}
        """Loss of the encoding of a bucket's means."""
        self._losses: list[float] = []
        """Times at which processes were lost that owed something."""

    def lose(self, at: float) -> None:
        """Note that a data shard, or the coordinator with all of them, was lost."""
        if self._workload.shards > 1:
            self._losses.append(at)

    def owes(self, bucket: Bucket, moment: float) -> list[Array]:
        """List what the coordinator can owe to a mean that was made at this ``moment``."""
        nothing = np.zeros(bucket.size, np.float32)
        owed = self._owed.get(bucket.part, nothing)
        if bucket.codec is None or not any(at - 1.0 <= moment <= at + _FORGETS_SECONDS for at in self._losses):
            return [owed]
        found, layout = [], bucket.share.layout
        for choice in range(1 << layout.count):
            one = owed.copy()
            for index in range(layout.count):
                if choice >> index & 1:
                    one[slice(*layout.span(index))] = 0
            found.append(one)
        return found

    def made(self, bucket: Bucket, number: int, rows: Sequence[recount.Row], cut: recount.Cut, owed: Array) -> Wired:
        """Compute the mean of rows, as members decode it."""
        mean = recount.bucket(bucket.share, rows, cut, bucket.size, self._workload.mean)
        if bucket.codec is None:
            return Wired(mean)
        layout = bucket.share.layout
        given = [index for index in range(layout.count) if any(_has(row, cut, index) for row in rows)]
        return over_the_wire(bucket, number, mean, owed, given)

    def end(self, bucket: Bucket, made: Wired) -> None:
        """Owe what was lost of this mean."""
        if made.owed is not None:
            self._owed[bucket.part] = made.owed


def _has(row: recount.Row, cut: recount.Cut, index: int) -> bool:
    """Tell whether a row counts in a slice."""
    name, weight, _ = row
    return weight > 0 and (name not in cut or index in cut[name])
