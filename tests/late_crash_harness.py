"""Real sessions of a durable group that does not wait for all, while coordinators, connections and members are lost.

What a member gives to a slice is 1, at a place of its own for each round. So a result, times its weight, shows which
gradients of which rounds are in it, and with which weight.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gradserver.engine.policy import Lateness, Policy
from gradserver.engine.records import Round, RoundRecord
from gradserver.protocol.messages import Result
from tests.session_crash_harness import Doubles, Returning, Sessions

Where = tuple[int, int, int]
"""A round, a bucket and a slice."""


class Told(NamedTuple):
    """A result, as a member was told it last."""

    weight: float
    weights: tuple[float, ...]
    payload: bytes | None


class LateSessions(Sessions):
    """Members of which some do nothing for a while, so that rounds are closed without them.

    Attributes:
        told: results by member and slice.
    """

    def __init__(
        self, world: int, buckets: Sequence[int], rounds: int, seed: int, fuses: Sequence[int], lateness: Lateness
    ) -> None:
        self.policy = Policy(1, 8, lateness=lateness)
        self.numel = world * rounds
        """Elements of a slice."""
        chance = random.Random(seed)
        self.weights = [[chance.choice([0.5, 1.0, 2.0]) for _ in range(rounds)] for _ in range(world)]
        self.told: dict[int, dict[Where, Told]] = {rank: {} for rank in range(world)}
        self.slices = tuple(buckets)
        self._chance = chance
        self._busy = -1
        """The member that computes, and neither pushes nor finishes a round."""
        self._is_deaf = False
        """Whether that member reads nothing for the moment."""
        super().__init__(world, [size * self.numel for size in buckets], rounds, seed, fuses)

    def step(self) -> bool:
        if self._chance.random() < 0.02:
            self._busy = self._chance.randrange(-1, self.world)
        self._is_deaf = self._chance.random() < 0.5
        if super().step():
            return True
        self._is_deaf = False
        if super().step():
            return True
        due = self.harness.engine.next_deadline()
        if self._busy >= 0 and (due is None or due > self.harness.now + 1.5 or self._chance.random() < 0.3):
            self._busy = -1  # nothing but time would pass, until it is left out
            return super().step()
        return False

    def doings(self, member: Returning) -> Sequence[Callable[[Returning], bool]]:
        if member.rank != self._busy:
            return super().doings(member)
        return (self.resume, self.restate) if self._is_deaf else (self.resume, self.restate, self.deliver)

    def weight_of(self, member: Returning) -> float:
        return self.weights[member.rank][member.session.round]

    def given(self, rank: int, number: int, part: int) -> Doubles:
        data = np.zeros(self.buckets[part])
        data[rank * self.rounds + number :: self.numel] = 1.0
        return data

    def deliver(self, member: Returning) -> bool:
        waiting = self.harness.inbox.get(member.rope.connection)
        if waiting and isinstance(result := waiting[0][0], Result):
            payload = bytes(waiting[0][1][0]) if waiting[0][1] else None
            for index in range(result.slice, result.slice + result.slices):
                where = result.key.number, result.key.part, index
                self.told[member.rank][where] = Told(result.weight, result.weights, payload)
        return super().deliver(member)

    # ── what came of it ───────────────────────────────────────────────────────────────────────────────

    def places(self) -> list[Where]:
        """Return all slices of all rounds."""
        return [
            (number, part, index)
            for number in range(self.rounds)
            for part, count in enumerate(self.slices)
            for index in range(count)
        ]

    def counted(self, rank: int) -> dict[tuple[int, int, Where], float]:
        """Return the weight of each gradient in each result that a member was told, by its giver and its round."""
        found: dict[tuple[int, int, Where], float] = defaultdict(float)
        for where, told in self.told[rank].items():
            values = np.zeros(self.numel) if told.payload is None else np.frombuffer(told.payload, np.float64)
            for at in np.flatnonzero(values):
                giver, number = divmod(int(at), self.rounds)
                found[giver, number, where] += float(values[at]) * told.weight
        return found

    def kept(self, member: Returning, number: int, part: int, index: int) -> float:
        """Return the weight with which a member has yet to give what it gave to a slice of a round too late."""
        there = member.session.member.stragglers.carry._slices.get(part, {}).get(index)
        if there is None or there.data is None:
            return 0.0
        return float(there.data.view(np.float64)[member.rank * self.rounds + number]) * there.weight

    def ledger(self) -> dict[int, RoundRecord]:
        """Return the last record of each round."""
        return {one.record.round: one.record for one in self.harness.records if isinstance(one, Round)}
