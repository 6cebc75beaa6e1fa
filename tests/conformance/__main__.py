"""Run torch's own tests of process groups with gloo and with gradserver, and compare the outcomes with a list.

Run as ``make conformance`` or ``python -m tests.conformance``. `expected.toml` is the list of tests that do not pass,
with a reason for each. Exit status 0 if all others pass and these do not; 1 if not, also if one of the list passes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from tests.conformance.crew import FORK, GOOD, Crew, Kind, Outcome
from tests.conformance.expected import counted, drift, drift_of_figures, entries, figures, kinds, told
from tests.conformance.suite import GLOO, SuiteError, load, names_of

OURS: Final = "gradserver"
LIMIT: Final = 60.0
"""Seconds that a test may take."""
SHORT: Final = 15.0
"""Seconds for a test that is not expected to pass."""
LOADED: Final = ("torch.testing._internal.common_distributed", "gradserver.torch.creating", "gradserver.worker.connect")
"""Modules that are imported once for all processes."""
ENVIRONMENT: Final = {
    "GLOO_SOCKET_IFNAME": "lo",
    "KINETO_LOG_LEVEL": "5",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


@contextmanager
def coordinator() -> Iterator[str]:
    """Run a coordinator, and yield its URL. Its log is printed only if it ends by itself.

    A rank may wait long for one of few cores: it is not frozen then.
    """
    command = [sys.executable, "-m", "gradserver", "serve", "--quiet", "--bind", "tcp://127.0.0.1:0"]
    command += ["--frozen-after", "30"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        found = re.search(r"tcp://\S+", process.stdout.readline())
        try:
            yield found[0] if found else ""
        finally:
            if process.poll() is not None:
                log.seek(0)
                raise SuiteError(f"the coordinator ended with status {process.returncode}:\n{log.read()}")
            process.terminate()


def run(backend: str, size: int, only: str, listed: Mapping[str, Kind], progress: bool) -> dict[str, Outcome]:
    """Run the tests in a world of one backend: in a process of its own, as torch's tests can be imported once.

    Each that does not pass is printed; with ``progress`` each that is run.
    """
    outcomes = dict[str, Outcome]()
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        suite = load(backend, size, Path(folder))
        crew = Crew(suite)
        try:
            for test in names_of(suite.case, only):
                began = time.monotonic()
                outcomes[test] = outcome = crew.run(test, SHORT if test in listed else LIMIT)
                if outcome.kind not in GOOD or progress:
                    print(f"  {backend}: {test}, {time.monotonic() - began:.1f} s: {outcome}", flush=True)
        finally:
            crew.end()
    return outcomes


class Apart:
    """A call of `run` in a process that is forked for it."""

    def __init__(self, *arguments: Any) -> None:
        self._line, theirs = FORK.Pipe(duplex=False)
        self._began = time.monotonic()
        self._process = FORK.Process(target=self._run, args=(theirs, arguments))
        self._process.start()
        theirs.close()

    @staticmethod
    def _run(line: Connection, arguments: Sequence[Any]) -> None:
        line.send(run(*arguments))

    def result(self) -> tuple[dict[str, Outcome], float]:
        """Return the outcomes, and the seconds that it took."""
        try:
            outcomes: dict[str, Outcome] = self._line.recv()
        except EOFError:
            raise SuiteError("the tests ended early: see above") from None
        finally:
            self._process.join()
        return outcomes, time.monotonic() - self._began


def run_world(size: int, only: str, torch: str, progress: bool) -> tuple[dict[str, dict[str, Outcome]], list[str]]:
    """Run the tests with both backends at once. Return the outcomes by backend, and what has drifted."""
    listed, found, lines = entries(), dict[str, dict[str, Outcome]](), list[str]()
    expected = {backend: kinds(listed, backend, size, torch) for backend in (GLOO, OURS)}
    runs = {backend: Apart(backend, size, only, expected[backend], progress) for backend in expected}
    for backend, one in runs.items():
        found[backend], seconds = one.result()
        print(f"world {size}, {backend:<10} {told(counted(found[backend]))}, in {seconds:.0f} s", flush=True)
        wanted = {test: kind for test, kind in expected[backend].items() if re.search(only, test)}
        lines += [f"{backend}: {line}" for line in drift(found[backend], wanted, found[GLOO])]
    if not only:
        lines += drift_of_figures(
            figures(), torch, size, {backend: counted(outcomes) for backend, outcomes in found.items()}
        )
    return found, lines


def main(arguments: Sequence[str]) -> int:
    """Run all, and print figures and drift."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], metavar="N", help="ranks: 2 4")
    parser.add_argument("--only", default="", metavar="REGEX", help="tests in which this expression is found")
    parser.add_argument("--progress", action="store_true", help="print what comes of each test")
    parser.add_argument("--outcomes", type=Path, metavar="FILE", help="write the outcomes of all tests to a file")
    options = parser.parse_args(arguments)
    os.environ.update(ENVIRONMENT)
    torch = importlib.metadata.version("torch")
    for name in LOADED:
        importlib.import_module(name)
    print(f"torch {torch}")
    drifted, all_outcomes = list[str](), dict[str, Any]()
    with coordinator() as url:
        os.environ["GRADSERVER_URL"] = url
        for size in options.worlds:
            found, lines = run_world(size, options.only, torch, options.progress)
            drifted += [f"world {size}, {line}" for line in lines]
            for backend, outcomes in found.items():
                all_outcomes[f"{backend} {size}"] = {test: asdict(outcome) for test, outcome in outcomes.items()}
    if options.outcomes:
        options.outcomes.write_text(json.dumps(all_outcomes, indent=1), "utf-8")
    print("\n".join(drifted) or "All as the list says.")
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
