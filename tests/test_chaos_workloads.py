"""Tests that the oracle of `gradserver chaos` follows local SGD and lossy wires, and finds what is not kept of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from gradserver.engine.commands import RESULT, Contribution, Digests, Memory, Reduce
from gradserver.engine.journal_state import Dated
from gradserver.engine.records import Epoch, Group, Round, RoundRecord
from gradserver.protocol.codecs import Feedback, codec_of, seed_of
from gradserver.protocol.digest import MODULUS, places
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.plan import Plan, Section
from gradserver.protocol.plan_codecs import with_codec
from gradserver.reducer import reduce
from gradserver.tools.chaos import generator
from gradserver.tools.chaos.contributions import NO_STEPS, Contributions
from gradserver.tools.chaos.oracle import Oracle
from gradserver.tools.chaos.replica import Replica
from gradserver.tools.chaos.workload import Workload
from gradserver.worker.local_sgd.fragments import make_fragments
from gradserver.worker.local_sgd.outer import description, make_outer

Array = np.ndarray[tuple[int], np.dtype[np.float32]]
NAMES = ("ada", "bob", "cyd")
ROUNDS = 6
SEED = 11
LOCAL = Workload(SEED, outer="nesterov")
STREAMED = Workload(SEED, outer="nesterov", fragments=2, wire="int8")
WORKLOADS = [
    LOCAL,
    Workload(SEED, outer="average", fragments=3),
    STREAMED,
    *(Workload(SEED, wire=wire) for wire in ("bf16", "fp16", "int8", "topk:0.01", "randomk:0.1")),
    Workload(SEED, shards=3, wire="int8"),
]


def plan_of(workload: Workload) -> tuple[Plan, list[list[int]]]:
    """Return the plan that workers agree on, and the vectors of each section's last bucket."""
    codec = codec_of(workload.wire)
    if not workload.is_local:
        return with_codec(generator.plan(), codec), []
    module = nn.Module()
    for vector, size in enumerate(generator.SIZES):
        module.register_parameter(f"{vector}", nn.Parameter(torch.zeros(size)))
    fragments = make_fragments(module, workload.fragments, ())
    outer = description(make_outer(workload.outer, list(module.parameters())))
    plans = [with_codec(one.proposal(outer, None), codec) for one in fragments]
    sections = tuple(Section(number, 0, 2 * number, 2) for number in range(len(plans)))
    buckets = tuple(bucket for plan in plans for bucket in plan.buckets)
    return Plan(buckets, sections), [[int(part.name) for part in one.parts] for one in fragments]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_the_buckets_are_those_of_the_product(workload: Workload) -> None:
    plan, vectors = plan_of(workload)
    for number in range(workload.fragments):
        for bucket in workload.buckets(number):
            spec = plan.buckets[bucket.part]
            assert (bucket.size, bucket.at) == (spec.numel, places(plan)[bucket.part])
            assert bucket.codec == (spec.codec if spec.operation.is_lossy else None)
            if vectors:
                assert list(bucket.vectors) == vectors[number]


@dataclass
class World:
    """A group with the product's encoding, means and outer optimizer, unless a test plants a fault.

    ``plant`` is called before each round with its number, and may change what is kept.
    """

    workload: Workload
    plant: Callable[[World, int], object] = lambda _world, _number: None
    owed: dict[tuple[str, int], Feedback] = field(default_factory=dict)
    memories: dict[tuple[int, int], Memory] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    sent: dict[tuple[str, int], float] = field(default_factory=dict)
    rejoins: int = -1
    """Round before which the last worker joins anew."""

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.workload)
        self.plan, _ = plan_of(self.workload)
        self.weights = [nn.Parameter(torch.zeros(size), requires_grad=False) for size in generator.SIZES]
        self.outer = make_outer(self.workload.outer, self.weights) if self.workload.is_local else None

    def judged(self, rounds: int = ROUNDS) -> Oracle:
        oracle = self.oracle
        for dated in (Group("default", len(NAMES), 20.0), Epoch("default", 1, 0, tuple(enumerate(NAMES)), "complete")):
            oracle.take(Dated(0.0, dated))
        for name in NAMES:
            oracle.hear({"kind": "entered", "name": name, "round": 0, "at": 0.0})
        for number in range(rounds):
            if number == self.rejoins:
                self.join(oracle, NAMES[-1], number)
            self.plant(self, number)
            self.exchange(oracle, number)
            oracle.settle()
        oracle.settle(everything=True)
        return oracle

    def join(self, oracle: Oracle, name: str, number: int) -> None:
        oracle.hear({"kind": "entered", "name": name, "round": number, "at": number})
        self.owed = {key: owed for key, owed in self.owed.items() if key[0] != name}
        self.sent.update({(name, fragment): self.spent.get(name, 0.0) for fragment in range(self.workload.fragments)})

    def exchange(self, oracle: Oracle, number: int) -> None:
        weights = {name: self.weight(name, number) for name in NAMES}
        means: list[Array] = []
        inputs: Counter[int] = Counter()
        results = [0] * (2 if self.workload.is_local else len(generator.SIZES))
        for rank, name in enumerate(NAMES):
            oracle.hear({"kind": "gives", "name": name, "round": number, "rank": rank, "at": number})
        for bucket in self.workload.buckets(number):
            mean = np.zeros(bucket.size, np.float32)
            found: list[tuple[int, int]] = []
            rows = {name: self.values(name, number, bucket.vectors) for name in NAMES if weights[name] > NO_STEPS}
            layout = bucket.share.layout
            for index in range(layout.count):
                start, stop = layout.span(index)
                given = [
                    Contribution(place, weights[name], self.payload(name, number, bucket.part, index, rows.get(name)))
                    for place, name in enumerate(NAMES)
                    if weights[name] > 0
                ]
                key = ExchangeKey(Stream.BUCKET, number, bucket.part)
                operation = self.plan.buckets[bucket.part].operation
                memory = self.memories.setdefault((bucket.part, index), Memory()) if operation.is_lossy else None
                nbytes = layout.nbytes(index)
                digests = Digests(places(self.plan)[bucket.part], found)
                made = reduce(
                    Reduce("default", 1, key, index, operation, start, nbytes, stop - start, memory, given, [], True)
                    ._replace(digests=digests)
                )  # fmt: skip
                assert isinstance(made, np.ndarray | memoryview | bytes)
                seed = seed_of(number, bucket.part, start)
                layout.codec.decode(bytes(made), stop - start, mean[start:stop], seed)
            means.append(mean)
            for member_id, value in found:
                if member_id == RESULT:
                    results[bucket.place] += value
                else:
                    inputs[member_id] += value
        self.step(number, means)
        record = RoundRecord(
            number, tuple(weights.values()), number, number + 0.1, 0, (),
            tuple(inputs[rank] % MODULUS for rank in range(len(NAMES))), tuple(value % MODULUS for value in results),
        )  # fmt: skip
        oracle.take(Dated(number + 0.1, Round("default", 1, record)))
        line = {"kind": "round", "round": number, "at": number + 0.1, "weights": self.fingerprint()}
        for rank, name in enumerate(NAMES):
            told = [generator.fingerprint([mean]) for mean in means]
            oracle.hear({**line, "name": name, "rank": rank, "results": told})

    def weight(self, name: str, number: int) -> float:
        weight = generator.weight(SEED, name, number)
        if not self.workload.is_local:
            return weight
        self.spent[name] = self.spent.get(name, 0.0) + weight
        key = name, number % self.workload.fragments
        weight, self.sent[key] = self.spent[name] - self.sent.get(key, 0.0), self.spent[name]
        return max(weight, NO_STEPS)

    def values(self, name: str, number: int, vectors: tuple[int, ...]) -> Array:
        found: Array = np.concatenate([generator.values(SEED, name, number, vector) for vector in vectors])
        if self.workload.is_local:
            group = torch.cat([self.weights[vector] for vector in vectors])
            found = (group - (group - torch.from_numpy(found))).numpy()
        return found

    def payload(self, name: str, number: int, part: int, index: int, row: Array | None) -> bytes | None:
        bucket = next(one for one in self.workload.buckets(number) if one.part == part)
        if row is None:
            return None
        start, stop = bucket.share.layout.span(index)
        if bucket.codec is None:
            return row[start:stop].tobytes()
        owed = self.owed.setdefault((name, part), Feedback(bucket.size))
        return bytes(owed.encode(bucket.codec, start, stop, row[start:stop], seed=seed_of(number, part, start)))

    def step(self, number: int, means: list[Array]) -> None:
        for bucket, mean in zip(self.workload.buckets(number), means, strict=True):
            sizes = [generator.SIZES[vector] for vector in bucket.vectors]
            for vector, gradient in zip(bucket.vectors, torch.split(torch.from_numpy(mean), sizes), strict=True):
                if self.outer is None:
                    self.weights[vector].sub_(gradient * float(generator.STEP))
                else:
                    self.weights[vector].grad = gradient
        if self.outer is not None:
            self.outer.step()
            self.outer.zero_grad()

    def fingerprint(self) -> int:
        states = [self.outer.state.get(weight, {}) for weight in self.weights] if self.outer is not None else []
        momenta = [state["momentum_buffer"].numpy() for state in states if "momentum_buffer" in state]
        return generator.fingerprint([*(weight.numpy() for weight in self.weights), *momenta])


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_nothing_is_found_where_nothing_is_wrong(workload: Workload) -> None:
    oracle = World(workload, rejoins=3).judged()
    assert (oracle.checked, oracle.found) == (ROUNDS, {}), oracle.findings


def planted(number: int, change: Callable[[World], object]) -> Callable[[World, int], object]:
    """Return a plant that changes something before round ``number``."""
    return lambda world, at: change(world) if at == number else None


def test_a_wrong_bit_of_the_momentum_is_found() -> None:
    def flip(world: World) -> None:
        assert world.outer is not None
        world.outer.state[world.weights[1]]["momentum_buffer"].numpy().view(np.uint32)[3] ^= 1

    oracle = World(LOCAL, planted(4, flip)).judged()
    assert oracle.found["wrong"], oracle.findings
    assert "round 4: weights are not those before it and nesterov of the mean" in oracle.findings[0]


def test_momentum_that_begins_anew_is_found() -> None:
    def forget(world: World) -> None:
        assert world.outer is not None
        world.outer.state.clear()

    assert "round 3: weights are not" in World(LOCAL, planted(3, forget)).judged().findings[0]


@pytest.mark.parametrize("workload", [Workload(SEED, wire="int8"), Workload(SEED, wire="topk:0.01"), STREAMED], ids=str)
@pytest.mark.parametrize("whose", ["a worker's", "the coordinator's"])
def test_what_is_owed_and_was_lost_is_found(workload: Workload, whose: str) -> None:
    def forget(world: World) -> None:
        if whose == "a worker's":
            world.owed = {key: owed for key, owed in world.owed.items() if key[0] != "bob"}
        else:
            world.memories.clear()

    oracle = World(workload, planted(4, forget)).judged()
    assert oracle.found["wrong"] == 1, "one finding tells it: later results follow from it"
    assert "wrong: round 4, bucket" in oracle.findings[0]


@pytest.mark.parametrize("is_lost", [True, False])
def test_only_shards_that_were_lost_may_lose_what_they_owe(is_lost: bool) -> None:
    def lose(world: World) -> None:
        del world.memories[3, 0]
        if is_lost:
            world.oracle.hear({"kind": "event", "event": "shard", "at": 4.0})

    found = World(Workload(SEED, shards=2, wire="int8"), planted(4, lose)).judged().found
    assert found == ({} if is_lost else {"wrong": 1})


def test_steps_of_a_worker_that_gave_and_did_not_count_are_in_its_next_weight() -> None:
    """A worker enters, gives to round 7 without counting there, and sends the other fragment in round 8."""
    workload = Workload(seed=3, outer="average", fragments=2)
    contributions = Contributions(workload, Replica(workload))
    contributions.join("w0", 7)
    each = [generator.weight(workload.seed, "w0", number) for number in (7, 8)]
    assert contributions.weight("w0", 8) == each[1]
    contributions.give("w0", 7)
    assert contributions.weight("w0", 8) == sum(each)
    contributions.join("w0", 8)  # with other memory
    contributions.give("w0", 8)
    assert contributions.weight("w0", 8) == each[1]
