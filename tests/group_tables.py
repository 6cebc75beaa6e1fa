"""Tables of a group's life: ``python -m tests.group_tables`` writes ``docs/reference/group-states.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gradserver.engine.control.group import State
from gradserver.engine.control.machine import ILLEGAL, ROWS, RULES, STATES, TIMERS, Transition
from tests.commands import ROOT

PAGE: Final = ROOT / "docs" / "reference" / "group-states.md"
_OPENING: Final = """# The life of a group

These tables are generated from those that the coordinator runs (`gradserver/engine/control/machine.py`). A group of
`--workers MIN:MAX` has one of these states; with `--workers N` both MIN and MAX are N.
"""
_TRANSITIONS: Final = """## Events

What becomes of each event in each state. The group stays in its state, or comes to one of those in the third column:
because of the event itself, or of the rules below. Most events are messages of workers or reports of data shards
(see [Messages, orders, reports and records](protocol.md)). Four others concern connections:

- Broke: the connection of a worker broke, and the worker may come back, as its group is durable.
- Lost: a worker is gone for good. It left, its process ended, it broke the protocol, or it did not come back.
- ShardLost: the connection of a data shard that the group uses broke.
- ShardEnlisted: there is a data shard that may take a lost one's place.
"""
_RULES: Final = """## Rules

They are tried in this order after each event, again and again, until none applies.
"""
_TIMERS: Final = """## Timers

A timer fires when its time has come. The rules are tried after it.
"""
_ILLEGAL: Final = """## What cannot be

An event that no state above has, and what its sender is told.
"""


def page() -> str:
    """Return the page."""
    parts = (_OPENING, _states(), _TRANSITIONS, _transitions(), _RULES, _rules(), _TIMERS, _timers(), _ILLEGAL)
    return "\n".join([*parts, _illegal()])


def _states() -> str:
    return _table("state", "meaning", rows=((state.value, meaning) for state, meaning in STATES.items()))


def _transitions() -> str:
    return _table(
        *("state", "event", "next", "what happens"),
        rows=((_names(row.states), _kinds(row.events), _names(row.next), _what(row)) for row in ROWS),
    )


def _rules() -> str:
    return _table("when", "what is done", rows=((rule.when, rule.what) for rule in RULES))


def _timers() -> str:
    return _table("when", "what is done", rows=((timer.until, timer.what) for timer in TIMERS))


def _illegal() -> str:
    alike: dict[tuple[State, str], list[type]] = {}
    for (state, event), what in ILLEGAL.items():
        alike.setdefault((state, what), []).append(event)
    found = ((state.value, _kinds(events), what) for (state, what), events in alike.items())
    return _table("state", "event", "instead", rows=found)


def _table(*heading: str, rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(_lines(heading, rows)) + "\n"


def _lines(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _names(states: Iterable[State]) -> str:
    return ", ".join(state.value for state in states) or "–"


def _what(row: Transition) -> str:
    summary = " ".join((row.react.__doc__ or "").partition("\n\n")[0].split())
    return f"{summary} {row.why}".strip()


def _kinds(events: Iterable[type]) -> str:
    return ", ".join(event.__name__ for event in events)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
