"""Sequences: numbers of exchanges come without gaps in each; so exchanges of members are matched."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from gradserver.protocol.exchange import BUCKET, COLLECTIVE, TRANSFER, ExchangeKey

NUMBERS: Final = 1 << 62
"""Collectives in one round, at most."""

Sequence = tuple[int, ...]
"""Rank, stream, part, source and target."""


@dataclass(slots=True)
class Sequences:
    """Sequences of all members of a group."""

    due: dict[Sequence, int] = field(default_factory=dict)
    """The next place in each."""
    transfers: Counter[int] = field(default_factory=Counter)
    """Sequences of transfers that each member takes part in."""
    first_round: int = 0
    """The first round that a member can begin that has begun none."""
    restarted: bool = False
    """True after a recovery. Then a sequence begins with any number."""

    def advance(self, sequence: Sequence, place: int) -> None:
        """Go on behind ``place``."""
        self.due[sequence] = place + 1

    def pass_over(self, member_id: int, key: ExchangeKey) -> None:
        """Take ``key`` as begun and ended by ``member_id``: it was settled before a member began it here."""
        self.due[sequence_of(member_id, key)] = place_of(key) + 1

    def is_past(self, member_id: int, key: ExchangeKey) -> bool:
        """Tell whether ``member_id`` has begun ``key`` before."""
        return place_of(key) < self.due.get(sequence_of(member_id, key), 0)

    def begin_transfers(self, member_id: int) -> int:
        """Count one more sequence of transfers of ``member_id``, and return how many there are."""
        self.transfers[member_id] += 1
        return self.transfers[member_id]

    def begin_buckets(self, first_round: int) -> None:
        """Begin the sequences of buckets anew with ``first_round``, as there is another plan."""
        self.first_round = first_round
        self.due = {key: due for key, due in self.due.items() if key[1] != BUCKET}

    def resume_buckets(self, number: int) -> None:
        """Go on with round ``number``, after members have said what they hold."""
        self.first_round = number

    def hand_over(self, member_id: int) -> None:
        """Forget all that a predecessor with ``member_id`` has begun."""
        self.due = {sequence: due for sequence, due in self.due.items() if not _concerns(sequence, member_id)}
        self.transfers = Counter(sequence[0] for sequence in self.due if sequence[1] == TRANSFER)

    def restart(self) -> None:
        """Forget all numbers: members say where they are."""
        self.due.clear()
        self.transfers.clear()
        self.restarted = True


def place_of(key: ExchangeKey) -> int:
    """Return the place of an exchange in its sequence. Collectives count from 0 in each round."""
    return key.part * NUMBERS + key.number if key.stream == COLLECTIVE else key.number


def sequence_of(member_id: int, key: ExchangeKey) -> Sequence:
    """Return the sequence of ``member_id`` that ``key`` is in."""
    return (member_id, key.stream, 0 if key.stream == COLLECTIVE else key.part, key.source, key.target)


def _concerns(sequence: Sequence, member_id: int) -> bool:
    owner, stream, _, source, target = sequence
    return owner == member_id or (stream == TRANSFER and member_id in (source, target))
