"""Contributions are combined in rank order, in fp32 or wider, exactly; and nothing but finite means comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gradserver import reducer
from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.events import Broken, Finding, NonFinite, Sifted, Undecodable
from gradserver.engine.policy import OnNonFinite
from gradserver.mean import Outcome
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import BY_NAME, FLOAT32, numpy_dtype
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from tests.reference import OPS, REDUCTIONS, TYPES, expected, samples, wide

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Array = np.ndarray[Any, Any]


def command(
    op: Op,
    name: str,
    payloads: Sequence[Buffer | None],
    weights: Sequence[float] | None = None,
    kind: Kind = Kind.ALL_REDUCE,
) -> Reduce:
    """Return a reduction of contributions of ranks 0, 2, 4, …"""
    given = [
        Contribution(2 * place, 1.0 if weights is None else weights[place], payload)
        for place, payload in enumerate(payloads)
    ]
    size = next(len(payload) for payload in payloads if payload is not None)
    dtype = BY_NAME[name]
    operation = Operation(kind, op, dtype, size // dtype.itemsize)
    return Reduce(
        "group", 1, ExchangeKey(Stream.BUCKET, 0), 0, operation, 0, size, operation.numel, None, given, (), True
    )


def reduce(command: Reduce) -> Buffer | NonFinite:
    """Return the outcome of a reduction with a result that is kept."""
    outcome = reducer.reduce(command)
    assert outcome is not None
    assert not isinstance(outcome, Sifted | Undecodable | Broken | tuple)
    return outcome


def outcome_of(
    op: Op, arrays: Sequence[Array | None], weights: Sequence[float] | None = None
) -> tuple[Buffer | NonFinite, np.dtype[Any]]:
    """Return the result of reducing arrays of one type (None stands for zeros), and that type."""
    dtype = next(array.dtype for array in arrays if array is not None)
    payloads = [None if array is None else array.tobytes() for array in arrays]
    return reduce(command(op, dtype.name, payloads, weights)), dtype


def combine(op: Op, arrays: Sequence[Array | None], weights: Sequence[float] | None = None) -> Array:
    """Reduce arrays."""
    outcome, dtype = outcome_of(op, arrays, weights)
    assert not isinstance(outcome, NonFinite), outcome
    return np.frombuffer(outcome, dtype)


def blamed(arrays: Sequence[Array | None], weights: Sequence[float] | None = None) -> NonFinite:
    """Return what keeps arrays from having a mean."""
    outcome, _ = outcome_of(Op.MEAN, arrays, weights)
    assert isinstance(outcome, NonFinite)
    return outcome


def mean(*values: float, weights: Sequence[float] | None = None, dtype: str = "float32") -> float:
    """Return the mean of numbers, one of each worker."""
    return float(combine(Op.MEAN, [np.array([value], numpy_dtype(BY_NAME[dtype])) for value in values], weights)[0])


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.dtype is torch.complex32:
        tensor = tensor.view(torch.float16)
    return tensor.view(torch.uint8).numpy().tobytes()


# ── every type, every operation ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_reduction_is_what_wide_arithmetic_gives(name: str, op: Op) -> None:
    tensors = samples(name, 4, 257)

    outcome = reduce(command(op, name, [bits(tensor) for tensor in tensors]))

    assert not isinstance(outcome, NonFinite)
    result = torch.frombuffer(bytearray(outcome), dtype=tensors[0].dtype)
    np.testing.assert_array_equal(wide(result), expected(tensors, op))


@pytest.mark.parametrize("name", [name for name in TYPES if BY_NAME[name].is_floating])
def test_single_contribution_is_its_own_mean_bit_by_bit(name: str) -> None:
    (tensor,) = samples(name, 1, 100)
    payload = bits(tensor)
    memory = bytearray(payload)

    outcome = reduce(command(Op.MEAN, name, [memory], [0.37]))
    memory[:] = bytes(len(memory))

    assert outcome == payload


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_outcome_is_memory_of_its_own(name: str, op: Op) -> None:
    contributions = [bytearray(bits(tensor)) for tensor in samples(name, 2, 16)]
    before = [bytes(contribution) for contribution in contributions]

    outcome = reduce(command(op, name, contributions))
    assert not isinstance(outcome, NonFinite)
    result = bytes(outcome)

    assert [bytes(contribution) for contribution in contributions] == before
    for contribution in contributions:
        contribution[:] = b"\x01" * len(contribution)
    assert bytes(outcome) == result


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_result_does_not_depend_on_how_a_tensor_is_cut(name: str, op: Op) -> None:
    tensors = [uneven(tensor) for tensor in samples(name, 3, 99)]

    def reduced(start: int, stop: int) -> bytes:
        parts = [bits(tensor[start:stop].clone()) for tensor in tensors]
        outcome = reduce(command(op, name, parts, [0.3, 1.7, 11.0]))
        assert not isinstance(outcome, NonFinite)
        return bytes(outcome)

    whole = reduced(0, 99)
    for cut in (1, 2, 7, 13, 32, 50, 97, 98):
        assert reduced(0, cut) + reduced(cut, 99) == whole


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_result_does_not_depend_on_where_contributions_lie(name: str, op: Op) -> None:
    payloads = [bits(uneven(tensor)) for tensor in samples(name, 3, 1000)]
    shifted = [memoryview(bytes(place + 1) + payload)[place + 1 :] for place, payload in enumerate(payloads)]

    assert reduce(command(op, name, shifted)) == reduce(command(op, name, payloads))


def uneven(tensor: torch.Tensor) -> torch.Tensor:
    """Draw floating numbers with more digits than a sum or product can keep."""
    if BY_NAME[str(tensor.dtype).removeprefix("torch.")].kind == "c":
        return (tensor.to(torch.complex128) * (0.37 + 0.21j)).to(tensor.dtype)
    return tensor * 0.37 if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


# ── means ─────────────────────────────────────────────────────────────────────────────────────────────


def test_sum_runs_in_rank_order() -> None:
    large, small = np.array([2.0**30], np.float32), np.array([1.0], np.float32)

    in_order = combine(Op.SUM, [large, small, -large])
    swapped = combine(Op.SUM, [large, -large, small])

    assert (float(in_order[0]), float(swapped[0])) == (0.0, 1.0)


@pytest.mark.parametrize(("name", "large"), [("bfloat16", 256.0), ("float16", 2048.0), ("float8_e4m3fn", 16.0)])
def test_narrow_types_are_summed_in_float32(name: str, large: float) -> None:
    # 1 is lost when it is added to `large` in the type itself
    assert mean(large, 1.0, 1.0, -large, dtype=name) == 0.5


def test_float64_is_summed_in_float64() -> None:
    assert mean(2.0**50, 1.0, -(2.0**50), 0.0, dtype="float64") == 0.25


def test_mean_is_weighted() -> None:
    assert mean(1.0, 2.0, weights=[1, 3]) == 1.75


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=5),
    weights=st.lists(st.floats(0.5, 1e5, width=32), min_size=5, max_size=5),
)
def test_weighted_mean_is_exact_but_for_rounding(values: list[float], weights: list[float]) -> None:
    weights = weights[: len(values)]

    exact = math.fsum(w * g for w, g in zip(weights, values, strict=True)) / math.fsum(weights)

    slack = max(abs(value) for value in values) * 2**-24 * (len(values) + 2) * max(weights) * len(weights)
    assert mean(*values, weights=weights) == pytest.approx(exact, rel=0, abs=slack / sum(weights) + 1e-37)


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=2, max_size=5),
    weight=st.floats(1e-30, 1e30),
)
def test_equal_weights_are_the_plain_mean(values: list[float], weight: float) -> None:
    assert mean(*values, weights=[weight] * len(values)) == mean(*values)


@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e-6, 1e6, 1e29])
def test_only_the_ratio_of_weights_counts(scale: float) -> None:
    assert mean(1e9, 3e9, weights=[scale, 2 * scale]) == pytest.approx(7e9 / 3, rel=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_absent_contribution_counts_as_zeros(op: Op) -> None:
    given = np.array([4.0, -8.0], np.float32)
    zeros = np.zeros(2, np.float32)

    for arrays in ([given, None], [None, given], [given, None, 2 * given]):
        explicit = [zeros if array is None else array for array in arrays]
        weights = [1.0, 3.0, 2.0][: len(arrays)]
        np.testing.assert_array_equal(combine(op, arrays, weights), combine(op, explicit, weights))


# ── what is not finite ────────────────────────────────────────────────────────────────────────────────

BAD = {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf}
HAVE_NAN = [name for name in TYPES if BY_NAME[name].is_floating]


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
def test_mean_blames_the_first_rank_and_element_that_is_not_finite(what: str, weights: list[float]) -> None:
    arrays = [np.ones(5, np.float32) for _ in range(3)]
    arrays[1][3] = arrays[1][4] = arrays[2][0] = BAD[what]

    assert blamed(arrays, weights) == NonFinite(2, 3, what)


@pytest.mark.parametrize("name", HAVE_NAN)
def test_mean_finds_nan_in_every_type(name: str) -> None:
    tensors = [tensor.clone() for tensor in samples(name, 3, 50)]
    tensors[2][17] = math.nan

    assert reduce(command(Op.MEAN, name, [bits(tensor) for tensor in tensors])) == NonFinite(4, 17, "NaN")


def test_mean_finds_an_imaginary_part_that_is_not_finite() -> None:
    arrays = [np.ones(5, np.complex64) for _ in range(2)]
    arrays[0][3] = complex(1, math.inf)

    assert blamed(arrays) == NonFinite(0, 3, "Inf")


def test_mean_of_one_contribution_must_be_finite_too() -> None:
    assert blamed([np.array([1.0, math.nan], np.float32)]) == NonFinite(0, 1, "NaN")


def test_infinities_that_cancel_are_found() -> None:
    arrays = [np.array([math.inf, -math.inf], np.float32), np.ones(2, np.float32)]

    assert blamed(arrays) == NonFinite(0, 0, "Inf")


LARGE = {"float32": 3e38, "float64": 1.5e308, "bfloat16": 3e38, "float16": 6e4}


@pytest.mark.parametrize("policy", list(OnNonFinite))
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("name", LARGE)
def test_finite_elements_with_a_sum_out_of_range_have_their_mean_alike_wherever_it_is_cut(
    name: str, weights: list[float], policy: OnNonFinite
) -> None:
    dtype = numpy_dtype(BY_NAME[name])
    rows = [np.linspace(-1, 1, 50).astype(dtype) for _ in range(3)]
    plain = reduce(command(Op.MEAN, name, [row.tobytes() for row in rows], weights))
    for row in rows:
        row[[7, 48]] = LARGE[name], -LARGE[name]

    def made(start: int, stop: int) -> bytes:
        spans = ((0, stop - start),) if policy in (OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP) else ()
        whole = command(Op.MEAN, name, [row[start:stop].tobytes() for row in rows], weights)
        outcome = reduce(whole._replace(nonfinite=policy, spans=spans))
        assert not isinstance(outcome, NonFinite)
        return bytes(outcome)

    result = np.frombuffer(made(0, 50), dtype)
    np.testing.assert_allclose(result[[7, 48]].astype(np.float64), [LARGE[name], -LARGE[name]], 1e-2)
    others = np.delete(np.arange(50), [7, 48])
    assert not isinstance(plain, NonFinite)
    assert result[others].tobytes() == np.frombuffer(plain, dtype)[others].tobytes()  # ordinary sums keep their bits
    for cut in (1, 7, 8, 33, 49):
        assert made(0, cut) + made(cut, 50) == result.tobytes()


def test_a_sum_out_of_range_beside_an_infinity_is_mended_and_the_infinity_blamed_or_passed_on() -> None:
    arrays = [np.array([3e38, math.inf, 1.0], np.float32), np.array([3e38, 1.0, 1.0], np.float32)]

    assert blamed(arrays) == NonFinite(0, 1, "Inf")
    passing = command(Op.MEAN, "float32", [array.tobytes() for array in arrays])._replace(
        nonfinite=OnNonFinite.PROPAGATE
    )
    outcome = reduce(passing)
    assert not isinstance(outcome, NonFinite)
    np.testing.assert_array_equal(np.frombuffer(outcome, np.float32), np.array([3e38, math.inf, 1.0], np.float32))


def test_the_mean_of_the_largest_numbers_is_that_number() -> None:
    largest = np.full(3, np.finfo(np.float32).max)

    np.testing.assert_array_equal(combine(Op.MEAN, [largest, largest, None], [1.0, 1.0, 1e-300]), largest)


@pytest.mark.parametrize("name", HAVE_NAN)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
def test_mean_that_is_to_carry_all_numbers_has_nan_where_one_had_and_alike_wherever_it_is_cut(
    name: str, weights: list[float]
) -> None:
    tensors = [tensor.clone() for tensor in samples(name, 3, 50)]
    clean = bytes(reduce(command(Op.MEAN, name, [bits(tensor) for tensor in tensors], weights)))  # type: ignore[arg-type]
    tensors[0][17] = -math.nan
    tensors[2][17] = tensors[1][48] = math.nan

    def carried(start: int, stop: int) -> bytes:
        whole = command(Op.MEAN, name, [bits(tensor[start:stop].clone()) for tensor in tensors], weights)
        outcome = reduce(whole._replace(nonfinite=OnNonFinite.PROPAGATE))
        assert not isinstance(outcome, NonFinite)
        return bytes(outcome)

    result, size = carried(0, 50), tensors[0].element_size()
    rows = torch.frombuffer(bytearray(result), dtype=tensors[0].dtype)
    assert [place for place in range(50) if torch.isnan(rows[place])] == [17, 48]
    for place in set(range(50)) - {17, 48}:
        assert result[place * size : (place + 1) * size] == clean[place * size : (place + 1) * size]
    for cut in (1, 17, 18, 33, 49):
        assert carried(0, cut) + carried(cut, 50) == result


def test_sum_of_finite_elements_may_overflow_in_the_check_itself() -> None:
    many = np.full(1000, np.finfo(np.float32).max / 2)

    np.testing.assert_array_equal(combine(Op.MEAN, [many, many]), many)


@pytest.mark.parametrize("op", [op for op in OPS if op is not Op.MEAN])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_other_reductions_let_nan_through(name: str, op: Op) -> None:
    arrays = [np.array([1.0, math.nan], numpy_dtype(BY_NAME[name])), np.ones(2, numpy_dtype(BY_NAME[name]))]

    assert np.isnan(combine(op, arrays).astype(np.float64)).tolist() == [False, True]


@pytest.mark.parametrize(("op", "result"), [(Op.SUM, math.inf), (Op.MAX, math.inf), (Op.MIN, 1.0)])
def test_other_reductions_let_infinity_through(op: Op, result: float) -> None:
    assert combine(op, [np.array([math.inf], np.float32), np.ones(1, np.float32)]) == result


# ── what is not a reduction ───────────────────────────────────────────────────────────────────────────


def test_gathering_puts_contributions_one_behind_the_other() -> None:
    assert reduce(command(Op.NONE, "uint8", [b"abc", b"def"], kind=Kind.ALL_GATHER)) == b"abcdef"


def test_first_is_the_first_contribution_whatever_its_bits() -> None:
    nan = np.array([math.nan], np.float32).tobytes()
    memory = bytearray(nan)

    outcome = reduce(command(Op.FIRST, FLOAT32.name, [memory]))
    memory[:] = bytes(4)

    assert outcome == nan


# ── what is left out, or skipped ──────────────────────────────────────────────────────────────────────

SPANS = ((0, 16), (16, 32), (32, 41))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", HAVE_NAN)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 3.0]])
def test_a_slice_that_is_not_finite_is_left_out_and_its_memory_has_the_mean_of_the_others(
    name: str, weights: list[float], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer, "_SPREAD_BYTES", 1)
    tensors = [tensor.clone() for tensor in samples(name, 3, 41)]
    size = tensors[0].element_size()

    def of(start: int, stop: int, places: Sequence[int]) -> bytes:
        parts = [bits(tensors[place][start:stop].clone()) for place in places]
        outcome = reduce(command(Op.MEAN, name, parts, [weights[place] for place in places]))
        assert not isinstance(outcome, NonFinite)
        return bytes(outcome)

    due = of(0, 16, [0, 1, 2]) + of(16, 32, [0, 2]) + of(32, 41, [0])
    tensors[1][20] = tensors[1][40] = tensors[2][33] = math.nan
    memory = [bytearray(bits(tensor)) for tensor in tensors]
    whole = command(Op.MEAN, name, memory, weights)
    whole = whole._replace(targets=memory, nonfinite=OnNonFinite.LEAVE_OUT, spans=SPANS)
    outcome = _outcome(whole, threads)

    assert isinstance(outcome, Sifted)
    assert outcome.findings == (Finding(1, 2, 20), Finding(2, 2, 40), Finding(2, 4, 33))
    assert outcome.payload is not None
    assert bytes(outcome.payload) == due
    assert len(due) == 41 * size
    assert [bytes(one) for one in memory] == [due] * 3


@pytest.mark.parametrize("policy", [OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP])
def test_finite_contributions_whose_sum_is_not_have_a_mean_all_the_same(policy: OnNonFinite) -> None:
    for name in ("float32", "float64"):
        kind = np.dtype(name)
        largest: Array = np.full(41, np.finfo(kind).max, kind)
        for weights in ([1.0, 1.0, 1.0], [1.0, 2.0, 7.0]):
            rows = [largest.tobytes(), largest.tobytes(), (largest / 2).tobytes()]
            whole = command(Op.MEAN, name, rows, weights)
            outcome = reduce(whole._replace(nonfinite=policy, spans=SPANS))
            assert not isinstance(outcome, NonFinite)
            share = (weights[0] + weights[1] + weights[2] / 2) / sum(weights)
            np.testing.assert_allclose(np.frombuffer(outcome, kind), largest * share, rtol=1e-6)


def test_a_slice_that_is_skipped_is_not_written() -> None:
    rows = [bytearray(np.full(41, value, np.float32)) for value in (1.0, 3.0)]
    rows[1][80:84] = np.float32(np.inf).tobytes()
    whole = command(Op.MEAN, "float32", rows)._replace(targets=rows, keep=False)
    outcome = _outcome(whole._replace(nonfinite=OnNonFinite.SKIP, spans=SPANS), 1)

    assert outcome == Sifted(None, (Finding(1, 2, 20),))
    for row, own in zip(rows, (1.0, 3.0), strict=True):
        values = np.frombuffer(row, np.float32)
        assert values[:16].tolist() == [2.0] * 16
        assert values[16] == own


def _outcome(whole: Reduce, threads: int) -> Outcome:
    pool, told = reducer.Reducer(threads), list[Outcome]()
    outcome = pool.start(whole, told.append)
    pool.close()
    if not isinstance(outcome, reducer.Pending):
        return outcome
    (later,) = told
    return later
