"""Codecs: lossy encodings of a float32 slice for the wire, and the error feedback that makes up for their loss.

| name             | bytes per element                 | what arrives                             |
|------------------|-----------------------------------|------------------------------------------|
| ``fp32``         | 4                                 | everything                               |
| ``bf16``         | 2                                 | 8 significant bits, the range of float32 |
| ``fp16``         | 2                                 | 11 significant bits, up to ±65504        |
| ``int8``         | 1.016                             | steps of 1/127 of the largest among 256  |
| ``topk:0.01``    | 6 × fraction, or 4 × fraction + ⅛ | the largest of each 65536                |
| ``randomk:0.01`` | 4 × fraction                      | those that the seed draws                |

A codec has no state: the caller keeps what it loses, in a `Feedback`.
"""

from __future__ import annotations

from typing import Final

from gradserver.protocol.codecs.base import Codec, Scratch, is_finite
from gradserver.protocol.codecs.dense import Bf16, Fp16, Fp32, Int8
from gradserver.protocol.codecs.feedback import Feedback, encode_with_feedback
from gradserver.protocol.codecs.sparse import MILLION, RandomK, Sparse, TopK, seed_of
from gradserver.protocol.errors import InvalidArgumentError, MalformedMessageError

_DENSE: Final[dict[str, Codec]] = {codec.name: codec for codec in (Fp32(), Bf16(), Fp16(), Int8())}
_SPARSE: Final[dict[str, type[Sparse]]] = {family.family: family for family in (TopK, RandomK)}
_DENSE_CODES: Final = {codec.code: codec for codec in _DENSE.values()}
_SPARSE_CODES: Final = {family.code: family for family in _SPARSE.values()}


def codec_of(name: str) -> Codec:
    """Return the codec called ``name``. ``topk:0.001`` names the fraction that it keeps, by default 0.01.

    Raises:
        InvalidArgumentError: there is none, or its fraction is not a number of millionths above 0 and up to 1.
    """
    family, colon, fraction = name.partition(":")
    if family in _SPARSE:
        return _SPARSE[family](_millionths(name, fraction)) if colon else _SPARSE[family]()
    if name in _DENSE:
        return _DENSE[name]
    sparse = ", ".join(f"{family}[:FRACTION]" for family in _SPARSE)
    raise InvalidArgumentError(f"there is no codec {name!r}; there are {', '.join(_DENSE)}, {sparse}")


def codec_from(code: int, parameter: int) -> Codec:
    """Return the codec that a peer's header names by ``Codec.code`` and ``Codec.parameter``.

    Raises:
        MalformedMessageError: there is none.
    """
    if code in _SPARSE_CODES and 1 <= parameter <= MILLION:
        return _SPARSE_CODES[code](parameter)
    if code in _DENSE_CODES and parameter == 0:
        return _DENSE_CODES[code]
    raise MalformedMessageError(f"there is no codec {code} with parameter {parameter}")


def _millionths(name: str, fraction: str) -> int:
    try:
        exact = float(fraction) * MILLION
        millionths = round(exact)
    except (ValueError, OverflowError):  # no number; NaN; Inf
        millionths = exact = 0
    if not 1 <= millionths <= MILLION or abs(exact - millionths) > 1e-6:
        raise InvalidArgumentError(
            f"codec {name!r}: the fraction must be above 0, at most 1, and have at most 6 decimals, got {fraction!r}"
        )
    return millionths


__all__ = ["Codec", "Feedback", "Scratch", "codec_from", "codec_of", "encode_with_feedback", "is_finite", "seed_of"]
