"""The suite `levels`: training steps of workers that share hosts, by levels and without."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict

from gradserver.protocol.planes import HIERARCHICAL, TCP
from gradserver.tables import counted
from gradserver.tools.bench.fleet import Needs
from gradserver.tools.bench.places import Shared
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import FLOAT_BYTES, Case, Contender, Link
from gradserver.tools.bench.suites import lab, link_names
from gradserver.tools.bench.train_suite import settings_of


def levels(arguments: argparse.Namespace, session: Session) -> None:
    """Measure steps of a GPT on the hierarchical plane and over TCP in turn, on emulated hosts."""
    workers = arguments.hosts * arguments.per_host
    settings = settings_of(arguments, workers, arguments.width, arguments.blocks)
    links = [Link(wire, TCP, plane) for wire in arguments.wire for plane in (TCP, HIERARCHICAL)]
    contenders = [
        Contender(
            f"{link.plane} {link.wire}",
            "step",
            link.wire,
            link.channel,
            {"settings": asdict(settings), "engine": "ours"},
            link.plane,
        )
        for link in links
    ]
    alone = Contender("alone", "step", options={"settings": asdict(settings), "engine": "alone"})
    nbytes = settings.parameters * FLOAT_BYTES
    where = f"{counted(arguments.hosts, 'host')} with {counted(arguments.per_host, 'worker')} each"
    title = f"GPT of {settings.parameters / 1e6:.1f} M parameters, {where}, {link_names(arguments)}"
    with ExitStack() as stack:
        place = Shared(stack.enter_context(lab(arguments, arguments.hosts)), arguments.per_host)
        fleet = stack.enter_context(session.fleet(workers, Needs(tuple(links)), title, place, layout="levels"))
        measured = session.measure(fleet, Case(nbytes, (*contenders, alone)), sample_seconds=0.0)
    compute = measured["alone"].times
    for one in contenders:
        mine, peer = measured[one.name], measured[f"{TCP} {one.wire}"]
        exposed = mine.times.median - compute.median
        more = {"compute_s": compute.median, "exposed_s": exposed, "exposed_share": exposed / mine.times.median}
        compared = one.plane != TCP
        session.add(
            Row(
                "levels",
                one.plane,
                one.wire,
                workers,
                nbytes,
                mine.times,
                mine.wrong,
                peer=TCP if compared else "",
                peer_time=peer.times if compared else None,
                peer_wrong=peer.wrong if compared else 0,
                more={**more, **mine.figures},
            )
        )
