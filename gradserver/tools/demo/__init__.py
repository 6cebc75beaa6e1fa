"""`gradserver demo`: a coordinator and its workers on this machine, compared with one process.

Importing this package is light: the processes that train import torch. The parent imports only matplotlib, at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from gradserver.arguments import codec, number, seconds

_NEEDS = ("torch", "matplotlib")
_STEPS, _QUICK_STEPS = 200, 40
_WORKERS, _CHURN_WORKERS = 2, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's description and options to `parser`."""
    parser.description = (
        "Start a coordinator and N workers as processes of this machine, and train a small GPT on the source of "
        "Python's standard library. Then compare the result with one process that trains on the same samples."
    )
    parser.add_argument(
        "--workers",
        type=number(int, 1, 64),
        metavar="N",
        help=f"number of workers (default {_WORKERS}; with --churn {_CHURN_WORKERS})",
    )
    parser.add_argument(
        "--steps", type=number(int, 1, 1_000_000), metavar="S", help=f"number of training steps (default {_STEPS})"
    )
    parser.add_argument(
        "--batch", type=number(int, 1, 4096), default=4, metavar="B", help="sequences per worker and step (default 4)"
    )
    parser.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="X", help="seed of weights and samples (default 0)"
    )
    parser.add_argument(
        "--wire",
        type=codec,
        default="fp32",
        metavar="CODEC",
        help="codec of gradients: fp32, bf16, fp16, int8, topk:0.01, randomk:0.01 (default fp32, which is exact)",
    )
    parser.add_argument(
        "--churn",
        type=seconds(0.1, 3600.0),
        default=0.0,
        metavar="SECONDS",
        help="kill a worker (SIGKILL) every SECONDS seconds, and let another one join in its place",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gradserver-demo"),
        metavar="DIR",
        help="folder for the picture, numbers, weights and logs (default ./gradserver-demo)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"train a tiny model for {_QUICK_STEPS} steps, which shows that everything works",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo with the options of `add_arguments`. Return the exit status.

    0: replicas are identical, and the curve is within the tolerance, or finite if the wire is lossy. With churn also:
    each sample was used once, and a worker was killed. 1: this does not hold, or a process failed. 2: it cannot start.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gradserver demo requires {' and '.join(missing)}: pip install 'gradserver[demo]'", file=sys.stderr)
        return 2
    workers = args.workers or (_CHURN_WORKERS if args.churn else _WORKERS)
    if args.churn and workers == 1:
        print("gradserver demo --churn requires at least 2 workers, as it kills one: --workers 2", file=sys.stderr)
        return 2
    from gradserver.tools.demo.churn import Churn
    from gradserver.tools.demo.runner import Demo, run_demo
    from gradserver.tools.demo.settings import Settings

    steps = args.steps or (_QUICK_STEPS if args.quick else _STEPS)
    make = Settings.quick if args.quick else Settings
    settings = make(workers=workers, batch=args.batch, steps=steps, seed=args.seed, wire=args.wire, churn=args.churn)
    return run_demo(settings, args.out, Churn if args.churn else Demo)
