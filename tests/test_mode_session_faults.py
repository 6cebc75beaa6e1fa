"""Tests that the laws of rounds that do not wait for all find faults: each is planted, and some run fails with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradserver.engine.control import journal, requests as control, rounds
from gradserver.engine.control.group.requests import Requests as Asked
from gradserver.engine.control.group.rounds import Rounds
from gradserver.engine.policy import Mode
from gradserver.protocol.errors import GradServerError
from gradserver.worker.member import requests as member
from gradserver.worker.member.requests import Event, Requests, State, Turn
from tests.session_scripts import check, script_of_full_disks
from tests.test_mode_session_laws import holds_in_run, several_modules_hold_in_run

RUNS = 60
"""Runs in which a fault must show."""
Plant = Callable[[pytest.MonkeyPatch], None]


pytestmark = pytest.mark.usefixtures("session_code")


def _instead(owner: Any, name: str, made: Any) -> Plant:
    """Plant ``made`` in place of what ``owner`` has under this name."""
    return lambda patch: patch.setattr(owner, name, made)


def _takes_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mode, "takes", lambda *_: True)


def _grants_twice(patch: pytest.MonkeyPatch) -> None:
    right = Asked.begin

    def wrong(self: Asked, number: int, cohort: Any, section: int) -> None:
        before = dict(self.waiting)
        right(self, number, cohort, section)
        self.waiting.update(before)

    patch.setattr(Asked, "begin", wrong)


def _written_in_front(patch: pytest.MonkeyPatch) -> None:
    right = journal.begun

    def wrong(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(journal, "_write", journal._first)
            right(*args)

    patch.setattr(journal, "begun", wrong)


def _pushes_early(patch: pytest.MonkeyPatch) -> None:
    """Push when a round is granted, before the rounds in front of it are applied."""
    right = Requests.turn

    def wrong(self: Requests) -> Turn | None:
        if self._state is State.GRANTED:
            self._answered = self._rounds.number
        return right(self)

    patch.setattr(Requests, "turn", wrong)


def _forgets_on_a_new_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Requests, "again", lambda _: [])


def _contributes_again(patch: pytest.MonkeyPatch) -> None:
    """Take a request for open when its round is over."""
    row = member._TABLE[State.PUSHING, Event.OVER]
    patch.setitem(member._TABLE, (State.PUSHING, Event.OVER), row._replace(next=State.ASKED, said=True))


FAULTS: dict[str, Plant] = {
    "a contribution of any age counts": _takes_anything,
    "a request is granted two rounds": _grants_twice,
    "what begins a round is written before the round in front of it": _written_in_front,
    "others are not cut off": _instead(rounds, "cut", lambda *_: None),
    "a coordinator does not note which members are cut off": _instead(Rounds, "close_without", lambda *_: None),
    "a later round begins while one is open": _instead(
        control, "is_due", lambda group: bool(group.requests.waiting) and group.requests.begun < group.rounds.number
    ),
    "a round that members have results of begins again": _instead(Asked, "note_begun", lambda *_: None),
    "a member pushes before it has applied the rounds in front": _pushes_early,
    "a member takes results for there that are not": _instead(Requests, "_has_results", lambda _: True),
    "a request is not said again on a new connection": _forgets_on_a_new_connection,
    "a member says a request again when it is over": _contributes_again,
    "rounds of another section count for staleness": _instead(
        Asked, "staleness_in", lambda _, number, section, version: number - version - 0 * section
    ),
    "a member takes the first section for that of a round": _instead(
        Requests, "_section_here", lambda self: self._rounds.plan.each[0]
    ),
    "a round takes members of all lines": _instead(Asked, "ready_in", lambda self, number, _: self.ready(number)),
    "a member in another line is waited for": _instead(
        control, "_could_come", lambda group, _: control._with_data(group)
    ),
}
SHOWN_BY = {"a contribution of any age counts": 1, "a later round begins while one is open": 30}
"""Runs to begin with, for faults that few runs show."""


RUNS_OF: dict[str, Callable[[int], None]] = {
    "rounds of another section count for staleness": several_modules_hold_in_run,
    "a member takes the first section for that of a round": several_modules_hold_in_run,
    "a round takes members of all lines": several_modules_hold_in_run,
    "a member in another line is waited for": several_modules_hold_in_run,
    "a round that members have results of begins again": lambda seed: check(script_of_full_disks(seed)),
}
"""Runs of faults that show in others than those of `holds_in_run`."""


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    for seed in (SHOWN_BY.get(name, 0), *range(RUNS)):
        try:
            RUNS_OF.get(name, holds_in_run)(seed)
        except (AssertionError, GradServerError, KeyError, IndexError):
            return
    pytest.fail(f"{RUNS} runs keep all laws, though {name}")
