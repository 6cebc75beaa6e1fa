"""Codecs of a plan: the buckets that travel with loss, because the group or a caller has named a codec for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gradserver.protocol.codecs import codec_of
from gradserver.protocol.codecs.base import Codec
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.exchange import EXACT, Op
from gradserver.protocol.limits import KIB
from gradserver.protocol.plan import Bucket, Plan

EXEMPT_BYTES: Final = 64 * KIB
"""Bytes below which a bucket travels without loss, unless a codec is named for it: biases and norms, which weigh
little."""


def with_codec(plan: Plan, codec: Codec) -> Plan:
    """Return ``plan`` with ``codec`` for its means of float32, except for small buckets and those with a codec."""
    if codec is EXACT:
        return plan
    return Plan(tuple(_with_codec(bucket, codec) for bucket in plan.buckets))


def _with_codec(bucket: Bucket, codec: Codec) -> Bucket:
    small = bucket.numel * bucket.dtype.itemsize < EXEMPT_BYTES
    if bucket.codec is not None or bucket.dtype != FLOAT32 or bucket.op is not Op.MEAN or small:
        return bucket
    return replace(bucket, codec=codec)


def check_names(names: object, example: str) -> None:
    """Raise InvalidArgumentError unless ``names`` is a mapping, such as one with the key ``example``."""
    if not isinstance(names, Mapping):
        raise InvalidArgumentError(
            f"wire is {names!r}, and must have a format for each bucket that it names, as {{{example!r}: 'int8'}}. A "
            f"format for all buckets is an argument of gradserver.connect"
        )


def with_named_codecs(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return ``plan`` with the codecs that ``names`` has for the keys of its buckets.

    Raises:
        InvalidArgumentError: there is no bucket of that key, or no codec of that name.
        UnsupportedOperationError: a bucket cannot travel as its codec.
    """
    check_names(names, plan.buckets[0].key)
    chosen = {plan.index(key): codec_of(name) for key, name in names.items()}
    buckets = (replace(b, codec=chosen[i]) if i in chosen else b for i, b in enumerate(plan.buckets))
    return Plan(tuple(buckets))
