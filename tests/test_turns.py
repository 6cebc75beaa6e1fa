"""Tests of what a member hears of rounds that others begin: `gradserver.worker.member.turns`."""

from __future__ import annotations

from gradserver.protocol.messages import Follow, Opened
from gradserver.worker.member.effects import Complete, Effects
from gradserver.worker.member.identity import Identity
from gradserver.worker.member.rounds import Rounds
from gradserver.worker.member.turns import Turns
from tests.test_member import Waiting


def test_an_answer_that_comes_twice_is_heeded_once() -> None:
    """Test a question that is repeated on a new connection, where it may have been asked before."""
    effects, rounds = Effects(), Rounds(Identity())
    rounds.go_on_from(7)
    turns = Turns(effects, rounds)
    first, second = Waiting(), Waiting()
    update, begun = Opened(7, 0, updated=1, index=0), Opened(7, 1, index=1)

    assert turns.follow(first) == Follow(7, 0)
    turns.opened(update)
    assert effects.take() == [Complete(first, None, update)]
    turns.followed(update)
    assert turns.follow(second) == Follow(7, 1)
    turns.opened(update)
    assert effects.take() == []
    turns.opened(begun)
    assert effects.take() == [Complete(second, None, begun)]


def test_what_was_said_of_rounds_that_are_over_is_not_repeated() -> None:
    """Test a new connection: only the open round counts there, and the question without an answer."""
    rounds = Rounds(Identity())
    turns = Turns(Effects(), rounds)
    turns.steps(1, 0)
    rounds.finish()
    assert turns.again() == []
    turns.follow(Waiting())
    turns.steps(0, 0)
    assert [type(message).__name__ for message, _ in turns.again()] == ["Steps", "Follow"]
