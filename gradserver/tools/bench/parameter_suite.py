"""The suite `parameters`: steps of a module with many parameters of three elements, beside torch's wrapper."""

from __future__ import annotations

import argparse

from gradserver.tools.bench.fleet import Needs
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import FLOAT_BYTES, Case, Contender, Link

_ELEMENTS = 3  # gradserver.tools.bench.many imports torch


def parameters(arguments: argparse.Namespace, session: Session) -> None:
    """Measure steps with each number of parameters: by processes, torch's wrapper, the bare module, and threads."""
    contenders = (
        Contender("gradserver", "parameters", options={"engine": "ours"}),
        Contender("ddp", "parameters", options={"engine": "ddp"}),
        Contender("none", "parameters", options={"engine": "alone"}),
        Contender("LocalCluster", "parameter threads"),
    )
    title = f"{arguments.workers} processes, and as many threads, on this machine"
    with session.fleet(arguments.workers, Needs((Link(),), threads=True), title) as fleet:
        for count in arguments.counts:
            case = Case(count * _ELEMENTS * FLOAT_BYTES, contenders)
            measured = session.measure(fleet, case, sample_seconds=0.0)
            peer = measured["ddp"]
            for one in contenders:
                mine, compared = measured[one.name], one.name not in ("ddp", "none")
                session.add(
                    Row(
                        "parameters",
                        one.name,
                        "fp32",
                        fleet.workers,
                        case.nbytes,
                        mine.times,
                        mine.wrong,
                        peer="ddp" if compared else "",
                        peer_time=peer.times if compared else None,
                        peer_wrong=peer.wrong if compared else 0,
                        more={"parameters": float(count)},
                    )
                )
