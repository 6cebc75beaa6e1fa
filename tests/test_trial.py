"""The choice between the ways of rounds of workers on several hosts: over the coordinator, or among themselves."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gradserver.worker.planes.trial import FIGURES, TRIED, Trial
from tests.cluster import STARTED_WITHIN, Daemon, Program, wait_until
from tests.trial_training import PAUSE

Seconds = Callable[[int, bool], float]


class Members:
    """Members of a group. A function of a round's number and way says how long it takes."""

    def __init__(self, count: int, seconds: Seconds, monkeypatch: pytest.MonkeyPatch, apart: int = 0) -> None:
        self.trials = [Trial(apart * number) for number in range(count)]
        self.seconds, self.round, self.now = seconds, apart * (count - 1), 0.0
        self.ways = dict[int, bool]()
        self.voids = list[int]()
        self.said = list[str]()
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def train(self, rounds: int) -> None:
        for number in range(self.round, self.round + rounds):
            ways = {one.goes_direct(number) for one in self.trials}
            if len(ways) == 2:
                self.voids.append(number)
                for one in self.trials:
                    if one.goes_direct(number):
                        one.fail(number)
                continue
            (self.ways[number],) = ways
            self.now += self.seconds(number, self.ways[number])
            if self.ways[number] and self.trials[0].votes(number):
                self.vote(number)
            for one in self.trials:
                one.end(number, self.ways[number])
        self.round += rounds

    def vote(self, number: int) -> None:
        votes = torch.zeros(len(self.trials), FIGURES)
        for one, vote in zip(self.trials, votes, strict=True):
            one.tell(vote)
        self.said += {one.hear(number, votes.mean(0).tolist()) for one in self.trials} - {""}

    def share(self, first: int, stop: int) -> float:
        return sum(self.ways[number] for number in range(first, stop) if number in self.ways) / (stop - first)


def steady(through: float, direct: float) -> Seconds:
    return lambda _, is_direct: direct if is_direct else through


@pytest.mark.parametrize(("through", "direct", "share"), [(0.9, 0.45, 1.0), (0.45, 0.9, 0.0), (0.45, 0.44, 0.0)])
def test_rounds_take_the_quicker_way_after_fifteen_rounds(
    through: float, direct: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = Members(3, steady(through, direct), monkeypatch)
    members.train(2000)
    assert not any(members.ways[number] for number in range(8)), "the first rounds go over the coordinator"
    assert members.share(8 + TRIED + 1, 32) == share
    assert abs(members.share(600, 2000) - share) < 0.02, "trials become rare"
    assert not members.voids


def test_the_choice_says_how_long_a_round_takes_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(2, steady(0.9, 0.45), monkeypatch)
    members.train(100)
    assert members.said == ["from worker to worker: 0.45 s a round; over the coordinator: 0.9 s a round"]


@pytest.mark.parametrize("falls", [False, True], ids=["the coordinator's link falls", "a link between workers falls"])
def test_a_link_that_falls_to_a_tenth_changes_the_way_within_twenty_rounds(
    falls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {falls: 0.1, not falls: 0.2}

    def seconds(number: int, is_direct: bool) -> float:
        return before[is_direct] * (10 if number >= 20 and is_direct == falls else 1)

    members = Members(2, seconds, monkeypatch)
    members.train(60)
    assert members.ways[19] == falls
    assert members.share(40, 60) == (not falls)


def test_one_slow_round_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(2, lambda number, is_direct: 30.0 if number == 12 else 0.1 if is_direct else 0.2, monkeypatch)
    members.train(32)
    assert members.share(8 + TRIED + 1, 32) == 1.0


def test_members_that_cannot_reach_each_other_try_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Trial(0)
    tried = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    for number in range(3000):
        if one.goes_direct(number):
            tried.append(number)
            one.fail(number)
        else:
            one.end(number, False)
    assert len(tried) == 2


def test_members_that_hear_of_a_membership_in_different_rounds_meet_in_a_later_trial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for first in range(16):
        members = Members(2, steady(0.9, 0.45), monkeypatch, apart=1)
        members.trials = [Trial(first), Trial(first + 1)]
        members.round = first + 1
        members.train(200)
        assert len(members.voids) <= 2
        assert members.share(150, 200) == 1.0


def test_after_a_departure_the_way_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(3, steady(0.9, 0.45), monkeypatch)
    members.train(20)
    for one in members.trials:
        one.fail(20)
        one.renew(21)
    members.round = 21
    members.train(3)
    assert members.share(21, 24) == 1.0


def test_departures_in_a_row_end_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = {False: 0.9, True: 0.45}
    members = Members(4, lambda _, is_direct: slow[is_direct], monkeypatch)
    members.train(20)
    for number in (20, 21, 22):
        members.trials.pop()
        for one in members.trials:
            one.fail(number)
            one.renew(number + 1)
        members.round = number + 1
    slow[False] = 0.1
    members.train(60)
    assert members.share(50, 83) < 0.5, "the way that became the quicker one is found"


def test_rounds_of_several_modules_are_not_timed_and_go_over_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Trial(0)
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    for number in range(100):
        assert not one.goes_direct(number)
        one.end(number, False)
        one.end(number, False)


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────

PROGRAM = Path(__file__).with_name("trial_training.py")


def start(
    stack: ExitStack, daemon: Daemon, world: int, steps: int, slow: str, hosts: int | None = None, *more: str
) -> list[Program]:
    """Start workers on as many hosts, or on a host each."""
    return [
        stack.enter_context(
            Program(
                str(PROGRAM),
                *(daemon.url, str(rank), str(world), str(steps), slow, *more),
                environment={"GRADSERVER_HOST": f"host-{rank % (hosts or world)}", "OMP_NUM_THREADS": "1"},
                loaded="torch",
            )
        )
        for rank in range(world)
    ]


def ends(workers: list[Program]) -> tuple[str, str]:
    """Return the ways of all rounds, and the digest of the weights. All workers have the same."""
    (end,) = {worker.expect("ended ", STARTED_WITHIN) for worker in workers}
    ways, digest = end.split()
    return ways, digest


def outcome(world: int, steps: int, slow: str, hosts: int | None = None) -> tuple[str, str, str]:
    """Train, and return the same, and the plane."""
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", str(world)))
        workers = start(stack, daemon, world, steps, slow, hosts)
        for worker in workers if steps > PAUSE else []:
            worker.expect("paused ", STARTED_WITHIN)
        plane = str(daemon.group()["plane"]) if steps > PAUSE else ""
        for worker in workers if steps > PAUSE else []:
            worker.tell()
        return (*ends(workers), plane)


def test_two_hosts_exchange_among_themselves_where_the_coordinators_link_is_slow_and_have_the_same_weights() -> None:
    ways, digest, plane = outcome(2, 40, "coordinator")
    assert ways == "c" * 8 + "d" * 24 + "c" * TRIED + "d" * 2
    assert "each worker is on a host of its own" in plane
    beside, expected, plane = outcome(2, 40, "coordinator", hosts=1)
    assert beside == "c" * 40
    assert "has no CUDA device" in plane
    assert digest == expected


def test_a_round_that_is_skipped_has_no_vote() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "2", "--nonfinite", "skip"))
        ways, _ = ends(start(stack, daemon, 2, 30, "coordinator", None, str(8 + TRIED)))
    assert ways == "c" * 8 + "d" * (TRIED + 1) + "c" * 9 + "d" * TRIED


def test_rounds_stay_with_the_coordinator_where_the_way_between_hosts_is_slow() -> None:
    ways, _, _ = outcome(2, 30, "workers")
    assert ways == "c" * 8 + "d" * (TRIED + 1) + "c" * 15


def test_hosts_that_cannot_reach_each_other_train_over_the_coordinator() -> None:
    ways, digest, _ = outcome(2, 40, "unreachable")
    assert ways == "c" * 40
    assert digest == outcome(2, 40, "workers", hosts=1)[1]


def test_after_a_death_rounds_go_on_in_the_way_that_was_chosen() -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "2:3"))
        first, second, victim = start(stack, daemon, 3, 40, "coordinator")
        for worker in (first, second, victim):
            assert worker.expect("paused ", STARTED_WITHIN).endswith("d" * 15)
        victim.send_signal(signal.SIGKILL)
        wait_until(lambda: daemon.group()["world_size"] == 2, "the coordinator has noticed")
        for worker in (first, second):
            worker.tell()
        ways, _ = ends([first, second])
    assert ways.count("c") <= 9, "at most the round of the death"
    assert ways.endswith("d" * 9)
