"""Codecs in torch's operations, against those of numpy: every bit of payloads, results and residuals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, strategies as st

from gradserver.protocol.codecs import Feedback, encode_with_feedback, is_finite
from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.errors import DTypeError, SizeMismatchError
from gradserver.worker.devices.codecs import DEVICE_CODECS, DeviceCodec

torch.set_num_threads(1)

Floats = npt.NDArray[np.float32]

CODECS = [pytest.param(codec, id=name) for name, codec in DEVICE_CODECS.items()]
SPECIAL = np.array(
    [
        *(0, 1, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F808000, 0x3F818000, 0x3F7FFFFF, 0x7F7F7FFF, 0x7F7F8000),
        *(0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7C010200, 0x7C010201, 0x42FE0000, 0x3F000000),
    ],
    np.uint32,
)
"""Magnitudes at which something changes: subnormal numbers, ties, the largest that round down, Inf, NaN."""


def equal(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    return bool(np.array_equal(one.view(np.uint8), other.view(np.uint8)))


@st.composite
def slices(draw: st.DrawFn) -> Floats:
    """Draw the elements of a slice: any bits, usual numbers, and some special ones among them."""
    numel = draw(st.one_of(st.integers(0, 600), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300])))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        values = generator.integers(0, 2**32, numel, np.uint32).view(np.float32)
    else:
        values = (generator.standard_normal(numel) * 10.0 ** draw(st.integers(-44, 37))).astype(np.float32)
    if numel and draw(st.booleans()):
        places = generator.integers(0, numel, draw(st.integers(1, 20)))
        signs = generator.integers(0, 2, places.size, np.uint32) << 31
        values.view(np.uint32)[places] = generator.choice(SPECIAL, places.size) | signs
    if draw(st.booleans()):
        values = np.where(np.isfinite(values), values, np.float32(1.5))
    return values


@pytest.mark.parametrize("device", CODECS)
@given(values=slices())
def test_payload_and_result_are_those_of_the_host(device: DeviceCodec, values: Floats) -> None:
    expected = np.frombuffer(device.codec.encode(values), np.uint8)
    payload = torch.empty(expected.size, dtype=torch.uint8)
    device.encode(torch.from_numpy(values), payload)
    assert equal(payload.numpy(), expected)
    decoded, there = np.empty_like(values), torch.empty(values.size)
    device.codec.decode(expected.data, values.size, decoded)
    device.decode(payload, there)
    assert np.array_equal(np.isnan(there.numpy()), np.isnan(decoded))
    numbers = ~np.isnan(decoded)
    assert equal(there.numpy()[numbers], decoded[numbers])


@pytest.mark.parametrize("device", CODECS)
@pytest.mark.parametrize("sifts", [False, True])
@given(steps=st.lists(slices(), min_size=1, max_size=3))
def test_feedback_is_that_of_the_host(device: DeviceCodec, sifts: bool, steps: list[Floats]) -> None:
    numel = steps[0].size
    feedback, residual = Feedback(numel), torch.zeros(numel)
    for step in steps:
        values = np.resize(step, numel) if step.size else np.zeros(numel, np.float32)
        if sifts and numel and not is_finite(values):  # as `gradserver.worker.member.coder` does
            expected = device.codec.encode(values)
        else:
            expected = encode_with_feedback(device.codec, values, feedback.residual)
        payload = torch.empty(device.codec.nbytes(numel), dtype=torch.uint8)
        device.encode(torch.from_numpy(values), payload, residual, sifts)
        assert equal(payload.numpy(), np.frombuffer(expected, np.uint8))
        assert equal(residual.numpy(), feedback.residual)


@pytest.mark.parametrize("device", CODECS)
def test_every_special_number(device: DeviceCodec) -> None:
    values = np.concatenate([SPECIAL, SPECIAL | np.uint32(1 << 31)]).view(np.float32)
    for group in (values, values[np.isfinite(values)], np.repeat(values, 256)):
        payload = torch.empty(device.codec.nbytes(group.size), dtype=torch.uint8)
        device.encode(torch.from_numpy(group.copy()), payload)
        assert equal(payload.numpy(), np.frombuffer(device.codec.encode(group), np.uint8))


@pytest.mark.parametrize("device", CODECS)
def test_wrong_memory_is_refused(device: DeviceCodec) -> None:
    payload = torch.empty(device.codec.nbytes(10), dtype=torch.uint8)
    with pytest.raises(DTypeError, match="expected float32 and uint8, got torch.float64"):
        device.encode(torch.zeros(10, dtype=torch.float64), payload)
    with pytest.raises(SizeMismatchError, match=f"11 elements as {device.codec.name}"):
        device.encode(torch.zeros(11), payload)
    with pytest.raises(SizeMismatchError, match="residual has shape"):
        device.encode(torch.zeros(10), payload, torch.zeros(9))
