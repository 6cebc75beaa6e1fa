"""Run everything that needs a GPU, and write ``docs/gpu.md``: ``make gpu``, or ``python -m tests.gpu``.

It needs no installation and no network: a Python with torch and the packages of `NEEDED`, and this checkout. Each line
runs in a process of its own and within its own time. So one that fails or hangs costs no other its figures. Without a
GPU nothing is written.

Where a command may not take as long as all of it, ``--only`` makes some of the lines. With ``--results FILE`` earlier
ones are kept, and the page has all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "gpu.md"
NEEDED: Final = {"numpy": "numpy", "zmq": "pyzmq", "msgpack": "msgpack", "ml_dtypes": "ml_dtypes", "torch": "torch"}
"""Modules that must be there, and the package that each is in."""
FOR_TESTS: Final = {"pytest": "pytest", "pytest_timeout": "pytest-timeout", "hypothesis": "hypothesis"}
"""The same for the line `tests` alone."""
TOTAL_SECONDS: Final = 1740.0
"""Time limit of all lines together: a machine is often lent for half an hour."""


@dataclass(frozen=True)
class Line:
    """One thing that is to be shown.

    Attributes:
        name: its name, for ``--only``.
        promise: what is to be shown.
        seconds: its time limit.
        command: arguments of Python. Its last line of output is JSON.
    """

    name: str
    promise: str
    seconds: float
    command: tuple[str, ...]


def _measured(name: str, promise: str, seconds: float) -> Line:
    return Line(name, promise, seconds, ("-m", "tests.gpu_measurements", name))


# Collecting all modules would take a minute, and packages that only developers have.
_MARKED: Final = sorted(str(one) for one in Path(__file__).parent.glob("test_*.py") if "mark.gpu\n" in one.read_text())
_SELECTED: Final = ("-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu", *_MARKED)

LINES: Final = (
    Line("tests", "The tests that need a GPU pass", 300, _SELECTED),
    _measured("nccl", "One rank trains over NCCL, end to end", 150),
    _measured("two-workers", "Two workers on one device train over the host path", 180),
    _measured("copies", "Copies run at 80 % or more of a plain pinned copy's rate, each way", 90),
    _measured("overlap", "Copies to the host are hidden behind backward", 120),
    _measured(
        "large-model", "A GPT with 432 million parameters in bf16, one worker on the GPU and one on the CPU", 300
    ),
    _measured("overhead", "The wrapper costs less than 1 % of a step with a world size of 1", 150),
    _measured("waits", "Torch's sync debug mode, set to error, passes", 90),
    _measured("memory", "At most one extra copy of the gradients", 90),
    _measured("scaler", "fp16 with a GradScaler", 90),
    _measured("codecs", "Codecs have the same bits on the device as on the host", 120),
)


@dataclass
class Outcome:
    """Outcome of one line.

    Attributes:
        ran: true if it came to its end.
        passed: true if it shows what it is to show; None if it did not run.
        text: its figures; or why it did not run.
        timeline: lines of a picture.
        seconds: how long it took.
        date: when it ended.
    """

    ran: bool
    passed: bool | None
    text: str
    timeline: list[str] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""


def run(line: Line, seconds: float, environment: Mapping[str, str]) -> Outcome:
    """Run one line, for ``seconds`` at most. Whatever it starts ends with it."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *line.command],
        cwd=ROOT,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
            ended = True
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            ended = False
    outcome = _judge(line, process.returncode, said) if ended else _unfinished(seconds, said)
    outcome.seconds = time.monotonic() - began
    outcome.date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return outcome


def _unfinished(seconds: float, said: str) -> Outcome:
    return Outcome(False, None, f"it was ended after {seconds:.0f} s. Its last words: {_last_words(said)}")


def _judge(line: Line, status: int, said: str) -> Outcome:
    if line.name == "tests":
        return Outcome(True, status == 0, _last_words(said))
    lines = [one for one in said.splitlines() if one.startswith("{")]
    if status or not lines:
        return Outcome(False, None, f"it failed with status {status}. Its last words: {_last_words(said)}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "unavailable" in found:
        return Outcome(False, None, found["unavailable"])
    return Outcome(True, found["passed"], found["text"], found.get("timeline", []))


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────

_INTRODUCTION: Final = """\
# GPU

`make gpu` runs everything that needs a CUDA device, and writes this page. It takes less than half an hour on one
device. It needs this checkout, a Python with torch and the packages of the coordinator, and no network:
`make gpu GPU_PYTHON=python3` names the interpreter. [`architecture.md`](architecture.md) describes the path of a
device's gradients.
"""

_NOTHING: Final = """\
**Nothing on this page has run on a GPU yet.** No device was at hand when this was written. On the CPU, tests run the
copies with a device that executes each operation as late as its order allows (`tests/test_staging.py`). They compare
the codecs with the host's, bit by bit (`tests/test_device_codecs.py`), and rehearse each measurement
(`tests/test_gpu.py`).
"""


def page(facts: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> str:
    """Return the page with these outcomes."""
    parts = [_INTRODUCTION]
    if facts and outcomes:
        latest = max(outcome.date for outcome in outcomes.values())
        parts.append("".join(f"- {name}: {value}\n" for name, value in {**facts, "date": f"{latest} UTC"}.items()))
    else:
        parts.append(_NOTHING)
    rows = ["| what is to be shown | shown | figures |", "|---|---|---|"]
    for line in LINES:
        outcome = outcomes.get(line.name)
        if outcome is None:
            shown, text = "not run", "no device was at hand" if not facts else "not asked for"
        else:
            shown = {True: "yes", False: "**no**", None: "did not run"}[outcome.passed if outcome.ran else None]
            text = outcome.text.replace("|", "\\|")
        rows.append(f"| {line.promise} (`{line.name}`) | {shown} | {text} |")
    parts.append("\n".join(rows) + "\n")
    for line in LINES:
        if (outcome := outcomes.get(line.name)) is not None and outcome.timeline:
            parts.append("\n".join([f"{line.promise}:\n", "```text", *outcome.timeline, "```"]) + "\n")
    return "\n".join(parts)


# ── the run ───────────────────────────────────────────────────────────────────────────────────────────


def missing(packages: Mapping[str, str]) -> list[str]:
    """Return the packages that are not there."""
    return [package for module, package in packages.items() if importlib.util.find_spec(module) is None]


def environment() -> dict[str, str]:
    """Return the environment of all lines: this checkout comes first, and nothing is asked of a coordinator."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVER_")}
    known = found.get("PYTHONPATH")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        found.pop(name, None)
    return {**found, "PYTHONPATH": f"{ROOT}{os.pathsep}{known}" if known else str(ROOT), "PYTHONUNBUFFERED": "1"}


def facts_of_this_machine() -> dict[str, str]:
    """Return what is known of the device and the software; nothing without a device."""
    line = Line("facts", "", 120, ("-m", "tests.gpu_measurements", "facts"))
    asked = subprocess.run(
        [sys.executable, *line.command],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=line.seconds,
    )
    if asked.returncode:
        print(f"make gpu: the device cannot be asked: {_last_words(asked.stderr)}")
        return {}
    found: dict[str, str] = json.loads(asked.stdout.splitlines()[-1])
    return {**found, "driver": _driver(), "Python": platform.python_version()} if found else {}


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip().split("\n")[0] or "unknown"
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def main(arguments: Sequence[str]) -> int:
    """Run the lines that are asked for, and write the page. Return 1 if one of them fails or does not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=(__doc__ or "").partition("\n\n")[0])
    names = [line.name for line in LINES]
    parser.add_argument("--only", default=",".join(names), metavar="NAME,…", help=f"some of {', '.join(names)}")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page (default docs/gpu.md)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file that keeps outcomes for a later run")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time limit of all lines together")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"there is no line {', '.join(unknown)}; the lines are {', '.join(names)}")
    if lacking := missing(NEEDED):
        print(f"make gpu: {sys.executable} has no {', '.join(lacking)}: install them there, or put them on PYTHONPATH")
        return 2
    facts = facts_of_this_machine()
    if not facts:
        print("make gpu: no CUDA device was found, so nothing was run and docs/gpu.md stays as it is")
        return 0
    return _run_all([line for line in LINES if line.name in wanted], facts, options)


def _run_all(lines: Sequence[Line], facts: dict[str, str], options: argparse.Namespace) -> int:
    until, outcomes = time.monotonic() + options.seconds, dict[str, Outcome]()
    if options.results is not None and options.results.exists():
        outcomes = {name: Outcome(**kept) for name, kept in json.loads(options.results.read_text()).items()}
    for line in lines:
        left = until - time.monotonic()
        lacking = missing(FOR_TESTS) if line.name == "tests" else []
        if lacking:
            outcomes[line.name] = Outcome(False, None, f"{', '.join(lacking)} is not installed")
        elif left < 10:
            outcomes[line.name] = Outcome(False, None, f"no time was left of {options.seconds:.0f} s")
        else:
            outcomes[line.name] = run(line, min(line.seconds, left), environment())
        one = outcomes[line.name]
        shown = {True: "yes", False: "NO", None: "did not run"}[one.passed if one.ran else None]
        print(f"{line.name}: {shown}, {one.seconds:.0f} s. {one.text}", flush=True)
        # After each line: what is there by then stays, whatever ends this process.
        if options.results is not None:
            options.results.write_text(
                json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1)
            )
        options.page.write_text(page(facts, outcomes))
    print(f"{options.page} has the figures")
    return 0 if all(outcomes[line.name].passed for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
