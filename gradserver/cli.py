"""The command line: ``gradserver serve | status | ledger | demo | bench | chaos``."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradserver
from gradserver.arguments import ANY, names, number, quorum, size, sync, workers_of
from gradserver.protocol.errors import GradServerError, InvalidArgumentError
from gradserver.protocol.limits import (
    JOURNAL_QUOTA_BYTES,
    MAX_COUNTER,
    MAX_RATE,
    MAX_SHARDS,
    MAX_TIMEOUT,
    MAX_WORLD_SIZE,
    MIB,
    OTHERS,
    ROUND_TIMEOUT,
)

if TYPE_CHECKING:
    from gradserver.engine.policy import Lateness, Policy

DEFAULT_BIND = "tcp://127.0.0.1:7411"
_OF_THE_LATE = ("quorum", "grace", "backup", "late")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of the user's get one line, and status 1 or 2."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except GradServerError as error:
        print(f"gradserver: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradserver",
        description="Keeps the replicas of a data-parallel training job in step over ordinary networks.",
        epilog="A first look, about a minute on two cores: gradserver demo",
    )
    parser.add_argument("--version", action="version", version=f"gradserver {gradserver.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Command)
    commands.add_parser("serve", help="run a coordinator", description=_serve.__doc__, fill=_add_serve)
    commands.add_parser("status", help="show what a coordinator sees", description=_status.__doc__, fill=_add_status)
    text = "show what a coordinator wrote down: who contributed, who was slow, what was lost"
    commands.add_parser("ledger", help=text, description=_ledger.__doc__, fill=_add_ledger)
    commands.add_parser("demo", help="train a small GPT across processes of this machine", fill=_add_demo)
    text = "measure it here, beside gloo and what the machine can do at most"
    commands.add_parser("bench", help=text, fill=_add_bench)
    text = "harm its processes on this machine, and check that no round is wrong or lost"
    commands.add_parser("chaos", help=text, fill=_add_chaos)
    return parser


class _Command(argparse.ArgumentParser):
    """The parser of a command, which `fill` gives its arguments only when it is needed.

    So nobody who starts a coordinator waits for what the benchmark's arguments import.
    """

    def __init__(self, fill: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """What every way of parsing goes through, and each command's help too."""
        fill, self._fill = self._fill, None
        if fill is not None:
            fill(self)
        return super().parse_known_args(args, namespace)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bind",
        metavar="URL",
        help=f"tcp://HOST:PORT to listen on (default {DEFAULT_BIND}: this machine only; "
        "tcp://0.0.0.0:7411 is reachable from others; port 0 picks a free one)",
    )
    parser.add_argument(
        "--credit", type=_mebibytes, metavar="MIB", help="MiB that one worker may have in flight (default 16)"
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    _add_nonfinite(parser)
    _add_groups(parser.add_argument_group("groups"))
    _add_lateness(parser.add_argument_group("late workers of an elastic group"))
    _add_silence(parser.add_argument_group("workers that die or freeze"))
    _add_shards(parser.add_argument_group("data shards"))
    _add_ledger_options(parser.add_argument_group("what is kept on disk"))
    parser.set_defaults(run=_serve)


def _add_groups(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--workers",
        type=workers_of,
        action="append",
        metavar="[GROUP=]N|MIN:MAX",
        help="workers in the group; without it each worker says world_size. MIN:MAX (or MIN:) makes it elastic: "
        "it begins with MIN to MAX, and goes on without those that leave or die while MIN are left. "
        "Once for each group: `--workers 2:8 --workers critics=1:4`; `*=1:8` is for groups that are not named",
    )
    parser.add_argument(
        "--group",
        default="default",
        metavar="NAME",
        help="the group that --workers speaks of when it names none (default: default)",
    )
    parser.add_argument(
        "--groups",
        type=names,
        metavar="NAME,…",
        help="serve groups of these names only; `any` for groups of any name "
        "(default: the group that --workers speaks of; without --workers, any)",
    )
    parser.add_argument(
        "--gather",
        type=number(float, 0, 3600, "a number of seconds", "{:g} to {:g}"),
        metavar="S",
        help="seconds that an elastic group waits for more than MIN before it begins (default 2)",
    )


def _add_nonfinite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nonfinite",
        choices=("halt", "leave-out", "skip", "propagate"),
        help="what becomes of a gradient with NaN or Inf in it: the group halts with an error that names worker, "
        "bucket and parameter (default); that slice of it is left out of the mean; no worker applies the round; or it "
        "is passed on as torch does, which a GradScaler needs. A group that survives its coordinator (--state-dir) "
        "goes on as it began",
    )


def _add_lateness(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--quorum",
        type=quorum,
        metavar="Q|P%",
        help="close a round when so many workers have given everything, or so many percent of those who are there, "
        "and the others had time enough (default: all)",
    )
    parser.add_argument(
        "--grace",
        type=number(float, 0, 3600, "a number of seconds", "{:g} to {:g}"),
        metavar="S",
        help="with --quorum: seconds that the others have at least (default 0.5)",
    )
    parser.add_argument(
        "--backup",
        type=number(int, 1, MAX_WORLD_SIZE - 1, "a number of workers"),
        metavar="B",
        help="instead of --quorum: close a round when all but B have given everything, whoever these are",
    )
    parser.add_argument(
        "--late",
        choices=("keep", "drop"),
        help="with --quorum or --backup: whether a worker adds what came too late to what it gives next, or forgets it "
        "(default keep)",
    )
    parser.add_argument(
        "--backlog",
        type=number(int, 0, 1 << 20, "a number of MiB"),
        metavar="MIB",
        help="MiB of results that a member of an elastic group may leave unread, before it is left out, and that who "
        "joins may, before the others wait for it; 0: they always do (default 64)",
    )
    parser.add_argument(
        "--state-timeout",
        type=number(float, 1, 86_400, "a number of seconds", "{:g} to {:g}"),
        metavar="S",
        help="seconds that the members of an elastic group wait for a worker that joins to get its state, at most, and "
        "eight times as many as for the first byte of it (default 120)",
    )
    parser.add_argument(
        "--state-rate",
        type=number(float, 0.001, 1e6, "a number of MiB", "{:g} to {:g}"),
        metavar="MIB",
        help="MiB of that state that must come in a second, or they go on without it (default 4)",
    )


def _add_silence(parser: argparse._ArgumentGroup) -> None:
    seconds = number(float, 0.5, 3600, "a number of seconds", "{:g} to {:g}")
    parser.add_argument(
        "--dead-after",
        type=seconds,
        default=1.0,
        metavar="S",
        help="seconds after which the owner of a connection that broke is dead (default 1)",
    )
    parser.add_argument(
        "--frozen-after",
        type=seconds,
        default=3.0,
        metavar="S",
        help="seconds of silence after which a worker is taken for frozen, or cut off (default 3; one that computes "
        "is not silent)",
    )
    parser.add_argument(
        "--round-timeout",
        type=number(float, 0.5, MAX_TIMEOUT, "a number of seconds", "{:g} to {:g}"),
        metavar="S",
        help="seconds that others wait for a worker that is alive but busy: with validation, compilation, or a "
        f"checkpoint (default {ROUND_TIMEOUT:g})",
    )


def _add_shards(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--shards",
        type=number(int, 1, MAX_SHARDS, "a number of data shards"),
        default=1,
        metavar="S",
        help="processes of this machine that hold slices (default 1: the coordinator alone)",
    )
    parser.add_argument(
        "--allow-shards",
        action="store_true",
        help="take data shards that others start with --join, too: whoever reaches the port can then offer one, and "
        "hold back or falsify what it holds (default: none but those of --shards)",
    )
    parser.add_argument(
        "--join",
        metavar="URL",
        help="be a data shard of the coordinator at URL, which must allow it (--allow-shards), and hold some of its "
        "slices here "
        "(then --bind is by default a free port of the address from which that one is reached)",
    )
    parser.add_argument(
        "--reconnect",
        type=number(float, 0, 3600, "a number of seconds", "{:g} to {:g}"),
        metavar="S",
        help="with --join: seconds to look for a lost coordinator that has a --state-dir, and may be started again "
        "(default 60)",
    )
    parser.add_argument(
        "--rate",
        type=number(float, 0, MAX_RATE, "a rate in Gbit/s", "{:g} to {:g}"),
        metavar="GBIT",
        help="this machine's link in Gbit/s: shards get slices by their rates (default: all alike; "
        "0 at a coordinator: none but small ones)",
    )


def _add_ledger_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="write the ledger into DIR: who contributed to each round, when, and digests (see `gradserver ledger`). "
        "Killed and started again with the same DIR, the coordinator goes on with its elastic groups",
    )
    parser.add_argument(
        "--ledger-hashes",
        choices=("on", "off"),
        default="on",
        help="hash contributions and results for the ledger: of every round, or of as many as take 2 %% of the time "
        "(default on)",
    )
    parser.add_argument(
        "--ledger-keep",
        type=size,
        default=1024 * MIB,
        metavar="SIZE",
        help="delete the ledger's oldest files above this size, 500MiB or 2GiB for example (default 1GiB)",
    )
    parser.add_argument(
        "--journal-quota",
        type=size,
        default=JOURNAL_QUOTA_BYTES,
        metavar="SIZE",
        help="let the members of one group fill at most SIZE of the ledger in an hour by joining, leaving, plans and "
        "claims of data; then the group is refused more of these. Rounds are not counted (default 256MiB; "
        "0KiB: no limit)",
    )
    parser.add_argument(
        "--sync",
        type=sync,
        default=1.0,
        metavar="none|SECONDS|round",
        help="how much of the ledger a power failure may cost (default 1 second; the coordinator's own death costs "
        "nothing of it)",
    )


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_BIND, metavar="URL", help=f"default {DEFAULT_BIND}")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    parser.add_argument(
        "--interval",
        type=number(float, 0.05, 3600, "a number of seconds"),
        default=1.0,
        metavar="S",
        help="seconds over which rates are measured (default 1)",
    )
    parser.set_defaults(run=_status)


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE|DIR", help="the directory that --state-dir named, or a file in it")
    parser.add_argument("--round", type=number(int, 0, MAX_COUNTER), metavar="N", help="all about round N")
    parser.add_argument("--from", dest="first", type=number(int, 0, MAX_COUNTER), metavar="N", help="rounds from N on")
    parser.add_argument("--to", dest="last", type=number(int, 0, MAX_COUNTER), metavar="M", help="rounds up to M")
    parser.add_argument("--group", metavar="NAME", help="this group only")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print every record as a line of JSON")
    instead.add_argument("--verify", action="store_true", help="check every byte, and that no round is missing")
    instead.add_argument(
        "--export", metavar="FILE", help="write all that can be read to FILE, as lines of JSON, without secrets"
    )
    instead.add_argument(
        "--repair",
        action="store_true",
        help="leave out what is damaged or of another version, say what is lost, and keep the files as they were "
        "beside it (while no coordinator uses them)",
    )
    parser.set_defaults(run=_ledger)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from gradserver import demo

    demo.add_arguments(parser)
    parser.set_defaults(run=demo.run)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from gradserver.bench import command

    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    from gradserver.chaos import command

    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _serve(arguments: argparse.Namespace) -> int:
    """Run a coordinator until SIGTERM or SIGINT. Prints `listening on tcp://HOST:PORT` when it is ready."""
    logging.basicConfig(
        level=logging.WARNING if arguments.quiet else logging.INFO, format="%(asctime)s %(levelname).1s %(message)s"
    )
    gc.disable()  # until it serves: a start makes what stays, and looking for garbage is a tenth of its time
    try:
        return _serve_as_told(arguments)
    finally:
        gc.enable()


def _serve_as_told(arguments: argparse.Namespace) -> int:
    from gradserver.daemon import Ledger, serve, serve_shard
    from gradserver.engine.policy import RECONNECT_SECONDS, on_non_finite
    from gradserver.transport.liveness import Patience

    patience = Patience(arguments.dead_after, arguments.frozen_after)
    if arguments.join is not None:
        told = (
            "workers",
            "groups",
            "gather",
            *_OF_THE_LATE,
            "backlog",
            "state_timeout",
            "state_rate",
            "round_timeout",
            "credit",
            "state_dir",
        )
        for option in (*told, "allow_shards", "nonfinite"):
            if getattr(arguments, option) not in (None, False):
                raise InvalidArgumentError(
                    f"--{option.replace('_', '-')} is the coordinator's to say, not a data shard's (--join)"
                )
        if arguments.shards != 1:
            raise InvalidArgumentError("--shards is for a coordinator: run --join once for each further data shard")
        if arguments.rate == 0:
            raise InvalidArgumentError("a data shard of rate 0 would hold nothing")
        reconnect = RECONNECT_SECONDS if arguments.reconnect is None else arguments.reconnect
        return serve_shard(arguments.join, arguments.bind, arguments.rate, patience=patience, reconnect=reconnect)
    if arguments.reconnect is not None:
        raise InvalidArgumentError("--reconnect is for a data shard (--join): how long it looks for its coordinator")
    ledger = None
    if arguments.state_dir is not None:
        hashes = arguments.ledger_hashes == "on"
        sizes = arguments.ledger_keep, hashes, arguments.journal_quota
        ledger = Ledger(Path(arguments.state_dir), arguments.sync, *sizes)
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
    )


def _names_of_groups(arguments: argparse.Namespace) -> frozenset[str] | None:
    """The groups that may be founded; None for any."""
    if arguments.groups is None:
        told = _sizes(arguments)
        return frozenset(told) if told and OTHERS not in told else None
    if arguments.groups == ANY:
        return None
    for name in _sizes(arguments):
        if name != OTHERS and name not in arguments.groups:
            raise InvalidArgumentError(f"--workers speaks of group {name!r}, which --groups does not name")
    return frozenset(arguments.groups)


def _sizes(arguments: argparse.Namespace) -> dict[str, int | Policy]:
    """What --workers says of each group."""
    told: dict[str, int | Policy] = {}
    for name, count in arguments.workers or ():
        group = name or arguments.group
        if group in told:
            raise InvalidArgumentError(f"--workers speaks of group {group!r} twice: name another one, as NAME=MIN:MAX")
        told[group] = count
    return told


def _worlds(arguments: argparse.Namespace) -> dict[str, int | Policy]:
    """The sizes of groups that --workers speaks of. Other options are for all of them that are elastic."""
    from gradserver.engine.policy import Policy, lateness_of

    sizes = _sizes(arguments)
    lateness = lateness_of(arguments.quorum, arguments.backup or 0, arguments.grace, arguments.late)
    if lateness is not None:
        if not sizes:
            raise InvalidArgumentError("--quorum and --backup need to know how many workers there are: --workers")
        sizes = {name: Policy(size, size) if isinstance(size, int) else size for name, size in sizes.items()}
    if not any(isinstance(size, Policy) for size in sizes.values()):
        for option in ("gather", "backlog", "state_timeout", "state_rate"):
            if getattr(arguments, option) is not None:
                raise InvalidArgumentError(f"--{option.replace('_', '-')} is for elastic groups: --workers MIN:MAX")
    return {
        name: _policy(arguments, size, lateness) if isinstance(size, Policy) else size for name, size in sizes.items()
    }


def _policy(arguments: argparse.Namespace, size: Policy, lateness: Lateness | None) -> Policy:
    """An elastic group, as the options say."""
    gather = size.gather if arguments.gather is None else arguments.gather
    backlog = size.backlog if arguments.backlog is None else arguments.backlog * MIB
    told = {
        "state_seconds": arguments.state_timeout,
        "state_rate": None if arguments.state_rate is None else arguments.state_rate * MIB,
    }
    given = {name: value for name, value in told.items() if value is not None}
    return dataclasses.replace(size, gather=gather, backlog=backlog, lateness=lateness, **given)


def _status(arguments: argparse.Namespace) -> int:
    """Show the groups of a coordinator: members, round, rates, and who is being waited for."""
    from gradserver.status import show

    return show(arguments.url, arguments.interval, arguments.json)


def _ledger(arguments: argparse.Namespace) -> int:
    """Show what a coordinator with --state-dir wrote down: who contributed to which round, and who was slow and why."""
    from gradserver.ledger import command

    if arguments.export is not None:
        return command.export(arguments.path, arguments.export)
    if arguments.repair:
        return command.mend(arguments.path)
    selection = command.Selection(arguments.group, arguments.round, arguments.first, arguments.last)
    return command.show(arguments.path, selection, arguments.json, arguments.verify)


def _mebibytes(text: str) -> int:
    return number(int, 2, 1 << 20, "a number of MiB")(text) << 20


if __name__ == "__main__":
    sys.exit(main())
