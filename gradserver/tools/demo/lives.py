"""History of a group with changing members: the lives of workers, the use of samples, and the waiting of others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from gradserver.tools.demo.outcome import Result
from gradserver.tools.demo.reports import Done, Joined, Round, TooLate
from gradserver.tools.demo.settings import CHURN_TOLERANCE, FINAL


@dataclass(slots=True)
class Life:
    """Life of one worker."""

    name: str
    founds: bool = True
    joined: Joined | None = None
    killed: float | None = None  # time of its kill
    rounds: list[Round] = field(default_factory=list)
    done: Done | None = None
    late: TooLate | None = None

    @property
    def is_member(self) -> bool:
        """True if it is in the group, as far as is known."""
        return self.joined is not None and self.killed is None


@dataclass(frozen=True, slots=True)
class GroupRound:
    """Round, joined from the reports of its workers."""

    number: int  # from 0
    loss: float  # mean over the samples; NaN if there were none
    samples: int  # samples that workers reported
    used: int  # samples used behind it, by all
    workers: int


@dataclass(frozen=True, slots=True)
class Account:
    """Use of the samples. Each is used once if none was used twice, and all are used."""

    total: int
    used: int  # number in the coordinator's count
    told: int  # number of different ones in the workers' reports
    twice: int  # number of these that were used more than once
    by_the_dead: int  # number that counted in a round that their killed workers could not report

    @property
    def each_once(self) -> bool:
        """True if the coordinator's count and the workers' reports both have each sample once."""
        return not self.twice and self.used == self.total == self.told + self.by_the_dead


@dataclass(frozen=True, slots=True)
class Event:
    """Kill or arrival of a worker."""

    name: str
    joined: bool
    used: int  # samples that the group had used by then
    waited: float  # seconds for which others had to wait longer than usual


@dataclass(frozen=True, slots=True)
class Churned:
    """Result of a training run with kills."""

    rounds: list[GroupRound]
    events: list[Event]
    account: Account
    done: list[Done]  # reports of the workers that reached the end
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean loss of the last samples."""
        last = [one for one in self.rounds if one.used > self.account.total * (1 - FINAL) and one.samples]
        samples = sum(one.samples for one in last)
        return math.fsum(one.loss * one.samples for one in last) / samples if samples else math.nan

    @property
    def validation_loss(self) -> float:
        """Loss on held-out text, by rank 0."""
        return next((one.validation_loss for one in self.done if one.validation_loss is not None), math.nan)

    @property
    def sample(self) -> str:
        """Model's continuation of the prompt."""
        return next((one.sample for one in self.done if one.sample is not None), "")

    def count(self, joined: bool) -> int:
        """Count the workers that joined, or those that were killed."""
        return sum(event.joined == joined for event in self.events)

    def waits(self, joined: bool) -> list[float]:
        """Return how long others waited for each of these."""
        return [event.waited for event in self.events if event.joined == joined]

    def losses_at(self, used: Sequence[int]) -> list[float]:
        """Return the losses of the rounds at which these numbers of samples had been ``used``."""
        rounds = iter([one for one in self.rounds if one.samples])
        now = next(rounds, None)
        found = []
        for wanted in used:
            while now is not None and now.used < wanted and (following := next(rounds, None)) is not None:
                now = following
            found.append(math.nan if now is None else now.loss)
        return found


def churned(lives: Sequence[Life], total: int) -> Churned:
    """Join these lives to the result of a training on `total` samples."""
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
    # A worker that counted and could not report it was killed in the round behind the last one that it reported.
    last = {number + 1 for life in lives if life.killed is not None and (number := _last_told(life, lives)) is not None}
    used = by_the_dead = 0
    for one in rounds:
        if one.number in last:
            by_the_dead += max(one.used - used - one.samples, 0)
        used = one.used
    twice = sum(count > 1 for count in times.values())
    return Account(total, used, len(times), twice, by_the_dead)


def _last_told(life: Life, lives: Sequence[Life]) -> int | None:
    """Return the last round that it reported; if there is none, the last one that was over when it joined."""
    if life.rounds or life.joined is None:
        return life.rounds[-1].number if life.rounds else None
    came = life.joined.at
    return max((one.number for other in lives for one in other.rounds if one.at <= came), default=-1)


class _Waits:
    """Waiting times of members for each other."""

    def __init__(self, lives: Sequence[Life]) -> None:
        self._lives = lives
        waits = [one.exchange_seconds for life in lives for one in life.rounds]
        self._usual = median(waits) if waits else 0.0

    def around(self, begin: float, end: float) -> float:
        """Return the longest additional wait of a member, in the rounds between two moments and the next one."""
        longest = 0.0
        for life in self._lives:
            there = [one for one in life.rounds if one.at >= begin]
            met = [one for one in there if one.at - one.seconds <= end]
            met += there[len(met) : len(met) + 1]
            longest = max(longest, sum(max(one.exchange_seconds - self._usual, 0.0) for one in met))
        return longest


@dataclass(frozen=True, slots=True)
class ChurnVerdict:
    """Comparison of a run with kills and one without."""

    hashes: tuple[str, ...]  # hashes of the weights of all workers that reached the end
    account: Account
    losses: tuple[float, float]  # final losses, of the run with kills and of the other
    killed: int
    joined: int
    lossy: bool = False

    @property
    def identical(self) -> bool:
        """True if all replicas have the same weights, bit for bit."""
        return len(set(self.hashes)) == 1

    @property
    def distance(self) -> float:
        """Distance of the final losses, relative to that of the undisturbed run."""
        one, other = self.losses
        return abs(one - other) / other if math.isfinite(one) and math.isfinite(other) and other > 0 else math.inf

    @property
    def loss_allowed(self) -> bool:
        """True if the final losses are near enough; with lossy gradients, if they are finite."""
        return math.isfinite(self.distance) if self.lossy else self.distance <= CHURN_TOLERANCE

    @property
    def faults(self) -> list[str]:
        """Descriptions of the failed checks."""
        found = [] if self.identical else ["the replicas' weights differ"]
        found += [] if self.account.each_once else ["not every sample was used once"]
        found += [] if self.loss_allowed else ["the final losses " + ("are not finite" if self.lossy else "differ")]
        found += [] if self.killed else ["no worker was killed in so short a run"]
        found += [] if self.joined or not self.killed else ["no worker joined in so short a run"]
        return found


def judge_churn(group: Churned, reference: Result, *, lossy: bool) -> ChurnVerdict:
    """Compare the runs."""
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
