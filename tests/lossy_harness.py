"""A durable group with buckets in a lossy codec, driven by hand: members encode, and the reducer decodes.

Members and the coordinator keep back what a codec loses, and add it to what comes next.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np

from gradserver.engine.policy import Policy
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import codec_of, seed_of
from gradserver.protocol.exchange import layout_of
from gradserver.protocol.messages import Push, Result, RoundDone
from gradserver.protocol.plan import Plan
from gradserver.reducer import reduce
from tests.engine_harness import SEATS, Array, bucket, floats, plan_of
from tests.test_engine_resuming import BACK, Group

CODECS = ("bf16", "int8", "fp16", "topk:0.25")


class LossyGroup(Group):
    """A group of ``world`` members that exchange buckets of ``sizes`` elements as ``codec``. ``seed`` orders pushes."""

    def __init__(self, world: int, sizes: list[int], codec: str, seed: int) -> None:
        self.lossy = Plan(tuple(replace(one, codec=codec_of(codec)) for one in plan_of(*sizes).buckets))
        super().__init__(world, self.lossy, Policy(1, 8))
        self.random = random.Random(seed)
        self.member_ids, self.number = list(range(world)), 0
        self.first_line = SEATS
        """The connection of member 0."""
        self.kept: dict[tuple[int, int, int], Array] = {}
        """The residual of each member, by bucket and slice."""
        self.results: dict[tuple[int, int, int], list[bytes]] = defaultdict(list)
        """Results that members were sent, by round, bucket and slice."""

    def round(self, dies: int = -1) -> None:
        """Let all push all buckets, each in its order. One may die when it has pushed half of its slices."""
        due = [
            (member_id, part)
            for member_id in self.member_ids
            for part in range(len(self.lossy.buckets))
            for _ in self.slices(part)
        ]
        self.random.shuffle(due)
        pushed: dict[tuple[int, int], int] = defaultdict(int)
        for step, (member_id, part) in enumerate(due):
            if dies in self.member_ids and step == len(due) // 2:
                self.member_ids.remove(dies)
                self.harness.lose(dies, ended=True)
            if member_id in self.member_ids:
                self.push(member_id, part, pushed[member_id, part])
                pushed[member_id, part] += 1
            while self.harness.reduces and self.random.random() < 0.5:
                self.reduce()
        while self.harness.reduces:
            self.reduce()
        self.read()

    def slices(self, part: int) -> range:
        return range(layout_of(self.lossy.buckets[part].operation, 2).count)

    def push(self, member_id: int, part: int, index: int) -> None:
        """Encode a slice, with its residual, and push it."""
        operation = self.lossy.buckets[part].operation
        start, stop = layout_of(operation, 2).span(index)
        whole = floats(*[self.random.gauss(0.0, 1.0) for _ in range(start, stop)])
        whole += self.kept.get((member_id, part, index), np.float32(0))
        seed, decoded = seed_of(self.number, part, index), np.empty_like(whole)
        payload = bytes(operation.codec.encode(whole, seed=seed))
        operation.codec.decode(payload, whole.size, decoded, seed)
        self.kept[member_id, part, index] = whole - decoded
        push = Push(bucket(self.number, part), index, 1.0 + member_id, True)
        self.harness.receive(self.first_line + member_id, push, payload)

    def reduce(self) -> None:
        command = self.harness.reduces.pop(0)
        outcome = reduce(command)
        assert outcome is None or isinstance(outcome, Buffer)
        self.harness.answer(command, outcome)

    def read(self) -> None:
        """Take what has come: results, and the end of the round."""
        for member_id in self.member_ids:
            waiting = self.harness.inbox.pop(self.first_line + member_id, [])
            for message, payloads in waiting:
                if isinstance(message, Result):
                    place = message.key.number, message.key.part, message.slice
                    self.results[place].append(bytes(payloads[0]))
            assert [one.round for one, _ in waiting if isinstance(one, RoundDone)] == [self.number]
        self.number += 1

    def crash(self) -> None:
        """Lose the coordinator with its residuals. All members return between two rounds."""
        self.harness.restart()
        self.first_line = BACK
        for member_id in self.member_ids:
            self.resume(member_id, epoch=1)
        for member_id in self.member_ids:
            self.hold(member_id, self.number)
        self.harness.inbox.clear()


def run(seed: int) -> LossyGroup:
    """Run six rounds: one member dies in the second, the coordinator is lost after the fourth."""
    chance = random.Random(seed)
    sizes = [chance.randint(5, 30) for _ in range(chance.randint(1, 3))]
    group = LossyGroup(3, sizes, CODECS[seed % len(CODECS)], seed)
    for number in range(6):
        if number == 4:
            group.crash()
        group.round(dies=2 if number == 1 else -1)
    for got in group.results.values():
        assert len(set(got)) == 1, "not the same for all"
    return group
