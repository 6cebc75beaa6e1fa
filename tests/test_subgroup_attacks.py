"""Bytes of branches that no worker of ours would send: they cost their sender, and no other peer anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gradserver.protocol.errors import GradServerError
from gradserver.protocol.exchange import COLLECTIVE, ExchangeKey
from gradserver.protocol.messages import Attend, BePresent, Failure, Join, Leave, Message, Ping, Push, Split, Welcome
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.transport.branches import branch_of, on_branch
from gradserver.protocol.transport.numbers import split
from gradserver.protocol.wire import decode, encode
from gradserver.worker.client import Worker
from tests.cluster import PATIENCE, coordinator, joined, together, wait_until
from tests.strangers import Stranger
from tests.test_subgroups import sub, summed


class Member(Stranger):
    """A stranger that is the one member of a group of its own, and speaks on branches."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.send(Join("own", "evil", 0, 1, 10.0))
        number, welcome = self.next()
        assert isinstance(welcome, Welcome)
        assert number == 0
        self.epoch = welcome.epoch

    def on(self, branch: int, message: Message, *payloads: bytes) -> None:
        self.say(on_branch(encode(message), branch), *payloads)

    def next(self) -> tuple[int, Message]:
        """Return the next message that is neither a Ping nor a BePresent, and its branch."""
        while True:
            assert self._socket.poll(int(PATIENCE * 1000)), "nothing came"
            header, *payloads = self._socket.recv_multipart()
            header = bytes(split(header)[1])
            number, frames = branch_of([header, *payloads]) if header[:1] == b"B" else (0, [header, *payloads])
            message, _ = decode(frames)
            if not isinstance(message, Ping | BePresent):
                return number, message

    def refusal(self, branch: int) -> GradServerError:
        """Return the error that ends a branch."""
        number, message = self.next()
        assert number == branch
        assert isinstance(message, Failure), message
        return message.exception()


@contextmanager
def victims() -> Iterator[tuple[str, list[Worker], list[Worker]]]:
    """Give workers with a sub-group, which must not notice anything."""
    with coordinator() as server, joined(server.url, 2) as workers:
        made = together(workers, lambda worker: sub(worker, 0, 1))
        yield server.url, workers, made
        assert together(made, lambda group: summed(group, 3)) == [6.0, 6.0]
        assert together(workers, lambda worker: sub(worker, 0, 1).world_size) == [2, 2]
        wait_until(lambda: "own" not in server._runtime.snapshot()["groups"], "it is gone")  # type: ignore[operator]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Split("default", 1, (0, 1), 5.0), "not a member of it"),
        (Split("nothing", 1, (0,), 5.0), "not a member of it"),
        (Split("own", 1, (1,), 5.0), "expected ids in order, with the sender's, 0"),
        (Split("own", 1, (0, 7), 5.0), "expected ids in order"),
        (Split("own", 1, (0, 0), 5.0), "expected ids in order"),
        (Split("own", 1, (), 5.0), "expected ids in order"),
        (Attend("default", 1, 0, "guessed"), "not for a coordinator"),
        (Resume("default/1", 0, "guessed", 1, ""), "no place is kept"),
        (Resume("nothing", 0, "guessed", 1, ""), "there is no durable group 'nothing'"),
    ],
    ids=str,
)
def test_a_wrong_first_message_ends_its_branch_alone(wrong: Message, said: str) -> None:
    with victims() as (url, _, made), Member(url) as member:
        member.on(5, wrong)
        assert said in str(member.refusal(5))
        member.on(5, Split("own", member.epoch, (0,), 5.0))
        assert isinstance(member.next()[1], Welcome)
        assert made[0].world_size == 2


def test_what_a_worker_says_on_no_branch_or_a_closed_one_is_dropped() -> None:
    with victims() as (url, _, _), Member(url) as member:
        push = Push(ExchangeKey(COLLECTIVE, 0, 0), 0, 1.0, True, None)
        member.on(9, push, np.ones(4, np.float32).tobytes())
        member.on(9, Leave("nothing"))
        member.on(1, Split("own", member.epoch, (0,), 5.0))
        assert isinstance(member.next()[1], Welcome)
        member.on(1, Leave("done"))
        assert member.next() == (1, Leave("done"))
        member.on(1, push, np.ones(4, np.float32).tobytes())
        member.on(1, Leave("again"))
        member.send(Leave("over"))
        assert member.next() == (0, Leave("over"))


@pytest.mark.parametrize("header", [b"B", b"B\0\0\0\1", b"B\0\0\0\1GS", b"B\0\0\0\1B\0\0\0\2GS\7"])
def test_bytes_that_are_no_message_cost_all_of_the_connection(header: bytes) -> None:
    with victims() as (url, _, _), Member(url) as member:
        member.on(1, Split("own", member.epoch, (0,), 5.0))
        assert isinstance(member.next()[1], Welcome)
        member.say(header)
        assert "gradserver" in str(member.refusal(0)) or "header" in str(member.refusal(0))


def test_a_worker_that_has_not_joined_has_no_branches() -> None:
    with victims() as (url, _, _), Stranger(url) as stranger:
        stranger.say(on_branch(encode(Split("default", 1, (0,), 5.0)), 1))
        assert "not a gradserver message" in str(stranger.error())
