"""The suite `train`: whole training steps beside torch's wrapper, and what is exposed of their exchange.

Contenders take turns. In a *visit* one of them builds its replica, with the weights and samples that all have, and
trains a few steps. So one replica at a time needs memory, and all have a loss after the same number of steps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from statistics import median
from typing import Final, NamedTuple

from gradserver.protocol.planes import AMONG_MEMBERS
from gradserver.tools.bench.fleet import Fleet, Measured, Needs
from gradserver.tools.bench.places import Place
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import BACKENDS, FLOAT_BYTES, Case, Contender, Link
from gradserver.tools.bench.stats import Stats
from gradserver.tools.bench.suites import lab, link_names
from gradserver.tools.demo.settings import Settings

DDP: Final = "ddp"
"""The way of torch's DistributedDataParallel over gloo, in place of a plane."""
ALONE: Final = "none"
"""The way of a step without exchange."""
_UNCOUNTED: Final = 2
"""Steps of a visit that are not counted. The first makes the optimizer's state, and torch's wrapper rebuilds its
buckets in it. Until the third, PowerSGD cannot compress."""
_POWERSGD_WAITS: Final = 0.1
"""Share of the steps before PowerSGD compresses: what torch's documentation suggests to begin with."""
_HEAD_WIDTH: Final = 64
_BLOCKS: Final = 8
_MLP: Final = 41 / 16  # hidden width of the MLP by the model's: 25 M parameters at width 512 and 8 blocks
_CALIBRATION: Final = 3  # exchanges


class Way(NamedTuple):
    """A contender: a plane or `DDP`, and the format of its gradients."""

    plane: str
    wire: str

    @property
    def is_torch(self) -> bool:
        """True for torch's own wrapper."""
        return self.plane == DDP

    @property
    def link(self) -> Link:
        """Membership that it needs, unless it is torch's, or a process group opens it."""
        return Link(self.wire, "", self.plane)

    def contender(self, settings: Settings, steps: int) -> Contender:
        """Return it as the processes know it, to train as many steps."""
        engine = {"ddp": "ddp", "own": "own", ALONE: "alone"}.get(self.plane.partition("-")[0], "ours")
        options = {"settings": asdict(settings), "engine": engine, "start": powersgd_start(steps)}
        plane = self.plane if engine == "ours" else BACKENDS.get(self.plane, "")
        return Contender(f"{self.plane} {self.wire}", "step", self.wire, "", options, plane)


_REFERENCE: Final = Way(DDP, "fp32")
_COMPUTING: Final = Way(ALONE, "")


def train(arguments: argparse.Namespace, session: Session) -> None:
    """Measure steps of GPTs of each size on each kind of links, and backwards that are emulated by waiting."""
    ways = [Way(*one) for one in arguments.contenders]
    links = tuple(way.link for way in ways if not (way.is_torch or way.plane in BACKENDS))
    needs = Needs(links, coordinator=any(way.plane in BACKENDS for way in ways))
    for hosts, place in _places(arguments):
        where = f"{hosts.workers} hosts, {link_names(hosts)}" if hosts.rate else f"{hosts.workers} processes, loopback"
        with ExitStack() as stack:
            there = stack.enter_context(place)
            fleet = stack.enter_context(session.fleet(hosts.workers, needs, "", there))
            for count in arguments.parameters:
                settings = settings_of(hosts, hosts.workers, width_of(count), _BLOCKS)
                session.section(f"GPT of {settings.parameters / 1e6:.1f} M parameters, {where}", "step")
                _steps(hosts, session, fleet, ways, settings)
            if arguments.overlap_size is not None:
                session.section(f"overlap: backward of {_BLOCKS} blocks emulated by waiting, {where}", "overlap")
                _overlap(hosts, session, fleet, links)


def _places(arguments: argparse.Namespace) -> Iterator[tuple[argparse.Namespace, AbstractContextManager[Place | None]]]:
    """Yield the arguments for the links of each rate, and what makes their hosts; or for this machine's loopback."""
    coordinators = arguments.coordinator_rate or arguments.rate or [None]
    rates = arguments.rate or [None]
    if len(coordinators) == 1:
        coordinators = coordinators * len(rates)
    for rate, coordinator in zip(rates, coordinators, strict=True):
        hosts = argparse.Namespace(**{**vars(arguments), "rate": rate, "coordinator_rate": coordinator})
        yield hosts, lab(hosts, hosts.workers) if rate else nullcontext()


def width_of(parameters: int) -> int:
    """Return the width of a GPT of 8 blocks with about so many parameters: a whole number of heads."""
    ideal = math.sqrt(parameters / (_BLOCKS * (4 + 3 * _MLP)))  # what blocks have, for each pair of its units
    return max(_HEAD_WIDTH, _HEAD_WIDTH * round(ideal / _HEAD_WIDTH))


def settings_of(arguments: argparse.Namespace, workers: int, width: int, blocks: int) -> Settings:
    """Return the settings of a training by so many workers, from the arguments."""
    return Settings(
        workers=workers,
        batch=arguments.batch,
        steps=arguments.repetitions,
        context=arguments.context,
        width=width,
        heads=max(1, width // _HEAD_WIDTH),
        blocks=blocks,
        hidden=round(width * _MLP),
        validation_rows=16,
    )


def powersgd_start(steps: int) -> int:
    """Return the step at which PowerSGD begins to compress, of a training of so many steps."""
    return max(_UNCOUNTED, round(_POWERSGD_WAITS * (_UNCOUNTED + steps)))


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────────────


def _steps(arguments: argparse.Namespace, session: Session, fleet: Fleet, ways: list[Way], settings: Settings) -> None:
    # Torch's replica comes first: the weights of others are compared with its.
    turns = [_COMPUTING, *sorted(ways, key=lambda way: way != _REFERENCE)]
    nbytes = settings.parameters * FLOAT_BYTES
    visits: dict[Way, list[Measured]] = {way: [] for way in turns}
    for _ in range(arguments.repetitions):
        for way in turns:
            one = way.contender(settings, arguments.steps)
            measured = session.measure(fleet, Case(nbytes, (one,)), repetitions=arguments.steps, sample_seconds=0.0)
            visits[way].append(measured[one.name])
    found = {way: _together(way, measured, arguments.steps) for way, measured in visits.items()}
    for way in [_COMPUTING, *ways]:
        session.add(_step_row(arguments, way, found, nbytes))


def _together(way: Way, visits: list[Measured], steps: int) -> Measured:
    """Put the visits of a contender together. Steps before PowerSGD compresses are not its own."""
    skipped = powersgd_start(steps) - _UNCOUNTED if way.wire.startswith("powersgd") else 0
    samples = [second for visit in visits for second in visit.times.samples[skipped:]]
    costs = [cost for visit in visits for cost in visit.costs[skipped:]]
    return Measured(Stats.of(samples), sum(visit.wrong for visit in visits), 1, visits[-1].figures, costs)


def _step_row(arguments: argparse.Namespace, way: Way, found: dict[Way, Measured], nbytes: int) -> Row:
    mine, compute, peer = found[way], found[_COMPUTING].times, found.get(_REFERENCE)
    more = {**mine.figures}
    if way != _COMPUTING:
        exposed = mine.times.median - compute.median
        more |= {"compute_s": compute.median, "exposed_s": exposed, "exposed_share": exposed / mine.times.median}
        others = [one.times.median for other, one in found.items() if other.is_torch]
        more |= {"best_ratio": min(others) / mine.times.median} if others and not way.is_torch else {}
        if not (way.is_torch or way.plane in AMONG_MEMBERS):
            more["coordinator_s"] = median(cost.coordinator for cost in mine.costs)
    limit = max(compute.median, _link_seconds(arguments, way, mine.figures))
    return Row(
        "step",
        way.plane,
        way.wire,
        arguments.workers,
        nbytes,
        mine.times,
        mine.wrong,
        peer="" if way in (_REFERENCE, _COMPUTING) or peer is None else "ddp fp32",
        peer_time=None if way in (_REFERENCE, _COMPUTING) or peer is None else peer.times,
        limit="" if way == _COMPUTING else "longer of compute and links",
        limit_time=None if way == _COMPUTING else limit,
        more=more,
        place=_place_name(arguments, nbytes),
    )


def _link_seconds(arguments: argparse.Namespace, way: Way, figures: dict[str, float]) -> float:
    """Compute the time of the links for the bytes that were counted; 0 without links."""
    if not arguments.rate:
        return 0.0
    on_link = max(figures["sent_bytes"], figures["received_bytes"])
    shared = 0.0 if way.is_torch or way.plane in AMONG_MEMBERS else arguments.workers * on_link
    return float(max(on_link / arguments.rate, shared / (arguments.coordinator_rate or arguments.rate)))


def _place_name(arguments: argparse.Namespace, nbytes: int) -> str:
    links = link_names(arguments) if arguments.rate else "loopback"
    return f"{nbytes / FLOAT_BYTES / 1e6:.1f} M parameters, {links}"


# ── overlap ───────────────────────────────────────────────────────────────────────────────────────────────


def _overlap(arguments: argparse.Namespace, session: Session, fleet: Fleet, links: tuple[Link, ...]) -> None:
    """Measure every exchange alone, and during a backward that lasts as long as gradserver's first exchange."""

    def pair(name: str, kind: str, link: Link, wait: float) -> tuple[Contender, Contender]:
        options, plane = {"blocks": _BLOCKS}, link.plane
        return (
            Contender(f"{name} alone", kind, link.wire, link.channel, dict(options), plane),
            Contender(name, kind, link.wire, link.channel, {**options, "wait_s": wait}, plane),
        )

    mine = [link for link in links if link.plane not in AMONG_MEMBERS]
    first = pair("first", "rounds", mine[0], 0.0)[0]
    alone = session.measure(fleet, Case(arguments.overlap_size, (first,)), repetitions=_CALIBRATION, sample_seconds=0.0)
    wait = alone[first.name].times.median
    contenders = [one for link in mine for one in pair(f"{link.plane} {link.wire}", "rounds", link, wait)]
    contenders += pair(f"{DDP} fp32", "blocks", Link(), wait)
    count = arguments.repetitions * arguments.steps
    case = Case(arguments.overlap_size, tuple(contenders))
    measured = session.measure(fleet, case, repetitions=count, sample_seconds=0.0)
    for one in contenders[1::2]:
        session.add(_overlap_row(arguments, one.name, measured, wait))


def _overlap_row(arguments: argparse.Namespace, name: str, measured: dict[str, Measured], wait: float) -> Row:
    mine, exchange = measured[name], measured[f"{name} alone"].times.median
    plane, _, wire = name.partition(" ")
    is_ours, peer = plane != DDP, measured[f"{DDP} fp32"]
    exposed = mine.times.median - wait
    return Row(
        "overlap",
        plane,
        wire,
        arguments.workers,
        arguments.overlap_size,
        mine.times,
        mine.wrong + measured[f"{name} alone"].wrong,
        peer="gloo" if is_ours else "",
        peer_time=peer.times if is_ours else None,
        peer_wrong=peer.wrong if is_ours else 0,
        limit="longer of compute and exchange",
        limit_time=max(wait, exchange),
        more={
            "compute_s": wait,
            "exchange_s": exchange,
            "exposed_s": exposed,
            "exposed_share": exposed / mine.times.median,
        },
        place=link_names(arguments) if arguments.rate else "loopback",
    )
