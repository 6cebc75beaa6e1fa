"""Tables of a group's life: ``python -m tests.group_tables`` writes ``docs/reference/group-states.md``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from gradserver.engine.control.group import State
from gradserver.engine.control.group.learners import Stage
from gradserver.engine.control.group.stages import NEVER, ROWS as STEPS, STAGES
from gradserver.engine.control.machine import ILLEGAL, ROWS, RULES, STATES, TIMERS, Transition
from gradserver.worker.member import learner
from tests.commands import ROOT

PAGE: Final = ROOT / "docs" / "reference" / "group-states.md"
_OPENING: Final = """# The life of a group

These tables are generated from those that the coordinator runs (`gradserver/engine/control/machine.py`). A group of
`--workers MIN:MAX` has one of these states; with `--workers N` both MIN and MAX are N.
"""
_TRANSITIONS: Final = """## Events

The table says what becomes of each event in each state. The group stays in its state, or comes to one of those in the
third column, because of the event itself or of the rules below. Most events are messages of workers or reports of data
shards (see [Messages, orders, reports and records](protocol.md)). Four others concern connections:

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

An event of these cannot be in that state. The last column says what happens instead, or what the sender is told.
"""
_LEARNERS: Final = """## Learners

A learner is a worker that joins the running group and has a member id. Its stages are in a table of their own
(`gradserver/engine/control/group/stages.py`). Nothing else changes a stage. Only the last one, when it is a member,
changes the membership.
"""
_STEPS: Final = """The table says what becomes of each event in each stage.
The first row with a condition that holds counts.

If none holds, the learner is told UnexpectedMessageError. A learner that is told an error is evicted, but for an error
about its plan.
"""
_NEVER_HEADING: Final = """These events cannot be in these stages.
The last column says why, or what the learner is told:
"""
_OWN: Final = """## A worker's own stages

A worker knows its stage by what it was told and has done (`worker/member/learner.py`). It begins as one that joins, or
as a member of a group that forms. Each stage is followed by one of those in the third column.
"""


def page() -> str:
    """Return the page."""
    group = (_OPENING, _states(), _TRANSITIONS, _transitions(), _RULES, _rules(), _TIMERS, _timers(), _ILLEGAL)
    learners = (_LEARNERS, _stages(), _STEPS, _steps(), _NEVER_HEADING, _never())
    return "\n".join([*group, _illegal(), *learners, _OWN, _own()])


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


def _stages() -> str:
    return _table("stage", "meaning", rows=((stage.value, meaning) for stage, meaning in STAGES.items()))


def _steps() -> str:
    rows = ((_names(s.stages), s.event.value, s.when or "–", s.next, s.what) for s in STEPS)
    found = ((*here, "–" if stage is None else stage.value, what) for *here, stage, what in rows)
    return _table("stage", "event", "condition", "next", "what happens", rows=found)


def _own() -> str:
    rows = ((_small(stage), stage.value, ", ".join(map(_small, after))) for stage, after in learner.FOLLOWS.items())
    return _table("stage", "the worker", "next", rows=rows)


def _small(stage: learner.Stage) -> str:
    return stage.name.lower()


def _never() -> str:
    alike: dict[tuple[str, str], list[Stage]] = {}
    for (stage, event), what in NEVER.items():
        alike.setdefault((event.value, what), []).append(stage)
    found = ((_names(stages), event, what) for (event, what), stages in alike.items())
    return _table("stage", "event", "instead", rows=found)


def _table(*heading: str, rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(_lines(heading, rows)) + "\n"


def _lines(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _names(states: Iterable[State | Stage]) -> str:
    return ", ".join(state.value for state in states) or "–"


def _what(row: Transition) -> str:
    summary = " ".join((row.react.__doc__ or "").partition("\n\n")[0].split())
    return f"{summary} {row.why}".strip()


def _kinds(events: Iterable[type]) -> str:
    return ", ".join(event.__name__ for event in events)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
