"""Options of `gradserver chaos`."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradserver.arguments import add_seconds, mean, number
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MAX_SHARDS
from gradserver.protocol.means import PLAIN
from gradserver.protocol.planes import AUTO
from gradserver.tools.chaos.schedule import DEFAULT, KILLS, SPECS
from gradserver.tools.chaos.workload import EXACT, OUTERS

_STALENESS = 4
"""Bound of the staleness in mode "bounded", by default."""
_NEEDS_WIRES = frozenset({"reset", "midcall", "throttle"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options to `parser`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Run a coordinator and workers as processes of this machine, and inject faults that are drawn from a seed.\n"
        "An oracle recomputes every round: each result must be, bit by bit, the mean of the contributions, and the\n"
        "same at all members."
    )
    kinds = "\n".join(f"  {name:12}{spec.brief}" for name, spec in SPECS.items())
    default = ", ".join(DEFAULT)
    parser.epilog = (
        f"events (by default {default}, and with --shards also shard):\n{kinds}\n\n"
        f"Exit status: 0 if no fault was found, 1 if one was found, 2 if the run could not begin."
    )
    parser.add_argument(
        "--workers", type=number(int, 2, 256), default=8, metavar="N", help="number of workers (default 8)"
    )
    add_seconds(parser, "--seconds", 10, 1e6, "length of the run (default 60)", 60.0)
    parser.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=7, metavar="X", help="seed of the events (default 7)"
    )
    parser.add_argument("--events", type=_kinds, metavar="KIND,…", help="kinds of events to draw from")
    add_seconds(parser, "--every", 0.05, 3600, "mean time between two events, in seconds (default 0.3)", 0.3)
    add_seconds(parser, "--coordinator-kill", 1, 1e6, "also kill the coordinator every S seconds")
    text = (
        "minimum time between two events that make all workers wait (freeze, partition, coordinator, shard), in "
        "seconds; otherwise their times add up (default 0)"
    )
    add_seconds(parser, "--apart", 0, 3600, text, 0.0)
    parser.add_argument(
        "--shards", type=number(int, 1, MAX_SHARDS), default=1, metavar="S", help="number of data shards (default 1)"
    )
    add_seconds(parser, "--pace", 0, 60, "time that a worker computes in each round, in seconds (default 0.05)", 0.05)
    add_seconds(
        parser, "--stall", 0.5, 3600, "a longer time without a finished round is a fault, in seconds (default 15)", 15.0
    )
    parser.add_argument(
        "--plane",
        choices=("auto", "direct", "hierarchical", "quicker"),
        default="auto",
        help="direct: workers reduce gradients among themselves, with gloo. hierarchical: they do so on each of two "
        "emulated hosts, of which one worker exchanges with the coordinator. quicker: each is on an emulated host, and "
        "rounds take the quicker way (default: the coordinator reduces them)",
    )
    parser.add_argument(
        "--mode",
        choices=("sync", "bounded", "async"),
        default="sync",
        help="mode of the group's rounds, as of gradserver serve (default sync)",
    )
    parser.add_argument(
        "--staleness",
        type=number(int, 0, 1_000_000),
        metavar="S",
        help="with --mode bounded or async: most updates by which a contribution is late. More is a fault (bounded: 4)",
    )
    parser.add_argument(
        "--mean",
        type=mean,
        default=PLAIN,
        metavar="RULE",
        help="rule by which gradients are averaged, as of gradserver serve: median, trimmed:B, clipped:C, krum:F "
        "(default plain)",
    )
    parser.add_argument(
        "--local",
        choices=OUTERS,
        metavar="OUTER",
        help="workers use local SGD with this outer optimizer: average or nesterov (default: they average gradients)",
    )
    parser.add_argument(
        "--fragments",
        type=number(int, 1, 4),
        default=1,
        metavar="N",
        help="with --local: number of fragments. With several, one is on its way while a worker computes (default 1)",
    )
    parser.add_argument(
        "--wire",
        type=_wire,
        default=EXACT,
        metavar="FORMAT",
        help="format in which larger buckets travel, as of gradserver.connect: bf16, fp16, int8, topk:F, randomk:F "
        "(default fp32, which is exact)",
    )
    parser.add_argument(
        "--netns",
        action="store_true",
        help="give each worker a network namespace of its own, which a partition disconnects; requires root",
    )
    parser.add_argument(
        "--least",
        type=_least,
        default={},
        metavar="N|KIND=N,…",
        help="minimum number of events that took effect, in all and by kind, such as 100,kill=5,shard=2; with fewer "
        "the run fails (default 0)",
    )
    parser.add_argument(
        "--kills",
        type=number(int, 1, 1_000_000),
        default=0,
        metavar="N",
        help="end the events when N workers have been killed (kill, midpush); with fewer in --seconds the run fails",
    )
    parser.add_argument("--stop-at-fault", action="store_true", help="end the run when a fault is found")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write ledger, logs and reports to DIR, and keep them")
    parser.add_argument("--json", action="store_true", help="print only the result, as JSON")


def complete(arguments: argparse.Namespace) -> None:
    """Fill in the options that depend on others."""
    if arguments.events is None:
        kinds = (*DEFAULT, "shard") if arguments.shards > 1 else DEFAULT
        arguments.events = [kind for kind in kinds if not (kind in _NEEDS_WIRES and arguments.netns)]
    if arguments.mode == "bounded" and arguments.staleness is None:
        arguments.staleness = _STALENESS


def why_not(arguments: argparse.Namespace) -> str:
    """Return why options do not go together, and what to do; empty if they do."""
    if arguments.plane != AUTO and (text := _why_no_plane(arguments)):
        return text
    if arguments.mean.is_robust and (needs := arguments.mean.needs) >= arguments.workers:
        return f"--mean {arguments.mean} needs {needs} workers, and one more that can be lost: --workers {needs + 1}"
    if arguments.mode == "sync" and arguments.staleness is not None:
        return "--staleness requires --mode bounded or async"
    if arguments.local and arguments.mode != "sync":
        return f"--local is not possible with --mode {arguments.mode}: local SGD needs rounds that wait for all workers"
    if arguments.fragments > 1 and not arguments.local:
        return "--fragments requires --local average or --local nesterov"
    if "shard" in arguments.events and arguments.shards == 1:
        return "the event shard requires a further data shard: --shards 2"
    if arguments.kills and not KILLS.intersection(arguments.events):
        return "--kills requires the event kill or midpush"
    if unasked := [kind for kind in arguments.least if kind and kind not in _possible(arguments)]:
        return f"--least names {', '.join(unasked)}, which is not among --events {','.join(arguments.events)}"
    return (_why_no_hosts(arguments.events) or "") if arguments.netns else ""


def _why_no_plane(arguments: argparse.Namespace) -> str:
    """Return why workers cannot reduce among themselves, and what to do; empty if they can."""
    what = f"--plane {arguments.plane} is not possible with"
    if arguments.mode != "sync":
        return (
            f"{what} --mode {arguments.mode}: workers that reduce among themselves wait for all. Leave out --plane, or "
            f"use --mode sync"
        )
    if arguments.mean.is_robust:
        return (
            f"{what} --mean {arguments.mean}: libraries that reduce among workers only add up. Leave out --plane, or "
            f"--mean"
        )
    if arguments.local or arguments.wire != EXACT:
        option = "--local" if arguments.local else f"--wire {arguments.wire}"
        return f"{what} {option}: the coordinator makes these means. Leave out --plane, or {option}"
    return ""


def _why_no_hosts(kinds: list[str]) -> str | None:
    from gradserver.tools.common import netns

    lacking = [kind for kind in kinds if kind in _NEEDS_WIRES]
    if lacking:
        return f"{', '.join(lacking)} cannot be injected with --netns: leave it out of --events"
    return netns.why_not()


def _kinds(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SPECS:
            raise argparse.ArgumentTypeError(f"{name!r} is not an event; the events are {', '.join(SPECS)}")
    return names


def _wire(text: str) -> str:
    try:
        return codec_of(text).name
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _least(text: str) -> dict[str, int]:
    """Parse the minimum number of events of each kind, and of all kinds under the name ""."""
    found = {}
    for part in text.split(","):
        kind, _, count = part.rpartition("=")
        if kind and kind not in SPECS:
            raise argparse.ArgumentTypeError(f"{kind!r} is not an event; the events are {', '.join(SPECS)}")
        if not count.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor KIND=N, as in 100,kill=5")
        found[kind] = int(count)
    return found


def _possible(arguments: argparse.Namespace) -> set[str]:
    return {*arguments.events, *(("coordinator",) if arguments.coordinator_kill else ())}
