"""`gradserver bench`: measures exchanges on this machine, beside gloo and the limits of the hardware.

Importing this module is light: the processes that measure import torch, and the parent at most matplotlib.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gradserver.arguments import codec, mean, number
from gradserver.protocol.planes import CHANNELS
from gradserver.tools.bench import arguments as parse, modes

if TYPE_CHECKING:
    from gradserver.tools.bench.session import Session

_SUITES = {
    "same-host": "processes and threads of this machine, beside gloo and the bandwidth of the memory",
    "loopback": "processes of this machine over TCP, beside gloo and plain sockets",
    "cluster": "one host for each worker with limited links, emulated on this machine; requires root",
    "latency": "small tensors, beside gloo and plain pyzmq",
    "codecs": "size, error and processor time of each codec, beside a copy; uses no network",
    "means": "processor time of each rule by which gradients are averaged (serve --mean); uses no network",
    "train": "training steps of a GPT, beside torch DDP on gloo, and overlap with an emulated backward",
    "parameters": "training steps with many parameters of three elements, beside torch DDP and the bare module",
    "levels": "training steps of workers that share emulated hosts, by levels beside TCP; requires root",
    "modes": "the same training in every mode: loss, time, bytes, staleness, also on unequal workers or slow links",
    "large": "training steps of a GPT with 432 million parameters, over each channel or between devices",
}
_LAYOUTS = {
    "train": "step",
    **{name: name for name in ("same-host", "latency", "codecs", "means", "parameters", "levels")},
}
_ALONE = ("codecs", "means")
"""Suites without processes, which do not need torch."""
_MOST_WORKERS = 64
_WORKERS = "numbers of processes"
_SIZES = "sizes of the tensor in bytes, all fp32"
_VARIANTS = "buckets: all_reduce in shared memory; plan: a round of buckets; ordinary: all_reduce in other memory"
_TYPES = "element types on the wire: fp32, bf16, int8"
_sizes = parse.listed(parse.size)
_workers = parse.listed(parse.whole(2, _MOST_WORKERS))
_wires = parse.listed(parse.wire)
_count = parse.whole(1, 100_000)
_CONTENDERS = "tcp/fp32,tcp/bf16,tcp/int8,ddp/fp32,ddp/bf16,ddp/powersgd:1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the suites and their options to `parser`."""
    parser.description = (
        "Measure gradserver on this machine. Each row is the median of repetitions in which gradserver, gloo and the "
        "limit of the hardware take turns. All results are checked."
    )
    suites = parser.add_subparsers(metavar="SUITE", required=True)
    added = {
        name: suites.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name, text in _SUITES.items()
    }
    for name, one in added.items():
        one.set_defaults(suite=name)

    one = added["same-host"]
    _option(one, "--workers", _workers, "2,4", "N,…", _WORKERS)
    _option(one, "--sizes", _sizes, "4KiB,1MB,26MB,100MB", "SIZE,…", _SIZES)
    variants = parse.listed(parse.one_of("buckets", "plan", "ordinary", "threads"))
    text = f"{_VARIANTS}; threads: threads of one process"
    _option(one, "--variants", variants, "buckets,plan,ordinary,threads", "NAME,…", text)

    variants = parse.listed(parse.one_of("buckets", "plan", "ordinary"))
    one = added["loopback"]
    _option(one, "--workers", _workers, "2,4", "N,…", _WORKERS)
    _option(one, "--sizes", _sizes, "4KiB,1MB,26MB,100MB", "SIZE,…", _SIZES)
    _option(one, "--variants", variants, "buckets,plan", "NAME,…", _VARIANTS)
    _option(one, "--wire", _wires, "fp32", "TYPE,…", _TYPES)

    one = added["cluster"]
    _option(one, "--hosts", parse.whole(2, 64), "4", "N", "number of hosts, with one worker each")
    _add_links(one, "1gbit", "4gbit")
    one.add_argument("--shards-beside", action="store_true", help="run a data shard on the host of each worker")
    _option(one, "--sizes", _sizes, "1MB,26MB,100MB", "SIZE,…", _SIZES)
    _option(one, "--variants", variants, "plan", "NAME,…", _VARIANTS)
    _option(one, "--wire", _wires, "fp32", "TYPE,…", _TYPES)

    one = added["latency"]
    _option(one, "--workers", _workers, "2,4,8", "N,…", _WORKERS)
    _option(one, "--sizes", _sizes, "8B,4KiB,64KiB", "SIZE,…", _SIZES)

    one = added["codecs"]
    _option(
        one,
        "--wire",
        parse.listed(codec),
        "fp32,bf16,fp16,int8,topk,randomk",
        "CODEC,…",
        "codecs, with the names of connect(wire=)",
    )
    _option(one, "--workers", parse.whole(1, 64), "4", "N", "number of contributions to a mean")
    _option(one, "--sizes", _sizes, "26MB", "SIZE,…", _SIZES)
    _option(one, "--rounds", _count, "50", "N", "number of rounds after which the sum of all means is compared")

    one = added["means"]
    rules = "median,trimmed:0.25,clipped:1,krum:1"
    _option(one, "--mean", parse.listed(mean), rules, "RULE,…", "rules beside the plain mean, as in serve --mean")
    _option(one, "--workers", parse.whole(3, 64), "8", "N", "number of contributions to a mean")
    _option(one, "--sizes", _sizes, "26MB", "SIZE,…", _SIZES)

    one = added["train"]
    count = parse.whole(2, _MOST_WORKERS)
    text = "number of workers; with --rate, of hosts with one worker each"
    one.add_argument("--workers", "--hosts", type=count, default="2", metavar="N", help=f"{text} (default 2)")
    _add_links(one, None, None, listed=True)
    text = "contenders as WAY/WIRE: a plane (auto, tcp, shm, direct) and a codec, ddp and fp32, bf16 or powersgd:RANK"
    text += ", or over the backend of gradserver ddp-PLANE (torch's DDP) and own-PLANE (gradserver.torch's)"
    _option(one, "--contenders", parse.listed(parse.contender), _CONTENDERS, "NAME,…", text)
    text = "numbers of parameters of the GPT, about"
    _option(one, "--parameters", parse.listed(parse.parameters), "25M", "N,…", text)
    _option(one, "--steps", _count, "6", "N", "steps of a visit that are measured, behind two that are not")
    _option(one, "--context", parse.whole(8, 4096), "128", "N", "length of a sequence in bytes")
    _option(one, "--batch", parse.whole(1, 1024), "1", "N", "sequences per worker and step")
    text = "measure also exchanges of so many bytes during a backward that is emulated by waiting"
    _option(one, "--overlap-size", parse.size, None, "SIZE", text)

    one = added["parameters"]
    _option(one, "--workers", parse.whole(2, _MOST_WORKERS), "2", "N", "number of processes, and of threads of one")
    _option(one, "--counts", parse.listed(parse.whole(1, 100_000)), "300,1000,10000", "N,…", "numbers of parameters")

    one = added["levels"]
    _option(one, "--hosts", parse.whole(2, 64), "2", "N", "number of hosts")
    _option(one, "--per-host", parse.whole(2, 64), "2", "N", "number of workers on each host")
    _add_links(one, "1gbit", None)
    _option(one, "--wire", _wires, "fp32", "TYPE,…", _TYPES)
    _add_model(one, context="32")

    _add_modes(added.pop("modes"))

    one = added.pop("large")
    _option(one, "--channel", parse.listed(parse.one_of("tcp", "shm")), "tcp,shm", "NAME,…", "channels, one run each")
    _option(one, "--devices", str, "cpu,cpu", "NAME,…", "device of each worker, such as cuda or cuda:1")
    _option(one, "--dtype", parse.one_of("fp32", "bf16", "fp16"), "fp32", "TYPE", "type of parameters and gradients")
    _option(
        one, "--wire", codec, "fp32", "CODEC", "format in which gradients of fp32 travel, as connect(wire=) names it"
    )
    _option(one, "--steps", parse.whole(1, 10_000), "3", "N", "number of steps")
    _option(one, "--batch", parse.whole(1, 1024), "1", "N", "sequences per worker and step")
    _option(one, "--context", parse.whole(8, 4096), "32", "N", "length of a sequence in tokens")
    _option(one, "--width", parse.whole(16, 8192), "1024", "N", "width of the model")
    _option(one, "--blocks", parse.whole(1, 256), "24", "N", "number of transformer blocks")
    _option(one, "--vocabulary", parse.whole(2, 1 << 20), "32768", "N", "number of different tokens")
    _option(one, "--seconds", parse.whole(1, 100_000), "1800", "S", "time limit of a run")
    one.add_argument("--json", action="store_true", help="print only one JSON document")

    for name, one in added.items():
        if name == "train":
            _option(one, "--repetitions", _count, "3", "N", "number of visits of each contender, in turns")
            one.set_defaults(sample_ms=0)
        elif name in ("levels", "parameters"):
            _option(one, "--repetitions", _count, "20", "N", "number of measured steps")
            one.set_defaults(sample_ms=0)
        elif name in _ALONE:
            _option(one, "--repetitions", _count, "15", "N", f"number of measurements of each of the {name}")
            one.set_defaults(sample_ms=0)
        else:
            _option(one, "--repetitions", _count, "15", "N", "number of measurements of each contender")
            text = "length of a measurement: fast operations are repeated for so long"
            _option(one, "--sample-ms", parse.whole(1, 10_000), "30", "MS", text)
        one.add_argument("--json", action="store_true", help="print only one JSON document")
        one.add_argument("--plot", type=parse.picture, metavar="FILE.png", help="save a picture")


def _add_modes(one: argparse.ArgumentParser) -> None:
    """Add the options of the suite `modes`."""
    names, places = [mode.name for mode in modes.MODES], modes.SCENARIOS
    _option(one, "--workers", parse.whole(2, _MOST_WORKERS), "2", "N", "number of workers")
    text = f"modes, in turns, of {', '.join(names)}"
    _option(one, "--modes", parse.listed(parse.one_of(*names)), ",".join(modes.USUAL), "NAME,…", text)
    text = "equal workers, a slower one among them, and equal ones with slow links, which requires root"
    _option(one, "--scenarios", parse.listed(parse.one_of(*places)), "equal,unequal", "NAME,…", text)
    _option(one, "--steps", _count, "320", "N", "batches of each worker, on average")
    _option(one, "--batch", parse.whole(1, 1024), "16", "N", "sequences in a batch")
    _option(one, "--slow", number(float, 1.0, 100.0), "3", "X", "how many times slower a slower worker is")
    _option(one, "--rate", parse.rate, "100mbit", "RATE", "rate of slow links")
    _option(one, "--seconds", parse.whole(1, 100_000), "3600", "S", "time limit of one training")
    text = "trainings of each mode, with those of --add; the table has their medians and ranges"
    _option(one, "--repetitions", _count, "1", "N", text)
    text = "JSON file to add each training to. What it has already is shown, and not trained again"
    one.add_argument("--add", type=Path, metavar="FILE", help=text)
    one.add_argument("--quick", action="store_true", help="train a tiny model, to see that everything works")
    one.add_argument("--json", action="store_true", help="print only one JSON document")
    one.add_argument("--plot", type=parse.picture, metavar="FILE.png", help="save a picture")


def run(arguments: argparse.Namespace) -> int:
    """Run a suite. Return 0 if all values are right, 1 if some are wrong or a process failed, 2 if it cannot start."""
    reason = _why_not(arguments)
    if reason is not None:
        print(f"gradserver bench: {reason}", file=sys.stderr)
        return 2
    if arguments.suite == "modes":
        from gradserver.tools.bench import mode_suite

        return mode_suite.run(arguments)
    if arguments.suite == "large":
        from gradserver.tools.bench import large

        return large.run(arguments)
    from gradserver.tools.bench import session as sessions
    from gradserver.tools.common.processes import RunError, ended_by_signals
    from gradserver.tools.common.screen import Screen, discard_output

    screen = None if arguments.json else Screen(sys.stdout)
    with tempfile.TemporaryDirectory(prefix="gradserver-bench-") as folder:
        session = sessions.Session(
            arguments.suite,
            _LAYOUTS.get(arguments.suite, "all_reduce"),
            arguments.repetitions,
            arguments.sample_ms / 1e3,
            Path(folder),
            screen,
        )
        try:
            with ended_by_signals():
                session.introduce()
                _suite(arguments.suite)(arguments, session)
            status = session.conclude()
            if arguments.json:
                print(session.document(sys.argv, _settings(arguments)))
            if arguments.plot is not None:
                from gradserver.tools.bench.plot import save_plot

                save_plot(arguments.plot, arguments.suite, session.rows)
                if screen is not None:
                    screen.line(f"The picture is {arguments.plot}")
        except BrokenPipeError:  # standard output was closed, as behind `| head`
            discard_output()
            return 1
        except (RunError, OSError) as error:
            session.interrupted()
            print(f"gradserver bench: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            session.interrupted()
            print("Interrupted. All processes and hosts of the benchmark have been removed.", file=sys.stderr)
            return 130
    return status


def _suite(name: str) -> Callable[[argparse.Namespace, Session], None]:
    if name == "means":
        from gradserver.tools.bench.mean_suite import means

        return means
    if name == "codecs":
        from gradserver.tools.bench.codec_suite import codecs

        return codecs
    from gradserver.tools.bench import level_suite, parameter_suite, suites, train_suite

    return {
        "same-host": suites.same_host,
        "loopback": suites.loopback,
        "cluster": suites.cluster,
        "latency": suites.latency,
        "train": train_suite.train,
        "parameters": parameter_suite.parameters,
        "levels": level_suite.levels,
    }[name]


def _why_not(arguments: argparse.Namespace) -> str | None:
    """Explain why the suite cannot run here, and what to do; None if it can."""
    if arguments.suite not in _ALONE and importlib.util.find_spec("torch") is None:
        return "the comparison with gloo requires PyTorch: pip install 'gradserver[torch]'"
    if getattr(arguments, "plot", None) is not None and importlib.util.find_spec("matplotlib") is None:
        return "--plot requires matplotlib: pip install 'gradserver[demo]'"
    if getattr(arguments, "coordinator_rate", None) and not arguments.rate:
        return "--coordinator-rate requires --rate, the rate of the workers' links"
    if arguments.suite == "train" and (reason := _why_not_train(arguments)) is not None:
        return reason
    if getattr(arguments, "congestion", None) and not arguments.rate:
        return "--congestion requires --rate: it applies to emulated links"
    if getattr(arguments, "rate", None) and "link" in getattr(arguments, "scenarios", ["link"]):
        from gradserver.tools.common import netns

        if (reason := netns.why_not()) is not None:
            return reason
    return None


def _why_not_train(arguments: argparse.Namespace) -> str | None:
    """Explain which options of the suite `train` do not fit together; None if all do."""
    if arguments.coordinator_rate and len(arguments.coordinator_rate) not in (1, len(arguments.rate)):
        return "--coordinator-rate takes one rate, or one for each of --rate"
    if arguments.overlap_size and not any(way in CHANNELS for way, _ in arguments.contenders):
        return "--overlap-size requires a contender over tcp or shm: it measures rounds of the coordinator"
    return None


def _add_links(
    parser: argparse.ArgumentParser, rate: str | None, coordinator: str | None, listed: bool = False
) -> None:
    without = "" if rate else " (default: the loopback, without emulated links)"
    each = "; several are measured one after the other" if listed else ""
    text = f"rate of each worker's link in each direction, such as 1gbit{each}{without}"
    kind, metavar = (parse.listed(parse.rate), "RATE,…") if listed else (parse.rate, "RATE")
    _option(parser, "--rate", kind, rate, metavar, text)
    _option(
        parser,
        "--coordinator-rate",
        kind,
        coordinator,
        metavar,
        f"rate of the coordinator's link (default {coordinator or 'as --rate'})",
    )
    text = "congestion control of TCP on these links, such as cubic (default: this machine's)"
    _option(parser, "--congestion", parse.algorithm, None, "NAME", text)


def _add_model(parser: argparse.ArgumentParser, context: str) -> None:
    text = "width of the model; a width of 512 with 8 blocks is 25 M parameters"
    _option(parser, "--width", parse.whole(16, 4096), "512", "N", text)
    _option(parser, "--blocks", parse.whole(1, 256), "8", "N", "number of transformer blocks")
    _option(parser, "--context", parse.whole(8, 4096), context, "N", "length of a sequence in bytes")
    _option(parser, "--batch", parse.whole(1, 1024), "1", "N", "sequences per worker and step")


def _option(
    parser: argparse.ArgumentParser,
    name: str,
    kind: Callable[[str], object],
    default: str | None,
    metavar: str,
    text: str,
) -> None:
    text = f"{text} (default {default})" if default and "(default" not in text else text
    parser.add_argument(name, type=kind, default=default, metavar=metavar, help=text)


def _settings(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(arguments).items() if not callable(value) and name != "plot"}
