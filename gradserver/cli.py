"""The command line: ``gradserver serve | config | run | status | doctor | ledger | checkpoint | demo | …``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import gradserver
from gradserver import serving
from gradserver.arguments import add_seconds, number, seconds
from gradserver.command_line import Command, open_missing_streams, print_all
from gradserver.printing import complain
from gradserver.protocol.errors import GradServerError, InvalidArgumentError
from gradserver.protocol.limits import MAX_COUNTER


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. An error of the user prints one line, with status 1 or 2."""
    open_missing_streams()
    print_all(sys.stdout)
    parser = _parser()
    arguments = parser.parse_args(argv)
    if "run" not in arguments:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # what reads the output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as a shell reports of a process that SIGPIPE has ended
    except GradServerError as error:
        complain("gradserver", error)
        return 2 if isinstance(error, InvalidArgumentError) else 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Command(
        prog="gradserver",
        description="Keep the replicas of a data-parallel training job synchronized over ordinary networks.",
        epilog="To try it out, run `gradserver demo`. It takes some minutes; with --quick, ten seconds.",
    )
    parser.add_argument("--version", action="version", version=f"gradserver {gradserver.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    text = "run a coordinator"
    commands.add_parser("serve", help=text, description=serving.run.__doc__, fill=serving.add_arguments)
    text = "show the settings that `gradserver serve` would run with, and where each comes from"
    commands.add_parser("config", help=text, description=serving.show.__doc__, fill=serving.add_config_arguments)
    text = "start the workers of a training script, and a coordinator, on this machine or several"
    commands.add_parser("run", help=text, fill=_add_run)
    commands.add_parser(
        "status", help="show the state of a running coordinator", description=_status.__doc__, fill=_add_status
    )
    text = "examine this machine, its devices, and the link to a coordinator, and say what to change"
    commands.add_parser("doctor", help=text, fill=_add_doctor)
    text = "show the ledger of a coordinator: contributions, stragglers and lost workers of each round"
    commands.add_parser("ledger", help=text, description=_ledger.__doc__, fill=_add_ledger)
    text = "show what is in a checkpoint of a job, or write its models for torch or safetensors"
    commands.add_parser("checkpoint", help=text, fill=_add_checkpoint)
    text = "compile the kernels that encode, decode and average, before the first start does"
    commands.add_parser("kernels", help=text, fill=_add_kernels)
    commands.add_parser("demo", help="train a small GPT across processes of this machine", fill=_add_demo)
    text = "measure gradserver on this machine, beside gloo and the limits of the hardware"
    commands.add_parser("bench", help=text, fill=_add_bench)
    text = "inject faults into a group on this machine, and check that no round is wrong or lost"
    commands.add_parser("chaos", help=text, fill=_add_chaos)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    from gradserver.tools.launch import command

    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url",
        nargs="?",
        default=serving.DEFAULT_BIND,
        metavar="URL",
        help=f"the coordinator's address (default {serving.DEFAULT_BIND})",
    )
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    add_seconds(parser, "--interval", 0.05, 3600, "seconds over which rates are measured (default 1)", 1.0)
    parser.add_argument(
        "--watch",
        type=seconds(0.05, 3600),
        nargs="?",
        const=2.0,
        metavar="S",
        help="show the status every S seconds (default 2), until Ctrl-C",
    )
    parser.set_defaults(run=_status)


def _add_ledger(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FILE|DIR", help="the coordinator's --state-dir, or a file in it")
    parser.add_argument("--round", type=number(int, 0, MAX_COUNTER), metavar="N", help="show all details of round N")
    parser.add_argument(
        "--from", dest="first", type=number(int, 0, MAX_COUNTER), metavar="N", help="show rounds from N on"
    )
    parser.add_argument("--to", dest="last", type=number(int, 0, MAX_COUNTER), metavar="M", help="show rounds up to M")
    parser.add_argument("--group", metavar="NAME", help="show this group only")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print each record as one line of JSON")
    instead.add_argument(
        "--verify", action="store_true", help="check every byte of the files, and that no round is missing"
    )
    instead.add_argument(
        "--export", metavar="FILE", help="write every readable record to FILE, as lines of JSON, without secrets"
    )
    instead.add_argument(
        "--repair",
        action="store_true",
        help="remove records that are damaged or of another version, and print what is lost. The original files are "
        "kept beside the new ones. Requires that no coordinator uses the directory",
    )
    parser.set_defaults(run=_ledger)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    shown = actions.add_parser("show", help="print its round, position, models, optimizers, digest and versions")
    shown.add_argument("path", type=Path, metavar="FILE", help="the checkpoint, such as runs/7/latest")
    shown.set_defaults(run=_show_checkpoint)
    exported = actions.add_parser("export", help="write its models as a state_dict")
    exported.add_argument("path", type=Path, metavar="FILE", help="the checkpoint, such as runs/7/latest")
    exported.add_argument("target", type=Path, metavar="TARGET", help="the file: MODEL.pt, or MODEL.safetensors")
    exported.add_argument("--model", metavar="NAME", help="of several models, this one (default: all, by name)")
    exported.set_defaults(run=_export_checkpoint)


def _show_checkpoint(arguments: argparse.Namespace) -> int:
    from gradserver.worker.job.inspecting import show

    print("\n".join(show(arguments.path)))
    return 0


def _export_checkpoint(arguments: argparse.Namespace) -> int:
    from gradserver.worker.job.inspecting import export

    export(arguments.path, arguments.target, arguments.model)
    print(f"wrote {arguments.target}")
    return 0


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    compiling = actions.add_parser("compile", help="compile all of them, unless they are compiled already")
    text = "compile for all users of this installation, beside the package (default: for this user, in ~/.cache)"
    compiling.add_argument("--system", action="store_true", help=text)
    compiling.set_defaults(run=_compile_kernels)


def _compile_kernels(arguments: argparse.Namespace) -> int:
    from gradserver.protocol.compiled import loader

    print(loader.compile_ahead(arguments.system))
    return 0


def _add_demo(parser: argparse.ArgumentParser) -> None:
    from gradserver.tools import demo

    demo.add_arguments(parser)
    parser.set_defaults(run=demo.run)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from gradserver.tools.bench import command

    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_chaos(parser: argparse.ArgumentParser) -> None:
    from gradserver.tools.chaos import command

    command.add_arguments(parser)
    parser.set_defaults(run=command.run)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    from gradserver.tools.doctor import command
    from gradserver.worker.offer import offer_of

    command.add_arguments(parser)
    parser.set_defaults(run=lambda arguments: command.run(arguments, lambda: offer_of("auto", imports=True)))


def _status(arguments: argparse.Namespace) -> int:
    """Show the groups of a coordinator: members, round, rates, and the workers that a round waits for."""
    from gradserver.status import show, watch

    if arguments.watch is not None:
        return watch(arguments.url, arguments.watch)
    return show(arguments.url, arguments.interval, arguments.json)


def _ledger(arguments: argparse.Namespace) -> int:
    """Show the ledger of a coordinator with --state-dir: the contributions to each round, and what was slow and why."""
    from gradserver.ledger import command

    parts = {"--round": arguments.round, "--from": arguments.first, "--to": arguments.last, "--group": arguments.group}
    given = [flag for flag, value in parts.items() if value is not None]
    asked = {"--export": arguments.export is not None, "--repair": arguments.repair, "--verify": arguments.verify}
    whole = next((flag for flag, is_asked in asked.items() if is_asked), None)
    if whole is not None and given and (whole, given) != ("--verify", ["--group"]):
        raise InvalidArgumentError(f"{whole} takes all of the ledger: leave out {given[0]}")
    if arguments.export is not None:
        return command.export(arguments.path, arguments.export)
    if arguments.repair:
        return command.mend(arguments.path)
    selection = command.Selection(arguments.group, arguments.round, arguments.first, arguments.last)
    return command.show(arguments.path, selection, arguments.json, arguments.verify)


if __name__ == "__main__":
    sys.exit(main())
