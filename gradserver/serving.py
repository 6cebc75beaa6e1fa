"""The command ``gradserver serve``: its options, and the coordinator or data shard that it runs by them."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradserver.arguments import ANY, add_mode, add_seconds, mean, names, number, quorum, size, sync, workers_of
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import (
    JOURNAL_QUOTA_BYTES,
    MAX_RATE,
    MAX_SHARDS,
    MAX_TIMEOUT,
    MAX_WORLD_SIZE,
    MIB,
    OTHERS,
    ROUND_TIMEOUT,
)
from gradserver.protocol.planes import AMONG_MEMBERS, AUTO, WISHES

if TYPE_CHECKING:
    from gradserver.engine.policy import Lateness, Mode, Policy
    from gradserver.transport.liveness import Patience

DEFAULT_BIND = "tcp://127.0.0.1:7411"
_FOR_COORDINATORS: Final = (
    *("workers", "groups", "gather", "rejoin_for", "quorum", "grace", "backup", "late", "mode", "staleness", "damping"),
    *("backlog", "state_timeout", "state_rate", "round_timeout", "credit", "state_dir", "allow_shards", "nonfinite"),
    *("mean", "group", "plane"),
)
"""Options that a data shard does not take."""
_OF_LEDGERS: Final[dict[str, Any]] = {
    "sync": 1.0,
    "ledger_keep": 1024 * MIB,
    "ledger_hashes": "on",
    "journal_quota": JOURNAL_QUOTA_BYTES,
}
"""Options that require --state-dir, and their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its ``parser``."""
    parser.add_argument(
        "--bind",
        metavar="URL",
        help=f"address to listen on, as tcp://HOST:PORT (default {DEFAULT_BIND}, which only this machine can reach). "
        "With tcp://0.0.0.0:7411 other machines can connect. Port 0 picks a free port",
    )
    parser.add_argument(
        "--credit", type=_mebibytes, metavar="MIB", help="limit of the MiB that one worker has in flight (default 16)"
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    _add_nonfinite(parser)
    parser.add_argument(
        "--mean",
        type=mean,
        metavar="RULE",
        help="rule by which gradients are averaged. plain (default): the weighted mean. Robust rules withstand wrong "
        "gradients of a few workers. median: the middle value of each element. trimmed:B: the mean without the share "
        "B of the smallest values, and of the largest. clipped:C: the mean with norms of at most C times the median "
        "norm. krum:F: multi-Krum, for F faulty workers. Such groups do not use the direct and hierarchical planes",
    )
    parser.add_argument(
        "--plane",
        choices=WISHES,
        help="way of the gradients that all groups must go by, so that a worker which cannot is refused. direct: from "
        "worker to worker, by NCCL or gloo. hierarchical: so within each host, and from one worker of each to the "
        "coordinator. tcp, shm: to the coordinator. auto (default): direct if each worker has a CUDA device of its "
        "own; else hierarchical if the workers of a host have; else each worker's channel to the coordinator",
    )
    _add_groups(parser.add_argument_group("groups"))
    add_mode(parser.add_argument_group("modes"))
    _add_lateness(parser.add_argument_group("stragglers and learners"))
    _add_silence(parser.add_argument_group("liveness"))
    _add_shards(parser.add_argument_group("data shards"))
    _add_ledger_options(parser.add_argument_group("ledger and durability (--state-dir)"))
    parser.set_defaults(run=run)


def _add_groups(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--workers",
        type=workers_of,
        action="append",
        metavar="[GROUP=]N|MIN:MAX",
        help="number of workers in the group; without this option each worker passes world_size. MIN:MAX (or MIN:) "
        "makes the group elastic: it begins with MIN to MAX workers, and continues without those that leave or are "
        "lost while MIN are left. Repeat the option for further groups: `--workers 2:8 --workers critics=1:4`; "
        "`*=1:8` applies to every group that is not named",
    )
    parser.add_argument(
        "--group",
        metavar="NAME",
        help="group that --workers applies to if it names none (default: default)",
    )
    parser.add_argument(
        "--groups",
        type=names,
        metavar="NAME,…",
        help="serve only groups of these names; `any` allows every name "
        "(default: the groups of --workers; without --workers, any)",
    )
    text = "seconds that an elastic group waits for more than MIN workers before it begins (default 2)"
    add_seconds(parser, "--gather", 0, 3600, text)
    text = (
        "seconds that a group with fewer than MIN workers waits, between two rounds, for the lost worker or for "
        "another one to join with the state of a member. With 0 it ends at once, with an error that names the worker "
        "(default: 0 for --workers N; for MIN:MAX the longest timeout of its workers)"
    )
    add_seconds(parser, "--rejoin-for", 0, 86_400, text)


def _add_nonfinite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nonfinite",
        choices=("halt", "leave-out", "skip", "propagate"),
        help="policy for a gradient that contains NaN or Inf. halt (default): the group halts with an error that names "
        "worker, bucket and parameter. leave-out: the slice is left out of the mean. skip: no worker applies the "
        "round. propagate: the mean is computed as torch does, which a GradScaler needs. A group that survives its "
        "coordinator (--state-dir) keeps the policy with which it began",
    )


def _add_lateness(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--quorum",
        type=quorum,
        metavar="Q|P%",
        help="close a round when Q workers, or P percent of those present, have contributed everything and the "
        "stragglers have had their grace period (default: wait for all)",
    )
    add_seconds(
        parser, "--grace", 0, 3600, "with --quorum: shortest grace period of stragglers, in seconds (default 0.5)"
    )
    parser.add_argument(
        "--backup",
        type=number(int, 1, MAX_WORLD_SIZE - 1, "a number of workers"),
        metavar="B",
        help="instead of --quorum: close a round as soon as all workers but any B have contributed everything",
    )
    parser.add_argument(
        "--late",
        choices=("keep", "drop"),
        help="with --quorum or --backup: keep carries over what a straggler contributed too late, to its next "
        "contribution; drop discards it (default keep)",
    )
    parser.add_argument(
        "--backlog",
        type=number(int, 0, 1 << 20, "a number of MiB"),
        metavar="MIB",
        help="limit of the MiB of unread results, of each member. Above it a member is left out, and the others "
        "wait for a learner; with 0 they always wait for learners (default 64)",
    )
    text = (
        "seconds that the members wait at most while a learner receives the state from its donor; they "
        "wait for the first byte an eighth of that time (default 120)"
    )
    add_seconds(parser, "--state-timeout", 1, 86_400, text)
    parser.add_argument(
        "--state-rate",
        type=number(float, 0.001, 1e6, "a number of MiB", "{:g} to {:g}"),
        metavar="MIB",
        help="slowest transfer of that state, in MiB per second; below it the group continues without the learner "
        "(default 4)",
    )


def _add_silence(parser: argparse._ArgumentGroup) -> None:
    text = "seconds from the break of a connection until its worker is lost (default 1)"
    add_seconds(parser, "--dead-after", 0.5, 3600, text, 1.0)
    text = (
        "seconds of silence after which a worker is lost, as it is frozen or unreachable; a worker that computes "
        "is not silent (default 3)"
    )
    add_seconds(parser, "--frozen-after", 0.5, 3600, text, 3.0)
    text = (
        "seconds that a group waits for a worker that is alive but busy with validation, compilation or a "
        f"checkpoint (default {ROUND_TIMEOUT:g})"
    )
    add_seconds(parser, "--round-timeout", 0.5, MAX_TIMEOUT, text)


def _add_shards(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--shards",
        type=number(int, 1, MAX_SHARDS, "a number of data shards"),
        default=1,
        metavar="S",
        help="number of data shards, which are processes of this machine; the coordinator is the first (default 1)",
    )
    parser.add_argument(
        "--allow-shards",
        action="store_true",
        help="accept data shards that were started elsewhere with --join. Every host that can reach the port can then "
        "offer one, and can withhold or falsify the slices that it holds (default: accept only those of --shards)",
    )
    parser.add_argument(
        "--join",
        metavar="URL",
        help="run a data shard of the coordinator at URL instead of a coordinator. The coordinator must allow it "
        "(--allow-shards). --bind is then by default a free port of the address that reaches the coordinator",
    )
    text = "with --join: seconds to wait until a lost coordinator with --state-dir has been started again (default 60)"
    add_seconds(parser, "--reconnect", 0, 3600, text)
    parser.add_argument(
        "--rate",
        type=number(float, 0, MAX_RATE, "a rate in Gbit/s", "{:g} to {:g}"),
        metavar="GBIT",
        help="rate of this machine's link in Gbit/s. Data shards get slices in proportion to their rates; a "
        "coordinator with 0 gets only small ones (default: all shards alike)",
    )


def _add_ledger_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="write the ledger to DIR: the contributions to each round, with times and digests (see "
        "`gradserver ledger`). A coordinator that was killed and is started again with the same DIR, and the same "
        "options, continues its groups",
    )
    parser.add_argument(
        "--ledger-hashes",
        choices=("on", "off", "all"),
        default=argparse.SUPPRESS,
        help="write digests of contributions and results to the ledger, of every round or of as many rounds as take "
        "2 %% of the time (default on). With `all`, the lowest rank also hashes the results of each round that members "
        "reduce among themselves",
    )
    parser.add_argument(
        "--ledger-keep",
        type=size,
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="limit of the ledger's size, such as 500MiB or 2GiB; above it the oldest files are deleted (default 1GiB)",
    )
    parser.add_argument(
        "--journal-quota",
        type=size,
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="limit of what one group writes to the ledger in an hour by joins, departures, plans and leases. Above it "
        "the coordinator refuses such requests. Rounds do not count; 0KiB is no limit (default 256MiB)",
    )
    parser.add_argument(
        "--sync",
        type=sync,
        default=argparse.SUPPRESS,
        metavar="none|SECONDS|round",
        help="flush the ledger to disk never, at this interval, or behind every round. A power failure loses what was "
        "not flushed; the death of the coordinator alone loses nothing (default 1 second)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run a coordinator until SIGTERM or SIGINT. It prints `listening on tcp://HOST:PORT` when it is ready."""
    logging.basicConfig(
        level=logging.WARNING if arguments.quiet else logging.INFO, format="%(asctime)s %(levelname).1s %(message)s"
    )
    gc.disable()  # until it serves: a start makes objects that stay, and garbage collection takes a tenth of its time
    try:
        from gradserver.transport.liveness import Patience

        patience = Patience(arguments.dead_after, arguments.frozen_after)
        return (_serve if arguments.join is None else _serve_shard)(arguments, patience)
    finally:
        gc.enable()


def _serve_shard(arguments: argparse.Namespace, patience: Patience) -> int:
    from gradserver.daemon import serve_shard
    from gradserver.engine.policy import RECONNECT_SECONDS

    for option in (*_FOR_COORDINATORS, *_OF_LEDGERS):
        value = getattr(arguments, option, False)
        if value is not False and (value is not None or option in _OF_LEDGERS):
            raise InvalidArgumentError(f"{_flag(option)} is an option of coordinators, not of data shards (--join)")
    if arguments.shards != 1:
        raise InvalidArgumentError(
            "--shards is an option of coordinators: run `gradserver serve --join` once for each data shard"
        )
    if arguments.rate == 0:
        raise InvalidArgumentError("a data shard of rate 0 would hold no slices: with --join, --rate must be above 0")
    reconnect = RECONNECT_SECONDS if arguments.reconnect is None else arguments.reconnect
    return serve_shard(arguments.join, arguments.bind, arguments.rate, patience=patience, reconnect=reconnect)


def _serve(arguments: argparse.Namespace, patience: Patience) -> int:
    from gradserver.daemon import Ledger, serve
    from gradserver.engine.policy import Hashes, on_non_finite

    if arguments.reconnect is not None:
        raise InvalidArgumentError("--reconnect is an option of data shards: it requires --join")
    given = {option: getattr(arguments, option) for option in _OF_LEDGERS if option in arguments}
    ledger = None
    if arguments.state_dir is not None:
        told = {**_OF_LEDGERS, **given}
        sizes = told["ledger_keep"], Hashes(told["ledger_hashes"]), told["journal_quota"]
        ledger = Ledger(Path(arguments.state_dir), told["sync"], *sizes)
    elif given:
        raise InvalidArgumentError(f"{_flag(next(iter(given)))} needs a directory for the ledger: give --state-dir")
    return serve(
        arguments.bind or DEFAULT_BIND,
        _worlds(arguments),
        arguments.credit,
        shards=arguments.shards,
        rate=arguments.rate,
        quiet=arguments.quiet,
        ledger=ledger,
        patience=patience,
        groups=_names_of_groups(arguments),
        allow_shards=arguments.allow_shards,
        round_timeout=ROUND_TIMEOUT if arguments.round_timeout is None else arguments.round_timeout,
        nonfinite=on_non_finite(arguments.nonfinite or "halt"),
        plane=arguments.plane or AUTO,
    )


def _names_of_groups(arguments: argparse.Namespace) -> frozenset[str] | None:
    """Collect the names that groups may have; None for any."""
    if arguments.groups is None:
        told = _sizes(arguments)
        return frozenset(told) if told and OTHERS not in told else None
    if arguments.groups == ANY:
        return None
    for name in _sizes(arguments):
        if name != OTHERS and name not in arguments.groups:
            raise InvalidArgumentError(f"--workers has group {name!r}, which --groups does not allow")
    return frozenset(arguments.groups)


def _sizes(arguments: argparse.Namespace) -> dict[str, Policy]:
    """Collect what --workers says of each group."""
    told: dict[str, Policy] = {}
    for name, policy in arguments.workers or ():
        group = name or arguments.group or "default"
        if group in told:
            raise InvalidArgumentError(f"--workers has group {group!r} twice: name another group, as NAME=MIN:MAX")
        told[group] = policy
    if arguments.group is not None and arguments.group not in told:
        raise InvalidArgumentError("--group needs the number of workers in the group: give --workers without a name")
    return told


def _worlds(arguments: argparse.Namespace) -> dict[str, Policy]:
    """Collect the policies of the groups of --workers. The other options apply to all of them."""
    from gradserver.engine.policy import Policy, in_mode, mode_of

    sizes = _sizes(arguments)
    most = max((size.maximum for size in sizes.values()), default=MAX_WORLD_SIZE)
    chosen = mode_of(arguments.mode, arguments.staleness, arguments.damping)
    told = arguments.quorum, arguments.backup or 0, arguments.grace, arguments.late, most
    mode, lateness = in_mode(chosen, *told)
    if lateness is not None and arguments.plane in AMONG_MEMBERS:
        raise InvalidArgumentError(
            f"--plane {arguments.plane} is not possible with --quorum, --backup or --mode {mode.name}: workers that "
            f"reduce among themselves wait for all"
        )
    if lateness is not None and not sizes:
        raise InvalidArgumentError("--quorum, --backup and --mode need the number of workers: give --workers")
    for option in ("gather", "rejoin_for", "backlog", "state_timeout", "state_rate"):
        if not sizes and getattr(arguments, option) is not None:
            raise InvalidArgumentError(f"{_flag(option)} needs the number of workers: give --workers")
    worlds = {name: _policy(arguments, size, lateness, mode) for name, size in sizes.items()}
    if arguments.mean is None or not arguments.mean.is_robust:
        return worlds
    if arguments.plane in AMONG_MEMBERS:
        what = f"--plane {arguments.plane} is not possible with --mean {arguments.mean}"
        raise InvalidArgumentError(f"{what}: libraries that reduce among workers only add up")
    worlds = {name: dataclasses.replace(policy, mean=arguments.mean) for name, policy in worlds.items()}
    for name, policy in worlds.items():
        policy.check_mean(name)
    return {OTHERS: Policy(mean=arguments.mean), **worlds}


def _policy(arguments: argparse.Namespace, size: Policy, lateness: Lateness | None, mode: Mode) -> Policy:
    """Make the policy of a group from the options."""
    gather = size.gather if arguments.gather is None else arguments.gather
    backlog = size.backlog if arguments.backlog is None else arguments.backlog * MIB
    told = {
        "rejoin": arguments.rejoin_for,
        "state_seconds": arguments.state_timeout,
        "state_rate": None if arguments.state_rate is None else arguments.state_rate * MIB,
    }
    given = {name: value for name, value in told.items() if value is not None}
    return dataclasses.replace(size, gather=gather, backlog=backlog, lateness=lateness, mode=mode, **given)


def _flag(option: str) -> str:
    """Return ``option`` as it is written on the command line."""
    return f"--{option.replace('_', '-')}"


def _mebibytes(text: str) -> int:
    return number(int, 2, 1 << 20, "a number of MiB")(text) << 20
