"""Run test files of torch's repository, which its wheel has not, with gloo and with gradserver in its place.

Run as ``python -m tests.conformance.repository CHECKOUT [PATTERN…]``, with a checkout of the installed version of torch
(``git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch``). It prints a table, and each test that
gloo passes and gradserver does not. Exit status 1 if there is one. The checkout is only read.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.conformance.suite import GLOO

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = "gradserver"
FOLDER: Final = Path("test", "distributed")
PATTERNS: Final = (
    "test_c10d_common.py",
    "test_c10d_pypg.py",
    "test_c10d_pybackend.py",
    "test_c10d_fault_tolerance.py",
    "test_device_mesh.py",
    "_composable/fsdp/test_*.py",
)
"""Files in the folder. Not every version of torch has each."""
BEGINNING: Final = (
    "import torch.distributed as _dist; _init = _dist.init_process_group; _dist.init_process_group = "
    f"lambda backend=None, *a, **k: _init({OURS!r} if backend in (None, {GLOO!r}) else backend, *a, **k)"
)
"""The first line in the copy of a test file: groups that torch's helpers make with gloo have this backend, too."""
RESULT: Final = re.compile(r"^\S+?::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
REASON: Final = re.compile(r"^(?:FAILED|ERROR) \S+?::(.+?) - (.*)$", re.MULTILINE)
PASSED, FAILED, SKIPPED, MISSING = "passed", "failed", "skipped", "missing"
KINDS: Final = {"PASSED": PASSED, "XPASS": PASSED, "SKIPPED": SKIPPED, "XFAIL": SKIPPED}


def with_ours(text: str) -> str:
    """Return the text of a test file that has gradserver in place of gloo."""
    text = re.sub(r"""(["'])gloo\1""", f'"{OURS}"', text)
    text = re.sub(rf"\b(cpu|cuda):{GLOO}\b", rf"\1:{OURS}", text)
    text = re.sub(r"\b(?:c10d|dist)\.Backend\.GLOO\b", f'"{OURS}"', text)
    lines = text.splitlines()
    futures = [number for number, line in enumerate(lines, 1) if line.startswith("from __future__ import")]
    begin = max(futures, default=0)
    return "\n".join([*lines[:begin], BEGINNING, *lines[begin:], ""])


@dataclass(frozen=True)
class Report:
    """Outcomes of the tests of a file, and reasons of those that failed."""

    outcomes: Mapping[str, str]
    reasons: Mapping[str, str]
    is_whole: bool
    """False if the file was not done when its time was over."""

    def __str__(self) -> str:
        counts = Counter(self.outcomes.values())
        shown = f"{counts[PASSED]:4} passed, {counts[FAILED]:3} failed, {counts[SKIPPED]:4} skipped"
        return shown if self.is_whole else f"{shown}, and not done"


def read(output: str, is_whole: bool) -> Report:
    """Read the output of pytest. Of a test that has an error besides, the error counts."""
    outcomes = dict[str, str]()
    for name, word in RESULT.findall(output):
        if outcomes.get(name) != FAILED:
            outcomes[name] = KINDS.get(word, FAILED)
    return Report(outcomes, dict(REASON.findall(output)), is_whole)


def run(file: Path, checkout: Path, backend: str, seconds: float) -> Report:
    """Run a file with a backend, in a process that takes so many seconds at most."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        copy = Path(folder, file.name)
        text = file.read_text("utf-8")
        copy.write_text(with_ours(text) if backend == OURS else text, "utf-8")
        paths = [folder, str(file.parent), str(checkout / FOLDER), str(checkout / "test")]
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), *before]),
            "OMP_NUM_THREADS": "1",
        }
        options = "-v", "-rfE", "--color=no", "--tb=no", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider"
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, copy],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as process:
            output, is_whole = output_of(process, seconds)
    return read(output, is_whole)


def output_of(process: subprocess.Popen[str], seconds: float) -> tuple[str, bool]:
    """Return the output of a process, and True if it has ended in time. Then nothing of it is left."""
    try:
        return process.communicate(timeout=seconds)[0], True
    except subprocess.TimeoutExpired:
        _kill_session(process)
        return process.communicate()[0], False
    finally:
        _kill_session(process)


def _kill_session(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def differences(gloo: Report, ours: Report) -> Iterator[str]:
    """Yield a line for each test that gloo passes and gradserver does not. Some tests are named after their backend."""
    for test, outcome in gloo.outcomes.items():
        name = test if test in ours.outcomes else test.replace(GLOO.title(), OURS.title()).replace(GLOO, OURS)
        here = ours.outcomes.get(name, MISSING)
        if outcome == PASSED and here != PASSED:
            yield f"{name} {here}: {ours.reasons.get(name, 'no reason given')}"


def main(arguments: Sequence[str]) -> int:
    """Run the files, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance.repository", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("checkout", type=Path, help="a checkout of torch's repository")
    parser.add_argument("patterns", nargs="*", default=PATTERNS, metavar="PATTERN", help=f"files in {FOLDER}")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time for a file with one backend, at most")
    options = parser.parse_args(arguments)
    folder, found = options.checkout / FOLDER, list[str]()
    for pattern in options.patterns:
        files = sorted(folder.glob(pattern))
        if not files:
            print(f"{pattern}: there is none in {folder}")
        for file in files:
            reports = [run(file, options.checkout, backend, options.seconds) for backend in (GLOO, OURS)]
            name = file.relative_to(folder)
            for backend, report in zip((GLOO, OURS), reports, strict=True):
                print(f"{name!s:<50} {backend:<10} {report}", flush=True)
            found += [f"{name}: {line}" for line in differences(*reports)]
    print("\n".join(found) or "gradserver passes all that gloo passes.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
