"""Tests of what a member hears of rounds that others begin: `gradserver.worker.turns`."""

from __future__ import annotations

from collections.abc import Callable

from gradserver.protocol.errors import DeadlineError
from gradserver.protocol.messages import Follow, Message, Opened
from gradserver.worker.handle import Handle
from gradserver.worker.turns import Turns


class Answering:
    """A session, and a coordinator that has heard the first question twice: each answer to it comes twice."""

    def __init__(self) -> None:
        self.round = 7
        self.turns = Turns(self)
        self.late: list[Opened] = []

    def new_handle(self, overdue: Callable[[float], DeadlineError]) -> Handle:
        return Handle(1.0, None, None, overdue)

    def tell(self, message: Message) -> None:
        assert isinstance(message, Follow)
        news = [Opened(7, 0, updated=1, index=0), Opened(7, 1, index=1)][message.index]
        for answer in (*self.late, news):
            for handle in self.turns.opened(answer):
                handle._complete()
        self.late = [news]


def test_an_answer_that_comes_twice_is_heeded_once() -> None:
    """Test a question that is repeated on a new connection, where it may have been asked before."""
    turns = Answering().turns

    assert turns.follow().updated == 1
    assert turns.follow() == Opened(7, 1, index=1)
