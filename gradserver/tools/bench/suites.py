"""The suites that reduce: their contenders, sizes and limits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gradserver.tools.bench.cost import per_gigabyte
from gradserver.tools.bench.fleet import Fleet, Measured, Needs
from gradserver.tools.bench.places import Place, Shared
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import FLOAT_BYTES, WIRES, Case, Contender, Link
from gradserver.tools.bench.stats import Stats
from gradserver.tools.common import netns

_VARIANTS = {
    "buckets": ("all_reduce", {"memory": "buckets"}),
    "plan": ("rounds", {}),
    "ordinary": ("all_reduce", {"memory": "ordinary"}),
    "threads": ("threads", {}),
}


def same_host(arguments: argparse.Namespace, session: Session) -> None:
    """Measure processes and threads of this machine over the default channel."""
    contenders = [_ours(variant) for variant in arguments.variants]
    needs = Needs(links=(Link(),), threads="threads" in arguments.variants)
    for workers in arguments.workers:
        with session.fleet(workers, needs, f"{workers} processes on this machine") as fleet:
            for nbytes in arguments.sizes:
                case = Case(nbytes, (*contenders, _gloo("fp32"), Contender("limit", "copy")))
                measured = session.measure(fleet, case)
                for one in contenders:
                    session.add(_row(fleet, case, one, measured, "memory", measured["limit"].times))


def loopback(arguments: argparse.Namespace, session: Session) -> None:
    """Measure processes of this machine over TCP: one daemon, and the loopback as the network."""
    needs = Needs(tuple(Link(wire, "tcp") for wire in arguments.wire), ring=True)
    for workers in arguments.workers:
        with session.fleet(workers, needs, f"{workers} processes over TCP on this machine") as fleet:
            for nbytes in arguments.sizes:
                ours = _over_wires(arguments, "tcp")
                limits = [
                    Contender(f"limit {wire}", "sockets", options={"nbytes": _on_wire(nbytes, wire)})
                    for wire in arguments.wire
                ]
                case = Case(nbytes, (*ours, *_gloos(arguments.wire), *limits))
                measured = session.measure(fleet, case)
                for one in ours:
                    limit = measured[f"limit {one.wire}"].times
                    session.add(_row(fleet, case, one, measured, "plain sockets", limit))


def cluster(arguments: argparse.Namespace, session: Session) -> None:
    """Measure one worker on each of several hosts, which are network namespaces with links of limited rate."""
    workers = arguments.hosts
    # A worker reaches only the shard beside it through memory: the hosts' local sockets are their own.
    channel = "" if arguments.shards_beside else "tcp"
    needs = Needs(tuple(Link(wire, channel) for wire in arguments.wire), shards=arguments.shards_beside)
    with lab(arguments, workers) as place:
        title = f"{workers} hosts, {link_names(arguments)}"
        with session.fleet(workers, needs, title, place) as fleet:
            for nbytes in arguments.sizes:
                ours = _over_wires(arguments, channel)
                case = Case(nbytes, (*ours, *_gloos(arguments.wire)))
                measured = session.measure(fleet, case)
                for one in ours:
                    limit = link_limit(arguments, workers, _on_wire(nbytes, one.wire))
                    session.add(_row(fleet, case, one, measured, "links", limit))


def latency(arguments: argparse.Namespace, session: Session) -> None:
    """Measure small tensors: their time is latency."""
    channels = {"default": "", "tcp": "tcp"}
    needs = Needs(tuple(Link(channel=channel) for channel in channels.values()), hub=True)
    ours = [
        Contender(name, "all_reduce", channel=channel, options={"memory": "buckets"})
        for name, channel in channels.items()
    ]
    for workers in arguments.workers:
        with session.fleet(workers, needs, f"{workers} processes on this machine") as fleet:
            for nbytes in arguments.sizes:
                case = Case(nbytes, (*ours, _gloo("fp32"), Contender("hops", "hops")))
                measured = session.measure(fleet, case)
                for one in ours:
                    session.add(_row(fleet, case, one, measured, "plain pyzmq", measured["hops"].times))


def _row(
    fleet: Fleet, case: Case, one: Contender, measured: dict[str, Measured], limit: str, limit_time: Stats | float
) -> Row:
    mine, peer = measured[one.name], measured[_peer(one.wire)]
    in_threads = one.kind == "threads"
    cost = {} if in_threads else per_gigabyte(mine.costs, fleet.workers, _on_wire(case.nbytes, one.wire))
    return Row(
        "all_reduce",
        one.name.partition(" ")[0],
        one.wire,
        fleet.workers,
        case.nbytes,
        mine.times,
        mine.wrong,
        mine.in_a_row,
        _peer(one.wire),
        peer.times,
        peer.wrong,
        limit,
        limit_time,
        cost,
    )


# ── links of a cluster ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def lab(arguments: argparse.Namespace, workers: int) -> Iterator[Place]:
    """Make hosts with the links of the arguments."""
    coordinator = arguments.coordinator_rate or arguments.rate
    with netns.links(workers, arguments.rate, coordinator, arguments.congestion) as place:
        yield Shared(place, 1)


def link_names(arguments: argparse.Namespace) -> str:
    """Describe the links."""
    coordinator = arguments.coordinator_rate or arguments.rate
    congestion = f", {arguments.congestion}" if arguments.congestion else ""
    return f"{_rate_name(arguments.rate)} each way, coordinator {_rate_name(coordinator)}{congestion}"


def link_limit(arguments: argparse.Namespace, workers: int, on_wire: float) -> float:
    """Compute the shortest time of the links for `on_wire` bytes of every worker, both ways at once."""
    if getattr(arguments, "shards_beside", False):
        # Each host sends its worker's bytes except for its own shard's, and its shard's results to the others.
        return float(2 * (workers - 1) / workers * on_wire / arguments.rate)
    return float(max(on_wire / arguments.rate, workers * on_wire / (arguments.coordinator_rate or arguments.rate)))


# ── contenders ────────────────────────────────────────────────────────────────────────────────────────────


def _ours(variant: str, wire: str = "fp32", channel: str = "") -> Contender:
    kind, options = _VARIANTS[variant]
    name = variant if wire == "fp32" else f"{variant} {wire}"
    return Contender(name, kind, wire, channel, dict(options))


def _over_wires(arguments: argparse.Namespace, channel: str) -> list[Contender]:
    return [_ours(variant, wire, channel) for wire in arguments.wire for variant in arguments.variants]


def _gloo(wire: str) -> Contender:
    return Contender(f"gloo {wire}", "gloo", wire)


def _gloos(wires: Sequence[str]) -> list[Contender]:
    return [_gloo(wire) for wire in dict.fromkeys(_peer(wire).removeprefix("gloo ") for wire in wires)]


def _peer(wire: str) -> str:
    """Choose the peer of a wire: gloo can do bf16 as well; other wires are compared with its fp32."""
    return "gloo bf16" if wire == "bf16" else "gloo fp32"


def _on_wire(nbytes: int, wire: str) -> int:
    """Compute the bytes on the wire, without headers and without the scales of int8 blocks."""
    return nbytes // FLOAT_BYTES * WIRES[wire]


def _rate_name(rate: float) -> str:
    bits = 8 * rate
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
