"""The law of durable groups, with the sessions that workers have: a lost coordinator costs no member anything."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.engine.records import Round
from tests.engine_harness import small_slices
from tests.examples import examples
from tests.session_crash_harness import Sessions

SLICE = 16
"""Bytes of a slice in these tests: two elements of float64."""


@pytest.fixture(scope="module", autouse=True)
def _small_slices() -> Iterator[None]:
    with small_slices(SLICE):
        yield


worlds = st.integers(1, 4)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=3)
fuses = st.lists(st.integers(0, 40), max_size=8)
deaths = st.dictionaries(st.integers(0, 80), st.integers(0, 3), max_size=3)
breaks = st.dictionaries(st.integers(0, 120), st.integers(0, 3), max_size=5)


@given(worlds, sizes, st.integers(1, 4), fuses, breaks, st.integers(0, 2**20))
@settings(max_examples=examples(60))
def test_sessions_lose_nothing_with_a_coordinator_or_a_connection(
    world: int, buckets: list[int], rounds: int, crashes: list[int], broken: dict[int, int], seed: int
) -> None:
    cluster = Sessions(world, buckets, rounds, seed, crashes)
    cluster.breaks = broken
    cluster.run()

    weights = np.arange(1.0, world + 1)
    for member in cluster.members:
        assert member.session.round == rounds, "a member waits"
        for number in range(rounds):
            for part in range(len(buckets)):
                given_ = np.array([cluster.given(rank, number, part) for rank in range(world)])
                weight, elements = member.results[number, part]
                assert weight == weights.sum()
                assert np.allclose(elements, np.average(given_, axis=0, weights=weights), rtol=1e-12)
    for one in cluster.members[1:]:
        assert one.results == cluster.members[0].results, "members hold different bits"
    written = {one.record.round: one.record for one in cluster.harness.records if isinstance(one, Round)}
    assert sorted(written) == list(range(rounds))
    assert all(record.weights == tuple(weights) for record in written.values())


@given(worlds, sizes, st.integers(1, 4), fuses, breaks, deaths, st.integers(0, 2**20))
@settings(max_examples=examples(60))
def test_sessions_that_are_left_hold_the_same(
    world: int,
    buckets: list[int],
    rounds: int,
    crashes: list[int],
    broken: dict[int, int],
    dead: dict[int, int],
    seed: int,
) -> None:
    cluster = Sessions(world, buckets, rounds, seed, crashes)
    cluster.breaks, cluster.deaths = broken, dead
    cluster.run()

    first, *others = cluster.members
    assert len(first.results) == rounds * len(buckets)
    for member in cluster.members:
        assert member.session.round == rounds, "a member waits"
        assert member.session.membership.epoch == cluster.harness.ends[rounds - 1]
    assert all(one.results == first.results for one in others), "members hold different bits"
