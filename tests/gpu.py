"""Run everything that needs a GPU, and write ``docs/gpu.md``: ``make gpu``, or ``python -m tests.gpu``.

It needs no installation and no network: a Python with torch and the packages of `NEEDED`, and this checkout. Each line
runs in a process of its own and within its own time. So one that fails or hangs costs no other its figures. Without a
GPU nothing is written.

Where a command may not take as long as all of it, give ``--results FILE`` and ``--seconds``, and do so again. Each
goes on where the one before ended. ``--only`` makes some of the lines, also anew. What they print is beside the
results, in ``FILE.log``.
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
_LINGERING_SECONDS: Final = 10.0
_MAX_NAMED: Final = 5


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
    _measured("copies", "Copies run at 80 % or more of a plain pinned copy's rate, each way", 90),
    _measured("nccl", "One rank trains over NCCL, end to end", 180),
    _measured("waits", "Torch's sync debug mode, set to error, passes", 90),
    _measured("overlap", "Copies to the host are hidden behind backward", 120),
    _measured("codecs", "Codecs have the same bits on the device as on the host", 120),
    _measured("two-workers", "Two workers on one device train over the host path", 240),
    _measured("overhead", "The wrapper costs less than 1 % of a step with a world size of 1", 120),
    _measured("memory", "At most one extra copy of the gradients", 90),
    _measured("scaler", "fp16 with a GradScaler", 90),
    _measured(
        "large-model", "A GPT with 432 million parameters in bf16, one worker on the GPU and one on the CPU", 300
    ),
    Line("tests", "The tests that need a GPU pass", 300, _SELECTED),
)
"""All lines. Those that tell the most in the least time come first."""


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
        said: all that it printed.
    """

    ran: bool
    passed: bool | None
    text: str
    timeline: list[str] = field(default_factory=list)
    seconds: float = 0.0
    date: str = ""
    said: str = field(default="", repr=False)


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
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            said, ended = _rest(process, late), False
    outcome = _judge(line, process.returncode, said) if ended else _unfinished(seconds, said)
    outcome.seconds = time.monotonic() - began
    outcome.date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    outcome.said = said
    return outcome


def _rest(process: subprocess.Popen[str], late: subprocess.TimeoutExpired) -> str:
    """Return all that a process has said that was killed. Its children may hold the pipe a little longer."""
    try:
        return process.communicate(timeout=_LINGERING_SECONDS)[0]
    except subprocess.TimeoutExpired:
        return bytes(late.stdout or b"").decode(errors="replace")


def _unfinished(seconds: float, said: str) -> Outcome:
    return Outcome(False, None, f"it was ended after {seconds:.0f} s. Its last words: {_last_words(said)}")


def _judge(line: Line, status: int, said: str) -> Outcome:
    if line.name == "tests":
        failed = [one.split(" - ")[0].split("::")[-1] for one in said.splitlines() if one.startswith("FAILED ")]
        named = ", ".join(failed[:_MAX_NAMED]) + (", …" if len(failed) > _MAX_NAMED else "")
        return Outcome(True, status == 0, _last_words(said) + (f": {named}" if named else ""))
    found = next(filter(None, map(_found, reversed(said.splitlines()))), None)
    if status or found is None:
        return Outcome(False, None, f"it failed with status {status}. Its last words: {_last_words(said)}")
    return Outcome(True, found["passed"], found["text"], found.get("timeline", []))


def _found(line: str) -> dict[str, Any] | None:
    """Return what a line of output says, if it is the outcome of a measurement."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and "passed" in said else None


def _last_words(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────

_INTRODUCTION: Final = """\
# GPU

`make gpu` runs everything that needs a CUDA device, and writes this page. It takes less than half an hour on one
device. It needs this checkout, a Python with torch, numpy, pyzmq, msgpack and ml_dtypes, and no network. The tests also
need pytest, pytest-timeout and hypothesis. `make gpu GPU_PYTHON=python3` names the interpreter; without make,
`python3 -m tests.gpu` does the same. [`architecture.md`](architecture.md) describes the path of a device's gradients.

Where a package is missing and there is no network, download its wheel elsewhere, for the Python and the processor of
that machine: `pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --dest
wheels pyzmq`. Carry it along, unpack it with `python3 -m pip install --no-index --no-deps --target site wheels/*.whl`,
and set `PYTHONPATH` to that folder.

Where one command may take ten minutes only, run this one again until it says that all lines have run:
`python3 -m tests.gpu --results build/gpu.json --seconds 540`. Each line is kept as soon as it has run, with all that it
has printed in `build/gpu.json.log`. A line that fails or hangs costs no other its figures.
"""

_NOTHING: Final = """\
**Nothing on this page has run on a GPU yet.** No device was at hand when this was written. What has been done instead:

- On the CPU, tests run the copies with a device that executes each operation as late as its order allows
  (`tests/test_staging.py`). They run reductions on such a device over gloo (`tests/test_communicator.py`). They compare
  the codecs with the host's, bit by bit (`tests/test_device_codecs.py`), and rehearse each measurement
  (`tests/test_gpu.py`). All of this also passed with Python 3.12 and torch 2.11 for CUDA 13, on a machine without a
  device.
- Every line that is for CUDA was reviewed a second time, beside the sources of torch's process group for NCCL and the
  library of torch 2.11 itself. That found faults which no rehearsal had shown, and they were mended. The stream of the
  computation waited for each reduction, so that nothing overlapped, and a leader's lanes waited for all of backward. A
  reduction on a device had no deadline. Torch's watchdog could end the process, or hold up the next reduction for a
  minute. A script's own process groups got settings that were meant for ours. Members could connect several devices in
  different orders. NCCL does not know all types of buffers. Memory of collectives could be taken for the next one while
  another stream still read it. A step that was captured into a CUDA graph broke without a word of why. A worker that
  trained alone copied its gradients to the host and back. Two measurements would have passed whatever happened, and one
  test would have failed on a machine with NCCL.

Only a device can tell how soon an abort of NCCL ends a kernel, whether the coordinator's shared memory can be
registered in a virtual machine, and all rates. A peer's death over NCCL needs two devices, or NCCL 2.30 and newer with
`NCCL_MULTI_RANK_GPU_ENABLE=1`.
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
            shown, text = "not run", "no device was at hand" if not facts else "not yet"
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
    line = Line("facts", "", 240, ("-m", "tests.gpu_measurements", "facts"))
    try:
        asked = subprocess.run(
            [sys.executable, *line.command],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=line.seconds,
        )
    except subprocess.TimeoutExpired:
        print(f"make gpu: the device has not answered within {line.seconds:.0f} s")
        return {}
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
    parser.add_argument("--only", metavar="NAME,…", help=f"some of {', '.join(names)}; also if they have run before")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page (default docs/gpu.md)")
    parser.add_argument("--results", type=Path, metavar="FILE", help="file that keeps outcomes, for the next command")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="time limit of all lines together")
    options = parser.parse_args(arguments)
    wanted = names if options.only is None else options.only.split(",")
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
    until, outcomes = time.monotonic() + options.seconds, _kept(options.results)
    for line in _due(lines, outcomes, options.only is not None):
        left = until - time.monotonic()
        lacking = missing(FOR_TESTS) if line.name == "tests" else []
        if lacking:
            outcomes[line.name] = Outcome(False, None, f"{', '.join(lacking)} is not installed")
        elif left < (line.seconds if options.results is not None else 10):
            if options.results is not None:  # it waits for the next command, and a shorter one may be possible
                continue
            outcomes[line.name] = Outcome(False, None, f"no time was left of {options.seconds:.0f} s")
        else:
            outcomes[line.name] = run(line, min(line.seconds, left), environment())
        one = outcomes[line.name]
        shown = {True: "yes", False: "NO", None: "did not run"}[one.passed if one.ran else None]
        print(f"{line.name}: {shown}, {one.seconds:.0f} s. {one.text}", flush=True)
        # After each line: what is there by then stays, whatever ends this process.
        _keep(options.results, line.name, outcomes)
        options.page.write_text(page(facts, outcomes))
    waiting = [line.name for line in lines if line.name not in outcomes]
    print(
        f"{options.page} has the figures; "
        + (f"not run yet: {', '.join(waiting)}" if waiting else "all lines have run")
    )
    return 0 if all(line.name in outcomes and outcomes[line.name].passed for line in lines) else 1


def _due(lines: Sequence[Line], outcomes: Mapping[str, Outcome], again: bool) -> list[Line]:
    """Return the lines to run: first those that were not tried, then those that did not come to their end."""
    failed = [line for line in lines if line.name in outcomes and (again or not outcomes[line.name].ran)]
    return [*(line for line in lines if line.name not in outcomes), *failed]


def _kept(results: Path | None) -> dict[str, Outcome]:
    """Return the outcomes of earlier commands."""
    if results is None or not results.exists():
        return {}
    return {name: Outcome(**kept) for name, kept in json.loads(results.read_text()).items()}


def _keep(results: Path | None, latest: str, outcomes: Mapping[str, Outcome]) -> None:
    """Keep the outcomes, and what the ``latest`` line has printed, for the next command and for people."""
    if results is None:
        return
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.with_name(f"{results.name}.log").open("a") as log:
        log.write(f"── {latest}, {outcomes[latest].date} ──\n{outcomes[latest].said}\n")
    kept = {name: {**asdict(outcome), "said": ""} for name, outcome in outcomes.items()}
    whole = results.with_name(f"{results.name}.new")
    whole.write_text(json.dumps(kept, indent=1))
    whole.replace(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
