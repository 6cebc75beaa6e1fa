"""Effects: what a member wants done. The session carries it out in this order, without its lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import Message
from gradserver.worker.member.waiter import Waiter


class Complete(NamedTuple):
    """The end of a caller's wait: with success, or with ``error``."""

    waiter: Waiter
    error: GradServerError | None = None
    value: object = None
    """The waiter's value, where that is known only now."""


class Tell(NamedTuple):
    """A message to a data shard. It is of no use once the connection has ended."""

    message: Message
    shard: int = 0
    payloads: Sequence[Buffer] = ()


class Lose(NamedTuple):
    """The membership ends with ``error``."""

    error: GradServerError


class Log(NamedTuple):
    """A line for the log: a text with places for ``arguments``."""

    text: str
    arguments: tuple[object, ...]
    warns: bool = True


Said = tuple[Message, Sequence[Buffer]]
"""A message to the coordinator that is repeated on a new connection, and its payloads."""
Effect = Complete | Tell | Lose | Log


class Effects:
    """Effects that wait to be carried out. Not safe to share: the session's lock guards it.

    Attributes:
        pending: effects that are not taken yet.
    """

    def __init__(self) -> None:
        self.pending: list[Effect] = []

    def complete(self, waiter: Waiter, error: GradServerError | None = None, value: object = None) -> None:
        """Have the caller of ``waiter`` go on."""
        self.pending.append(Complete(waiter, error, value))

    def complete_all(self, waiters: Iterable[Waiter]) -> None:
        """Have the callers of ``waiters`` go on."""
        self.pending += [Complete(waiter) for waiter in waiters]

    def add(self, effect: Effect) -> None:
        """Have ``effect`` carried out."""
        self.pending.append(effect)

    def take(self) -> list[Effect]:
        """Hand over what is to be carried out."""
        taken, self.pending = self.pending, []
        return taken
