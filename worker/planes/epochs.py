"""Epochs of a group in which members reduce among themselves: how they are connected, and which rounds go by that.

On the direct plane they are connected by a communicator of all. On the hierarchical plane there are two levels.

After a void round, the epoch goes through the coordinator for `_REST_ROUNDS`, doubled with each further one. All
members know of the same void rounds, and count alike. The reason for a void round often lasts: a learner that has yet
to catch up, or two members that cannot reach each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

import torch

from gradserver.protocol.log import log
from gradserver.protocol.messages import Welcome
from gradserver.protocol.offers import by_host
from gradserver.protocol.plan import Plan
from gradserver.protocol.planes import AMONG_MEMBERS, HIERARCHICAL, IN_PROCESS
from gradserver.worker.client import Worker
from gradserver.worker.member.learner import Stage
from gradserver.worker.planes.communicator import Communicator, Signal
from gradserver.worker.planes.flat import Alone, Flat
from gradserver.worker.planes.hierarchical import Hierarchical
from gradserver.worker.planes.levels import Levels, MakeWorker
from gradserver.worker.planes.plane import Way
from gradserver.worker.planes.trial import Trial, is_tried
from gradserver.worker.session import Session

_FORM_SECONDS: Final = 20.0
"""Seconds in which members have to find each other when an epoch begins."""
_TRIED_SECONDS: Final = 5.0
"""The same beyond the time of a round where both ways are tried: there may be none between two hosts."""
_REST_ROUNDS: Final = 8
_MOST_REST_ROUNDS: Final = 512


@dataclass
class Directs:
    """Communicators of one worker, which its modules share, and the rounds of the present epoch that are direct."""

    session: Session
    make: MakeWorker
    """Makes a worker of the session of a sub-group."""
    epoch: int = -1
    voids: int = 0
    """Rounds of this epoch that were void."""
    rests_until: int = 0
    """The first round of this epoch that may be direct again."""
    joint: Communicator | Levels | None = None
    """Connections of the members, once there are some."""
    ways: dict[int, Way] = field(default_factory=dict)
    """The way of each module, by the number of its commit."""
    devices: set[torch.device] = field(default_factory=set)
    trial: Trial | None = None
    """Choice among the ways of rounds, where no plane is demanded on CPUs."""
    can_try: bool = True
    """False if rounds of a module are not to change their way: with a lossy format, or in an order of its own."""
    _members: tuple[int, ...] = ()
    _number: int = 0

    @classmethod
    def of(cls, worker: Worker) -> Directs:
        """Return those of ``worker``."""
        if worker not in _of_worker:
            kind, channel, wire = type(worker), worker.channel, worker.wire
            _of_worker[worker] = cls(worker._session, lambda session: kind(session, channel, wire))
            worker._session.on_end(_of_worker[worker].give_up)
        return _of_worker[worker]

    def reduces(self) -> bool:
        """Tell whether the present round is direct. All members say the same: it depends on what all have been told."""
        session, here = self.session, self.session.membership
        if any(device.type == "cuda" for device in self.devices):
            session.boundaries.settle()  # kernels of collectives come before those of this round, at all members
        if here.epoch != self.epoch:
            self.give_up()
            self.epoch, self.voids, self.rests_until = here.epoch, 0, 0
            self._try(here)
        self._number = session.round
        if session.stage is not Stage.MEMBER or here.plane not in AMONG_MEMBERS or session.round < self.rests_until:
            return False
        return self.trial is None or (self.can_try and self.trial.goes_direct(session.round))

    def _try(self, here: Welcome) -> None:
        """Have a trial in a new epoch, or go on with it if nothing has happened but departures."""
        if not is_tried(here):
            self.trial = None
        elif self.trial is not None and set(here.member_ids) <= set(self._members):
            self.trial.renew(self.session.round)
        else:
            self.trial = Trial(self.session.round)
        self._members = here.member_ids

    def end(self, is_direct: bool) -> None:
        """Note that the present round has ended."""
        if self.trial is not None:
            self.trial.end(self._number, is_direct)

    @property
    def votes(self) -> Trial | None:
        """The trial, if the present round has a vote on the way."""
        return self.trial if self.trial is not None and self.trial.votes(self._number) else None

    def hear(self, figures: Sequence[float]) -> None:
        """Take the result of the present round's vote."""
        assert self.trial is not None
        found, here = self.trial.hear(self._number, figures), self.session.membership
        if found and here.rank == 0:
            log.info("group %r: gradients go from now on %s", here.group, found)

    def way(self, plan: Plan, number: int, timeout: float, signal: Signal) -> Way:
        """Return the way in the present epoch of a module, the one with the commit ``number``. Connect if need be."""
        here = self.session.membership
        world = len(here.member_ids)
        if world == 1 and here.offers[0].channel == IN_PROCESS:
            return self.ways.setdefault(number, Alone())
        joint = self._joined(signal)
        if number not in self.ways:
            if isinstance(joint, Levels):
                self.ways[number] = Hierarchical(joint, plan, world, timeout, signal)
            else:
                self.ways[number] = Flat(joint, world, len(by_host(here.offers)))
        return self.ways[number]

    def _joined(self, signal: Signal) -> Communicator | Levels:
        here = self.session.membership
        if self.joint is None:
            name = f"{self.epoch}/{self.voids}"
            if here.plane == HIERARCHICAL:
                self.joint = Levels(self.session, self.make, f"{here.group}/{name}", self.devices)
            else:
                self.joint = introduce(self.session, name, self.devices)
            signal.on_interrupt(self.joint.give_up)
            patience = _FORM_SECONDS if self.trial is None else _TRIED_SECONDS + self.trial.seconds
            form(self.joint, self.session, signal, patience)
        signal.on_interrupt(self.joint.give_up)
        return self.joint

    def void(self) -> None:
        """Note that the present round is void."""
        self.give_up()
        self.voids += 1
        if self.trial is not None:
            self.trial.fail(self._number)
        rest = min(_REST_ROUNDS << (self.voids - 1), _MOST_REST_ROUNDS)
        self.rests_until = self.session.round + 1 + rest

    def give_up(self) -> None:
        """End all that is under way among the members."""
        joint, self.joint = self.joint, None
        self.ways.clear()
        if joint is not None:
            joint.give_up()


def introduce(session: Session, name: str, devices: Iterable[torch.device]) -> Communicator:
    """Return a communicator of the present members of ``session``, which have yet to find each other."""
    here = session.membership
    store, host = store_of(here)
    return Communicator(store, f"{here.group}/{name}", here.rank, len(here.member_ids), devices, host)


def store_of(here: Welcome) -> tuple[str, str]:
    """Return the address at which members meet, and that of this host; empty for what its name stands for."""
    stores = [offer.store for offer in here.offers]
    return next(filter(None, stores)), stores[here.rank].rpartition(":")[0]


def form(joint: Communicator | Levels, session: Session, signal: Signal, seconds: float = _FORM_SECONDS) -> None:
    """Find the other members. See `Communicator.form`.

    One that has not found them in time says so well within the time that the others wait for it.
    """
    joint.form(signal, min(seconds, session.timeout / 2))


_of_worker: WeakKeyDictionary[Worker, Directs] = WeakKeyDictionary()
