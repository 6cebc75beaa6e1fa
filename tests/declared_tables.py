"""Tables of all that is declared: ``python -m tests.declared_tables`` writes ``docs/reference/protocol.md``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final, get_args, get_type_hints

from gradserver.engine.declared import kind as records
from gradserver.engine.orders import order as orders
from gradserver.engine.reports import report as reports
from gradserver.protocol import wire  # which knows all messages
from gradserver.protocol.declared import Family, fields_of
from gradserver.protocol.message_family import Payloads, message as messages
from tests.commands import ROOT
from tests.declarations import Shape, shape_of

PAGE: Final = ROOT / "docs" / "reference" / "protocol.md"
_OPENING: Final = """# Messages, orders, reports and records

These tables are generated from the declarations, each of which is one class in the source. A message, an order, a
report or a record is a msgpack array: its number or name, and its fields in this order. Behind the name of
a field stand the values that its check lets pass: `0 … 7` is a number from 0 to 7, and `text ≤ 128` has at most 128
characters. A number is never used twice.
"""
_SECTIONS: Final = (
    ("Messages", messages, "Messages between workers, coordinator and data shards. A payload is a frame of its own."),
    ("Orders", orders, "Orders of the coordinator to data shards: the payload of an `Ordered`."),
    ("Reports", reports, "Reports of data shards: the payload of a `Reported`. The epoch stands behind the name."),
    ("Records", records, "Records of the coordinator's journal."),
)


def page() -> str:
    """Return the page."""
    assert messages.codes.keys() >= wire.UNCHECKED
    return "\n".join([_OPENING, *(line for section in _SECTIONS for line in _section(*section))])


def _section(title: str, family: Family[Any, Any], opening: str) -> Iterator[str]:
    has_payloads = family is messages
    yield f"## {title}\n\n{opening}\n"
    yield "| | | fields | payload |" if has_payloads else "| | | fields |"
    yield "|---|---|---|---|" if has_payloads else "|---|---|---|"
    for code, kind in sorted(family.kinds.items()):
        cells = [str(code), f"**{kind.__name__}**: {_summary(kind)}", "; ".join(_fields(kind)) or "–"]
        if has_payloads:
            cells.append(_payload(messages.rows[code].payloads))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _summary(kind: type[Any]) -> str:
    """Return the first sentence about a class."""
    text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.?]) ", text)[0].replace("``", "`")


def _fields(kind: type[Any]) -> Iterator[str]:
    types = get_type_hints(kind)
    try:
        declared = fields_of(kind)
    except KeyError:  # it packs itself
        yield from (f"`{field.name}`" for field in fields(kind))
        return
    yield from (f"`{name}`: {_said(shape_of(field.check), types[name])}" for name, field in declared.items())


def _said(shape: Shape | None, declared: Any) -> str:
    match shape:
        case Shape("integer", low, high):
            return f"{_number(low)} … {_number(high)}"
        case Shape("number", low, high):
            return f"{float(low):g} … {float(high):g}"
        case Shape("text", high=high):
            return f"text ≤ {_number(high)}"
        case Shape("ASCII", high=high):
            return f"ASCII ≤ {_number(high)}"
        case Shape("choice", names=names):
            return ", ".join(names)
        case Shape("flag"):
            return "flag"
        case Shape("list", high=high, items=items):
            return f"list ≤ {_number(high)} of {_said(items[0], _inner(declared))}"
        case Shape("optional", items=items):
            return f"{_said(items[0], _inner(declared))}, or nothing"
        case Shape("fields", kind=kind) if kind is not None:
            return kind.__name__
    return _type(declared)


def _inner(declared: Any) -> Any:
    """Return the type of the items of a tuple, or of what is optional."""
    return get_args(declared)[0]


def _number(value: float) -> str:
    value = int(value)
    power = value.bit_length() - 1
    if power >= 40 and value in (1 << power, (1 << power + 1) - 1):
        return f"2^{power}" if value == 1 << power else f"2^{power + 1} − 1"
    return f"{value:,}"


def _type(declared: Any) -> str:
    name = declared.__name__ if isinstance(declared, type) else str(declared)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", name).replace(" | None", ", or nothing")


def _payload(payloads: Payloads) -> str:
    if not payloads.most:
        return "–"
    return f"{'' if payloads.fewest else 'none, or '}one ≤ {payloads.largest:,} bytes"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
