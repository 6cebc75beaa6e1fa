"""The roles of peers, by what each says first."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature

import pytest
import zmq

from gradserver.protocol.messages import Enlist, Join, Message, Ping
from gradserver.protocol.messages.recovery import Resume
from gradserver.transport.handshake import ROLES, Handshake
from gradserver.transport.liveness import Liveness, Patience
from gradserver.transport.traffic import Connections

NEW, OTHER = b"new", b"other"
JOIN = Join("group", "w0", 0, 1, 60.0)
MEMBER = Join("group", "w0", 0, 1, 60.0, key="known")
RESUME = Resume("group", 0, "token", 1, "")


@pytest.fixture
def told() -> list[bytes]:
    """Identities that were answered."""
    return []


@pytest.fixture
def handshake(told: list[bytes]) -> Iterator[Handshake]:
    connections = Connections()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        liveness = Liveness(router, None, Patience(), connections)
        yield Handshake(connections, liveness, lambda identity, _: not told.append(identity))  # type: ignore[func-returns-value]
        liveness.close()
    connections.close()


@pytest.mark.parametrize("kind", ROLES)
def test_the_key_of_a_role_is_a_field_of_what_it_says_first(kind: type[Message]) -> None:
    key = ROLES[kind].key
    assert not key or key in signature(kind).parameters


@pytest.mark.parametrize("message", [JOIN, RESUME, Enlist("tcp://shard:1")])
def test_a_first_message_opens_its_role(handshake: Handshake, message: Message) -> None:
    assert handshake.role_of(NEW, message, []) is ROLES[type(message)]


def test_other_messages_open_no_role(handshake: Handshake, told: list[bytes]) -> None:
    assert handshake.role_of(NEW, Ping(), []) is None
    assert told == [NEW]


def test_only_workers_that_join_wait_while_the_server_holds(handshake: Handshake) -> None:
    handshake.hold(lambda message: message == MEMBER)
    assert handshake.role_of(NEW, JOIN, [b"join"]) is None
    assert handshake.role_of(OTHER, MEMBER, [b"join"]) is ROLES[Join]
    assert handshake.role_of(NEW, Ping(), [b"ping"]) is None  # it asks whether something is missing
    assert handshake.role_of(OTHER, RESUME, [b"resume"]) is ROLES[Resume]
    assert handshake.release() == {NEW: [b"join"]}
    assert handshake.role_of(NEW, JOIN, [b"join"]) is ROLES[Join]
