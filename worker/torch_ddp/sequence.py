"""The turns of several modules on one worker: the order of their exchanges, the same on all workers.

A backward may go through several modules, as a generator's does through its discriminator. It makes one round of each,
and rounds are matched by their order. The order must not depend on which thread of autograd comes first. So:

- a module by itself pushes each bucket as soon as backward has completed it;
- of several, the first wrapped among the *armed* ones does so: their forward has run since their last exchange. It is
  the same one on all workers, whatever this backward reaches;
- the others collect what comes, and exchange it when that one is done, in the order in which they were wrapped.
"""

from __future__ import annotations

import weakref
from typing import Protocol
from weakref import WeakKeyDictionary

from gradserver.worker.client import Worker


class Member(Protocol):
    """A module that takes turns: `gradserver.worker.torch_ddp.backward.Backward`."""

    syncs: bool
    armed: bool
    leads: bool
    latest: object

    @property
    def begun(self) -> bool:
        """True if the present backward has reached it."""

    def end(self) -> None:
        """Do what is due at the end of backward."""

    def fail(self) -> None:
        """Handle a backward that ended with an error, if this has not ended before."""


class Sequence:
    """The modules of one worker, in the order in which they were wrapped."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Member]] = []
        self.is_shared = False
        """True if there were ever several at once."""
        self.backward = 0
        """Number of the latest backward through several modules."""

    @classmethod
    def of(cls, worker: Worker) -> Sequence:
        """Return the sequence of ``worker``."""
        return _of_worker.setdefault(worker, cls())

    def add(self, member: Member) -> None:
        """Add a module that was wrapped."""
        self._members = [one for one in self._members if one() is not None]
        self._members.append(weakref.ref(member))
        self.is_shared = self.is_shared or len(self._members) > 1

    @property
    def members(self) -> list[Member]:
        """The modules that still exist."""
        return [member for one in self._members if (member := one()) is not None]

    def may_push(self, member: Member) -> bool:
        """Return whether ``member`` pushes while backward is under way."""
        if not self.is_shared:
            return True
        return next((one for one in self.members if one.armed and one.syncs), None) is member

    def end(self) -> None:
        """End a backward at all modules that it has reached."""
        self.backward += 1
        reached = sorted((member for member in self.members if member.begun), key=lambda member: not member.leads)
        try:
            for member in reached:
                member.end()
            latest = object()
            for member in reached:
                member.latest = latest
        except BaseException:
            for member in reached:
                member.fail()
            raise


_of_worker: WeakKeyDictionary[Worker, Sequence] = WeakKeyDictionary()
