"""torchrun's rendezvous: ``torchrun --rdzv-backend=gradserver --rdzv-endpoint=HOST:PORT --rdzv-id=JOB``.

Each agent of torchrun is a worker of the group ``torchrun/JOB`` at the coordinator. Its connection says that it lives.

    an agent               does                                                          and is then
    ─────────────────────  ────────────────────────────────────────────────────────────  ──────────────
    begins                 asks to be let in                                             waiting
    begins again           leaves, looks until the others have left, and asks            waiting
    waits                  is let in, with all that the group needs                      complete
    waits                  finds the group complete without it: a spare, it waits on     waiting
    waits                  joins an elastic group at work, which begins again with it    waiting
    waits                  waits longer than join_timeout                                out, by an error
    is complete            is told the address of rank 0's store, and reaches it         a member
    is complete            loses another one before all have reached the store           waiting
    is a member            has work that fails, or sees that the group is to begin anew  waiting
    any                    closes the rendezvous: the job is over, or failed for good    out
    any                    finds it closed                                               out, by an error

A member looks at the coordinator's status, once a second, and goes by what that says of the group:

    members                          others                      what the agent hears
    ───────────────────────────────  ──────────────────────────  ─────────────────────────────────────────────────
    all are there                    none waits                  nothing
    all are there, and as many as    some wait                   nothing: they are spares
    there may be
    all are there, and there may     some wait                   so many wait: all begin again
    be more
    one has closed the rendezvous    any                         it is closed
    one has left, or was lost        any                         one waits at least: all begin again, and wait for it
    this agent is none: the          some wait                   so many wait
    coordinator was lost
    no group, or no answer           not known                   nothing: training goes on

An agent that closes the rendezvous leaves with a reason that says so. Those that have left before, and will be back,
would not see it: for them it joins a group ``torchrun/JOB/closed`` for as long as they take to look.

A number of nodes MIN:MAX needs a group that is elastic, with the same numbers. A coordinator that an agent starts at
the endpoint has it; another one is told so by ``--workers torchrun/JOB=MIN:MAX``.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from gradserver.options import DEFAULT_BIND
from gradserver.protocol.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    DeadlineError,
    GradServerError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
    MembershipChangedError,
    PeerError,
)
from gradserver.protocol.limits import MAX_TIMEOUT
from gradserver.protocol.log import log
from gradserver.protocol.messages import Join
from gradserver.protocol.planes import AUTO, GLOO, TCP
from gradserver.protocol.url import numeric_url, parse_target, parse_url
from gradserver.status import fetch
from gradserver.torch.coordinator import REACHING_SECONDS, URL, addresses, end, reach, start
from gradserver.torch.private import TCPStore
from gradserver.worker.client import Worker
from gradserver.worker.connect import Wish, join
from gradserver.worker.offer import offer_of

NAME: Final = "gradserver"
_CLOSED: Final = "it has closed the rendezvous"
"""The reason of an agent that leaves for good. Others read it in the status."""
_AGAIN: Final = "it begins a new rendezvous"
_JOIN_SECONDS: Final = 600.0
_GATHER_SECONDS: Final = 30.0
_RECONNECT_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 1.0
_RETRY_SECONDS: Final = 0.2
_MARK_SECONDS: Final = 3 * _LOOK_SECONDS
_OWN_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Environment variable of torch with which rank 0 of the training makes a store of its own."""
_INTERRUPTED: Final = PeerError, MembershipChangedError, DeadlineError, CoordinatorError
"""Errors with which an agent tries again: another one is lost, or the coordinator."""


class Words(NamedTuple):
    """Words about those that meet, as their user knows them.

    Attributes:
        kind: first part of their groups' names.
        them: what they are.
        number: option for their number.
        hint: question about a coordinator that is not there.
        patience: option for the time that they wait.
        trouble: why they have no devices.
    """

    kind: str
    them: str
    number: str
    hint: str
    patience: str
    trouble: str


AGENTS: Final = Words(
    "torchrun",
    "nodes",
    "--nnodes",
    "and is --rdzv-endpoint right? An agent starts one if the endpoint is its own machine",
    "--rdzv-conf join_timeout=SECONDS",
    "it is an agent of torchrun",
)
"""Agents of torchrun."""


class Wanted(NamedTuple):
    """The options of torchrun for a rendezvous.

    Attributes:
        run: the run's id.
        url: the coordinator's; with port 0, any that this agent starts.
        least: the smallest number of nodes.
        most: the largest one.
        join: seconds within which the rendezvous has to be complete.
        gather: seconds to wait for more than the smallest number.
        reach: seconds within which the coordinator and the store have to answer.
        address: this node's address, for the others; None to find it out.
        is_host: whether this agent starts a coordinator where there is none.
        words: words about those that meet: agents of torchrun, or processes of a training.
    """

    run: str
    url: str
    least: int
    most: int
    join: float
    gather: float
    reach: float
    address: str | None
    is_host: bool
    words: Words = AGENTS

    @property
    def group(self) -> str:
        """The group of the agents."""
        return f"{self.words.kind}/{self.run}"

    @property
    def mark(self) -> str:
        """The group that says that the rendezvous is closed."""
        return f"{self.group}/closed"

    @property
    def is_elastic(self) -> bool:
        """True if the number of nodes may change."""
        return self.least < self.most

    @property
    def nodes(self) -> str:
        """The number of nodes, as torchrun has it."""
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.least)


class Seen(NamedTuple):
    """The number of agents that wait for a member of the group, and the one that has closed the rendezvous, if any."""

    waiting: int = 0
    closed_by: str = ""


def create(parameters: RendezvousParameters) -> Rendezvous:
    """Make the rendezvous that torchrun asks for."""
    endpoint = parameters.endpoint.strip() or os.environ.get(URL) or DEFAULT_BIND
    host, port = parse_rendezvous_endpoint(endpoint.removeprefix("tcp://"), parse_url(DEFAULT_BIND)[1])
    if port == 0 and parameters.max_nodes > 1:
        raise ValueError(
            f"the endpoint {endpoint!r} has port 0, which is for one node: {parameters.max_nodes} nodes need the port "
            f"of a coordinator, as in --rdzv-endpoint={host}:{parse_url(DEFAULT_BIND)[1]}"
        )
    if not parameters.run_id:
        raise ValueError("the rendezvous has no id: give all nodes of a job the same --rdzv-id")
    is_host = parameters.get_as_bool("is_host")
    return Rendezvous(
        Wanted(
            parameters.run_id,
            numeric_url(host, port),
            parameters.min_nodes,
            parameters.max_nodes,
            _seconds(parameters, "join_timeout", _JOIN_SECONDS),
            _seconds(parameters, "last_call_timeout", _GATHER_SECONDS),
            _seconds(parameters, "read_timeout", REACHING_SECONDS),
            getattr(parameters, "local_addr", None),
            _is_here(host) if is_host is None else is_host,
        )
    )


def _seconds(parameters: RendezvousParameters, key: str, default: float) -> float:
    text = parameters.get(key, default)
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= MAX_TIMEOUT:
        raise ValueError(f"--rdzv-conf has {key}={text}: expected seconds above 0, and at most {MAX_TIMEOUT:g}")
    return found


def _is_here(host: str) -> bool:
    """Tell whether ``host`` is this machine: one of its addresses can be bound here."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    return False


class Status(NamedTuple):
    """The coordinator's status of the group, None if it has none, and the agent that has closed the rendezvous."""

    group: Mapping[str, Any] | None
    closed_by: str = ""

    @property
    def names(self) -> set[str]:
        """Names of the members."""
        return set() if self.group is None else {member["name"] for member in self.group["members"]}

    @property
    def is_forming(self) -> bool:
        """True if there is no group, or one that waits for its first members."""
        return self.group is None or self.group["state"] == "forming"

    @property
    def joining(self) -> set[str]:
        """Names of agents that join an elastic group at work."""
        return set() if self.group is None else {learner["name"] for learner in self.group["joining"]}

    def is_whole(self, most: int) -> bool:
        """Return true if the group has as many members as there may be, and can go on."""
        return self.group is not None and not self.group["broken"] and len(self.names) >= most

    @property
    def may_return(self) -> bool:
        """True if an agent has left that may be back."""
        return self.group is not None and any(_CLOSED not in one["why"] for one in self.group["gone"])


def look(url: str, wanted: Wanted) -> Status:
    """Return the coordinator's status. CoordinatorError if it does not answer."""
    try:
        groups = fetch(url)["groups"]
    except OSError as error:
        raise CoordinatorUnreachableError(f"the coordinator at {url} does not answer: {error}") from error
    group = groups.get(wanted.group)
    closed = [one["name"] for one in groups.get(wanted.mark, {}).get("members", ())]
    if group is not None:
        closed += [one["name"] for one in group["gone"] if _CLOSED in one["why"]]
        closed += re.findall(rf"^'(.*)' \(rank \d+\) left .*{_CLOSED}", group["broken"] or "")
    return Status(group, "".join(closed[:1]))


def judge(status: Status, name: str, size: int, most: int) -> Seen:
    """Return what the coordinator's status means to the agent ``name``: the second table above.

    Args:
        status: the status.
        name: the agent's name in the group.
        size: number of members that it had when it was complete.
        most: number of members that it may have.
    """
    group = status.group
    if group is None or status.closed_by:
        return Seen(0, status.closed_by)
    waiting = len(group["waiting"]) + len(status.joining)
    if name not in status.names:
        return Seen(waiting)
    if group["broken"] or len(status.names) < size:
        return Seen(max(waiting, 1))
    return Seen(min(waiting, most - size))


class Watch:
    """Look at the group of a member, in a thread of its own, since torchrun's loop must not wait for a coordinator."""

    def __init__(self, wanted: Wanted, url: str, worker: Worker) -> None:
        self._wanted, self._url, self._name, self._size = wanted, url, worker.name, worker.world_size
        self.seen = Seen()
        self._over = threading.Event()
        threading.Thread(target=self._run, name="gradserver-rendezvous", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> Seen:
        """Look once. What was seen stays if the coordinator does not answer; it may be about to be started again."""
        with suppress(GradServerError):
            found = judge(look(self._url, self._wanted), self._name, self._size, self._wanted.most)
            self.seen = found._replace(closed_by=found.closed_by or self.seen.closed_by)
        return self.seen

    def end(self) -> None:
        """Look no more."""
        self._over.set()


_numbers = itertools.count()
"""Numbers of the agents of this process, which has one as a rule."""


class Rendezvous(RendezvousHandler):
    """Rendezvous of one agent of torchrun with the others."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self._url = wanted, wanted.url
        self._name = f"{socket.gethostname()}:{os.getpid()}" + (f":{number}" if (number := next(_numbers)) else "")
        self._coordinator: subprocess.Popen[str] | None = None
        self._worker: Worker | None = None
        self._watch: Watch | None = None
        self._store: Any = None
        """The store of the last rendezvous. Processes that end may use it until the next one is complete."""
        self._names: tuple[str, ...] = ()
        """Names of the agents of the last rendezvous."""
        self._closed_by = ""

    # ── what torchrun calls ───────────────────────────────────────────────────────────────────────────

    def get_backend(self) -> str:
        """Return the name of the rendezvous backend."""
        return NAME

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._wanted.run

    @property
    def use_agent_store(self) -> bool:
        """True if processes of the training use the store of the agents."""
        return os.environ.get(_OWN_STORE, "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other agents, and return the store, this agent's rank and their number.

        Raises:
            RendezvousError: the rendezvous is closed, or not complete in time, or there is no coordinator.
        """
        try:
            return self._meet()
        except GradServerError as error:
            raise self._as_torchs(error) from error

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes for which all agents have to begin again."""
        return 0 if self._watch is None else self._watch.seen.waiting

    def is_closed(self) -> bool:
        """Return true if an agent has closed the rendezvous."""
        return bool(self._closed_by or (self._watch is not None and self._watch.seen.closed_by))

    def set_closed(self) -> None:
        """Close the rendezvous: no agent begins again."""
        if not self.is_closed() and self._worker is not None:
            with suppress(GradServerError):
                if look(self._url, self._wanted).may_return:
                    with self._let_in(self._wanted.mark, 1, time.monotonic()):
                        time.sleep(_MARK_SECONDS)
        self._closed_by = self._closed_by or self._name
        self._leave(_CLOSED)

    def shutdown(self) -> bool:
        """Close the rendezvous, and end a coordinator of its own when the others are gone."""
        self.set_closed()
        if self._coordinator is not None:
            end(self._coordinator, _LOOK_SECONDS)
        return True

    # ── one rendezvous ────────────────────────────────────────────────────────────────────────────────

    def _meet(self) -> RendezvousInfo:
        if self._watch is not None:
            self._watch.look()
        self._leave(_CLOSED if self.is_closed() else _AGAIN)
        self._check_open()
        until = time.monotonic() + self._wanted.join
        if self._names:
            with suppress(CoordinatorError):  # one that is lost is waited for below
                self._look_until(lambda status: status.names.isdisjoint(self._names), until)
        while True:
            self._reach(until)
            try:
                found, until = self._attempt(until)
            except _INTERRUPTED as error:
                if time.monotonic() + _RETRY_SECONDS >= until:
                    raise
                with suppress(GradServerError):
                    self._check_open(look(self._url, self._wanted))
                log.warning("the rendezvous %r begins again: %s", self._wanted.run, error)
                found = None
            if found is not None:
                return found
            self._leave(_AGAIN)
            time.sleep(_RETRY_SECONDS)

    def _attempt(self, until: float) -> tuple[RendezvousInfo | None, float]:
        """Try to meet. Return None if that has to be tried again, and the end of this agent's patience."""
        wanted = self._wanted
        try:
            worker = self._worker = self._let_in(wanted.group, 0 if wanted.is_elastic else wanted.least, until)
        except (JoinRefusedError, JoinTimeoutError) as error:
            return None, self._await_place(error, until)
        self._name = worker.name
        found = self._complete(worker, until)
        if found is not None:
            self._names, self._watch = worker.names, Watch(wanted, self._url, worker)
        return found, until

    def _check_open(self, status: Status | None = None) -> None:
        """Raise RendezvousClosedError if this agent knows, or the status says, that the rendezvous is closed."""
        self._closed_by = self._closed_by or (status.closed_by if status is not None else "")
        if self._closed_by:
            raise RendezvousClosedError(
                f"the rendezvous {self._wanted.run!r} was closed by {self._closed_by!r}: the job is over, or that node "
                f"has failed for good"
            )

    def _leave(self, reason: str) -> None:
        if self._watch is not None:
            self._watch.end()
            self._closed_by = self._closed_by or self._watch.seen.closed_by
        worker, self._worker, self._watch = self._worker, None, None
        if worker is not None:
            worker.close(reason)

    def _look_until(self, is_over: Callable[[Status], bool], until: float = math.inf) -> None:
        """Look until the status of the group is as it should be, or until ``until``, or the rendezvous is closed."""
        while time.monotonic() < until:
            status = look(self._url, self._wanted)
            self._check_open(status)
            if is_over(status):
                return
            time.sleep(_LOOK_SECONDS / 2)

    def _reach(self, until: float) -> None:
        """Wait for the coordinator, and start it if it is to be here."""
        host, port = parse_url(self._url)
        if self._wanted.is_host and (port == 0 or not _listens(self._url)):
            self._start(host.strip("[]"), port)
        patience = until - time.monotonic()
        reach(
            self._url, max(patience if self._names else min(patience, self._wanted.reach), 0.0), self._wanted.words.hint
        )
        os.environ.setdefault(URL, self._url)

    def _start(self, host: str, port: int) -> None:
        wanted = self._wanted
        elastic = (wanted.group, str(wanted.least), str(wanted.most), str(wanted.gather)) if wanted.is_elastic else ()
        try:
            self._coordinator, port = start(numeric_url(addresses(host)[0], port), *elastic)
        except CoordinatorError as error:
            if not _listens(self._url):  # else another agent of this machine was faster
                raise CoordinatorError(f"this agent {error}") from None
        self._url = numeric_url(host, port)

    def _let_in(self, group: str, size: int, until: float) -> Worker:
        """Join a group, and wait for the others."""
        # It says that it has no devices, without a look at them: a launcher leaves them alone.
        offer = offer_of(TCP)._replace(
            plane=AUTO, torch=str(torch.__version__), backends=(GLOO,), trouble=self._wanted.words.trouble
        )
        left = float(max(math.ceil(until - time.monotonic()), 1))
        wish = Wish(self._url, Join(group, self._name, -1, size, left, offer), "auto", "fp32", _RECONNECT_SECONDS)
        is_in = threading.Event()
        if self._wanted.is_host:
            threading.Thread(target=self._keep, args=(is_in,), name="gradserver-coordinator", daemon=True).start()
        try:
            return join(wish)
        finally:
            is_in.set()

    def _keep(self, is_in: threading.Event) -> None:
        """Start a coordinator if it ends while this agent waits, which then joins the next one."""
        host, port = parse_url(self._url)
        while not is_in.wait(_LOOK_SECONDS):
            if not _listens(self._url):
                with suppress(CoordinatorError):
                    self._start(host.strip("[]"), port)

    def _await_place(self, refusal: JoinRefusedError | JoinTimeoutError, until: float) -> float:
        """Wait until the group that has refused this agent has ended. Return the end of its patience.

        A spare waits for as long as the group is whole, since it may be needed later.
        """
        wanted, most = self._wanted, self._wanted.most
        if look(self._url, wanted).is_whole(most):
            text = (
                "the rendezvous %r is complete without this node, which waits until one is missing. If it is that of "
                "another job, give each job an --rdzv-id of its own. %s"
            )
            log.warning(text, wanted.run, refusal)
            self._look_until(lambda status: not status.is_whole(most))
            until = time.monotonic() + wanted.join
        elif time.monotonic() + _RETRY_SECONDS >= until or _is_for_good(refusal):
            raise refusal
        self._look_until(lambda status: status.is_forming or status.is_whole(most), until)
        return until

    def _complete(self, worker: Worker, until: float) -> RendezvousInfo | None:
        """Agree on the store. Return None if the group that has let this agent in has to form again."""
        wanted = self._wanted
        self._check_policy()
        if worker.joins:
            self._look_until(lambda status: self._name not in status.joining, until)
            return None  # the group has ended, and its members begin again, with this agent
        if not wanted.least <= worker.world_size <= wanted.most:
            return None
        return self._meet_at_store(worker, until)

    def _check_policy(self) -> None:
        """Refuse a group that cannot have the number of nodes that torchrun has, if that is elastic."""
        wanted = self._wanted
        group = look(self._url, wanted).group if wanted.is_elastic else None
        if group is None or group["elastic"] == [wanted.least, wanted.most]:
            return
        has = "{}:{}".format(*group["elastic"]) if group["elastic"] else group["world_size"]
        raise RendezvousStateError(
            f"{wanted.words.number} is {wanted.nodes}, and the coordinator at {self._url} has {has} for them. "
            f"{self._remedy()}"
        )

    def _remedy(self) -> str:
        wanted = self._wanted
        starts = ", or an endpoint at which an agent starts a coordinator" * (wanted.words is AGENTS)
        return (
            f"Start it with `gradserver serve --groups any --workers '{wanted.group}={wanted.nodes}'`, or give a "
            f"number that does not change{starts}"
        )

    def _meet_at_store(self, worker: Worker, until: float) -> RendezvousInfo:
        """Make the store at rank 0, reach it from all agents, and return what torchrun needs."""
        patience, seconds = max(until - time.monotonic(), 1.0), timedelta(seconds=self._wanted.reach)
        store: Any = None
        told: list[Any] | None = None
        if worker.rank == 0:
            address = self._own_address(worker)
            store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=seconds)
            told = [address, store.port]
        address, port = worker.broadcast_object(told, timeout=patience) or ("", 0)
        try:
            store = store or TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=seconds)
        except Exception as error:
            raise RendezvousConnectionError(
                f"{worker.names[0]!r} has the store of rendezvous {self._wanted.run!r} at {address}, port {port}, and "
                f"{worker.name!r} cannot reach it: {error}. Give that node a --local-addr that others reach"
            ) from error
        worker.barrier(timeout=patience)
        self._store = store
        rank, size = worker.rank, worker.world_size
        if self.use_agent_store:
            return RendezvousInfo(store, rank, size, RendezvousStoreInfo(address, port))
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo.build(rank, store, self._own_address(worker)))

    def _own_address(self, worker: Worker) -> str:
        """Return this node's address as the others reach it: that on the way to the coordinator, unless it is local."""
        if self._wanted.address:
            return self._wanted.address
        shown = addresses(parse_target(self._url)[0])[1]
        hosts = {name.partition(":")[0] for name in worker.names}
        return socket.getfqdn() if len(hosts) > 1 and shown in ("127.0.0.1", "::1", "localhost") else shown

    def _as_torchs(self, error: GradServerError) -> RendezvousError:
        """Return the error of torchrun for one of gradserver."""
        wanted = self._wanted
        if isinstance(error, DeadlineError):
            lost = [repr(name) for name in self._names if repr(name) not in error.message]
            more = f". Of the last rendezvous are missing: {', '.join(lost)}" if lost else ""
            return RendezvousTimeoutError(
                f"the rendezvous {wanted.run!r} of {wanted.nodes} {wanted.words.them} was not complete in time: "
                f"{error.message}{more}. Their patience is {wanted.words.patience}"
            )
        if isinstance(error, InvalidWorldSizeError):
            remedy = (
                self._remedy() if wanted.is_elastic else f"Give all {wanted.words.them} the same {wanted.words.number}"
            )
            return RendezvousStateError(f"{wanted.words.number} is {wanted.nodes}: {error.message}. {remedy}")
        if isinstance(error, CoordinatorError | JoinRefusedError):
            return RendezvousConnectionError(error.message)
        return RendezvousError(error.message)


def _listens(url: str) -> bool:
    with suppress(CoordinatorError):
        reach(url, 0.0)
        return True
    return False


def _is_for_good(refusal: GradServerError) -> bool:
    """Tell whether a coordinator that has refused an agent will do so again: it serves other groups only."""
    return refusal.message.startswith("this coordinator serves ")
