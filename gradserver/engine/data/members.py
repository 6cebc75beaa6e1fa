"""Members of a group as the data half knows them: connections, tokens, ranks, and the epoch of the membership."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradserver.engine.identities import Identities
from gradserver.protocol.errors import GradServerError


@dataclass(slots=True)
class Members:
    """Members of one group, by member id."""

    identities: Identities
    connections: list[int]
    """Connection of each; -1 if it has yet to come to this shard."""
    tokens: list[str]
    """Text that each shows when it comes here."""
    epoch: int
    """Number of the latest membership."""
    departed: dict[int, GradServerError] = field(default_factory=dict)
    """Reason for which each departed."""
    change: str = ""
    """Latest change of the membership, as a clause."""
    before: tuple[int, int] = (-1, 0)
    """The latest round in which a member joined, and the epoch of the membership without it."""

    @property
    def present(self) -> tuple[int, ...]:
        """Ids of the members that are present, by member id."""
        return self.identities.present

    def calls(self, member_ids: Iterable[int]) -> str:
        """Name several members for people."""
        names = [self.identities.call(member_id) for member_id in member_ids]
        return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")

    def epoch_of(self, number: int) -> int:
        """Return the epoch of the membership in which collectives of round ``number`` are called."""
        last_before, epoch = self.before
        return epoch if number <= last_before else self.epoch

    def admit(self, member_id: int, name: str, connection: int, token: str) -> None:
        """Give ``member_id``, which may have been another member's, to a worker that is about to become a member."""
        self.identities.admit(member_id, name)
        self.connections += [-1] * (member_id + 1 - len(self.connections))
        self.tokens += [""] * (member_id + 1 - len(self.tokens))
        self.connections[member_id], self.tokens[member_id] = connection, token
        self.departed.pop(member_id, None)

    def connect(self, member_id: int, connection: int) -> None:
        """Reach ``member_id`` on ``connection`` from now on."""
        self.connections[member_id] = connection

    def disconnect(self, member_id: int) -> None:
        """Reach ``member_id`` no more, for the moment."""
        self.connections[member_id] = -1

    def lose(self, member_id: int, error: GradServerError) -> None:
        """Note that ``member_id`` has departed from a group that needs all its members."""
        self.departed[member_id] = error

    def depart(self, member_id: int, error: GradServerError, epoch: int) -> None:
        """Go on without ``member_id`` in the membership ``epoch``."""
        self.departed[member_id] = error
        self.change = error.message
        self.identities.depart(member_id)
        if epoch != self.epoch:
            self.epoch = epoch
            self.before = (self.before[0], epoch)

    def set_present(self, present: tuple[int, ...], new: Sequence[int], joined_in: int | None, epoch: int) -> None:
        """Begin the membership ``epoch`` of the members ``present``, of which ``new`` ones joined in a round."""
        self.before = (self.before[0], epoch) if joined_in is None else (joined_in, self.epoch)
        self.identities.set_present(present)
        self.epoch, self.change = epoch, f"{self.calls(new)} joined" if new else self.change
