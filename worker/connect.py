"""`gradserver.connect`: from a URL, or the environment, to a `Worker`."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gradserver.protocol.codecs import codec_of
from gradserver.protocol.compiled import loader
from gradserver.protocol.errors import (
    BackendUnavailableError,
    ClosedError,
    ConnectionLostError,
    CoordinatorUnreachableError,
    DeadlineError,
    DisagreementError,
    InvalidArgumentError,
    InvalidRankError,
    InvalidWorldSizeError,
    JoinRefusedError,
    JoinTimeoutError,
    LeftOutError,
    UnexpectedMessageError,
    raised,
)
from gradserver.protocol.limits import FORGOTTEN_SECONDS, MAX_TEXT, MAX_TIMEOUT, MAX_WORLD_SIZE, RUN_BYTES
from gradserver.protocol.log import log
from gradserver.protocol.messages import Join, Welcome
from gradserver.protocol.nearest import names_keywords
from gradserver.protocol.offers import summary
from gradserver.protocol.planes import AMONG_MEMBERS, AUTO, IN_PROCESS, SHM, TCP, WISHES
from gradserver.protocol.url import no_coordinator, not_answered, parse_target
from gradserver.worker.background import await_background
from gradserver.worker.client import Worker
from gradserver.worker.handle import VERDICT_SECONDS, Handle
from gradserver.worker.meeting import with_store
from gradserver.worker.offer import LOCAL_VARIABLES, offer_of
from gradserver.worker.session import Session, ShardReceiver
from gradserver.worker.transport.farewell import Farewell
from gradserver.worker.transport.greeting import takes_no_workers
from gradserver.worker.transport.probing import Link, measure
from gradserver.worker.transport.reconnect import ReconnectingChannel
from gradserver.worker.transport.tcp import TcpChannel

_CHANNELS = ("auto", "shm", "tcp")
_SHARING_SECONDS = 5.0
"""Seconds that the coordinator may take to answer when memory is shared. It takes about 50 µs if it is not busy."""
_SETTLING_SECONDS = 2.0
"""Seconds until the coordinator would notice that this process froze. It takes 0.2 s if neither side is busy."""
_AGAIN_SECONDS = 0.1
"""Seconds between two attempts to join."""
_SHARD_SECONDS = 3.0
"""Seconds that a data shard has to answer a learner. Another one may take its place, which the next Welcome names."""
_INTERRUPTED = ConnectionLostError, LeftOutError, ClosedError, CoordinatorUnreachableError
"""Errors with which a learner joins again."""
_ASKING_SECONDS = 0.5
"""Seconds that a listener which breaks a connection without a word may take to say what it is."""
# Of torchrun and `gradserver run`, Open MPI, MPICH and Intel MPI, Slurm. Processes of an mpirun within a Slurm job
# inherit what Slurm tells the job's script, so Slurm's come last.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


@names_keywords
def connect(
    url: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    group: str = "default",
    name: str | None = None,
    timeout: float = 60.0,
    channel: str | None = None,
    wire: str = "fp32",
    reconnect: float = 60.0,
    plane: str | None = None,
) -> Worker:
    """Join a group, and wait until all of its workers have joined.

    Arguments that are not given come from the environment. ``url`` comes from GRADSERVER_URL. ``rank`` comes from
    RANK, and ``world_size`` from WORLD_SIZE, as `gradserver run` and torchrun set them. Otherwise they come from the
    variables of mpirun (OMPI_COMM_WORLD_RANK and PMI_RANK, with their sizes) or srun (SLURM_PROCID, SLURM_NTASKS).
    ``channel`` comes from GRADSERVER_CHANNEL, and ``plane`` from GRADSERVER_PLANE. The coordinator assigns a rank that
    is given nowhere. It also decides a world size that is given nowhere. With GRADSERVER_RENDEZVOUS_DIR, workers that
    reduce among themselves find each other by files in that directory, which all hosts see.

    Without a URL, a single worker trains by itself, without a coordinator, and logs this in one line. A worker is
    single if the world size is 1, or if neither rank nor world size is given. With a URL it is a group of one.

    If a connection breaks before the group is complete, this call connects again, within ``timeout``.

    A worker that has left a group may connect to it again. If that group cannot take it in, it waits within ``timeout``
    until the others have left. Then it forms the next one.

    If a worker is still a member when its process ends, it leaves the group then. The others are told of an uncaught
    error.

    Args:
        url: ``tcp://HOST:PORT`` of the coordinator. ``""`` means none, whatever the environment says.
        rank: the wanted rank, 0 … world_size - 1.
        world_size: number of workers that the group must have.
        group: name of the group. A coordinator serves many groups.
        name: name of this worker in messages. A group recognizes a worker that returns by its name. The
            default is GRADSERVER_NAME, else the name of the host with LOCAL_RANK, its like of mpirun or srun, or the
            process id. If several workers have one name, all but the first get a number behind it, and a warning.
        timeout: seconds to wait for the coordinator and the other workers. The coordinator decides how long a later
            exchange waits for a worker that is alive: ``gradserver serve --round-timeout``, 30 minutes by default.
        channel: path of the gradients to the coordinator. ``"shm"`` is memory shared with a coordinator on the same
            host. ``"tcp"`` is the connection. ``"auto"`` is shared memory if that is possible.
        wire: format in which float32 gradients travel, the same at all members. ``"fp32"`` is exact. ``"bf16"``,
            ``"fp16"``, ``"int8"``, ``"topk:FRACTION"`` and ``"randomk:FRACTION"`` lose something. The format applies to
            means of 64 KiB and more. Later rounds make up for the losses in buckets. The dense formats also apply to
            `Worker.all_reduce`. Sums are always fp32, and every worker gets the same bytes.
        reconnect: seconds to wait for a lost coordinator. This needs a coordinator that keeps its state on disk
            (``gradserver serve --state-dir``). Nothing fails meanwhile.
        plane: way of the group's gradients, which all members share. ``"direct"`` is a process group of
            torch.distributed among the workers: NCCL between CUDA devices, and else gloo. ``"hierarchical"`` is one
            such group on each host, of which one worker exchanges with the coordinator. ``"tcp"`` and ``"shm"`` are
            the channels to the coordinator. ``"auto"`` is direct if each worker has a CUDA device of its own. It is
            hierarchical if that is not so, or not possible, and the workers of a host have. Otherwise it is each
            worker's channel. `Worker.plane_reason` says why. For this, a process that has imported torch asks it for
            its CUDA devices. Members that demand different planes get an error.

    Raises:
        CoordinatorUnreachableError: nothing listens at ``url``, or the listener is not a coordinator.
        JoinTimeoutError: not all workers came in time. The error names the missing ones.
        JoinRefusedError: the rank is taken, the group is complete, or the demanded plane is not possible with all
            workers.
        DisagreementError: other workers, or the coordinator, demand another plane.
        ConnectionLostError: the last connection broke, and no time is left for another one.
        InvalidRankError: the rank is out of range.
        InvalidWorldSizeError: the world size is out of range, or not the group's.
        BackendUnavailableError: memory cannot be shared, and ``channel`` or ``plane`` is ``"shm"``. Or this process
            has no torch.distributed, and ``plane`` is ``"direct"`` or ``"hierarchical"``.
        InvalidArgumentError: there is no URL and this worker is one of several, or an argument can never be right.
    """
    said = Said()
    url = said.text(url, "GRADSERVER_URL", _check_url) or None
    _check_seconds("timeout", timeout, above=0)
    channel = said.text(channel or None, "GRADSERVER_CHANNEL", _check_channel) or "auto"
    plane = said.text(plane or None, "GRADSERVER_PLANE", _check_plane) or AUTO
    plane, channel = _agreed_wishes(plane, channel)
    if codec_of(wire).name != "fp32":
        loader.start()  # they are there by the time that there is something to encode
    _check_seconds("reconnect", reconnect)
    world_size = said.number("world_size", world_size, _WORLD_VARIABLES)
    if url is None and world_size == 1:
        rank = rank or 0  # its place among others does not matter
    rank = said.number("rank", rank, _RANK_VARIABLES)
    _check(rank, world_size, said)
    what = Join(
        group=_text("group", group),
        name=name if name and _text("name", name) else said.name(),
        rank=-1 if rank is None else rank,
        world_size=world_size or 0,
        timeout=float(timeout),
        offer=offer_of(plane),
    )
    wish = Wish(url, what, channel, wire, float(reconnect))
    if wish.url is None:
        raise _no_url(wish, said)
    return join(wish)


class Said:
    """The variables that arguments come from, for messages about what they say."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._variables: dict[str, str] = {}

    def number(self, what: str, given: int | None, names: Sequence[str]) -> int | None:
        """Return the number that is ``given``, else that of the first variable that is set and not empty."""
        for name in names if given is None else ():
            if value := self._environment.get(name):
                self._variables[what] = f"{name}={value}"
                try:
                    return int(value)
                except ValueError:
                    raise InvalidArgumentError(
                        f"{name} is {value!r} in the environment, and must be a number: set it right, or unset it and "
                        f"give connect({what}=…)"
                    ) from None
        return given

    def text(self, given: str | None, name: str, check: Callable[[str], object]) -> str | None:
        """Return the text that is ``given``, else that of a variable, checked."""
        value = self._environment.get(name) if given is None else given
        try:
            if value:
                check(value)
        except InvalidArgumentError as error:
            if given is not None:
                raise
            raise InvalidArgumentError(f"{name} in the environment: {error.message}") from None
        return value

    def name(self) -> str:
        """Return a name to return by, after this process ends, if the environment tells processes of a host apart."""
        if given := self.text(None, "GRADSERVER_NAME", partial(_text, "name")):
            return given
        variable = next((name for name in LOCAL_VARIABLES if self._environment.get(name)), "")
        own = self._environment.get(variable) or str(os.getpid())
        return _text(f"name, by {variable or 'the process id'},", f"{socket.gethostname()}:{own}")

    def by(self, what: str) -> str:
        """Return `` (VARIABLE=VALUE)`` for an argument that comes from the environment; empty for any other."""
        return f" ({self._variables[what]})" if what in self._variables else ""


@dataclass(frozen=True, slots=True)
class Wish:
    """The arguments of `connect`, checked, with defaults from the environment.

    Attributes:
        url: the coordinator's; None for a worker that trains by itself.
        join: the request to the coordinator.
    """

    url: str | None
    join: Join
    channel: str
    wire: str
    reconnect: float


class UrlMissingError(InvalidArgumentError):
    """The error of a missing URL. The worker is the only one, so ``wish`` can be granted without a coordinator."""

    def __init__(self, message: str, wish: Wish) -> None:
        super().__init__(message)
        self.wish = wish


def _no_url(wish: Wish, said: Said) -> InvalidArgumentError:
    """Return the error of a missing URL."""
    size, rank = wish.join.world_size, wish.join.rank
    several = f", and this is rank {rank} of several{said.by('rank')}" * (rank >= 0)
    several = f", and there are {size} workers{said.by('world_size')}" if size else several
    text = "give connect('tcp://HOST:PORT'), set GRADSERVER_URL, or start the workers with `gradserver run`"
    if size != 1 and several:
        alone = "For one process that trains alone give connect(world_size=1), or set WORLD_SIZE=1"
        return InvalidArgumentError(f"no coordinator's URL{several}: {text}. {alone}")
    return UrlMissingError(f"no coordinator's URL: {text}", wish)


def join(wish: Wish) -> Worker:
    """Join the group at a coordinator. A worker that joins a running group does so again if that is interrupted."""
    until = time.monotonic() + wish.join.timeout
    wish = replace(wish, join=replace(wish.join, key=secrets.token_hex(16)))
    while True:
        connection, session, lasting = _join(wish, until)
        try:
            worker = _equipped(wish, connection, session, lasting, until)
            break
        except BaseException as error:
            session.close("it could not join")
            if (
                not (isinstance(error, _INTERRUPTED) and session.membership.joins)
                or time.monotonic() + _AGAIN_SECONDS >= until
            ):
                raise
            log.warning("%s; joining again", error)
        time.sleep(_AGAIN_SECONDS)
    atexit.register(_leave_at_exit, weakref.ref(worker), os.getpid())
    told = session.membership
    if worker.rank == 0 and told.offers:
        devices = summary(told.offers)
        log.info("group %r: plane %s, because %s; devices: %s", told.group, told.plane, told.plane_reason, devices)
    if worker.name != wish.join.name:
        log.warning(
            "this worker is called %r: there is another %r in group %r. Give each worker a name of its own "
            "(GRADSERVER_NAME, or name=). With it, a worker that starts again gets its place back",
            *(worker.name, wish.join.name, worker.group),
        )
    return worker


def _equipped(
    wish: Wish, connection: TcpChannel, session: Session, lasting: ReconnectingChannel | None, until: float
) -> Worker:
    """Return the worker of ``session``, with all that it needs beside its connection."""
    assert wish.url is not None
    channel = _agreed_channel(wish.channel, session.membership)
    if lasting is None:
        session.subgroups.grow_by(connection.branch)
    else:
        session.subgroups.grow_by(lasting.branch, lasting.carried)
    if lasting is None and not session.membership.needs_all:
        connection.attach(Farewell(session, wish.url))
    connection = _reach_all(channel, connection, lasting, session, until)
    if connection.on_this_host and connection.kind == "tcp":  # a message takes less time than to handle it
        session.member.exchanges.shards[0].send_together(RUN_BYTES, session.membership)
    connection.settle(_SETTLING_SECONDS)  # from now on Python's lock may be kept for long
    if session.membership.joins:
        session.check_open()
    return Worker(session, connection.kind, wish.wire)


def _reach_all(
    channel: str, connection: TcpChannel, lasting: ReconnectingChannel | None, session: Session, until: float
) -> TcpChannel:
    """Connect to all data shards, and share memory. Return the connection on which that was possible.

    If it breaks meanwhile, a member of a durable group resumes on another one, and attends the data shards on that.
    """
    attended = False
    while True:
        if lasting is not None and not session.membership.joins and not lasting.is_on(connection):
            connection, attended = lasting.stands(), True
        try:
            if not attended:
                _attend_shards(connection, session, until)
            if channel != "tcp" and connection.kind == "tcp":
                _share_memory(connection, channel == "shm", lasting is not None)
            if lasting is None or session.membership.joins or lasting.is_on(connection):
                return connection
        except (*_INTERRUPTED, BackendUnavailableError, UnexpectedMessageError) as error:
            if lasting is None or session.membership.joins:
                raise
            if isinstance(error, ConnectionLostError):
                lasting.broke(connection, error)  # which does nothing if that is known
            if lasting.is_on(connection):
                raise


def _join(wish: Wish, until: float) -> tuple[TcpChannel, Session, ReconnectingChannel | None]:
    """Join. Until the Welcome is heeded, a connection that breaks or loses a message is made anew."""
    assert wish.url is not None
    join, url = wish.join, wish.url
    lost: tuple[float, ConnectionLostError | LeftOutError] | None = None
    while True:
        try:
            connection = TcpChannel(url, join.timeout if lost is None else max(round(until - time.monotonic(), 1), 0.1))
        except CoordinatorUnreachableError as error:
            raise error from (None if lost is None else lost[1])
        session = Session(connection, join.timeout)
        try:
            way = SHM if connection.on_this_host and wish.channel != TCP else TCP
            link = Link() if connection.on_this_host else measure(connection)
            offer = join.offer._replace(channel=way, rate=link.rate, trip=link.trip)
            offer, store = with_store(offer, url)
            session.on_end(partial(id, store))  # it holds what members meet at for as long as the membership lasts
            joining = session.join(replace(join, offer=offer))
            connection.ask()
            _await_welcome(joining, connection, until - time.monotonic(), join.timeout)
            return connection, session, _outlasting(connection, session, wish.reconnect)
        except BaseException as error:
            if not connection.heard:
                connection.give_up()
            session.close("it could not join")
            now = time.monotonic()
            broken = isinstance(error, (ConnectionLostError, CoordinatorUnreachableError)) and now < until
            if broken and not connection.heard and takes_no_workers(url, _ASKING_SECONDS):
                raise CoordinatorUnreachableError(no_coordinator(url, "coordinator", closed=False)) from error
            if isinstance(error, (ConnectionLostError, LeftOutError)):
                lost = now, error
                log.warning("%s; joining again", error)
            elif not isinstance(error, JoinRefusedError) or lost is None or now > lost[0] + FORGOTTEN_SECONDS:
                raise
            if now + _AGAIN_SECONDS >= until:
                raise
        time.sleep(_AGAIN_SECONDS)


def _outlasting(connection: TcpChannel, session: Session, patience: float) -> ReconnectingChannel | None:
    """Have the membership in a durable group outlast its connection; None in another group.

    Raises:
        ConnectionLostError: the connection broke before.
    """
    if not session.membership.durable:
        return None
    lasting = ReconnectingChannel(connection, session, patience)  # without patience, too: others may ask this member
    session.endure(lasting)
    session.check_open()
    if session.membership.again:
        lasting.broke(connection, ConnectionLostError("the Welcome of this worker was lost with an earlier connection"))
    return lasting


def _attend_shards(connection: TcpChannel, session: Session, until: float) -> None:
    """Connect to each further data shard of the group, until ``until``, but for a second each at least."""
    if session.membership.joins:
        until = min(until, time.monotonic() + _SHARD_SECONDS)
    for number, url in enumerate(session.membership.shards, 1):
        connection.add(url, ShardReceiver(session, number), max(until - time.monotonic(), 1.0))
        left = max(until - time.monotonic(), 1.0)
        try:
            attending = session.attend(number, left, connection)  # as the question behind it, and on no later one
            connection.ask(number)
            attending.wait(left + VERDICT_SECONDS)
        except DeadlineError:
            raise CoordinatorUnreachableError(
                f"the data shard at {url} has not accepted this worker within {left:.0f} s"
            ) from None


def _share_memory(connection: TcpChannel, must: bool, durable: bool) -> None:
    try:
        connection.share_memory(_SHARING_SECONDS, durable)
    except BackendUnavailableError as error:
        if must:
            raise BackendUnavailableError(
                f"no memory can be shared with the coordinator, and channel is 'shm': {error}"
            ) from error
        level = logging.INFO if connection.on_this_host else logging.DEBUG
        log.log(level, "gradients go through the connection, as no memory can be shared: %s", error)


def _leave_at_exit(reference: weakref.ref[Worker], process: int) -> None:
    """Leave for a script that ends without ``close()``, and say why if that was an error."""
    if process != os.getpid():  # a forked child decides nothing
        return
    worker = reference()
    if worker is not None and not worker.closed:
        error = getattr(sys, "last_value", None)  # the interpreter has just shown its traceback
        if error is None:
            worker.close("its process ended")
        else:
            worker.abort(raised(error))
    await_background()  # its own exit function has run before this one, if a plane was loaded after connect


def _await_welcome(joining: Handle, connection: TcpChannel, left: float, timeout: float) -> None:
    """Wait for the Welcome. A coordinator gets time to name the missing workers, but none if it was silent so far."""
    for patience in (left, VERDICT_SECONDS):  # its own deadline began later than ours
        try:
            joining.wait(patience)
        except JoinTimeoutError:
            raise
        except TimeoutError:
            if not connection.heard:
                break
        else:
            return
    if connection.heard:  # it was there for a part of that time, and gives its verdict later
        raise JoinTimeoutError(
            f"the coordinator at {connection.url} has not let this worker in within {timeout:g} s, and has not said "
            f"yet what it waits for, as it was not there at first. Its log says so, and `gradserver status`"
        )
    raise CoordinatorUnreachableError(not_answered(connection.url, timeout))


def _check(rank: int | None, world_size: int | None, said: Said) -> None:
    for what, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InvalidArgumentError(f"{what} is {value!r}, and must be a whole number")
    if world_size is not None and not 1 <= world_size <= MAX_WORLD_SIZE:
        source = said.by("world_size")
        raise InvalidWorldSizeError(f"world_size is {world_size}{source}, and must be from 1 to {MAX_WORLD_SIZE}")
    if rank is not None and not 0 <= rank < (world_size or MAX_WORLD_SIZE):
        most = f"{(world_size or MAX_WORLD_SIZE) - 1}{said.by('world_size')}"
        raise InvalidRankError(f"rank is {rank}{said.by('rank')}, and must be from 0 to {most}")


def _check_url(url: str) -> None:
    parse_target(url)


def _check_channel(channel: str) -> None:
    if channel not in _CHANNELS:
        raise InvalidArgumentError(f"channel is {channel!r}, and must be one of {', '.join(_CHANNELS)}")


def _check_plane(plane: str) -> None:
    if plane not in WISHES:
        raise InvalidArgumentError(f"plane is {plane!r}, and must be one of {', '.join(WISHES)}")
    if plane == IN_PROCESS:
        raise InvalidArgumentError(
            f"plane is {plane!r}, which is for threads of one process: use gradserver.LocalCluster, or plane='auto'"
        )


def _agreed_wishes(plane: str, channel: str) -> tuple[str, str]:
    """Return a plane and a channel that fit together, as they are wanted."""
    if plane not in (TCP, SHM):
        return plane, channel
    if channel not in ("auto", plane):
        raise InvalidArgumentError(f"plane is {plane!r} and channel is {channel!r}: give one of them, or both alike")
    return plane, plane


def _agreed_channel(channel: str, membership: Welcome) -> str:
    """Return the channel, of those that this worker wants, by which the group's plane goes."""
    if not membership.demanded or membership.plane in AMONG_MEMBERS:
        return channel
    if channel not in ("auto", membership.plane):
        raise DisagreementError(
            f"channel is {channel!r}, and the plane of group {membership.group!r} is {membership.plane!r}, because "
            f"{membership.plane_reason}: leave the channel out, or demand the same"
        )
    return membership.plane


def _check_seconds(what: str, value: float, above: float | None = None) -> None:
    if not isinstance(value, (int, float)) or not (above or 0) <= value <= MAX_TIMEOUT or value == above:
        least = "from 0 to" if above is None else f"above {above:g} and at most"
        raise InvalidArgumentError(f"{what} is {value!r} seconds, and must be {least} {MAX_TIMEOUT:g}")


def _text(what: str, value: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise InvalidArgumentError(f"{what} is {value!r}, and must be printable text of 1 to {MAX_TEXT} characters")
    return value
