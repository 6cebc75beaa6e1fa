"""Tests of what one event leads to, in the order in which it is carried out."""

from __future__ import annotations

from gradserver.engine.commands import Close, Log, Record, Send
from gradserver.engine.declared import Kind
from gradserver.engine.effects import Effects
from gradserver.engine.orders import CloseGroup
from gradserver.engine.records import Closed, Round, RoundRecord
from gradserver.engine.reports import Applied
from gradserver.protocol.errors import UsageError
from gradserver.protocol.messages import Failure, Leave, Scope

LEAVE = Leave("done")


def record(number: int) -> Kind:
    return Closed("g", 1, number, "over")


def test_a_decision_is_written_before_all_that_is_said() -> None:
    effects = Effects()
    effects.send(1, LEAVE)
    effects.journal(record(1))
    effects.log("so it is")
    effects.journal(record(2))

    assert effects.commands == [Record(record(1)), Record(record(2)), Send(1, LEAVE), Log("so it is")]


def test_what_was_done_is_written_behind_what_was_said_of_it() -> None:
    effects = Effects()
    effects.send(1, LEAVE)
    effects.journal_behind(record(1))
    effects.send(2, LEAVE)
    effects.journal(record(2))

    assert effects.commands == [Record(record(2)), Send(1, LEAVE), Record(record(1)), Send(2, LEAVE)]


def test_records_stay_in_the_order_in_which_they_are_written_if_nothing_was_said() -> None:
    effects = Effects()
    effects.journal_behind(record(1))
    effects.journal(record(2))

    assert effects.commands == [Record(record(1)), Record(record(2))]


def test_a_decision_is_written_before_the_round_that_it_follows_from() -> None:
    """Test that without a later record the round counts as open, and the decision is known."""
    done = Round("g", 1, RoundRecord(0, (1.0,), 0.0, 0.0, 0, ((0.0, 0.0),)))
    effects = Effects()
    effects.journal(record(1))
    effects.journal_behind(done)
    effects.journal(record(2))

    assert effects.commands == [Record(record(1)), Record(record(2)), Record(done)]


def test_news_stands_before_what_the_data_half_sends_when_it_obeys() -> None:
    effects = Effects()
    effects.send(1, LEAVE)
    effects.order(CloseGroup("g"))
    assert effects.take_orders()
    effects.log("a result")
    effects.journal(record(1))
    effects.announce(1, LEAVE)
    effects.announce(2, LEAVE)
    effects.send(3, LEAVE)

    news = [Send(1, LEAVE), Send(2, LEAVE)]
    assert effects.commands == [Record(record(1)), Send(1, LEAVE), *news, Log("a result"), Send(3, LEAVE)]


def test_news_of_an_event_without_orders_is_sent_in_its_turn() -> None:
    effects = Effects()
    effects.send(1, LEAVE)
    effects.announce(2, LEAVE)

    assert effects.commands == [Send(1, LEAVE), Send(2, LEAVE)]


def test_a_connection_is_told_why_it_is_closed() -> None:
    effects = Effects()
    error = UsageError("no")
    effects.dismiss(7, error)

    assert effects.commands == [Send(7, Failure.of(error, Scope.CONNECTION)), Close(7)]


def test_orders_and_reports_are_taken_once() -> None:
    effects = Effects()
    effects.order(CloseGroup("g"))
    effects.report(Applied("g", 1))

    assert (effects.take_orders(), effects.take_orders()) == ([CloseGroup("g")], [])
    assert (effects.take_reports(), effects.take_reports()) == ([Applied("g", 1)], [])
    assert effects.commands == []
