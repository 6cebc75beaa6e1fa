"""Strategies of hypothesis for everything that is declared. They follow from the checks of the fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import UnionType
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from gradserver.engine.figures import Figures, OfBucket, OfMember
from gradserver.engine.order_fields import Member
from gradserver.engine.policy import Lateness, OnNonFinite, OnOutlier
from gradserver.engine.records import RoundRecord
from gradserver.protocol.declared import fields_of
from gradserver.protocol.dtypes import BY_CODE
from gradserver.protocol.errors import GradServerError, MalformedMessageError, NonFiniteError, WorkerLostError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import MAX_BUCKETS, MAX_COUNTER, MAX_LIST, MAX_NUMEL, MAX_PROOF_BYTES, MAX_WORLD_SIZE
from gradserver.protocol.means import Mean, mean_of
from gradserver.protocol.message_family import message as message_family
from gradserver.protocol.messages import Message, Place, Push, Result, Scope
from gradserver.protocol.plan import Plan
from gradserver.protocol.ranges import Ranges
from tests.engine_harness import plan_of

Strategy = st.SearchStrategy[Any]


class Shape(NamedTuple):
    """The values that a check lets pass.

    Attributes:
        what: "integer", "number", "text", "ASCII", "choice", "flag", "list", "optional", or "fields" of a named tuple.
        low: the least integer or number.
        high: the greatest one, or the most characters or items.
        items: the shapes of a list's items, of what is optional, or of each field; None for one that is not known.
        kind: the named tuple.
        names: the texts to choose from.
    """

    what: str
    low: float = 0
    high: float = 0
    items: tuple[Shape | None, ...] = ()
    kind: type[Any] | None = None
    names: tuple[str, ...] = ()


def shape_of(check: Callable[[Any], Any]) -> Shape | None:
    """Return the shape of the values that a check lets pass, from the arguments that the check was made with."""
    maker = getattr(check, "__qualname__", "").partition(".")[0]
    given = inspect.getclosurevars(check).nonlocals if inspect.isfunction(check) else {}
    match maker:
        case "integer" | "number":
            return Shape(maker, given["low"], given["high"])
        case "text":
            return Shape("text", high=given["longest"])
        case "ascii_text":
            return Shape("ASCII", high=given["longest"])
        case "choice":
            return Shape("choice", names=tuple(given["names"]))
        case "flag":
            return Shape("flag")
        case "listed":
            return Shape("list", high=given["most"], items=(shape_of(given["check"]),))
        case "numbers":
            return Shape("list", high=given["most"], items=(Shape("number", given["low"], given["high"]),))
        case "optional":
            return Shape("optional", items=(shape_of(given["check"]),))
        case "nested":
            return Shape("fields", items=tuple(shape_of(one.check) for _, one in given["fields"]), kind=given["kind"])
    return None


_counters: Final = st.integers(0, 99) | st.integers(0, MAX_COUNTER)
_ranks: Final = st.integers(-1, MAX_WORLD_SIZE - 1)
_texts: Final = st.lists(st.text(max_size=20), max_size=5).map(tuple)
_figures: Final = st.floats(allow_nan=False, allow_infinity=False)
_of_types: Final[dict[Any, Strategy]] = {
    bytes: st.binary(max_size=40) | st.just(bytes(MAX_PROOF_BYTES)),
    ExchangeKey: st.builds(
        ExchangeKey, st.sampled_from([int(s) for s in Stream]), _counters, _counters, _ranks, _ranks
    ),
    Operation: st.builds(
        Operation,
        st.sampled_from(Kind),
        st.sampled_from(Op),
        st.sampled_from(list(BY_CODE.values())),
        st.integers(0, MAX_NUMEL),
        _ranks,
    ),
    Place: st.builds(Place, _counters, _counters),
    Scope: st.sampled_from(Scope),
    OnNonFinite: st.sampled_from(OnNonFinite),
    OnOutlier: st.sampled_from(OnOutlier),
    Mean: st.sampled_from([mean_of(name) for name in ("plain", "median", "trimmed:0.25", "clipped:1.5", "krum:2")]),
    Lateness: st.sampled_from([Lateness(3), Lateness(percent=75.0, keeps=False), Lateness(backup=2, grace=0.0)]),
    Member: st.builds(Member, st.just(-1), st.text(max_size=20)),
    GradServerError: st.sampled_from(
        [NonFiniteError("NaN", worker="w1", rank=1, round=3), WorkerLostError("it died", worker="w1", rank=1)]
    ),
    Plan: st.sampled_from([plan_of(3), plan_of(3, 0, 100)]),
    RoundRecord: st.sampled_from(
        [
            RoundRecord(3, (1.0, 0.5), 7.0, 10.0, 1, ((7.0, 8.5), (7.25, 9.0)), (1, 2**64 - 1), (0, 5, 6)),
            RoundRecord(3, (1.0, 0.5), 7.0, 10.0, 1, cut=((0, 2, 5), (1, 0, 1))),
        ]
    ),
    Figures: st.builds(
        Figures,
        st.lists(
            st.builds(OfMember, st.integers(0, MAX_WORLD_SIZE - 1), _figures.map(abs), _figures, _figures.map(abs)),
            max_size=4,
        ).map(tuple),
        st.lists(st.builds(OfBucket, st.integers(0, MAX_BUCKETS - 1), *[_figures] * 2), max_size=4).map(tuple),
    ),
    Ranges: st.sets(st.integers(0, MAX_NUMEL), max_size=6).map(lambda ends: _ranges(sorted(ends))),
    dict[str, str | int | tuple[str, ...]]: st.dictionaries(
        st.text(max_size=10),
        st.text(max_size=20) | st.integers(-(2**63), 2**63 - 1) | _texts | st.just(("worker",) * MAX_LIST),
        max_size=5,
    ),
    tuple[float, ...]: st.lists(st.tuples(st.floats(0, allow_nan=False), st.floats(allow_nan=False)), max_size=3).map(
        lambda pairs: tuple(number for pair in pairs for number in pair)
    ),
    tuple[tuple[int, str], ...]: st.lists(
        st.tuples(st.integers(0, MAX_WORLD_SIZE - 1), st.text(max_size=20)), max_size=4
    ).map(tuple),
}
"""Values of fields with checks that do not tell their shape, by the type of the field."""


def _ranges(ends: list[int]) -> Ranges:
    return tuple(zip(ends[::2], ends[1::2], strict=False))


def _values(shape: Shape | None, declared: Any) -> Strategy:
    """Return the values that a check lets pass, the edges included; ``declared`` is the type of the field."""
    inner = [one for one in get_args(declared) if one not in (type(None), ...)]
    match shape:
        case Shape("integer", low, high):
            edges = st.sampled_from([int(low), int(high)])
            return edges | st.integers(int(low), min(int(high), 99)) | st.integers(int(low), int(high))
        case Shape("number", low, high):
            return st.floats(low, high) | st.sampled_from([low, high, 5e-324])
        case Shape("text", _, high):
            return st.text(max_size=min(20, int(high))) | st.just("ü" * int(high))
        case Shape("ASCII", high=high):
            return st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=min(20, int(high)))
        case Shape("choice", names=names):
            return st.sampled_from(names)
        case Shape("flag"):
            return st.booleans()
        case Shape("list", _, high, (item,)):
            short = st.lists(_short(item, inner[0]), max_size=min(5, int(high))).map(tuple)
            longest = _longest_item(item)
            return short if longest is None else short | st.just((longest,) * int(high))
        case Shape("optional", items=(item,)):
            return st.none() | _values(item, inner[0])
        case Shape("fields", items=items, kind=kind) if kind is not None:
            types = get_type_hints(kind).values()
            return st.builds(kind, *[_short(item, type_) for item, type_ in zip(items, types, strict=True)])
    if declared in _of_types:
        return _of_types[declared]
    assert get_origin(declared) is UnionType, f"no strategy for {declared}"
    (present,) = inner
    return st.none() | _of_types[present]


def _short(shape: Shape | None, declared: Any) -> Strategy:
    """Return values for the items of a list, which is long enough even if they are short."""
    if shape is not None and shape.what == "text":
        return st.text(max_size=min(20, int(shape.high)))
    return _values(shape, declared)


def _longest_item(shape: Shape | None) -> Any:
    match shape:
        case Shape("integer", _, high):
            return int(high)
        case Shape("number", _, high):
            return high
        case Shape("text"):
            return "worker"
    return None


def built(kind: type[Any], **given: Strategy) -> Strategy:
    """Return all of a declared kind. Some of its fields may be ``given``."""
    types = get_type_hints(kind)
    found = {name: _values(shape_of(field.check), types[name]) for name, field in fields_of(kind).items()}
    return st.builds(kind, **(found | given))


def _fitting(message: Message) -> Message:
    """Return a message like this with fields that fit together."""
    if isinstance(message, Push) and message.place is None:
        return message._replace(target=None, slices=1 if message.present else message.slices)
    if isinstance(message, Result) and message.present and not message.placed:
        return message._replace(slices=1)
    return message


def _payloads(message: Message, code: int) -> st.SearchStrategy[tuple[Message, list[bytes]]]:
    """Return the message with payloads that may go with it."""
    fewest, most, _ = message_family.rows[code].payloads
    counts = [count for count in range(fewest, most + 1) if _allows(message, count)]
    payloads = st.sampled_from(counts).flatmap(lambda n: st.lists(st.binary(max_size=40), min_size=n, max_size=n))
    return st.tuples(st.just(message), payloads)


def _allows(message: Message, count: int) -> bool:
    try:
        message.check_payloads(count)
    except MalformedMessageError:
        return False
    return True


def framed(kind: type[Any]) -> st.SearchStrategy[tuple[Message, list[bytes]]]:
    """Return all messages of a kind, with their payloads."""
    return built(kind).map(_fitting).flatmap(lambda message: _payloads(message, message_family.codes[kind]))


ALL_MESSAGES: Final = {kind: framed(kind) for kind in message_family.kinds.values()}
