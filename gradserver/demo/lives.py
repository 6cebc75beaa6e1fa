"""A group whose members change, seen from outside: who lived when, what became of each sample, and who waited."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from gradserver.demo.outcome import Result
from gradserver.demo.reports import Done, Joined, Round, TooLate
from gradserver.demo.settings import CHURN_TOLERANCE, FINAL


@dataclass(slots=True)
class Life:
    """One worker."""

    name: str
    founds: bool = True
    joined: Joined | None = None
    killed: float | None = None  # when that was
    rounds: list[Round] = field(default_factory=list)
    done: Done | None = None
    late: TooLate | None = None

    @property
    def is_member(self) -> bool:
        """Whether it is in the group, as far as is known."""
        return self.joined is not None and self.killed is None


@dataclass(frozen=True, slots=True)
class GroupRound:
    """One round of all who told of it."""

    number: int  # from 0
    loss: float  # mean over their samples; NaN if they had none
    samples: int  # of those who told of it
    used: int  # behind it, by all
    workers: int


@dataclass(frozen=True, slots=True)
class Account:
    """What became of the samples. They are used once each if nobody used one twice, and all are used up."""

    total: int
    used: int  # as the coordinator says
    told: int  # different ones that workers told of using
    twice: int  # of these
    by_the_dead: int  # that counted in a round of which whoever gave them could not tell any more

    @property
    def each_once(self) -> bool:
        """Whether the coordinator's count, and that of what workers told of, both come out even."""
        return not self.twice and self.used == self.total == self.told + self.by_the_dead


@dataclass(frozen=True, slots=True)
class Event:
    """Somebody was killed, or joined."""

    name: str
    joined: bool
    used: int  # samples that the group had used then
    waited: float  # seconds for which others had to wait longer than usual


@dataclass(frozen=True, slots=True)
class Churned:
    """One training run with deaths."""

    rounds: list[GroupRound]
    events: list[Event]
    account: Account
    done: list[Done]  # of those who saw the end
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean over the last samples."""
        last = [one for one in self.rounds if one.used > self.account.total * (1 - FINAL) and one.samples]
        samples = sum(one.samples for one in last)
        return math.fsum(one.loss * one.samples for one in last) / samples if samples else math.nan

    @property
    def validation_loss(self) -> float:
        """Loss on held-out text, by rank 0."""
        return next((one.validation_loss for one in self.done if one.validation_loss is not None), math.nan)

    @property
    def sample(self) -> str:
        """How the model continues the prompt."""
        return next((one.sample for one in self.done if one.sample is not None), "")

    def count(self, joined: bool) -> int:
        """How many joined, or were killed."""
        return sum(event.joined == joined for event in self.events)

    def waits(self, joined: bool) -> list[float]:
        """How long others waited for each."""
        return [event.waited for event in self.events if event.joined == joined]

    def losses_at(self, used: Sequence[int]) -> list[float]:
        """The loss of the round in which so many samples had been used."""
        rounds = iter([one for one in self.rounds if one.samples])
        now = next(rounds, None)
        found = []
        for wanted in used:
            while now is not None and now.used < wanted and (following := next(rounds, None)) is not None:
                now = following
            found.append(math.nan if now is None else now.loss)
        return found


def churned(lives: Sequence[Life], total: int) -> Churned:
    """What came of these lives, in a training on so many samples."""
    rounds = _together(lives)
    waits = _Waits(lives)
    moments = [(life.killed, life.name, False, waits.around(life.killed, life.killed)) for life in lives if life.killed]
    for life in lives:
        if life.joined is not None and not life.founds:
            begun = life.joined.at - life.joined.seconds
            moments.append((life.joined.at, life.name, True, waits.around(begun, life.joined.at)))
    ends = {one.number: one.at for life in lives for one in life.rounds}
    used = {ends[one.number]: one.used for one in rounds}
    events = [
        Event(name, joined, max((n for end, n in used.items() if end <= at), default=0), waited)
        for at, name, joined, waited in sorted(moments)
    ]
    seconds = sum(max(one.seconds for one in ones) for ones in _by_number(lives).values())
    done = [life.done for life in lives if life.done is not None]
    return Churned(rounds, events, _account(lives, rounds, total), done, seconds)


def _by_number(lives: Sequence[Life]) -> dict[int, list[Round]]:
    found: dict[int, list[Round]] = {}
    for life in lives:
        for one in life.rounds:
            found.setdefault(one.number, []).append(one)
    return dict(sorted(found.items()))


def _together(lives: Sequence[Life]) -> list[GroupRound]:
    rounds = []
    for number, ones in _by_number(lives).items():
        samples = sum(len(one.samples) for one in ones)
        loss = math.fsum(one.loss * len(one.samples) for one in ones if one.loss is not None)
        used, workers = max(one.used for one in ones), max(one.workers for one in ones)
        rounds.append(GroupRound(number, loss / samples if samples else math.nan, samples, used, workers))
    return rounds


def _account(lives: Sequence[Life], rounds: Sequence[GroupRound], total: int) -> Account:
    times = Counter(sample for life in lives for one in life.rounds for sample in one.samples)
    # Who has counted and could not tell of it was killed in the round behind the last one that it told of.
    last = {number + 1 for life in lives if life.killed is not None and (number := _last_told(life, lives)) is not None}
    used = by_the_dead = 0
    for one in rounds:
        if one.number in last:
            by_the_dead += max(one.used - used - one.samples, 0)
        used = one.used
    twice = sum(count > 1 for count in times.values())
    return Account(total, used, len(times), twice, by_the_dead)


def _last_told(life: Life, lives: Sequence[Life]) -> int | None:
    """The last round that it told of; if there is none, the last one that was over when it had come."""
    if life.rounds or life.joined is None:
        return life.rounds[-1].number if life.rounds else None
    came = life.joined.at
    return max((one.number for other in lives for one in other.rounds if one.at <= came), default=-1)


class _Waits:
    """How long members waited for each other, in which rounds."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self._lives = lives
        waits = [one.exchange_seconds for life in lives for one in life.rounds]
        self._usual = median(waits) if waits else 0.0

    def around(self, begin: float, end: float) -> float:
        """How much longer than usual whoever waited longest did, in the rounds between two moments and the next one."""
        longest = 0.0
        for life in self._lives:
            there = [one for one in life.rounds if one.at >= begin]
            met = [one for one in there if one.at - one.seconds <= end]
            met += there[len(met) : len(met) + 1]
            longest = max(longest, sum(max(one.exchange_seconds - self._usual, 0.0) for one in met))
        return longest


@dataclass(frozen=True, slots=True)
class ChurnVerdict:
    """A run with deaths against one without."""

    hashes: tuple[str, ...]  # of the weights of all who saw the end
    account: Account
    losses: tuple[float, float]  # final ones, of the run with deaths and of the other
    killed: int
    joined: int
    lossy: bool = False

    @property
    def identical(self) -> bool:
        """Whether all replicas hold the same weights, bit for bit."""
        return len(set(self.hashes)) == 1

    @property
    def distance(self) -> float:
        """How far the final losses are apart, relative to that of the undisturbed run."""
        one, other = self.losses
        return abs(one - other) / other if math.isfinite(one) and math.isfinite(other) and other > 0 else math.inf

    @property
    def loss_allowed(self) -> bool:
        """Whether they are near enough; where gradients lose something, whether they are numbers."""
        return math.isfinite(self.distance) if self.lossy else self.distance <= CHURN_TOLERANCE

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words."""
        found = [] if self.identical else ["the replicas' weights differ"]
        found += [] if self.account.each_once else ["not every sample was used once"]
        found += [] if self.loss_allowed else ["the final losses " + ("are no numbers" if self.lossy else "differ")]
        found += [] if self.killed else ["nobody was killed in so short a run"]
        found += [] if self.joined or not self.killed else ["nobody joined in so short a run"]
        return found


def judge_churn(group: Churned, reference: Result, *, lossy: bool) -> ChurnVerdict:
    """Compares the runs."""
    last = max(1, round(len(reference.losses) * FINAL))
    final = math.fsum(reference.losses[-last:]) / last
    return ChurnVerdict(
        tuple(done.sha256 for done in group.done),
        group.account,
        (group.final_loss, final),
        group.count(joined=False),
        group.count(joined=True),
        lossy,
    )
