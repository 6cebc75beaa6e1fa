"""Members of a group as the data half knows them: connections, tokens, ranks, and the epoch of the membership."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradserver.engine.seats import Seats
from gradserver.protocol.errors import GradServerError


@dataclass(slots=True)
class Members:
    """Members of one group, by seat."""

    seats: Seats
    connections: list[int]
    """Connection of each; -1 if it has yet to come to this shard."""
    tokens: list[str]
    """Text that each shows when it comes here."""
    epoch: int
    """Number of the latest membership."""
    departed: dict[int, GradServerError] = field(default_factory=dict)
    """Why each departed."""
    change: str = ""
    """Latest change of the membership, as a clause."""
    before: tuple[int, int] = (-1, 0)
    """The latest round in which a member joined, and the epoch of the membership without it."""

    @property
    def present(self) -> tuple[int, ...]:
        """Seats of the members that are present, by rank."""
        return self.seats.present

    def calls(self, seats: Iterable[int]) -> str:
        """Name several members for people."""
        names = [self.seats.call(seat) for seat in seats]
        return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")

    def epoch_of(self, number: int) -> int:
        """Return the epoch of the membership in which collectives of round ``number`` are called."""
        last_before, epoch = self.before
        return epoch if number <= last_before else self.epoch

    def admit(self, seat: int, name: str, connection: int, token: str) -> None:
        """Give ``seat``, which may have been another member's, to a worker that is about to become a member."""
        self.seats.admit(seat, name)
        self.connections += [-1] * (seat + 1 - len(self.connections))
        self.tokens += [""] * (seat + 1 - len(self.tokens))
        self.connections[seat], self.tokens[seat] = connection, token
        self.departed.pop(seat, None)

    def connect(self, seat: int, connection: int) -> None:
        """Reach ``seat`` on ``connection`` from now on."""
        self.connections[seat] = connection

    def disconnect(self, seat: int) -> None:
        """Reach ``seat`` no more, for the moment."""
        self.connections[seat] = -1

    def lose(self, seat: int, error: GradServerError) -> None:
        """Note that ``seat`` has departed from a group that needs all its members."""
        self.departed[seat] = error

    def depart(self, seat: int, error: GradServerError, epoch: int) -> None:
        """Go on without ``seat`` in the membership ``epoch``."""
        self.departed[seat] = error
        self.change = error.message
        self.seats.depart(seat)
        if epoch != self.epoch:
            self.epoch = epoch
            self.before = (self.before[0], epoch)

    def reseat(self, present: tuple[int, ...], new: Sequence[int], joined_in: int | None, epoch: int) -> None:
        """Begin the membership ``epoch`` of the seats ``present``, of which ``new`` ones joined in a round."""
        self.before = (self.before[0], epoch) if joined_in is None else (joined_in, self.epoch)
        self.seats.reseat(present)
        self.epoch, self.change = epoch, f"{self.calls(new)} joined"
