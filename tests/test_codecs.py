"""Codecs: what was encoded comes back as near as promised, never quietly non-finite, and late rather than never."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.codecs import Codec, Feedback, Scratch, codec_from, codec_of, encode_with_feedback, seed_of
from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.codecs.dense import Int8
from gradserver.protocol.codecs.sparse import Sparse, split_mix
from gradserver.protocol.compiled import loader
from gradserver.protocol.errors import (
    DTypeError,
    InvalidArgumentError,
    LayoutError,
    MalformedMessageError,
    SizeMismatchError,
)
from gradserver.protocol.kernels import Floats
from tests.memory import Measured, memory_of

DENSE = ["fp32", "bf16", "fp16", "int8"]
SPARSE = ["topk", "topk:0.3", "randomk", "randomk:0.3"]
ALL = DENSE + SPARSE
MAX = np.finfo(np.float32).max
SEED = seed_of(12, 3, 4 * BLOCK)

every_codec = pytest.mark.parametrize("name", ALL)
every_dense = pytest.mark.parametrize("name", DENSE)
every_sparse = pytest.mark.parametrize("name", SPARSE)


def floats_of(bits: list[int]) -> Floats:
    return np.array(bits, np.uint32).view(np.float32)


def normal(numel: int, scale: float = 1.0, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(numel) * scale).astype(np.float32)


def any_bits(numel: int, seed: int = 0) -> Floats:
    """Draw all kinds of numbers: large, subnormal, NaN with any payload."""
    return np.random.default_rng(seed).integers(0, 1 << 32, numel, np.uint32).view(np.float32)


def finite_bits(numel: int, seed: int = 0) -> Floats:
    values = any_bits(numel, seed)
    return np.where(np.isfinite(values), values, np.float32(0))


def decode(codec: Codec, payload: bytes | memoryview, numel: int, seed: int = SEED) -> Floats:
    out = np.full(numel, 99, np.float32)
    codec.decode(payload, numel, out, seed)
    return out


def through(codec: Codec, values: Floats, seed: int = SEED) -> Floats:
    return decode(codec, codec.encode(values, seed=seed), values.size, seed)


def same_bits(left: Floats, right: Floats) -> bool:
    return left.tobytes() == right.tobytes()


# Bit patterns that have broken such code before stand beside whatever hypothesis thinks of: zeros, subnormals, the
# limits of each format and their neighbours, infinities, NaN with one bit and with all.
edges = [0, 1, 0x7F_FFFF, 0x80_0000, 0x3300_0000, 0x3300_0001, 0x387F_EFFF, 0x387F_F000, 0x3880_0000, 0x477F_E000]
edges += [0x477F_EFFF, 0x477F_F000, 0x7F7F_7FFF, 0x7F7F_8000, 0x7F7F_FFFF, 0x7F80_0000, 0x7F80_0001, 0x7FFF_FFFF]
words = st.integers(0, (1 << 32) - 1) | st.sampled_from(edges + [bits | 1 << 31 for bits in edges])
patterns = st.lists(words, min_size=1, max_size=700).map(floats_of)
finite_patterns = patterns.map(lambda values: np.where(np.isfinite(values), values, np.float32(1)))


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_codec
def test_a_codec_is_found_by_its_name_and_by_what_travels(name: str) -> None:
    codec = codec_of(name)
    assert codec_of(codec.name) == codec
    assert codec_from(codec.code, codec.parameter) == codec
    assert 0 <= codec.parameter <= 1_000_000


def test_codes_stay_what_they_are() -> None:
    codes = {name: codec_of(name).code for name in ["fp32", "bf16", "fp16", "int8", "topk", "randomk"]}
    assert codes == {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "topk": 4, "randomk": 5}


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("topk", "topk:0.01"),
        ("randomk:1", "randomk:1"),
        ("topk:1e-6", "topk:1e-06"),
        ("topk:0.123456", "topk:0.123456"),
    ],
)
def test_names_have_one_form(name: str, canonical: str) -> None:
    assert codec_of(name).name == canonical


def test_an_unknown_codec_is_told_which_ones_there_are() -> None:
    message = "there is no codec 'int4'; there are fp32, bf16, fp16, int8, topk[:FRACTION], randomk[:FRACTION]"
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        codec_of("int4")


@pytest.mark.parametrize("name", ["", "bf16:2", "bf16:", "FP32", ":"])
def test_only_sparse_codecs_have_a_parameter(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="there is no codec"):
        codec_of(name)


@pytest.mark.parametrize("fraction", ["", "0", "-0.1", "1.1", "nan", "inf", "1e-7", "0.1234567", "half", "1e400"])
def test_a_fraction_is_some_millionths(fraction: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the fraction must be"):
        codec_of(f"topk:{fraction}")


@pytest.mark.parametrize(("code", "parameter"), [(6, 0), (-1, 0), (1, 1), (4, 0), (5, 1_000_001), (4, -1)])
def test_a_header_cannot_name_what_does_not_exist(code: int, parameter: int) -> None:
    with pytest.raises(MalformedMessageError, match=f"no codec {code} with parameter {parameter}"):
        codec_from(code, parameter)


# ── sizes, and what is refused ───────────────────────────────────────────────────────────────────────────────────────


@every_codec
@pytest.mark.parametrize("numel", [0, 1, 2, 255, 256, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300])
def test_the_size_follows_from_the_number_of_elements(name: str, numel: int) -> None:
    codec = codec_of(name)
    for values in (normal(numel), np.zeros(numel, np.float32), any_bits(numel)):
        payload = codec.encode(values, seed=SEED)
        assert payload.nbytes == len(payload) == codec.nbytes(numel)


@pytest.mark.parametrize(
    ("name", "most"),
    [("fp32", 4), ("bf16", 2), ("fp16", 2), ("int8", 1.02), ("topk", 0.0602), ("topk:0.3", 1.33), ("randomk", 0.0401)],
)
def test_a_slice_takes_so_many_bytes_an_element(name: str, most: float) -> None:
    assert codec_of(name).nbytes(262_144) / 262_144 <= most


@every_codec
def test_the_payload_is_the_beginning_of_what_was_handed_in(name: str) -> None:
    codec, values = codec_of(name), normal(1000)
    size = codec.nbytes(1000)
    out = np.full(size + 5, 77, np.uint8)
    payload = codec.encode(values, out, SEED)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), out)
    assert payload == codec.encode(values, seed=SEED)
    assert (out[size:] == 77).all()


@every_codec
def test_a_payload_may_lie_at_any_address(name: str) -> None:
    codec, values = codec_of(name), normal(BLOCK + 700)
    room = np.empty(codec.nbytes(values.size) + 1, np.uint8)
    payload = codec.encode(values, room[1:], SEED)
    assert same_bits(decode(codec, payload, values.size), through(codec, values))


@every_codec
def test_values_may_lie_at_any_address(name: str) -> None:
    codec, values = codec_of(name), normal(BLOCK + 700)
    shifted = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(np.float32)
    owed, odd = np.zeros_like(values), np.zeros(4 * values.size + 1, np.uint8)[1:].view(np.float32)
    assert not shifted.flags.aligned
    assert codec.encode(shifted, seed=SEED) == codec.encode(values, seed=SEED)
    assert encode_with_feedback(codec, shifted, odd, seed=SEED) == encode_with_feedback(codec, values, owed, seed=SEED)
    assert same_bits(odd, owed)


@every_codec
@pytest.mark.parametrize("extra", [-1, 1])
def test_a_payload_of_another_length_is_refused(name: str, extra: int) -> None:
    codec = codec_of(name)
    size = codec.nbytes(1000)
    message = f"1000 elements as {codec.name} take {size} bytes, got {size + extra}"
    with pytest.raises(MalformedMessageError, match=message):
        decode(codec, bytes(size + extra), 1000)


def test_arrays_of_another_kind_are_refused() -> None:
    codec, values = codec_of("bf16"), normal(10)
    wrong: Any = values.astype(np.float64)
    with pytest.raises(DTypeError, match="values must be float32, got float64"):
        codec.encode(wrong)
    with pytest.raises(LayoutError, match="contiguous"):
        codec.encode(values[::2])
    with pytest.raises(LayoutError, match=r"shape \(2, 5\)"):
        codec.encode(values.reshape(2, 5))
    with pytest.raises(SizeMismatchError, match="10 elements as bf16 take 20 bytes, got room for 19"):
        codec.encode(values, np.empty(19, np.uint8))
    with pytest.raises(SizeMismatchError, match="10 elements are to be decoded into an array of 9"):
        codec.decode(bytes(20), 10, np.empty(9, np.float32))
    with pytest.raises(SizeMismatchError, match=r"residual has shape \(9,\), values have \(10,\)"):
        encode_with_feedback(codec, values, np.zeros(9, np.float32))


@every_codec
@given(data=st.data())
def test_any_bytes_decode_to_numbers_or_are_refused(name: str, data: st.DataObject) -> None:
    codec = codec_of(name)
    numel = data.draw(st.integers(1, 600) | st.just(BLOCK + 5))
    size = codec.nbytes(numel)
    payload = data.draw(st.binary(min_size=min(size, 50), max_size=min(size, 50))) * (size // min(size, 50) + 1)
    guarded = np.full(numel + 2, 99, np.float32)
    try:
        codec.decode(payload[:size], numel, guarded[1:-1], SEED)
    except MalformedMessageError:
        assert codec.family == "topk"
    assert guarded[0] == guarded[-1] == 99


def test_offsets_out_of_range_or_order_are_refused() -> None:
    codec = codec_of("topk:0.02")  # 2 of 100
    for offsets in ([5, 100], [5, 65_535], [7, 6], [7, 7]):
        payload = bytes(8) + np.array(offsets, np.uint16).tobytes()
        with pytest.raises(MalformedMessageError, match="offsets do not ascend within 100 elements"):
            decode(codec, payload, 100)
    bits = codec_of("topk:0.3")  # 30 of 100, as a bitmap of 13 bytes
    for bitmap, refusal in (
        (b"\xff" * 13, "keeps 30, got 104 offsets"),
        (bytes(13), "keeps 30, got 0 offsets"),
        (bytes(9) + b"\xfc\xff\xff\xff", "do not ascend within 100"),
    ):
        with pytest.raises(MalformedMessageError, match=refusal):
            decode(bits, bytes(120) + bitmap, 100)


# ── the dense ones ───────────────────────────────────────────────────────────────────────────────────────────────────


@given(values=patterns)
def test_fp32_is_the_identity(values: Floats) -> None:
    assert same_bits(through(codec_of("fp32"), values), values)


def rounded(values: Floats, dtype: type[np.generic]) -> Floats:
    """Return the library's own conversion of ``values``, saturated where finite ones became Inf."""
    with np.errstate(all="ignore"):
        result = values.astype(dtype).astype(np.float32)
    limit = np.float32(3.3895314e38 if dtype is ml_dtypes.bfloat16 else 65504)
    return np.where(np.isinf(result) & np.isfinite(values), np.copysign(limit, values), result)


def assert_rounds_as_the_library(name: str, dtype: type[np.generic], values: Floats) -> None:
    result, reference = through(codec_of(name), values), rounded(values, dtype)
    np.testing.assert_array_equal(result, reference)
    assert (np.signbit(result) == np.signbit(values)).all()


halves = pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])


@halves
@given(values=patterns)
def test_halves_round_to_nearest_even(name: str, dtype: type[np.generic], values: Floats) -> None:
    assert_rounds_as_the_library(name, dtype, values)


@halves
def test_halves_round_to_nearest_even_everywhere(name: str, dtype: type[np.generic]) -> None:
    assert_rounds_as_the_library(name, dtype, any_bits(1 << 18))
    with np.errstate(all="ignore"):  # every half, what lies in the middle of two, and the neighbours of that
        codes = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float32).view(np.uint32)
    middle = codes + (0x8000 if name == "bf16" else 0x1000)
    for bits in (codes, middle, middle - 1, middle + 1):
        assert_rounds_as_the_library(name, dtype, bits.view(np.float32))


@pytest.mark.parametrize(("name", "relative", "absolute"), [("bf16", 2**-8, 2**-134), ("fp16", 2**-11, 2**-25)])
@given(values=finite_patterns)
def test_halves_err_no_more_than_promised(name: str, relative: float, absolute: float, values: Floats) -> None:
    fits = values[np.abs(values) <= 65504]
    wide = fits.astype(np.float64)
    error = np.abs(through(codec_of(name), fits) - wide)
    assert (error <= np.maximum(relative * np.abs(wide), absolute)).all()


@given(values=finite_patterns)
def test_int8_errs_by_half_a_scale(values: Floats) -> None:
    result = through(codec_of("int8"), values).astype(np.float64)
    for start in range(0, values.size, Int8.GROUP):
        group = values[start : start + Int8.GROUP].astype(np.float64)
        scale = max(np.abs(group).max() / 127, float(np.finfo(np.float32).tiny))
        assert (np.abs(result[start : start + Int8.GROUP] - group) <= scale / 2 * (1 + 2**-20)).all()


def test_int8_rounds_ties_to_even() -> None:
    values = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], np.float32)
    np.testing.assert_array_equal(through(codec_of("int8"), values), [127, 0, 2, 2, 0, -2, -2])


@every_dense
@given(values=patterns)
def test_what_was_decoded_encodes_to_the_same_bytes(name: str, values: Floats) -> None:
    codec = codec_of(name)
    values = values if name != "int8" else np.where(np.isfinite(values), values, np.float32(0))
    payload = codec.encode(values)
    assert codec.encode(decode(codec, payload, values.size)) == payload


@every_dense
def test_what_was_decoded_encodes_to_the_same_bytes_at_every_magnitude(name: str) -> None:
    codec = codec_of(name)
    for values in (finite_bits(1 << 17), *(normal(2048, 2.0**power) for power in range(-149, 125))):
        payload = codec.encode(values)
        assert codec.encode(decode(codec, payload, values.size)) == payload


def test_a_scale_of_int8_is_found_again() -> None:
    peaks = np.arange(127 << 23, 128 << 23, dtype=np.uint32).view(np.float32)  # every significand
    scales = peaks / np.float32(127)
    assert same_bits(scales * np.float32(127) / np.float32(127), scales)


# ── the sparse ones ──────────────────────────────────────────────────────────────────────────────────────────────────


def kept_of(codec: Codec, numel: int) -> int:
    assert isinstance(codec, Sparse)
    return codec.kept(numel)


@every_sparse
@pytest.mark.parametrize("numel", [1, 7, 999, BLOCK, BLOCK + 999])
def test_sparse_codecs_keep_some_elements_as_they_are(name: str, numel: int) -> None:
    codec, values = codec_of(name), normal(numel)
    result = through(codec, values)
    kept = np.flatnonzero(result)
    assert kept.size == sum(kept_of(codec, min(BLOCK, numel - start)) for start in range(0, numel, BLOCK))
    assert same_bits(result[kept], values[kept])


@pytest.mark.parametrize("name", ["topk", "topk:0.3", "topk:1"])
@given(values=finite_patterns)
def test_topk_keeps_the_largest(name: str, values: Floats) -> None:
    codec = codec_of(name)
    result = through(codec, values)
    order = np.argsort(-np.abs(values.astype(np.float64)), kind="stable")  # the first among equals
    expected = np.zeros_like(values)
    kept = order[: kept_of(codec, values.size)]
    expected[kept] = values[kept]
    assert same_bits(result, expected)


@pytest.mark.parametrize("name", ["topk", "topk:0.3"])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.04, 1.0])
@pytest.mark.parametrize("levels", [3, 1000, 0])
def test_topk_keeps_the_largest_of_whole_blocks_too(name: str, share: float, levels: int) -> None:
    """Test blocks that are mostly zeros, as means of sparse ones are, and blocks of few values."""
    codec, chance = codec_of(name), np.random.default_rng(0)
    values = normal(BLOCK)
    values[chance.random(BLOCK) >= share] = 0
    if levels:
        values = np.round(values * levels) / np.float32(levels)
    result = through(codec, values)
    expected = np.zeros_like(values)
    kept = np.argsort(-np.abs(values), kind="stable")[: kept_of(codec, BLOCK)]
    expected[kept] = values[kept]
    np.testing.assert_array_equal(result, expected)


def test_topk_is_not_misled_by_its_sample() -> None:
    """Test with all large elements where it looks, and with all where it does not."""
    for start in (0, 1):
        values = normal(BLOCK, 1e-3)
        values[start::31] += 1
        result = through(codec_of("topk:0.1"), values)
        assert np.flatnonzero(result).size == kept_of(codec_of("topk:0.1"), BLOCK)
        assert (result[start::31] == values[start::31]).all()


def drawn(codec: Codec, numel: int, seed: int) -> set[int]:
    return set(np.flatnonzero(through(codec, np.ones(numel, np.float32), seed)).tolist())


def test_one_seed_draws_the_same_elements_everywhere_and_another_others() -> None:
    codec, numel = codec_of("randomk:0.1"), 2 * BLOCK
    assert drawn(codec, numel, SEED) == drawn(codec, numel, SEED)
    others = [
        seed_of(12, 3, 9 * BLOCK),
        seed_of(12, 4, 4 * BLOCK),
        seed_of(13, 3, 4 * BLOCK),
        seed_of(3, 12, 4 * BLOCK),
    ]
    for seed in others:  # a tenth of them by chance
        assert len(drawn(codec, numel, SEED) & drawn(codec, numel, seed)) < 0.12 * 0.1 * numel
    first = drawn(codec, numel, SEED)
    blocks = [{index % BLOCK for index in first if index // BLOCK == number} for number in (0, 1)]
    assert len(blocks[0] & blocks[1]) < 0.12 * 0.1 * BLOCK


def test_the_draw_is_part_of_the_format() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert split_mix(1234567, 4).tolist() == published
    assert seed_of(1, 2, 3 * BLOCK) == 13608149317741381230
    assert seed_of(1, 2, 0) == 13608149317741381227
    assert sorted(drawn(codec_of("randomk:0.3"), 20, 7)) == [0, 4, 7, 12, 15, 18]


@pytest.mark.parametrize("name", ["randomk:0.1", "randomk:0.3", "randomk:0.7"])
def test_every_element_is_drawn_as_often(name: str) -> None:
    codec, numel, trials = codec_of(name), 101, 4000
    counts = np.zeros(numel)
    for trial in range(trials):
        counts[list(drawn(codec, numel, seed_of(trial, 0, 0)))] += 1
    chance = kept_of(codec, numel) / numel
    deviation = np.sqrt(trials * chance * (1 - chance))
    assert np.abs(counts - trials * chance).max() < 4.5 * deviation


def test_a_mean_of_the_same_elements_is_encoded_without_loss() -> None:
    codec, scratch = codec_of("randomk"), Scratch()
    given_values = [normal(BLOCK + 99, seed=rank) for rank in range(3)]
    mean: Floats = np.stack([through(codec, values) for values in given_values]).mean(axis=0, dtype=np.float32)
    reply = codec.encode(mean, seed=SEED, scratch=scratch)
    assert same_bits(decode(codec, reply, mean.size), mean)


# ── what holds for all of them ───────────────────────────────────────────────────────────────────────────────────────


@every_codec
def test_a_scratch_remembers_nothing(name: str) -> None:
    codec, scratch, values = codec_of(name), Scratch(), normal(BLOCK + 300)
    fresh = bytes(codec.encode(values, seed=SEED))
    codec.encode(any_bits(2 * BLOCK), seed=1, scratch=scratch)
    assert codec.encode(values, seed=SEED, scratch=scratch) == fresh
    out = np.empty_like(values)
    codec.decode(fresh, values.size, out, SEED, scratch)
    assert same_bits(out, decode(codec, fresh, values.size))


def memory_of_a_slice(name: str) -> int:
    loader.settle(300)
    codec, scratch, values = codec_of(name), Scratch(), normal(4 * BLOCK)
    out, back = np.empty(codec.nbytes(values.size), np.uint8), np.empty_like(values)
    return memory_of(
        lambda: codec.decode(codec.encode(values, out, SEED, scratch), values.size, back, SEED, scratch)
    ).peak


@every_codec
def test_with_memory_handed_in_a_slice_takes_little_more(measured: Measured, name: str) -> None:
    assert measured(memory_of_a_slice, name) < (64 << 10 if name in DENSE else 2 << 20)


@every_codec
@given(values=finite_patterns)
def test_finite_elements_stay_finite(name: str, values: Floats) -> None:
    assert np.isfinite(through(codec_of(name), values)).all()


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [("fp16", 70_000.0, 65_504.0), ("fp16", 65_519.9, 65_504.0), ("bf16", MAX, 3.3895314e38), ("int8", MAX, MAX)],
)
def test_what_does_not_fit_saturates(name: str, value: float, limit: float) -> None:
    values = np.array([value, -value, 1], np.float32)
    result = through(codec_of(name), values)
    np.testing.assert_allclose(result[:2], np.array([limit, -limit], np.float32), rtol=2**-20)


@every_codec
@pytest.mark.parametrize("bits", [0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF])
@pytest.mark.parametrize("place", [0, 300, BLOCK - 1, BLOCK, BLOCK + 499])
def test_what_is_not_finite_is_seen_after_decoding(name: str, bits: int, place: int) -> None:
    values = normal(BLOCK + 500)
    values.view(np.uint32)[place] = bits
    result = through(codec_of(name), values)
    if name.startswith("randomk"):  # somewhere in its block
        start = place // BLOCK * BLOCK
        assert np.isnan(result[start : start + BLOCK]).any()
    else:
        assert not np.isfinite(result[place])
        assert np.isnan(result[place]) >= (name != "int8" and bits & 0x7FFF_FFFF > 0x7F80_0000)


# ── error feedback ───────────────────────────────────────────────────────────────────────────────────────────────────


@every_codec
def test_what_an_encoding_loses_comes_later(name: str) -> None:
    codec, numel, steps, scratch = codec_of(name), 1000, 600, Scratch()
    feedback = Feedback(numel)
    inputs, outputs, out = np.zeros(numel), np.zeros(numel), np.empty(numel, np.float32)
    owed = []
    for step in range(steps):
        values = normal(numel, seed=step) + np.float32(0.5)
        seed = seed_of(step, 0, 0)
        payload = feedback.encode(codec, 0, numel, values, seed=seed, scratch=scratch)
        codec.decode(payload, numel, out, seed, scratch)
        inputs += values
        outputs += out
        owed.append(float(np.linalg.norm(feedback.residual)))
        np.testing.assert_allclose(inputs - outputs, feedback.residual, atol=2e-4 * np.sqrt(step + 1))
    if isinstance(codec, Sparse):  # Karimireddy et al. 2019, lemma 3: at most 2√(1 − δ)/δ inputs; and it has settled
        delta = codec.kept(numel) / numel
        assert max(owed) < 2 * np.sqrt(1 - delta) / delta * 1.2 * np.sqrt(numel)
        assert owed[-1] < 1.25 * owed[steps // 2]
    else:
        assert max(owed) < 0.02 * np.sqrt(numel)


@every_codec
def test_feedback_of_a_slice_leaves_the_others_alone(name: str) -> None:
    codec, feedback = codec_of(name), Feedback(3000)
    feedback.residual[:] = normal(3000, 0.1)
    before, values = feedback.residual.copy(), normal(1000, seed=1)
    compensated = feedback.compensate(1000, 2000, values)
    assert same_bits(compensated, values + before[1000:2000])
    payload = feedback.encode(codec, 1000, 2000, values, seed=SEED)
    assert payload == codec.encode(compensated, seed=SEED)
    assert same_bits(feedback.residual[1000:2000], compensated - decode(codec, payload, 1000))
    assert same_bits(feedback.residual[:1000], before[:1000])
    assert same_bits(feedback.residual[2000:], before[2000:])
    assert same_bits(values, normal(1000, seed=1))


@every_codec
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_stay_in_the_residual(name: str, poison: float) -> None:
    codec, residual, values = codec_of(name), normal(1000, 0.1), normal(1000)
    before = residual.copy()
    values[10] = poison
    payload = encode_with_feedback(codec, values, residual, seed=SEED)
    assert not np.isfinite(decode(codec, payload, 1000)).all()
    assert same_bits(residual, before)


@every_codec
def test_a_residual_that_overflows_does_not_make_a_gradient_infinite(name: str) -> None:
    codec, residual, values = codec_of(name), np.full(10, MAX, np.float32), np.full(10, MAX, np.float32)
    payload = encode_with_feedback(codec, values, residual, seed=SEED)
    assert np.isfinite(decode(codec, payload, 10)).all()
    assert (residual == MAX).all()


@every_codec
@given(data=st.data())
def test_shortcuts_of_feedback_change_no_bit(name: str, data: st.DataObject) -> None:
    """Test that a codec's own way of compensating is that of all: add, encode, decode, subtract."""
    codec, values = codec_of(name), data.draw(patterns)
    residual = data.draw(st.sampled_from([np.zeros_like(values), normal(values.size, 0.1), finite_bits(values.size)]))
    outcomes = []
    for compensate in (type(codec).compensate_block, Codec.compensate_block):
        owed, out = residual.copy(), np.zeros(codec.nbytes(values.size), np.uint8)
        with np.errstate(all="ignore"):
            done = compensate(codec, values, owed, out, SEED, Scratch())
        assert done or same_bits(owed, residual)
        outcomes.append((done, done and out.tobytes(), owed.tobytes()))
    assert outcomes[0] == outcomes[1]


@every_codec
@pytest.mark.parametrize("weight", [None, np.float32(0.3)])
def test_shortcuts_of_adding_up_change_no_bit(name: str, weight: np.float32 | None) -> None:
    codec, total = codec_of(name), normal(BLOCK - 77)
    payload = np.frombuffer(codec.encode(normal(total.size, seed=1), seed=SEED), np.uint8)
    outcomes = []
    for add in (type(codec).add_block, Codec.add_block):
        summed = total.copy()
        add(codec, payload, summed, weight, SEED, Scratch())
        outcomes.append(summed.tobytes())
    decoded = decode(codec, payload.data, total.size)
    outcomes.append((total + (decoded if weight is None else decoded * weight)).tobytes())
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_one_block_that_overflows_costs_the_others_nothing() -> None:
    codec, values, residual = codec_of("int8"), normal(2 * BLOCK), normal(2 * BLOCK, 0.1)
    values[5] = residual[5] = MAX
    before = residual.copy()
    payload = encode_with_feedback(codec, values, residual)
    assert same_bits(residual[:BLOCK], before[:BLOCK])
    compensated = values[BLOCK:] + before[BLOCK:]
    assert same_bits(residual[BLOCK:], compensated - decode(codec, payload, 2 * BLOCK)[BLOCK:])


def test_feedback_brings_what_did_not_fit_later() -> None:
    codec, residual = codec_of("fp16"), np.zeros(1, np.float32)
    large, none = np.full(1, 100_000, np.float32), np.zeros(1, np.float32)
    got = [float(decode(codec, encode_with_feedback(codec, values, residual), 1)[0]) for values in (large, none, none)]
    assert got == [65_504, 34_496, 0]
