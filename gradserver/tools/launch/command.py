"""`gradserver run`: its options, and what can be seen to be wrong before anything is started."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gradserver.arguments import add_seconds, folder, number
from gradserver.printing import complain
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.url import parse_target, parse_url

if TYPE_CHECKING:
    from gradserver.tools.launch.hosts import Host
    from gradserver.tools.launch.options import Options

_GRACE_SECONDS: Final = 30.0
_WRONG_USE: Final = 2
_OF_TORCHRUN: Final = ("--nproc-per-node", "--nproc_per_node")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the description and the options to `parser`."""
    parser.usage = "gradserver run [options] SCRIPT [ARGUMENT …]"
    parser.description = (
        "Start a coordinator and the workers of a training script: a process for each GPU, or --nproc of them. Each "
        "line of their output has the rank in front. When a worker fails, the others are ended, and its error is shown "
        "last."
    )
    parser.epilog = (
        "Exit status: 0 if all workers ended with 0; otherwise that of the worker that failed first, or 128 and the "
        "number of the signal that killed it."
    )
    text = "number of workers on each host (default: one for each GPU, or one without GPUs)"
    parser.add_argument("--nproc", "-n", type=_nproc, metavar="N|gpu", help=text)
    for name in _OF_TORCHRUN:
        parser.add_argument(name, dest="nproc", type=_nproc, help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in `python -m`")
    parser.add_argument("--no-python", action="store_true", help="SCRIPT is a program, and not for Python")
    parser.add_argument(
        "--gpus",
        choices=("own", "all"),
        default="own",
        help="own (default): each worker sees one GPU, as cuda:0; all: each sees all, and the script selects "
        "cuda:LOCAL_RANK, as under torchrun",
    )
    _add_coordinator(parser.add_argument_group("coordinator"))
    _add_ends(parser.add_argument_group("output and end"))
    _add_hosts(parser.add_argument_group("hosts"))
    # Of argparse's ways to take all words that follow, this one alone keeps a `--` behind the script for the script.
    text = "the training script, and its arguments"
    parser.add_argument("command", nargs=argparse.PARSER, action=_Command, metavar="SCRIPT", help=text)


class _Command(argparse.Action):
    """The script and its arguments, kept apart. A `--` in front only ends the options."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        _option: str | None = None,
    ) -> None:
        words = list(values or ())
        words = words[1:] if words[:1] == ["--"] else words
        if not words:
            parser.error("name the script to run, as in `gradserver run --nproc 2 train.py`")
        namespace.script, namespace.arguments = words[0], words[1:]


def _add_coordinator(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--coordinator",
        type=_url,
        metavar="URL",
        help="use the coordinator at tcp://HOST:PORT (default: the one in GRADSERVER_URL; without it one is started)",
    )
    parser.add_argument(
        "--bind",
        type=_bind,
        metavar="URL",
        help="address at which the started coordinator listens (default: a free port, which only the hosts' network "
        "can reach; with one host only this machine)",
    )
    parser.add_argument(
        "--serve",
        type=_words,
        default=(),
        metavar="'OPTIONS'",
        help="further options of the started coordinator, as in --serve '--quorum 75%% --state-dir state'",
    )


def _add_ends(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--log-dir",
        type=folder,
        metavar="DIR",
        help="also write each worker's output to DIR/rank-N.log, and the coordinator's to DIR/coordinator.log",
    )
    parser.add_argument(
        "--restart",
        type=number(int, 0, 1_000_000),
        default=0,
        metavar="K",
        help="start a worker that fails again, up to K times each; the others train on, and it joins them (default 0)",
    )
    parser.add_argument(
        "--min",
        type=number(int, 1, MAX_WORLD_SIZE, "a number of workers"),
        metavar="M",
        help="go on without a worker that has failed for good, while M are left (default: all are needed)",
    )
    parser.add_argument(
        "--resume",
        choices=("latest", "newest-whole"),
        help="with newest-whole, a job that finds its last checkpoint damaged continues from the newest whole one "
        "(default latest: that is an error)",
    )
    text = f"seconds from a request to end until a worker is killed (default {_GRACE_SECONDS:g})"
    add_seconds(parser, "--grace", 0, 86_400, text, _GRACE_SECONDS)


def _add_hosts(parser: argparse._ArgumentGroup) -> None:
    from gradserver.tools.launch.hosts import DEFAULT_RSH, Host, parse_hosts

    parser.add_argument(
        "--hosts",
        type=parse_hosts,
        default=(Host(),),
        metavar="A,B:N,…",
        help="run workers on these hosts: N there, or --nproc. Files and Python must be in the same places on all",
    )
    parser.add_argument(
        "--rsh",
        type=_words,
        default=tuple(shlex.split(DEFAULT_RSH)),
        metavar="'COMMAND'",
        help="command that runs a command on a host, called with the host's name and the command (default ssh)",
    )
    parser.add_argument(
        "--remote-python", default=sys.executable, metavar="PATH", help="Python there (default: as here)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the workers. Return their exit status; 2 for options that cannot be right, 1 if it could not begin."""
    problem = _problem(arguments)
    if problem is not None:
        complain("gradserver run", problem)
        return _WRONG_USE
    from gradserver.tools.common.processes import RunError
    from gradserver.tools.launch.descendants import adopt, descendants
    from gradserver.tools.launch.launcher import Launcher
    from gradserver.tools.launch.output import Console
    from gradserver.tools.launch.process import send_to

    adopt()  # if an agent is killed, what it has started falls to this process, which ends it
    console = Console()
    misplaced = [
        word for word in arguments.arguments if word.partition("=")[0] in ("--nproc", *_OF_TORCHRUN, "--hosts")
    ]
    if misplaced:
        console.say(
            f"{misplaced[0]} is behind the script, so that the script gets it. Options of this command come first"
        )
    try:
        launcher = Launcher(_options(arguments), console)
        return launcher.run()
    except InvalidArgumentError as error:
        console.say(str(error))
        return _WRONG_USE
    except (RunError, OSError) as error:
        console.say(str(error))
        return 1
    finally:
        for pid in descendants():
            send_to(pid, signal.SIGKILL)
        console.close()


def _problem(arguments: argparse.Namespace) -> str | None:
    """Return what is wrong with the options; None if nothing is."""
    if arguments.module and arguments.no_python:
        return "-m is for modules of Python, and --no-python for other programs: give one of them"
    given = arguments.coordinator or os.environ.get("GRADSERVER_URL")
    source = "--coordinator" if arguments.coordinator else "GRADSERVER_URL"
    for option, value in (("--bind", arguments.bind), ("--serve", arguments.serve)):
        if given and value:
            return f"{option} is for a coordinator that is started, and {source} names one that runs: {given}"
    if (wrong := _problem_of_serve(arguments.serve)) is not None:
        return wrong
    try:
        Path.cwd()
    except FileNotFoundError:
        return "the present folder, in which workers would begin, has been removed: change to another one"
    if not any(host.is_here for host in arguments.hosts):
        return None  # the files are elsewhere
    if arguments.module:
        return None
    return _problem_of_program(arguments.script) if arguments.no_python else _problem_of_script(arguments.script)


def _problem_of_serve(words: Sequence[str]) -> str | None:
    """Return what is wrong with the options of the coordinator, as far as it can be seen without the workers."""
    if not words:
        return None
    from gradserver.serving import settings_in

    try:
        settings = settings_in(words)
    except InvalidArgumentError as error:
        return f"--serve: {error.message}"
    if settings.given("join") is not None:
        return (
            "--serve '--join …' would start a data shard, and a run needs a coordinator: --serve '--shards N' adds some"
        )
    return None


def _problem_of_program(program: str) -> str | None:
    if shutil.which(program) is None:
        return f"there is no program {program!r}, here or on PATH"
    return None


def _problem_of_script(script: str) -> str | None:
    """Return what keeps Python from running ``script``."""
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").exists():
        return f"{script!r} is a folder: name the script in it"
    if not path.exists():
        if Path(script).name.startswith("python"):
            return f"name the script itself, without {script!r} in front; other programs need --no-python"
        if not script.endswith(".py") and shutil.which(script) is not None:
            return f"there is no script {script!r} in {Path.cwd()}. For the program of this name give --no-python"
        hint = f". For a module give -m {script}" if "/" not in script and not script.endswith(".py") else ""
        return f"there is no script {script!r} in {Path.cwd()}{hint}"
    if path.is_file():
        with path.open("rb") as stream:
            line = stream.readline(200)
        if line.startswith(b"\x7fELF") or (line.startswith(b"#!") and b"python" not in line):
            return f"{script!r} is a program, and not for Python: give --no-python"
    return None


def _options(arguments: argparse.Namespace) -> Options:
    from gradserver.tools.launch.options import Options

    hosts: Sequence[Host] = arguments.hosts
    return Options(
        command=(*["-m"] * arguments.module, arguments.script, *arguments.arguments),
        is_python=not arguments.no_python,
        folder=str(Path.cwd()),
        hosts=tuple(hosts),
        nproc=arguments.nproc,
        url=arguments.coordinator or os.environ.get("GRADSERVER_URL") or None,
        bind=arguments.bind,
        serve=arguments.serve,
        restarts=arguments.restart,
        minimum=arguments.min,
        grace=arguments.grace,
        resume=arguments.resume,
        log_dir=arguments.log_dir,
        all_gpus=arguments.gpus == "all",
        rsh=arguments.rsh,
        python=arguments.remote_python,
        pythonpath=_pythonpath(),
    )


def _pythonpath() -> str | None:
    """Return the workers' PYTHONPATH: the user's, and this checkout if gradserver is not found without it."""
    from gradserver.tools.common.processes import inherited_environment

    root = Path(__file__).resolve().parents[3]
    found_without = any(Path(path).resolve() == root for path in sys.path[1:])  # its first entry is Python's own
    return os.environ.get("PYTHONPATH") if found_without else inherited_environment().get("PYTHONPATH")


def _nproc(text: str) -> int | str:
    from gradserver.tools.launch.places import PER_GPU

    if text == PER_GPU:
        return text
    if not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of workers nor {PER_GPU!r}")
    return number(int, 1, MAX_WORLD_SIZE, "a number of workers")(text)


def _url(text: str) -> str:
    return _checked(text, parse_target)


def _bind(text: str) -> str:
    return _checked(text, parse_url)


def _checked(text: str, parse: object) -> str:
    assert callable(parse)
    try:
        parse(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
