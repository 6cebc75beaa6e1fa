"""Coordinators that are killed at regular times under DistributedDataParallel.

Run as ``make kills`` or ``python -m tests.kills [SECONDS] [EVERY]``. Three workers train for about SECONDS (30). The
coordinator is killed every EVERY seconds (3) and started again. A line for each kind of group says how long a step took
at most, and whether the weights are those of a calm run. With a quorum or backups the ledger says what they must be.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.cluster import STARTED_WITHIN
from tests.late_training import STEP_SECONDS
from tests.test_late_restart import PROGRAM, counts_in_part, recounted
from tests.test_restart import WORLD, Group


class Case(NamedTuple):
    """A kind of group."""

    name: str
    least: int
    options: tuple[str, ...] = ()
    wire: str = "fp32"
    cuts: bool = False
    """True if rounds close without the late: the ledger says what they are made of."""
    turns: bool = False
    """True if all workers are late in turn."""


KEPT = ("--staleness", "1000")
"""A busy machine must not make contributions so late that workers drop them: the ledger does not say of that."""
QUORUM = ("--quorum", "2", "--grace", "0.02", *KEPT)
CASES = (
    Case("--workers 3", WORLD),
    Case("--workers 2:3", WORLD - 1),
    Case("--workers 3 --shards 2", WORLD, ("--shards", "2")),
    Case("--workers 3, wire int8", WORLD, wire="int8"),
    Case("--workers 1:3 --quorum 2", 1, QUORUM, cuts=True),
    Case("--workers 3 --backup 1", WORLD, ("--backup", "1", *KEPT), cuts=True, turns=True),
    Case("--workers 2:3 --quorum 2 --shards 2", 2, (*QUORUM, "--shards", "2"), cuts=True),
)


class Outcome(NamedTuple):
    """The outcome of a run."""

    kills: int
    longest: float
    """Seconds of the longest step of any worker, behind its first."""
    same: bool
    """True if all workers have the weights that they must have."""
    dropped: int
    """Number of times that a worker has said that what it gave is too old, and is dropped."""


def run(case: Case, seconds: float, every: float) -> Outcome:
    """Train with a coordinator that is killed ``every`` so many seconds."""
    rounds, kills = int(seconds / STEP_SECONDS), 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        group = _group(stack, case, Path(folder), rounds)
        while _goes_on(group, every):
            group.kill()
            group.start()
            kills += 1
        _wait_for_ends(group)
        (weights, *others) = group.weights()
        longest = max(longest_step(worker.output()) for worker in group.workers)
        dropped = sum("and is dropped" in line for worker in group.workers for line in worker.complaints())
        return Outcome(kills, longest, not others and is_right(case, weights, group), dropped)


@cache
def calm(case: Case, rounds: int) -> int:
    """Return the weights of a run that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        group = _group(stack, case, Path(folder), rounds)
        _wait_for_ends(group)
        (weights,) = group.weights()
        return weights


def _group(stack: ExitStack, case: Case, folder: Path, rounds: int) -> Group:
    more, options = ("turns",) * case.turns, case.options
    group = Group(
        stack, folder / "state", "tcp", case.wire, rounds, *more, least=case.least, options=options, program=PROGRAM
    )
    for worker in group.workers[1:]:
        worker.expect("round 0 ", STARTED_WITHIN)
    return group


def _wait_for_ends(group: Group) -> None:
    """Wait for the last round of each worker, as long as rounds go on."""
    for worker in group.workers:
        while int(worker.expect("round ").split()[0]) < group.rounds - 1:
            pass


def is_right(case: Case, weights: int, group: Group) -> bool:
    """Return whether these are the weights that must be.

    Of a contribution that counts in part the ledger does not say in which slices of each shard.
    """
    if not case.cuts:
        return weights == calm(case, group.rounds)
    return weights == recounted(group.directory) or ("--shards" in case.options and counts_in_part(group.directory))


def _goes_on(group: Group, seconds: float) -> bool:
    """Return true when that time is over; false when the training ends soon."""
    until = time.monotonic() + seconds
    while True:
        number, done = group.workers[0].expect("round ").split()
        if int(number) > group.rounds - 20:
            return False
        if float(done) >= until:
            return True


def longest_step(lines: list[str]) -> float:
    """Return the seconds of the longest step of a worker that has said when each round was done."""
    ends = [float(line.split()[2]) for line in lines if line.startswith("round ")]
    return max(after - before for before, after in pairwise(ends))


def main() -> int:
    """Run all cases, and print what came of each. Return 1 if weights differ."""
    given = [float(text) for text in sys.argv[1:3]]
    seconds, every = (*given, *(30.0, 3.0)[len(given) :])
    differ = False
    for case in CASES:
        kills, longest, same, dropped = run(case, seconds, every)
        against = "the ledger" if case.cuts else "a calm run"
        verdict = f"weights {'equal' if same else 'DIFFER from'} those of {against}"
        verdict += f"; {dropped} times something late was dropped" * (dropped > 0)
        print(f"{case.name:36} {kills:3} kills, longest step {longest:5.2f} s, {verdict}", flush=True)
        differ = differ or not same
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
