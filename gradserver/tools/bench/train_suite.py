"""The suite `train`: the cost of the exchange in a training step, and its overlap with backward."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict

from gradserver.tools.bench.fleet import Fleet, Measured, Needs
from gradserver.tools.bench.places import Place
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import FLOAT_BYTES, Case, Contender, Link
from gradserver.tools.bench.suites import lab, link_names
from gradserver.tools.demo.settings import Settings

_HEAD_WIDTH = 64
_MLP = 41 / 16  # hidden width of the MLP by the model's: 25 M parameters at width 512 and 8 blocks
_CALIBRATION = 3  # exchanges


def train(arguments: argparse.Namespace, session: Session) -> None:
    """Measure steps of a GPT, then backwards that are emulated by waiting, with exchanges by the coordinator."""
    workers = arguments.workers
    # Hosts that are namespaces share this machine's memory, and must not use it.
    channel = "tcp" if arguments.rate or arguments.channel == "tcp" else ""
    links = tuple(Link(wire, channel) for wire in arguments.wire)
    if arguments.plane:
        channel = ""
        links = tuple(Link(wire, channel, plane) for plane in arguments.plane for wire in arguments.wire)
    with ExitStack() as stack:
        place: Place | None = None
        where = f"{workers} processes {'over TCP ' if channel else ''}on this machine"
        if arguments.rate:
            place = stack.enter_context(lab(arguments, workers))
            where = f"{workers} hosts, {link_names(arguments)}"
        settings = settings_of(arguments, workers)
        title = f"GPT of {settings.parameters / 1e6:.1f} M parameters, {where}"
        fleet = stack.enter_context(session.fleet(workers, Needs(links), title, place, layout="step"))
        _steps(arguments, session, fleet, links, settings)
        if arguments.plane:
            return
        session.section(f"overlap: backward of {arguments.blocks} blocks emulated by waiting, {where}", "overlap")
        _overlap(arguments, session, fleet, links)


def settings_of(arguments: argparse.Namespace, workers: int) -> Settings:
    """Return the settings of a training by so many workers, from the arguments."""
    width = arguments.width
    return Settings(
        workers=workers,
        batch=arguments.batch,
        steps=arguments.repetitions,
        context=arguments.context,
        width=width,
        heads=max(1, width // _HEAD_WIDTH),
        blocks=arguments.blocks,
        hidden=round(width * _MLP),
        validation_rows=4,
    )


def _steps(
    arguments: argparse.Namespace, session: Session, fleet: Fleet, links: tuple[Link, ...], settings: Settings
) -> None:
    def contender(name: str, engine: str, link: Link | None = None) -> Contender:
        options = {"settings": asdict(settings), "engine": engine, "warm": True}
        link = link or Link()
        return Contender(name, "step", link.wire, link.channel, options, link.plane)

    ours = [contender(f"{link.plane or 'gradserver'} {link.wire}", "ours", link) for link in links]
    gloos = [contender("torch fp32", "gloo"), contender("torch bf16", "gloo-bf16")]
    everybody = (*ours, *gloos, contender("alone", "alone"))
    nbytes = settings.parameters * FLOAT_BYTES
    measured = session.measure(fleet, Case(nbytes, everybody), sample_seconds=0.0)
    compute = measured["alone"].times
    for one in (*ours, *gloos):
        mine, peer = measured[one.name], measured["torch bf16" if one.wire == "bf16" else "torch fp32"]
        exposed = mine.times.median - compute.median
        is_ours = one in ours
        session.add(
            Row(
                "step",
                one.name.partition(" ")[0],
                one.name.partition(" ")[2],
                arguments.workers,
                nbytes,
                mine.times,
                mine.wrong,
                peer="torch DDP on gloo" if is_ours else "",
                peer_time=peer.times if is_ours else None,
                peer_wrong=peer.wrong if is_ours else 0,
                limit="computing alone" if is_ours else "",
                limit_time=compute if is_ours else None,
                more={
                    "compute_s": compute.median,
                    "exposed_s": exposed,
                    "exposed_share": exposed / mine.times.median,
                    **mine.figures,
                },
            )
        )


def _overlap(arguments: argparse.Namespace, session: Session, fleet: Fleet, links: tuple[Link, ...]) -> None:
    """Measure every exchange alone, and during a backward that lasts as long as gradserver's first exchange."""

    def pair(name: str, kind: str, link: Link, wait: float) -> tuple[Contender, Contender]:
        alone = {"blocks": arguments.blocks}
        return (
            Contender(f"{name} alone", kind, link.wire, link.channel, dict(alone)),
            Contender(name, kind, link.wire, link.channel, {**alone, "wait_s": wait}),
        )

    first = pair("gradserver", "rounds", links[0], 0.0)[0]
    alone = session.measure(fleet, Case(arguments.overlap_size, (first,)), repetitions=_CALIBRATION, sample_seconds=0.0)
    wait = alone[first.name].times.median
    contenders = [one for link in links for one in pair(f"gradserver {link.wire}", "rounds", link, wait)]
    contenders += pair("torch fp32", "blocks", Link(), wait)
    measured = session.measure(fleet, Case(arguments.overlap_size, tuple(contenders)), sample_seconds=0.0)
    for one in contenders[1::2]:
        session.add(_overlap_row(arguments, one.name, measured, wait))


def _overlap_row(arguments: argparse.Namespace, name: str, measured: dict[str, Measured], wait: float) -> Row:
    mine, exchange = measured[name], measured[f"{name} alone"].times.median
    engine, _, wire = name.partition(" ")
    is_ours = engine == "gradserver"
    exposed = mine.times.median - wait
    return Row(
        "overlap",
        engine,
        wire,
        arguments.workers,
        arguments.overlap_size,
        mine.times,
        mine.wrong + measured[f"{name} alone"].wrong,
        peer="gloo" if is_ours else "",
        peer_time=measured["torch fp32"].times if is_ours else None,
        peer_wrong=measured["torch fp32"].wrong if is_ours else 0,
        limit="longer of compute and exchange",
        limit_time=max(wait, exchange),
        more={
            "compute_s": wait,
            "exchange_s": exchange,
            "exposed_s": exposed,
            "exposed_share": exposed / mine.times.median,
        },
    )
