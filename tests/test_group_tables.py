"""The tables of a group's life: nothing is missing, and the coordinator does what they say."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gradserver.engine.control import machine
from gradserver.engine.control.group import State, stages
from gradserver.engine.control.group.learners import Stage
from gradserver.engine.control.group.stages import NEVER, STAGES, Event
from gradserver.engine.control.machine import ILLEGAL, TRANSITIONS
from gradserver.engine.control.reactions import Broke, Lost, ShardEnlisted, ShardLost
from gradserver.engine.reports import report as reports
from gradserver.protocol.errors import JoinRefusedError, UnexpectedMessageError
from gradserver.protocol.messages import Failure, Join, Message
from gradserver.protocol.messages.recovery import Resume
from gradserver.worker.member import learner
from gradserver.worker.member.identity import Identity
from tests.commands import ROOT
from tests.declarations import ALL_MESSAGES
from tests.engine_harness import SEATS, Harness
from tests.group_tables import PAGE, page
from tests.test_engine_rejoining import entered

NOTICES = {Lost, Broke, ShardLost, ShardEnlisted}
LIVING = [state for state in State if state is not State.ENDED]
EVENTS = {event for _, event in TRANSITIONS}
OF_MEMBERS = sorted(EVENTS & ALL_MESSAGES.keys() - {Join, Resume}, key=lambda kind: kind.__name__)


def test_each_event_in_each_state_is_handled_or_named_illegal() -> None:
    pairs = {(state, event) for state in LIVING for event in EVENTS}
    assert not TRANSITIONS.keys() & ILLEGAL.keys()
    assert TRANSITIONS.keys() | ILLEGAL.keys() == pairs


def test_each_report_is_an_event() -> None:
    assert EVENTS - NOTICES - ALL_MESSAGES.keys() == {*reports.kinds.values()}


def test_each_row_of_the_table_is_one_of_its_own() -> None:
    pairs = [(state, event) for row in machine.ROWS for state in row.states for event in row.events]
    assert len(pairs) == len(TRANSITIONS), "a later row would hide an earlier one"


def test_the_page_shows_the_tables_that_run() -> None:
    shown = PAGE.read_text("utf-8") if PAGE.exists() else ""
    assert shown == page(), "`python -m tests.group_tables` writes it anew"


def test_a_state_that_the_table_does_not_allow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    row = TRANSITIONS[State.FORMING, Join]
    monkeypatch.setitem(machine.TRANSITIONS, (State.FORMING, Join), row._replace(next=()))
    harness = Harness()

    with pytest.raises(AssertionError, match="FORMING to State.ACTIVE"):
        harness.join(SEATS, world=1)


def test_each_event_of_a_learner_is_handled_or_named_illegal_in_each_stage() -> None:
    handled = {(stage, row.event) for row in stages.ROWS for stage in row.stages}
    assert list(STAGES) == list(Stage)
    assert not handled & NEVER.keys()
    assert handled | NEVER.keys() == {(stage, event) for stage in stages.LIVING for event in Event}


def test_each_row_of_a_learner_can_apply() -> None:
    certain = [(stage, row.event) for row in stages.ROWS if not row.when for stage in row.stages]
    assert len({*certain}) == len(certain), "a later row would never apply"
    for index, row in enumerate(stages.ROWS):
        before = {(stage, one.event) for one in stages.ROWS[:index] if not one.when for stage in one.stages}
        assert not before & {(stage, row.event) for stage in row.stages}, f"a row hides {row}"


def test_nothing_but_the_table_changes_a_stage() -> None:
    folder = ROOT / "gradserver" / "engine" / "control"
    control = [(path.name, path.read_text("utf-8")) for path in folder.rglob("*.py")]

    def places(text: str) -> list[str]:
        return [name for name, source in control for _ in range(source.count(text))]

    assert places(".stage = ") == ["learners.py"], "Learner.go_on_as sets it"
    assert places(".go_on_as(") == ["stages.py"], "and the table alone calls that"


def test_a_stage_that_contradicts_what_is_known_of_a_learner_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row._replace(next=Stage.WAITING) if row.next is Stage.ENTERED else row for row in stages.ROWS]
    monkeypatch.setattr(stages, "ROWS", rows)

    with pytest.raises(AssertionError, match="contributes from round 2"):
        entered()


def test_each_stage_of_a_worker_has_those_that_may_follow_it_and_no_other_follows() -> None:
    assert list(learner.FOLLOWS) == list(learner.Stage)
    for before in learner.Stage:
        for after in learner.Stage:
            identity = Identity()
            identity.stage = before
            if after in learner.FOLLOWS[before]:
                identity.go_on_as(after)
            else:
                with pytest.raises(AssertionError, match=f"{after} of a worker that is {before}"):
                    identity.go_on_as(after)
            assert identity.stage is (after if after in learner.FOLLOWS[before] else before)


@given(st.sampled_from(OF_MEMBERS).flatmap(lambda kind: ALL_MESSAGES[kind]))
def test_an_applicant_that_speaks_as_a_member_is_refused(said: tuple[Message, list[bytes]]) -> None:
    message, payloads = said
    harness = Harness()
    harness.join(SEATS, "early", world=2)
    harness.join(SEATS + 1, "other", world=3, group="others")

    harness.receive(SEATS, message, *payloads)

    ((failure, _),) = harness.inbox[SEATS]
    assert isinstance(failure, Failure)
    assert failure.error == UnexpectedMessageError.__name__
    assert list(harness.engine.control.groups) == ["others"], "one that broke the protocol is forgotten"


def test_no_worker_comes_back_to_a_group_that_forms() -> None:
    harness = Harness()
    harness.join(SEATS, "early", world=2)

    harness.receive(SEATS + 1, Resume("default", 0, "", 0, ""))

    ((failure, _),) = harness.inbox[SEATS + 1]
    assert isinstance(failure, Failure)
    assert failure.error == JoinRefusedError.__name__
