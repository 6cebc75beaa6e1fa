"""Comparisons of contributions: against the definitions, in every kind of reduction, and added up over a round."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.comparison import is_due
from gradserver.engine.commands import Contribution, Measured, Measures, Memory, Reduce
from gradserver.engine.figures import (
    NONE,
    Figures,
    OfBucket,
    OfMember,
    Sampling,
    Span,
    Tally,
    added,
    figures_of,
    pack_figures,
    unpack_figures,
)
from gradserver.mean import Array
from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.means import mean_of
from gradserver.reducer import reduce

KEY = ExchangeKey(Stream.BUCKET, 3, 0)
UNIT = 131_072


def measured(
    rows: list[Array], weights: list[float] | None = None, stride: int = 1, turn: int = 0, **more: Any
) -> list[Measured]:
    """Reduce ``rows`` to their mean, and return what was measured of them."""
    dtype = BY_NAME[more.pop("dtype", "float32")]
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, dtype, rows[0].nbytes // dtype.itemsize)
    weights = weights or [1.0] * len(rows)
    several = [Contribution(i, w, row.tobytes()) for i, (w, row) in enumerate(zip(weights, rows, strict=True))]
    measures = Measures(stride, turn, UNIT, more.pop("usual", Memory()), [])
    numel = rows[0].nbytes // dtype.itemsize
    command = Reduce("g", 1, KEY, 0, operation, 0, rows[0].nbytes, numel, None, several, (), True)
    assert reduce(command._replace(squares=[], measures=measures, **more)) is not None
    return measures.found


def expected(rows: list[Array], weights: list[float]) -> list[tuple[int, float, float, float]]:
    """Compute the sums from their definitions."""
    wide = [row.astype(np.float64) for row in rows]
    sums = []
    for place, row in enumerate(wide):
        others = [other for other in range(len(wide)) if other != place]
        mean = np.average([wide[o] for o in others], axis=0, weights=[weights[o] for o in others])
        sums.append((place, float(row @ row), float(row @ mean), float(mean @ mean)))
    return sums


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 7), st.integers(1, 3000), st.integers(0, 2**32), st.booleans(), st.sampled_from([1e-22, 1.0, 1e25])
)
def test_sums_are_those_of_the_definitions(workers: int, numel: int, seed: int, weighed: bool, scale: float) -> None:
    random = np.random.default_rng(seed)
    base = np.abs(random.normal(size=numel)) + 2.0  # so that no norm is more than twice another
    rows = [((base + 0.3 * random.normal(size=numel)) * scale).astype(np.float32) for _ in range(workers)]
    weights = [float(w) for w in random.integers(1, 9, workers)] if weighed else [1.0] * workers
    (found,) = measured(rows, weights)
    assert found.numel == numel
    assert not found.stood_out
    for one, known in zip(found.members, expected(rows, weights), strict=True):
        assert one == pytest.approx(known, rel=2e-3)


def test_estimates_are_unbiased_for_any_weights() -> None:
    """|G|² is 4 · 500 and tr(Σ) is 9 · 500, whatever the batches of the workers are."""
    random = np.random.default_rng(1)
    numel, batches = 500, [1.0, 3.0, 8.0]
    found = []
    for _ in range(400):
        rows = [(2.0 + 3.0 * random.normal(size=numel) / math.sqrt(b)).astype(np.float32) for b in batches]
        found += measured(rows, batches)
    assert np.mean([one.signal for one in found]) == pytest.approx(4.0 * numel, rel=0.03)
    assert np.mean([one.noise for one in found]) == pytest.approx(9.0 * numel, rel=0.03)


def test_a_large_contribution_does_not_turn_the_mean_of_the_others() -> None:
    """Scaled by -10, one points away from the others, and none of them does."""
    random = np.random.default_rng(2)
    rows = [(1.0 + random.normal(size=4000)).astype(np.float32) for _ in range(4)]
    rows[2] *= -10
    (found,) = measured(rows)
    cosines = [inner / math.sqrt(squares * others) for _, squares, inner, others in found.members]
    assert cosines[2] < -0.5
    assert min(cosines[:2] + cosines[3:]) > 0.1
    rows[2][17] = 3e37  # its square has no room in float32
    (found,) = measured(rows)
    assert found.members[2][1] == pytest.approx(9e74, rel=1e-3)
    assert min(inner for place, _, inner, _ in found.members if place != 2) > 0


@pytest.mark.parametrize("rule", ["median", "trimmed:0.25"])
def test_a_robust_mean_is_what_contributions_are_compared_with(rule: str) -> None:
    rows = [np.full(1000, value, np.float32) for value in (1.0, 2.0, 3.0, -500.0)]
    (found,) = measured(rows, mean=mean_of(rule))
    assert (found.signal, found.noise) == (0.0, 0.0)
    assert [inner > 0 for _, _, inner, _ in found.members] == [True, True, True, False]
    assert {others for _, _, _, others in found.members} == {1000 * 1.5**2}


def test_other_types_and_sieved_means_are_measured_alike() -> None:
    random = np.random.default_rng(3)
    rows = [(1.0 + random.normal(size=2048)).astype(np.float32) for _ in range(3)]
    (plain,) = measured(rows)
    (wide,) = measured([row.astype(np.float64) for row in rows], dtype="float64")
    (half,) = measured([row.astype(np.float16) for row in rows], dtype="float16")
    (complex_,) = measured([row.view(np.complex64) for row in rows], dtype="complex64")
    from gradserver.engine.policy import OnNonFinite

    (sieved,) = measured(rows, spans=[(0, 2048)], nonfinite=OnNonFinite.LEAVE_OUT)
    for other in (wide, half, sieved):
        assert np.allclose(other.members, plain.members, rtol=5e-3)
        assert other.numel == plain.numel
    assert np.allclose(complex_.members, plain.members, rtol=5e-3)
    assert complex_.numel == 1024


def test_contributions_without_weight_or_values_are_taken_as_they_count() -> None:
    rows = [np.full(100, value, np.float32) for value in (2.0, 4.0, 0.0)]
    (found,) = measured(rows)
    assert np.allclose(found.members[2], (2, 0.0, 0.0, 900.0))
    assert measured(rows[:1]) == []


def test_blocks_take_turns_and_those_that_stand_out_are_measured_always() -> None:
    random = np.random.default_rng(4)
    rows = [random.normal(size=131_072 * 16).astype(np.float32) for _ in range(2)]
    usual, seen = Memory(), []
    for turn in range(8):
        found = measured(rows, stride=8, turn=turn, usual=usual)
        assert [one.stood_out for one in found] == [False, False]
        seen.append(tuple(found[0].members))
    assert len(set(seen)) == 8
    rows[1][131_072 * 5 + 3] = 1e35  # an exponent bit has flipped
    found = measured(rows, stride=8, turn=0, usual=usual)
    assert [one.stood_out for one in found] == [False, True, False]
    assert found[1].members[1][1] > 1e60 > found[1].members[0][1]


def test_usual_squares_follow_a_lasting_change() -> None:
    measures = Measures(8, 0, 100, Memory(), [])
    assert is_due(measures, 100, 200, 1.0) is None
    stood_out = [is_due(measures, 100, 200, 1000.0) for _ in range(20)]
    assert stood_out[0] is True
    assert stood_out[-1] is None
    assert [is_due(measures, start, start + 100, 1000.0) for start in (800, 900)] == [False, None]
    assert is_due(measures, 600, 900, 1.0) is False, "the unit at 800 is in it"
    assert is_due(measures, 800, 900, math.nan) is False
    assert is_due(measures, 800, 900, 17_000.0) is True, "as NaN is not followed"


def test_lossy_contributions_are_compared_as_they_were_decoded() -> None:
    from gradserver.protocol.codecs import codec_of

    random = np.random.default_rng(5)
    rows = [(1.0 + random.normal(size=5000)).astype(np.float32) for _ in range(3)]
    codec = codec_of("int8")
    coded = [codec.encode(row, None, 0) for row in rows]
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 5000, codec=codec)
    several = [Contribution(i, 1.0, bytes(row)) for i, row in enumerate(coded)]
    measures = Measures(1, 0, 65_536, Memory(), [])
    command = Reduce("g", 1, KEY, 0, operation, 0, codec.nbytes(5000), 5000, None, several, (), True)
    reduce(command._replace(squares=[], measures=measures))
    sums = np.sum([[list(one) for one in found.members] for found in measures.found], axis=0)
    assert np.allclose(sums[:, 1:], np.array(expected(rows, [1.0] * 3))[:, 1:], rtol=0.02)


# ── added up ──────────────────────────────────────────────────────────────────────────────────────────────


def test_sampled_blocks_stand_for_the_others_and_special_ones_for_themselves() -> None:
    tally = Tally()
    tally.expect(1000)
    tally.add([Measured(False, 100, 2.0, 3.0, [(0, 1.0, 0.5, 2.0), (1, 2.0, 0.5, 2.0)])])
    tally.add([Measured(True, 200, 50.0, 60.0, [(0, 5.0, 1.0, 7.0), (1, 900.0, 1.0, 7.0)])])
    figures = figures_of({4: tally})
    assert figures.members == (OfMember(0, 13.0, 5.0, 23.0), OfMember(1, 916.0, 5.0, 23.0))
    assert figures.buckets == (OfBucket(4, 66.0, 84.0),)
    assert figures_of({}) == NONE


def test_figures_of_data_shards_add_up_and_travel() -> None:
    one = Figures((OfMember(0, 1.0, 2.0, 3.0),), (OfBucket(1, 1.0, 2.0),))
    two = Figures((OfMember(0, 1.0, 2.0, 3.0), OfMember(3, 9e70, 0.0, 1.0)), (OfBucket(0, -1.0, 2.0),))
    both = added([one, two])
    assert both.members == (OfMember(0, 2.0, 4.0, 6.0), OfMember(3, 9e70, 0.0, 1.0))
    assert both.buckets == (OfBucket(0, -1.0, 2.0), OfBucket(1, 1.0, 2.0))
    assert unpack_figures(pack_figures(both)) == both
    assert unpack_figures(pack_figures(NONE)) == NONE
    good = pack_figures(one)
    several: list[Any] = [None, [], [[], [], []], [[b"1"], []], [[good[1][0]], []], [[], [b"\xff" * 24]]]
    for bad in several:
        with pytest.raises(MalformedMessageError):
            unpack_figures(bad)


def strides(sizes: list[int], sections: int = 1) -> tuple[int, ...]:
    each = [range(place, len(sizes), sections) for place in range(sections)]
    return Sampling.of([Span(0, size, UNIT) for size in sizes], each).strides


def test_of_large_rounds_a_smaller_share_is_measured() -> None:
    assert strides([10_000]) == (1,)
    assert strides([UNIT * 2]) == (2,)
    assert strides([UNIT] * 7) == (7,) * 7
    assert strides([UNIT] * 16) == (8,) * 16
    assert strides([UNIT] * 32, 2) == (8,) * 32
    assert strides([UNIT] * 120) == (60,) * 120
    assert strides([25_000_000]) == (95,)
    assert strides([1] * 16_384) == (96,) * 16_384


@given(
    spans=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 900)), min_size=1, max_size=12),
    sections=st.integers(1, 3),
    turn=st.integers(0, 10_000),
)
def test_each_round_of_each_section_has_a_unit_that_is_measured(
    spans: list[tuple[int, int]], sections: int, turn: int
) -> None:
    several = [Span(start, start + size, 7) for start, size in spans]
    each = [range(place, len(spans), sections) for place in range(min(sections, len(spans)))]
    sampling = Sampling.of(several, each)
    for parts in each:
        units = sum(-(-several[part].stop // 7) - several[part].start // 7 for part in parts)
        seen = 0
        for part in parts:
            measures, (start, stop, unit) = sampling.measures(part, turn), several[part]
            for first in range(start - start % unit, stop, unit):
                seen += is_due(measures, first, first + unit, 1.0) is not None
        assert 1 <= seen <= max(6, 2 + units // 8)


def test_rows_of_a_block_stand_for_all_of_it_and_others_are_seen_each_time() -> None:
    random, usual, seen = np.random.default_rng(6), Memory(), set()
    rows = [random.normal(size=UNIT * 2).astype(np.float32) for _ in range(3)]
    for turn in range(128):
        (found,) = measured(rows, stride=2, turn=turn, usual=usual)
        half = slice(None, UNIT) if turn % 2 == 0 else slice(UNIT, None)
        known = expected([row[half] for row in rows], [1.0] * 3)
        assert found.numel == UNIT
        assert np.allclose([one[1] for one in found.members], [one[1] for one in known], rtol=0.2)
        seen.add(found.members[0][1])
    assert len(seen) == 128
    whole = expected(rows, [1.0] * 3)[0][1]
    assert sum(seen) == pytest.approx(64 * whole, rel=1e-5), "all rows, sixty-four times"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_that_is_there_from_the_first_round_on_is_seen_between_the_rows(dtype: str) -> None:
    random, usual = np.random.default_rng(7), Memory()
    rows = [random.normal(size=UNIT).astype(np.float32) for _ in range(2)]
    if dtype == "bfloat16":
        rows = [(row.view(np.uint32) >> 16).astype(np.uint16) for row in rows]
    for turn in range(4):
        wrong = rows[1].copy()
        wrong[700 + 5000 * turn] = np.float32(1e33).view(np.uint32) >> 16 if dtype == "bfloat16" else 1e33
        (found,) = measured([rows[0], wrong], turn=turn, usual=usual, dtype=dtype)
        assert found.stood_out
        assert found.members[1][1] > 1e60 > 1e9 > found.members[0][1]
