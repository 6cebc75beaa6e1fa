"""Epochs of a group on the direct plane: the communicators of the present one, and the rounds that go by them.

After a void round, the epoch goes through the coordinator for `_REST_ROUNDS`, doubled with each further one. All
members know of the same void rounds, and count alike. The reason for a void round often lasts: a learner that has yet
to catch up, or two members that cannot reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import torch

from gradserver.protocol.planes import DIRECT
from gradserver.worker.client import Worker
from gradserver.worker.member.learner import Stage
from gradserver.worker.planes.communicator import Communicator, Signal
from gradserver.worker.session import Session

_FORM_SECONDS: Final = 20.0
"""Seconds in which members have to find each other when an epoch begins."""
_REST_ROUNDS: Final = 8
_MOST_REST_ROUNDS: Final = 512


@dataclass
class Directs:
    """Communicators of one worker, which its modules share, and the rounds of the present epoch that are direct."""

    session: Session
    epoch: int = -1
    voids: int = 0
    """Rounds of this epoch that were void."""
    rests_until: int = 0
    """The first round of this epoch that may be direct again."""
    communicator: Communicator | None = None
    devices: set[torch.device] = field(default_factory=set)

    @classmethod
    def of(cls, worker: Worker) -> Directs:
        """Return those of ``worker``."""
        if worker not in _of_worker:
            _of_worker[worker] = cls(worker._session)
            worker._session.on_end(_of_worker[worker].give_up)
        return _of_worker[worker]

    def reduces(self) -> bool:
        """Tell whether the present round is direct. All members say the same: it depends on what all have been told."""
        session, here = self.session, self.session.membership
        if here.epoch != self.epoch:
            self.give_up()
            self.epoch, self.voids, self.rests_until = here.epoch, 0, 0
        return session.stage is Stage.MEMBER and here.plane == DIRECT and session.round >= self.rests_until

    def joined(self, signal: Signal) -> Communicator:
        """Return the communicator of the present epoch, and form it if need be."""
        if self.communicator is None:
            self.communicator = introduce(self.session, f"{self.epoch}/{self.voids}", self.devices)
            form(self.communicator, self.session, signal)
        return self.communicator

    def void(self) -> None:
        """Note that the present round is void."""
        self.give_up()
        self.voids += 1
        rest = min(_REST_ROUNDS << (self.voids - 1), _MOST_REST_ROUNDS)
        self.rests_until = self.session.round + 1 + rest

    def give_up(self) -> None:
        """End all that is under way among the members."""
        communicator, self.communicator = self.communicator, None
        if communicator is not None:
            communicator.give_up()


def introduce(session: Session, name: str, devices: Iterable[torch.device]) -> Communicator:
    """Return a communicator of the present members of ``session``, which have yet to find each other."""
    here = session.membership
    stores = [offer.store for offer in here.offers]
    store, host = next(filter(None, stores)), stores[here.rank].rpartition(":")[0]
    return Communicator(store, f"{here.group}/{name}", here.rank, len(here.member_ids), devices, host)


def form(communicator: Communicator, session: Session, signal: Signal) -> None:
    """Find the other members. See `Communicator.form`."""
    communicator.form(signal, min(_FORM_SECONDS, session.timeout))


_of_worker: WeakKeyDictionary[Worker, Directs] = WeakKeyDictionary()
