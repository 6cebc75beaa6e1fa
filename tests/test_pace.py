"""Tests of lateness: it follows from the usual length of rounds, and from its variation."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from gradserver.engine.data.pace import Pace
from gradserver.engine.policy import Lateness, Policy, lateness_of
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.messages import Result
from tests.engine_harness import Harness, bucket, floats, plan_of


def pace_of(took: Sequence[float]) -> Pace:
    pace = Pace()
    for seconds in [9.0, 9.0, 9.0, *took]:  # the first three do not count
        pace.completed(seconds, {0: (0.0, 1.0), 1: (0.0, 1.0 + seconds), 2: (0.0, 1.0)})
    return pace


def test_it_says_nothing_before_it_has_seen_some_rounds() -> None:
    assert pace_of([1.0] * 7).deadline(0.5, 60.0) is None
    assert pace_of([1.0] * 7).explain(3, 4) == "3 of 4 had come"


def test_before_that_it_goes_by_what_this_round_has_taken_most() -> None:
    assert Pace().deadline(0.5, 60.0, took=2.0) == 3.5


def test_steady_rounds_leave_half_as_long_again_and_the_grace() -> None:
    pace = pace_of([0.4] * 20)
    assert pace.deadline(0.5, 60.0) == pytest.approx(1.1)
    assert pace.explain(7, 8) == "rounds take 0.4 s (median of 20, spread 0 s), and 7 of 8 had come"


def test_rounds_that_vary_leave_more() -> None:
    assert pace_of([1.0, 2.0] * 20).deadline(0.0, 60.0) == pytest.approx(1.5 + 6 * 1.4826 * 0.5)


def test_a_few_slow_rounds_change_nothing() -> None:
    assert pace_of([1.0] * 30 + [50.0] * 5).deadline(0.0, 60.0) == 1.5


def test_rounds_after_a_change_do_not_count() -> None:
    pace = pace_of([1.0] * 10)
    pace.changed()
    for _ in range(3):
        pace.completed(30.0, {})
    assert (pace.rounds, pace.usual) == (10, 1.0)


def test_it_knows_by_how_much_each_is_behind() -> None:
    pace = pace_of([1.0] * 10)
    assert (pace.lag(1), pace.lag(0), pace.lag(7)) == (1.0, 0.0, 0.0)
    pace.forget(1)
    assert pace.lag(1) == 0.0


@given(st.lists(st.floats(0.001, 100.0), max_size=100), st.floats(0, 10), st.floats(1, 200))
def test_a_deadline_is_never_below_what_is_usual_nor_beyond_the_timeout(
    took: list[float], grace: float, timeout: float
) -> None:
    pace = pace_of(took)
    deadline = pace.deadline(grace, timeout)
    assert (deadline is None) == (len(took) < 8)
    if deadline is not None:
        assert min(1.5 * pace.usual + grace, timeout) <= deadline * (1 + 1e-12)
        assert deadline <= timeout


# ── members that are waited for ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("lateness", "present", "needed"),
    [
        (Lateness(quorum=3), 8, 3),
        (Lateness(quorum=3), 2, 2),
        (Lateness(percent=75.0), 8, 6),
        (Lateness(percent=75.0), 5, 4),
        (Lateness(percent=1.0), 5, 1),
        (Lateness(percent=100.0), 7, 7),
        (Lateness(backup=2), 8, 6),
        (Lateness(backup=2), 2, 1),
    ],
)
def test_a_quorum_follows_from_how_many_are_there(lateness: Lateness, present: int, needed: int) -> None:
    assert lateness.needed(present) == needed


def test_options_for_late_members() -> None:
    assert lateness_of() is None
    assert lateness_of(3) == Lateness(quorum=3)
    assert lateness_of("75%", grace=2.0, late="drop") == Lateness(percent=75.0, grace=2.0, keeps=False)
    assert lateness_of(backup=1) == Lateness(backup=1, grace=0.0)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"grace": 1.0}, "grace and late need a quorum or backups"),
        ({"late": "drop"}, "grace and late need a quorum or backups"),
        ({"quorum": 2, "backup": 1}, "quorum and backup exclude each other"),
        ({"backup": 1, "grace": 1.0}, "grace needs a quorum"),
        ({"quorum": "most"}, "such as 75%, not 'most'"),
        ({"quorum": "175%"}, "1 % to 100 %"),
        ({"quorum": 5, "most": 3}, "quorum is 5, and must be at most 3"),
        ({"backup": 3, "most": 3}, "backup is 3, and must be at most 2"),
        ({"quorum": 2, "late": "later"}, "late is 'later', and must be 'keep' or 'drop'"),
    ],
)
def test_impossible_options(said: dict[str, int | str], error: str) -> None:
    with pytest.raises(InvalidArgumentError, match=error):
        lateness_of(**said)  # type: ignore[arg-type]


# ── without a quorum it only warns ────────────────────────────────────────────────────────────────────


def rounds(harness: Harness, first: int, count: int, late: float = 0.0) -> None:
    """Run rounds of a tenth of a second. The last of four members comes ``late``."""
    for number in range(first, first + count):
        for rank in range(4):
            if rank == 3 and late:
                harness.wait(0.0)
                for _ in range(round(late * 10)):
                    harness.wait(0.1)
            harness.push(rank, bucket(number), floats(1))
            harness.now += 0.02


def warnings(harness: Harness) -> list[str]:
    return [log.text for log in harness.logs if log.warning]


@pytest.mark.parametrize("world", [Policy(1, 8), 4], ids=["elastic", "of a fixed size"])
def test_a_late_member_is_named_once_a_round_and_not_every_round(world: Policy | int) -> None:
    harness = Harness({"default": world})
    harness.assemble(4, plan_of(1))
    rounds(harness, 0, 12)
    assert warnings(harness) == []

    rounds(harness, 12, 1, late=2.0)

    (warning,) = warnings(harness)
    assert warning.startswith("round 12 of group 'default' waits for 'w3' (rank 3) after 0.")
    assert "(median of 9, spread 0 s), and 3 of 4 had come" in warning
    rounds(harness, 13, 3, late=1.0)
    assert len(warnings(harness)) == 1
    harness.now += 10.0
    rounds(harness, 16, 1, late=1.0)
    assert len(warnings(harness)) == 2
    harness.sent(0)
    rounds(harness, 17, 1)
    assert harness.only([0], Result)[-1].over


def test_before_half_a_second_no_member_is_late_however_quick_rounds_are() -> None:
    harness = Harness({"default": 4})
    harness.assemble(4, plan_of(1))
    rounds(harness, 0, 12)
    rounds(harness, 12, 1, late=0.4)

    assert warnings(harness) == []
