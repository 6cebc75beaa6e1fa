"""The link to a coordinator: whether it is reached, its round trip, and its rates, measured in a group of their own.

The group is `PROBE_GROUP`, which every coordinator allows, and ends after `PROBE_SECONDS`. Its workers are threads of
this process. A reduce_scatter sends four times what comes back, and an all_gather the reverse. So the first shows the
rate to the coordinator, and the second the rate from it. Collectives grow until one takes `_LONG` seconds, or the bytes
that may be spent are spent: fewer, if other groups train.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

import gradserver
from gradserver.protocol.errors import GradServerError, InvalidArgumentError, JoinRefusedError, reason_of
from gradserver.protocol.limits import KIB, MIB, PROBE_GROUP, PROBE_WORLD
from gradserver.protocol.planes import AUTO, SHM, TCP
from gradserver.protocol.url import beside, parse_target
from gradserver.status import fetch
from gradserver.tools.doctor.report import Report, Section

_CONNECTING: Final = 3.0
_JOINING: Final = 10.0
_REFUSED_WITHIN: Final = 0.25
"""Seconds in which the first worker is refused, if another doctor measures."""
_AGAIN_SECONDS: Final = 0.1
_EXCHANGING: Final = 8.0
"""Seconds that one collective may take."""
_LONG: Final = 0.25
"""Seconds of a collective that are long enough to measure."""
_NEARLY: Final = 0.6
"""Part of `PROBE_WORLD` from which on the ratio of two measured rates can be that of their bytes."""
_BARRIERS: Final = 20
_FIRST: Final = 64 * KIB
_GROWS: Final = 4
_TIMES: Final = 2
"""Collectives of the last size; the fastest counts."""
IDLE_BYTES: Final = 64 * MIB
"""Bytes that are sent each way, at most, to a coordinator that is idle."""
BUSY_BYTES: Final = 8 * MIB
"""The same while groups train."""
_SLOW_ROUND_TRIP: Final = 0.005


@dataclass(slots=True)
class Rates:
    """Rates of one channel: the round trip in seconds, rates in Gbit/s, and the bytes that were sent each way.

    If one way is more than `PROBE_WORLD` times as slow as the other, it slows down what measures the other, too. Then
    ``slower`` names it, and the other rate is a lower bound.
    """

    round_trip: float = 0.0
    to_it: float = 0.0
    from_it: float = 0.0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def slower(self) -> str:
        """The way that is so slow that it bounds both: "to it" or "from it"; empty if there is none."""
        if self.from_it > self.to_it * PROBE_WORLD * _NEARLY:
            return "to it"
        return "from it" if self.to_it > self.from_it * PROBE_WORLD * _NEARLY else ""

    def __str__(self) -> str:
        up, down = ("at least " * (self.slower == way) for way in ("from it", "to it"))
        return (
            f"{up}{self.to_it:.2f} Gbit/s to it, {down}{self.from_it:.2f} Gbit/s from it, "
            f"round trip {1e3 * self.round_trip:.2f} ms"
        )


class Found(NamedTuple):
    """The status of a coordinator, if one has answered; ``here``: it is on this host."""

    status: dict[str, Any] | None = None
    here: bool = False


def examine(report: Report, url: str, measures: bool) -> Found:
    """Add what is found of the coordinator at ``url``."""
    section = report.section("coordinator", f"coordinator at {url}")
    here = _reach(report, section, url)
    if here is None:
        return Found()
    try:
        status = fetch(url)
    except GradServerError as error:
        change = "check the port, start `gradserver serve` there, or stop the process that listens in its place"
        report.find(f"no coordinator answers at {url}: {error.message}", change, breaks=True)
        return Found(here=here)
    if "shard" in status:
        what = f"{url} is data shard {status['shard']['number']}"
        report.find(what, f"give the coordinator's address, {status['shard']['primary']}", breaks=True)
        return Found(here=here)
    known = status.get("version", "unknown")
    section.add("version", known)
    if known != gradserver.__version__:
        here_is = gradserver.__version__
        report.find(f"the coordinator has gradserver {known}, and this machine {here_is}", "install the same on both")
    _shards(report, section, url, status)
    _trouble(report, status)
    if measures:
        _measure(report, section, url, status, here)
    return Found(status, here)


def _reach(report: Report, section: Section, url: str) -> bool | None:
    """Add whether a connection can be made. Return True if the coordinator is on this host, None if there is none."""
    host, port = parse_target(url)
    began = time.monotonic()
    try:
        with socket.create_connection((host, port), timeout=_CONNECTING) as connection:
            there, here = connection.getpeername()[0], connection.getsockname()[0]
    except socket.gaierror as error:
        section.add("reachable", False, f"no: {host!r} is not a known host")
        report.find(
            f"{host!r} cannot be resolved ({reason_of(error)})", "correct the name, or give an address", breaks=True
        )
        return None
    except OSError as error:
        section.add("reachable", False, f"no: {reason_of(error)}")
        change = (
            "start `gradserver serve` there, with --bind and a private address of that machine if other hosts are to "
            "reach it, and let firewalls pass TCP to the port"
        )
        report.find(f"{host}:{port} accepts no connection ({reason_of(error)})", change, breaks=True)
        return None
    took = time.monotonic() - began
    section.add("reachable", True, f"yes, {there} from {here}, connected in {1e3 * took:.1f} ms")
    return bool(there == here)


def _shards(report: Report, section: Section, url: str, status: dict[str, Any]) -> None:
    """Add the further data shards, which workers must reach too."""
    others = [{**shard, "url": _address(shard["url"], url)} for shard in status.get("shards", []) if shard["number"]]
    with ThreadPoolExecutor(max(len(others), 1)) as threads:
        reached = list(threads.map(lambda shard: _why_unreachable(shard["url"]), others))
    for shard, why in zip(others, reached, strict=True):
        if why:
            report.find(
                f"data shard {shard['number']} at {shard['url']} accepts no connection ({why})",
                "let firewalls pass TCP to its port, or give the shard a --bind that this machine can reach",
                breaks=True,
            )
    if others:
        section.add("data_shards", [shard["url"] for shard in others], f"{len(others) + 1}")


def _address(shard: str, url: str) -> str:
    """Return the URL of a data shard as this process finds it; as it was told, if it is none."""
    try:
        return beside(shard, url)
    except InvalidArgumentError:
        return shard


def _why_unreachable(address: str) -> str:
    """Return why no connection to a data shard can be made; empty if one can."""
    try:
        socket.create_connection(parse_target(address), timeout=_CONNECTING).close()
    except InvalidArgumentError as error:
        return error.message
    except OSError as error:
        return reason_of(error)
    return ""


def _trouble(report: Report, status: dict[str, Any]) -> None:
    ledger = status.get("ledger", {})
    if ledger.get("trouble"):
        report.find(
            f"the ledger {ledger['file']} cannot be written ({ledger['trouble']})", "make room on the disk there"
        )
    for name, group in status["groups"].items():
        if group["broken"]:
            report.find(f"group {name!r} is broken ({group['broken']})", "start its workers again")


# ── rates ─────────────────────────────────────────────────────────────────────────────────────────────


def _measure(report: Report, section: Section, url: str, status: dict[str, Any], here: bool) -> None:
    busy = [name for name, group in status["groups"].items() if group["state"] in ("active", "recovering")]
    most = BUSY_BYTES if busy else IDLE_BYTES
    for channel in (TCP, SHM) if here and "shared_memory" in status else (TCP,):
        try:
            found = measure(url, channel, most)
        except (GradServerError, OSError) as error:
            section.add(f"{channel}_rates", None, f"not measured: {error}")
            report.find(f"the rates over {channel} could not be measured", str(error))
            continue
        beside_others = f", beside {', '.join(map(repr, busy))}" if busy else ""
        text = f"{found} ({found.nbytes / MIB:.0f} MiB each way in {found.seconds:.1f} s{beside_others})"
        shown = {**asdict(found), "slower": found.slower}
        section.add(f"{channel}_rates", shown, text)
        if found.round_trip > _SLOW_ROUND_TRIP:
            report.find(
                f"a round trip takes {1e3 * found.round_trip:.1f} ms, and each round waits for one",
                "use larger buckets and larger batches, or a coordinator that is nearer",
            )


def measure(url: str, channel: str, most: int) -> Rates:
    """Measure the rates over ``channel``. At most ``most`` bytes are sent each way."""
    with ThreadPoolExecutor(PROBE_WORLD, thread_name_prefix="gradserver-doctor") as threads:
        workers = _come(threads, url, channel, time.monotonic() + _JOINING)
        began = time.monotonic()
        try:
            found = next(iter(threads.map(lambda worker: _exchange(worker, most), workers)))
        finally:
            list(threads.map(lambda worker: worker.close("it has measured"), workers))
    found.seconds = time.monotonic() - began
    return found


def _come(threads: ThreadPoolExecutor, url: str, channel: str, until: float) -> list[gradserver.Worker]:
    """Join the group with all workers.

    Rank 0 comes first. If another doctor has the group, that one is refused, and tries again until ``until``.
    """
    while True:
        first = threads.submit(_join, url, 0, channel, until)
        wait([first], _REFUSED_WITHIN)
        if not first.done():
            break
        if not isinstance(first.exception(), JoinRefusedError) or time.monotonic() >= until:
            first.result()
        time.sleep(_AGAIN_SECONDS)
    joining = [first, *(threads.submit(_join, url, rank, channel, until) for rank in range(1, PROBE_WORLD))]
    errors = [error for one in joining if (error := one.exception()) is not None]
    if errors:
        for one in joining:
            if one.exception() is None:
                one.result().close("it could not measure")
        raise errors[0]
    return [one.result() for one in joining]


def _join(url: str, rank: int, channel: str, until: float) -> gradserver.Worker:
    name = f"doctor-{socket.gethostname()[:40]}-{os.getpid()}-{rank}"
    left, place = max(until - time.monotonic(), 1.0), (url, rank, PROBE_WORLD, PROBE_GROUP)
    return gradserver.connect(*place, name, left, channel, reconnect=0.0, plane=AUTO)


def _exchange(worker: gradserver.Worker, most: int) -> Rates:
    """Measure in one of the threads; all do the same, as the first one says."""
    found = Rates()
    found.round_trip = median(_timed(worker) for _ in range(_BARRIERS))
    size, spent = _FIRST, 0
    while True:
        part = size // PROBE_WORLD // 4
        whole, own = np.zeros((PROBE_WORLD, part), np.float32), np.zeros(part, np.float32)
        found.to_it = found.from_it = 0.0  # small tensors are faster than the link where it takes bursts
        last, seconds = spent + _cost(size) + _TIMES * _cost(size * _GROWS) > most, 0.0
        for _ in range(_TIMES if last else 1):
            up = _timed(worker, partial(worker.reduce_scatter, whole, "sum", timeout=_EXCHANGING), found.round_trip)
            down = _timed(worker, partial(worker.all_gather, own, timeout=_EXCHANGING), found.round_trip)
            bits, seconds = 8.0 * PROBE_WORLD * size, max(seconds, up, down)
            found.to_it, found.from_it = max(found.to_it, bits / up / 1e9), max(found.from_it, bits / down / 1e9)
            spent += _cost(size)
        enough = np.array([last or seconds > _LONG], np.int8)
        worker.broadcast(enough, timeout=_EXCHANGING)
        if enough[0]:
            found.nbytes = spent
            return found
        size *= _GROWS


def _cost(size: int) -> int:
    """Return the bytes that travel each way in a reduce_scatter and an all_gather of tensors of ``size`` bytes."""
    return (PROBE_WORLD + 1) * size


def _timed(worker: gradserver.Worker, call: Callable[[], object] = lambda: None, less: float = 0.0) -> float:
    """Return the seconds until all workers have done a call: of it and a barrier, ``less`` so many for the barrier."""
    worker.barrier(timeout=_EXCHANGING)
    began = time.perf_counter()
    call()
    worker.barrier(timeout=_EXCHANGING)
    took = time.perf_counter() - began
    return max(took - less, took / 2)
