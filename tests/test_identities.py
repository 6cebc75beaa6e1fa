"""Members: what members of an elastic group keep, and how ranks follow from them."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gradserver.engine.identities import Identities, in_order
from gradserver.protocol.messages import Join


def join(rank: int) -> Join:
    return Join("default", f"wants {rank}", rank, 0, 1.0)


@given(st.integers(1, 8), st.data())
def test_ranks_are_dense_and_a_departure_does_not_change_the_order_of_the_others(
    count: int, data: st.DataObject
) -> None:
    identities = Identities(f"w{member_id}" for member_id in range(count))
    here = list(range(count))
    for member_id in data.draw(st.permutations(here)):
        assert [identities.rank(other) for other in here] == list(range(len(here)))
        assert identities.present == tuple(here)
        assert identities.present_names() == tuple(f"w{other}" for other in here)
        here.remove(member_id)
        identities.depart(member_id)


def test_a_departed_member_is_named_with_its_last_rank() -> None:
    identities = Identities(["a", "b", "c"])

    identities.depart(0)
    identities.depart(2)

    assert [identities.call(member_id) for member_id in range(3)] == ["'a' (rank 0)", "'b' (rank 0)", "'c' (rank 1)"]


def test_what_is_no_seat_is_its_own_rank() -> None:
    assert [Identities(["a"]).rank(number) for number in (-1, 1, 1023)] == [-1, 1, 1023]


def test_workers_that_ask_for_ranks_sit_in_that_order_and_the_others_fill_the_gaps() -> None:
    assert in_order([join(-1), join(3), join(0), join(-1)], 4) == {0: 2, 1: 0, 2: 3, 3: 1}


def test_free_ranks_are_left_to_later_workers() -> None:
    assert in_order([join(7), join(-1), join(2)], 8) == {0: 1, 2: 2, 7: 0}
