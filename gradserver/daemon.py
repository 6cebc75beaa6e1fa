"""The daemon: a coordinator or a data shard behind a TCP server, in the foreground, until a signal stops it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import gradserver
from gradserver.children import SHARD_TOKEN, Children
from gradserver.engine import Engine
from gradserver.engine.control.access import Access
from gradserver.engine.policy import Hashes, OnNonFinite, Policy
from gradserver.protocol.compiled import loader
from gradserver.protocol.errors import CoordinatorStoppedError
from gradserver.protocol.limits import CREDIT_BYTES, JOURNAL_QUOTA_BYTES, MAX_TOKEN, MIB, ROUND_TIMEOUT
from gradserver.protocol.messages import Enlist
from gradserver.protocol.planes import AUTO
from gradserver.protocol.url import numeric_url, parse_url
from gradserver.runtime import Residuals, Runtime
from gradserver.transport.liveness import Patience
from gradserver.transport.server import TcpServer
from gradserver.transport.system import check_limit

if TYPE_CHECKING:
    from gradserver.ledger.state import StateDir

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

log = logging.getLogger("gradserver")


class Ledger(NamedTuple):
    """Settings of the ledger.

    Attributes:
        directory: directory of its files, made if it does not exist.
        sync: seconds between two calls of `fdatasync`; 0 for one behind every round, None for none.
        keep: bytes above which the oldest files are deleted.
        hashes: which rounds are hashed.
        quota: bytes that one group may write in an hour, rounds not counted; 0 for no limit.
    """

    directory: Path
    sync: float | None
    keep: int
    hashes: Hashes
    quota: int = JOURNAL_QUOTA_BYTES


_JOINING_SECONDS = 10.0
"""Time that a data shard looks for its coordinator, and then waits for an answer."""


def serve(
    bind: str,
    worlds: Mapping[str, int | Policy],
    credit: int | None = None,
    share_memory: bool = True,
    shards: int = 1,
    rate: float | None = None,
    quiet: bool = False,
    ledger: Ledger | None = None,
    patience: Patience | None = None,
    groups: frozenset[str] | None = None,
    allow_shards: bool = False,
    round_timeout: float = ROUND_TIMEOUT,
    nonfinite: OnNonFinite = OnNonFinite.HALT,
    plane: str = AUTO,
    attend: Callable[[TcpServer, Callable[[], bool]], object] = lambda *_: None,
) -> int:
    """Serve as a coordinator until SIGTERM or SIGINT; returns the exit status.

    Args:
        bind: ``tcp://HOST:PORT``; port 0 picks a free one.
        worlds: world size or policy by group, for groups that have their size from here.
        credit: bytes that one worker may have in flight at each shard; None for the default.
        share_memory: whether workers of this host may share memory instead of sending gradients.
        shards: processes of this host that hold slices; the coordinator itself is one of them.
        rate: of this host's link in Gbit/s; None if it is as fast as that of other data shards.
        quiet: whether further processes log warnings only.
        ledger: settings of the ledger; None for no ledger.
        patience: times after which workers and data shards are lost; None for the defaults.
        groups: names that groups may have; None for any.
        allow_shards: whether to accept data shards that this process has not started.
        round_timeout: seconds that others wait for a worker that is alive and does not take part.
        nonfinite: policy for gradients that are not finite.
        plane: the way of the gradients that all groups must go by; "auto" for any.
        attend: is called once the server listens, with it and a function that says if there is no group. That may be
            asked in the server's loop only (`TcpServer.look`).
    """
    loader.require()
    _raise_limits()
    keep_memory()
    own, options = _share_rate(rate, shards)
    entropy = partial(secrets.token_hex, 16)
    with _journal(ledger) as journal:
        hashes = Hashes.OFF if ledger is None else ledger.hashes
        incarnation = 0 if journal is None else journal.incarnation
        credit = CREDIT_BYTES if credit is None else credit
        access = Access(groups, entropy(), allow_shards)
        known: tuple[Hashes, int, Callable[[str], bool]] = hashes, incarnation, lambda token: server.is_lit(token)
        quota = 0 if ledger is None else ledger.quota
        engine = Engine(worlds, credit, entropy, own, *known, access, round_timeout, nonfinite, quota, plane)
        children = Children(lambda: engine.control.roster.enlisted, access.shard_token)
        coordinator = Runtime(engine, journal=journal, residuals=_residuals(journal), hire=children.hire)
        if journal is not None:
            coordinator.restore(journal.restored)
            bind = _same_port(bind, journal.port()) if engine.control.groups else bind
        patience = patience or Patience()
        options += ["--dead-after", repr(patience.dead_after), "--frozen-after", repr(patience.frozen_after)]
        server = TcpServer(coordinator, bind, share_memory, patience)
        if journal is not None:
            journal.keep_port(parse_url(server.url)[1])
        with _serving(server, coordinator):
            before = signal.signal(signal.SIGCHLD, lambda *_: server.look())

            def all_there() -> bool:
                children.check()
                return engine.control.roster.own >= shards - 1

            try:
                children.start(server.url, shards - 1, options + ["--quiet"] * quiet)
                # A group that is complete before its shards would do without them.
                server.hold(engine.control.is_member)
                server.run(all_there)
                server.release()
                if all_there():
                    print(f"listening on {server.url}", flush=True)
                    attend(server, lambda: not engine.control.groups)
                    loader.start()  # the first rounds do without kernels
                    signal.signal(signal.SIGCHLD, lambda *_: server.look(children.replace))
                    server.run()
                log.info("stopped")
            finally:
                server.close()
                signal.signal(signal.SIGCHLD, before)
                children.end()
    loader.end_at_once()
    return 0


def serve_shard(
    primary: str,
    bind: str | None,
    rate: float | None = None,
    share_memory: bool = True,
    patience: Patience | None = None,
    reconnect: float = 0.0,
) -> int:
    """Serve as a data shard of the coordinator at ``primary`` until a signal, or until that coordinator is lost.

    Args:
        primary: the coordinator's URL.
        bind: ``tcp://HOST:PORT``; None for a free port of the address from which the coordinator is reached.
        rate: of this host's link in Gbit/s; None if it is as fast as those of the others.
        share_memory: whether workers of this host may share memory instead of sending gradients.
        patience: times after which workers are lost; None for the defaults.
        reconnect: seconds to look for a lost coordinator, if it keeps its state on disk.

    Raises:
        CoordinatorError: the coordinator was lost, or could not be reached.
    """
    from gradserver.engine.shard import ShardEngine  # imported here: a coordinator does not need it
    from gradserver.transport.shard_link import Link, advertised, find_again

    loader.require()
    _raise_limits()
    keep_memory()
    link = Link(primary, _JOINING_SECONDS)
    engine = ShardEngine(primary)
    coordinator = Runtime(engine)
    try:
        server = TcpServer(coordinator, bind or numeric_url(link.local, 0), share_memory, patience)
    except BaseException:
        link.end()
        raise
    with _serving(server, coordinator):
        try:
            engine.url = advertised(server.url, link)
            offer = Enlist(engine.url, rate, os.environ.get(SHARD_TOKEN, "")[:MAX_TOKEN])
            enlisted = link.enlist(offer, _JOINING_SECONDS)
            print(f"listening on {server.url} (data shard {enlisted.number} of {primary})", flush=True)
            loader.start()
            while True:
                engine.link = coordinator.connect(link)
                coordinator.receive(engine.link, enlisted)
                link.is_vital = not (enlisted.returns and reconnect > 0)
                link.serve(coordinator, engine.link)
                server.tend(link)
                server.run()
                failure = link.failure
                if server.is_stopping or failure is None:
                    break
                log.warning("%s; looking for it for %g s", failure.message, reconnect)
                server.neglect()
                link.end()
                coordinator.lost(engine.link, failure.message)
                server.run(lambda: engine.is_idle)  # no earlier message may be taken for a later one
                found = find_again(primary, offer, reconnect, lambda: server.is_stopping)
                if found is None:
                    break
                link, enlisted = found
            if failure is not None and not isinstance(failure, CoordinatorStoppedError):
                raise failure
            log.info("stopped" if failure is None else f"stopped: {failure.message}")
        finally:
            server.close()
            link.end()
    loader.end_at_once()
    return 0


def _residuals(journal: StateDir | None) -> Residuals | None:
    if journal is None:
        return None
    from gradserver.residuals import Residuals  # imported here: a coordinator without a directory does not need it

    return Residuals(journal.path)


@contextmanager
def _journal(ledger: Ledger | None) -> Iterator[StateDir | None]:
    """Open the journal while this process serves."""
    if ledger is None:
        yield None
        return
    from gradserver.ledger.state import StateDir  # imported here: a coordinator without a ledger does not need it

    with closing(StateDir(ledger.directory, gradserver.__version__, ledger.sync, ledger.keep)) as state:
        yield state


def _same_port(bind: str, before: int) -> str:
    """Put the port to which members come back into ``bind``, if it allows any port."""
    host, port = parse_url(bind)
    return f"tcp://{host}:{before}" if port == 0 and before else bind


@contextmanager
def _serving(server: TcpServer, coordinator: Runtime) -> Iterator[None]:
    """Prepare the process for serving: it stops on signals, and cleans up behind itself."""

    def stop(number: int, _frame: FrameType | None) -> None:
        server.request_stop(f"it received {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        gc.freeze()  # objects made at start-up stay: collections need not look at them,
        gc.set_threshold(50_000, 20, 20)  # nor run every few rounds, for an engine that makes no cycles
        gc.enable()
        yield
    finally:
        coordinator.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _share_rate(rate: float | None, shards: int) -> tuple[float | None, list[str]]:
    """Divide a host's rate: return the coordinator's own, and options with the share of each other process.

    All share the link. With 0 the coordinator holds no slices, and the others count as any other shard.
    """
    if not rate:
        return rate, []
    return rate / shards, ["--rate", repr(rate / shards)]


def keep_memory() -> None:
    """Let malloc keep freed memory: every slice is about as large as the one before.

    The C library would return a slice's memory to the system when it is freed. Each new slice would then cost page
    faults: an eighth of the time of large exchanges over TCP. Credits bound the memory that is kept.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(_M_TRIM_THRESHOLD, 512 * MIB)


def _raise_limits() -> None:
    """Raise the limit of open descriptors to the hard limit. LimitExceededError if that is too low to serve.

    The soft limit is 1024 on most systems, for the sake of programs that use select(). This one does not. Each worker
    takes a connection, or two and up to a descriptor for each bucket of its plan if it shares memory.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems set a hard limit that they do not keep
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    check_limit()
