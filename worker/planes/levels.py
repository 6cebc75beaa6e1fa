"""The two levels of one epoch on the hierarchical plane: the members of a host, and one leader of each host.

    host A                       coordinator                       host B
    ──────                       ───────────                       ──────
    member ──┐                                                 ┌── member
    member ──┼──► leader ──►  mean of the hosts' means  ◄── leader ◄──┼── member
    member ◄─┴─── leader ◄──  by the hosts' weights     ──► leader ───┴─► member

The leader of a host is its member of the lowest rank. Members of a host are in a `Communicator`, leaders in a sub-group
of the group. Both begin with the epoch, or behind a void round, and end with it. So a leader that is lost has a
successor in the next epoch. The round in which it was lost is done over the coordinator's plane.

What leaders do in their sub-group is done in two lanes, and the caller's thread waits with a signal alone. Thus nothing
that comes late at another host can keep it from hearing that the round is void.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Final

import torch

from gradserver.protocol.errors import BackendUnavailableError, ClosedError, GradServerError
from gradserver.protocol.offers import by_host
from gradserver.worker.background import in_background
from gradserver.worker.client import Worker
from gradserver.worker.planes.communicator import Communicator, Signal
from gradserver.worker.planes.tasks import Done, Task, Tasks
from gradserver.worker.session import Session
from gradserver.worker.splitting import split

MakeWorker = Callable[[Session], Worker]
_OVER: Final = "the epoch of the leaders is over"


class Levels:
    """The levels of one epoch, for all modules of one worker.

    Args:
        session: the worker's session.
        make: makes a worker of the session of a sub-group.
        name: name of this epoch and attempt: no other one of the group has it.
        devices: devices of the buckets.

    Attributes:
        hosts: ranks of each host's members, the hosts in the order of their leaders.
        place: this host's place among them.
        leads: true if this worker is its host's leader.
        inside: communicator of this host's members; None if this worker is its only one.
        among: membership of the sub-group of leaders; None at other members, and if there is one host.
        up: lane in which a leader sends what its host has summed up.
        down: lane in which it takes results.
        inner: signal for waits in the lanes.
    """

    def __init__(self, session: Session, make: MakeWorker, name: str, devices: Iterable[torch.device]) -> None:
        here = session.membership
        self._session, self._make = session, make
        self.hosts = by_host(here.offers)
        self.place = next(place for place, ranks in enumerate(self.hosts) if here.rank in ranks)
        ranks = self.hosts[self.place]
        self.leads = ranks[0] == here.rank
        self.inside: Communicator | None = None
        if len(ranks) > 1:
            store = next(filter(None, (here.offers[rank].store for rank in ranks)))
            own = here.offers[here.rank].store.rpartition(":")[0]
            self.inside = Communicator(store, f"{name}/host", ranks.index(here.rank), len(ranks), devices, own)
        self.among: Worker | None = None
        self.up, self.down, self.inner = Tasks("leader-up"), Tasks("leader-down"), Signal()
        self._lock = threading.Lock()
        self._leaders: Session | None = None
        self._given_up = False

    def form(self, signal: Signal, timeout: float) -> None:
        """Find the other members of the host, and the other leaders, within ``timeout`` seconds.

        Raises:
            GradServerError: what interrupted the wait.
            BackendUnavailableError: they did not find each other. The error says why.
        """
        splitting: Done | None = None
        if self.leads and len(self.hosts) > 1:
            leaders = [self._session.member_of(ranks[0]) for ranks in self.hosts]
            splitting = self.down.do(
                lambda: split(self._session, leaders, timeout, leaders=True, begun=self._note), signal
            )
        if self.inside is not None:
            self.inside.form(signal, timeout)
        if splitting is not None:
            self.await_lanes(lambda: splitting.is_done, signal, timeout)
            self.among = self._make(splitting.value)

    def _note(self, leaders: Session) -> None:
        with self._lock:
            self._leaders = leaders
            given_up = self._given_up
        if given_up:
            leaders.close(_OVER, waits=False)

    def ask(self, task: Task, signal: Signal, timeout: float) -> object:
        """Do a task of the sub-group in its lane, and return what it returns. It raises what `await_lanes` does."""
        done = self.down.do(task, signal)
        self.await_lanes(lambda: done.is_done, signal, timeout)
        return done.value

    def await_lanes(self, is_done: Callable[[], bool], signal: Signal, timeout: float) -> None:
        """Wait until what the lanes do ``is_done``.

        Raises:
            GradServerError: what interrupted the wait.
            BackendUnavailableError: the leaders could not exchange, or this host's members. The error says why.
            TimeoutError: it is not done in time.
        """

        def failed() -> Exception | None:
            return self.up.error or self.down.error

        came = signal.wait_until(lambda: is_done() or failed() is not None, timeout)
        if signal.error is not None:
            raise signal.error.again()
        if (why := failed()) is not None:
            said = str(why) if isinstance(why, GradServerError) else f"{type(why).__name__}: {why}"
            raise BackendUnavailableError(f"the {len(self.hosts)} leaders of hosts could not exchange: {said}") from why
        if not came:
            raise TimeoutError(f"the {len(self.hosts)} leaders of hosts are not done after {timeout:g} s")

    def check_complete(self) -> None:
        """Raise RuntimeError if a leader has departed from the sub-group: results may lack its host."""
        if self.among is not None and self.among.world_size != len(self.hosts):
            raise RuntimeError(f"{self.among.world_size} of {len(self.hosts)} leaders are left")

    def give_up(self) -> None:
        """End all that is under way, and leave the sub-group. A second call does nothing."""
        with self._lock:
            if self._given_up:
                return
            self._given_up = True
            leaders = self._leaders
        over = ClosedError(_OVER)
        self.inner.interrupt(over)
        self.up.end(over)
        self.down.end(over)
        if self.inside is not None:
            self.inside.give_up()
        if leaders is not None and not leaders.closed:
            in_background(lambda: leaders.close(_OVER, waits=False), "leave")
