"""The form of a coordinator's snapshot, and the one check of it: what answers at a URL may be no coordinator."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.limits import MAX_COUNTER, MAX_SHARDS
from gradserver.protocol.planes import CHANNELS, WISHES

Snapshot = dict[str, Any]

_MAX_DEPTH: Final = 32
_MAX_NUMBER: Final = 1e300


class _Maybe(NamedTuple):
    """A value, or null."""

    form: Any


class _Each(NamedTuple):
    """A mapping from any names."""

    form: Any


class _Some(NamedTuple):
    """A list of so many items."""

    form: Any
    least: int
    most: int


class _One(NamedTuple):
    """One of some texts."""

    of: Collection[str]


class _Optional(NamedTuple):
    """The value of a key that may be missing."""

    form: Any


class _Natural:
    """An integer from 0 on."""


_DEVICE: Final = {"name": str, "uuid": str, "memory": _Natural}
_OFFER: Final = {
    **dict.fromkeys(("host", "host_id", "torch", "nccl", "driver", "trouble", "store"), str),
    "plane": _One(WISHES),
    "channel": _One(CHANNELS),
    "rate": float,
    "trip": float,
    "backends": [str],
    "devices": [_DEVICE],
}
_MEMBER: Final = {
    "rank": int,
    "name": str,
    "seat": _Optional(_Natural),
    "offer": _Optional(_OFFER),
    "pace": _Optional({"rate": float, "unit": str, "share": float, "batches": int}),
    "held_up": _Optional({"rounds": int, "seconds": float, "cause": str}),
    "gradients": _Optional({"norm_ratio": _Maybe(float), "cosine": _Maybe(float), "off": _Maybe(str)}),
}
_PLANE: Final = {
    "name": str,
    "reason": str,
    "devices": str,
    "coordinator_demands": _One(WISHES),
    "mode": str,
    "mean": str,
    "leaves_late": bool,
    "has_commits": bool,
}
_TRAFFIC: Final = {
    **dict.fromkeys(("bytes_in", "bytes_out", "slices"), _Natural),
    "outstanding": [_Natural],
    "open": [{"what": str, "age": float, "missing": [str], "round": _Optional(_Maybe(int))}],
    "rates": _Optional(_Maybe(dict.fromkeys(("rounds", "in", "out"), float))),
}
_AUDIT: Final = {
    "policy": str,
    "rounds": int,
    "differing": int,
    "largest": _Maybe(float),
    "last": str,
    "wrong": _Each(int),
    "doubtful": _Each(int),
}
_GROUP: Final = {
    "state": str,
    "world_size": int,
    "elastic": _Optional(_Maybe(_Some(int, 2, 2))),
    "epoch": int,
    "round": int,
    "parent": _Optional(str),
    "mean": str,
    "broken": _Maybe(str),
    "plane": _PLANE,
    "members": [_MEMBER],
    "waiting": [{"rank": int, "name": str, "waits": float}],
    "plan": _Maybe({"buckets": int, "bytes": _Natural}),
    "last_round": _Maybe({"weights": _Optional([float])}),
    "pace": _Optional({"rounds": int, "known": int}),
    "joining": _Optional([{"name": str, "stage": str}]),
    "gone": _Optional([{"name": str, "why": str, "ago": float, "joining": bool}]),
    "noise_scale": {"scale": _Maybe(float)},
    "audit": _Optional(_AUDIT),
    "nonfinite": _Optional({"policy": str, "rounds": int, "workers": _Each(int)}),
    "outliers": {"policy": str, "keeps_all": str, "evicted": _Each(str)},
    **{key: _Optional(form) for key, form in _TRAFFIC.items()},
}
_SHARD: Final = {"number": _Natural, "url": str, "rate": _Maybe(float)}
_COORDINATORS: Final = {
    "url": str,
    "version": str,
    "uptime": float,
    "groups": _Each(_GROUP),
    "totals": _Each(int),
    "kernels": _Optional({"kernels": str, "reason": str}),
    "ledger": _Optional({"file": str, "trouble": _Maybe(str)}),
    "shards": _Some(_SHARD, 0, MAX_SHARDS),
}
_SHARDS: Final = {"shard": {"number": _Natural, "primary": str}, "groups": _Each(_TRAFFIC)}


def snapshot_in(data: Buffer) -> Snapshot:
    """Return the snapshot that ``data`` is, of a coordinator or (with the key ``shard``) of a data shard.

    Raises:
        MalformedMessageError: it is none. The error says which part is not as it should be.
    """
    try:
        found = json.loads(bytes(data), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(f"a status that is not JSON: {str(error)[:120]}") from None
    _check_plain(found, 0)
    is_shards = isinstance(found, dict) and "shard" in found
    _check(found, _SHARDS if is_shards else _COORDINATORS, "the status")
    snapshot: Snapshot = found
    return snapshot


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _check_plain(value: Any, depth: int) -> None:
    """Check what holds for each value: the depth, and that numbers can be computed with."""
    if depth > _MAX_DEPTH:
        raise MalformedMessageError(f"a status that is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _check_plain(one, depth + 1)
    elif isinstance(value, int):
        if abs(value) > 2 * MAX_COUNTER:
            raise MalformedMessageError(f"a status with an integer of {value.bit_length()} bits")
    elif isinstance(value, float) and not abs(value) < _MAX_NUMBER:
        raise MalformedMessageError(f"a status with the number {value}")


def _check(value: Any, form: Any, where: str) -> None:
    """Raise MalformedMessageError unless ``value`` has this form."""
    match form:
        case _Optional(inner):
            _check(value, inner, where)
        case _Maybe(inner):
            if value is not None:
                _check(value, inner, where)
        case _One(texts):
            _expect(isinstance(value, str) and value in texts, value, f"one of {', '.join(texts)}", where)
        case list():
            _check(value, _Some(form[0], 0, MAX_COUNTER), where)
        case _Some(inner, least, most):
            _expect(isinstance(value, list) and least <= len(value) <= most, value, "a list, not longer", where)
            for number, one in enumerate(value):
                _check(one, inner, f"{where}[{number}]")
        case _Each(inner):
            _expect(isinstance(value, dict), value, "an object", where)
            for name, one in value.items():
                _check(one, inner, f"{where}.{name[:40]}")
        case dict():
            _check_keys(value, form, where)
        case _:
            _expect(_is_plain(value, form), value, _NAMES[form], where)


_NAMES: Final[dict[type, str]] = {str: "a text", int: "an integer", float: "a number", bool: "true or false"} | {
    _Natural: "an integer from 0 on"
}


def _is_plain(value: Any, form: type) -> bool:
    if form is _Natural:
        return type(value) is int and value >= 0
    return type(value) is form or (form is float and type(value) is int)


def _check_keys(value: Any, form: dict[str, Any], where: str) -> None:
    _expect(isinstance(value, dict), value, "an object", where)
    for key, inner in form.items():
        if key in value:
            _check(value[key], inner.form if isinstance(inner, _Optional) else inner, f"{where}.{key}")
        elif not isinstance(inner, _Optional):
            raise MalformedMessageError(f"{where} has no {key!r}")


def _expect(holds: bool, value: Any, what: str, where: str) -> None:
    if not holds:
        raise MalformedMessageError(f"{where} is {str(value)[:40]!r}: {what} was expected")
