"""`gradserver demo`: a coordinator and its workers on this machine, checked against one process.

Importing this package is light: the processes that train import torch, and the parent only matplotlib, at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from gradserver.arguments import codec, number

_NEEDS = ("torch", "matplotlib")
_STEPS, _QUICK_STEPS = 200, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Gives `parser` the demo's description and options."""
    parser.description = (
        "Start a coordinator and N workers as processes of this machine, train a small GPT on the source of "
        "Python's standard library, and check the result against one process that trains on the same samples."
    )
    parser.add_argument("--workers", type=number(int, 1, 64), default=2, metavar="N", help="workers (default 2)")
    parser.add_argument(
        "--steps", type=number(int, 1, 1_000_000), metavar="S", help=f"training steps (default {_STEPS})"
    )
    parser.add_argument(
        "--batch", type=number(int, 1, 4096), default=4, metavar="B", help="sequences per worker and step (default 4)"
    )
    parser.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="X", help="of weights and samples (default 0)"
    )
    parser.add_argument(
        "--wire",
        type=codec,
        default="fp32",
        metavar="CODEC",
        help="what gradients travel as: fp32, bf16, fp16, int8, topk:0.01, randomk:0.01 (default fp32, without loss)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gradserver-demo"),
        metavar="DIR",
        help="folder for picture, numbers, weights and logs (default ./gradserver-demo)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"a tiny model and {_QUICK_STEPS} steps: shows that all works, learns little",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the demo as `add_arguments` had it described. Returns the exit status.

    0: replicas identical and curve within tolerance, or only finite if the wire is lossy; 1: not so, or a process
    failed; 2: it cannot start.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gradserver demo needs {' and '.join(missing)}: pip install 'gradserver[demo]'", file=sys.stderr)
        return 2
    from gradserver.demo.runner import run_demo
    from gradserver.demo.settings import Settings

    steps = args.steps or (_QUICK_STEPS if args.quick else _STEPS)
    make = Settings.quick if args.quick else Settings
    settings = make(workers=args.workers, batch=args.batch, steps=steps, seed=args.seed, wire=args.wire)
    return run_demo(settings, args.out)
