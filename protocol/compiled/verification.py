"""The check of compiled kernels before they are used: on this machine they give the same bits as numpy.

A member with kernels that round differently would hold other weights than all others. The tests compare far more cases,
but with the compiler and the processor of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gradserver.protocol.codecs import Codec, Scratch, codec_of
from gradserver.protocol.kernels import NONE, Floats, Given, Kernels

_NUMEL: Final = 2500
"""Elements of a block: four chunks and a part of one, nine groups of int8 and a part of one."""


def differences(table: Kernels) -> list[str]:
    """Name the kernels of ``table`` that give other bits than numpy, while no kernel is in use."""
    rows = list(_rows())
    found = [name for codec in map(codec_of, ("bf16", "fp16", "int8")) for name in _of(table, codec, rows)]
    return found if _hands_out(table, rows) else [*found, "means that are handed out"]


def _hands_out(table: Kernels, rows: Sequence[Floats]) -> bool:
    """Tell whether the mean of finite numbers has numpy's bits at all members, and none behind one that is not."""
    expected = (rows[1] + rows[2] + rows[3]) / np.float32(3)
    memory = [row.copy() for row in rows[1:]]
    addresses = np.array([row.ctypes.data for row in memory], np.uint64)
    done = table.hand_out["float32"](Given.of(memory, [], 3), addresses, 0, _NUMEL, np.inf)
    lacking = [np.full(_NUMEL, np.inf, np.float32), memory[0]]
    void = table.hand_out["float32"](Given.of(lacking, [], 2), addresses, 0, _NUMEL, np.inf)
    return done == _NUMEL and void == 0 and all(_same(row, expected) for row in memory)


def _rows() -> Iterator[Floats]:
    """Yield numbers of all sizes, with infinities and NaN, and then finite ones."""
    chance = np.random.default_rng(7)
    bits = chance.integers(0, 1 << 32, _NUMEL, np.uint32)
    bits[: _NUMEL // 2] &= 0xBFFF_FFFF
    yield bits.view(np.float32)
    for scale in (1e-38, 1.0, 1e5):
        yield chance.standard_normal(_NUMEL, np.float32) * np.float32(scale)


def _of(table: Kernels, codec: Codec, rows: Sequence[Floats]) -> Iterator[str]:
    code, scratch, finite = codec.code, Scratch(), rows[1:]
    payloads = [np.frombuffer(codec.encode(row), np.uint8) for row in rows]
    out, number, other = np.empty_like(payloads[0]), np.empty(_NUMEL, np.float32), np.empty(_NUMEL, np.float32)
    with np.errstate(all="ignore"):
        for row, payload in zip(rows, payloads, strict=True):
            table.encode[code](row, out)
            codec.decode(payload.data, _NUMEL, number)
            table.decode[code](payload, other)
            if not (_same(payload, out) and _same(number, other)):
                yield codec.name
        given = Given.of(payloads[1:], [0.5, 0.25, 0.75], 1.5)
        total = np.zeros(_NUMEL, np.float32)
        codec.decode(payloads[1].data, _NUMEL, total)
        total *= np.float32(0.5)
        for payload, weight in zip(payloads[2:], (0.25, 0.75), strict=True):
            codec.add_block(payload, total, np.float32(weight), 0, scratch)
        total /= np.float32(1.5)
        residual, expected = finite[1] * np.float32(0.01), np.empty_like(out)
        before, after = residual.copy(), np.empty_like(residual)
        assert codec.compensate_block(total, residual, expected, 0, scratch)
        combined = table.combine[code](given, 0, _NUMEL, before, after, out, NONE)
        if combined < 0 or not (_same(expected, out) and _same(residual, after)):
            yield f"combine of {codec.name}"
        if not table.compensate[code](total, before, out, np.empty_like(total)) or not (
            _same(expected, out) and _same(residual, before)
        ):
            yield f"compensate of {codec.name}"


def _same(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> bool:
    return left.tobytes() == right.tobytes()
