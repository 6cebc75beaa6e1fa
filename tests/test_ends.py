"""Tests of the epochs in force behind rounds that are over."""

from __future__ import annotations

from gradserver.engine.ends import MAX_CUTS, Ends


def ends(*written: tuple[int, int]) -> Ends:
    made = Ends()
    for number, epoch in written:
        made.write(number, epoch)
    return made


def test_each_round_has_the_epoch_that_was_written_last() -> None:
    made = ends((0, 1), (1, 1), (2, 1), (2, 4), (3, 4), (4, 6))

    assert [made.behind(number) for number in range(6)] == [1, 1, 4, 4, 6, None]
    assert made.told == (4, 6)
    assert not made.write(4, 6), "known"


def test_rounds_that_are_made_anew_end_anew() -> None:
    made = ends((0, 1), (1, 2), (2, 3), (1, 5))

    assert [made.behind(number) for number in range(3)] == [1, 5, None]


def test_what_is_written_again_says_the_same() -> None:
    made = ends((0, 1), (1, 1), (2, 4), (3, 6), (4, 6))
    again = ends(*made.changes(), made.told)

    assert [again.behind(number) for number in range(6)] == [made.behind(number) for number in range(6)]
    assert list(ends((0, 1), (1, 1)).changes()) == [], "nothing that the last record does not say"


def test_only_the_last_rounds_are_known() -> None:
    made = ends(*((number, number) for number in range(3 * MAX_CUTS)))

    assert len(list(made.changes())) <= MAX_CUTS
    first = made.told[0] - MAX_CUTS
    assert [made.behind(number) for number in (first, first + 1)] == [first, first + 1]
    assert made.behind(0) == made.earliest == first
