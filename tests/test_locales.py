"""Commands in locales that lack signs, with paths that the locale cannot decode, optimized, and with all warnings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import ROOT

PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STRICT = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error"}
COMMANDS = ("", "serve", "config", "run", "status", "doctor", "ledger", "demo", "bench", "bench train", "chaos")
JOINS = "import gradserver\nwith gradserver.connect(timeout=60) as worker: worker.barrier()\nprint(ascii(__file__))\n"


def command(*words: str, folder: Path, **environment: str) -> tuple[int, bytes, bytes]:
    """Run a command to its end. Return its status, output and messages."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVER_")}
    environment = {**own, "PYTHONPATH": str(ROOT), **environment}
    words = (sys.executable, "-m", "gradserver", *words)
    ran = subprocess.run(words, capture_output=True, cwd=folder, env=environment, timeout=90)
    return ran.returncode, ran.stdout, ran.stderr


HELP = """
import contextlib, sys
from gradserver.cli import main
for words in sys.argv[1:]:
    with contextlib.suppress(SystemExit):
        main([*words.split(), "--help"])
"""


@pytest.mark.parametrize(
    ("flags", "environment"),
    [((), PLAIN), ((), {"PYTHONIOENCODING": "latin-1"}), (("-OO",), STRICT)],
    ids=["plain", "latin", "strict"],
)
def test_help_can_be_printed_anywhere(flags: tuple[str, ...], environment: dict[str, str]) -> None:
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    words = (sys.executable, *flags, "-c", HELP, *COMMANDS)
    ran = subprocess.run(words, capture_output=True, env=everything, timeout=90)
    assert (ran.returncode, ran.stderr) == (0, b"")
    for name in COMMANDS:
        assert f"usage: gradserver {name}".rstrip().encode() in ran.stdout


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder and a script with names that are no ASCII, and a folder that is no UTF-8."""
    folder = tmp_path / "gewählt"
    folder.mkdir()
    (folder / "übung.py").write_text(JOINS)
    return folder


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
        pytest.param(STRICT, id="strict", marks=pytest.mark.long),
        pytest.param({**PLAIN, **STRICT}, id="both"),
    ],
)
def test_a_run_keeps_paths_as_they_are(environment: dict[str, str], odd: Path) -> None:
    logs = os.fsdecode(b"l\xc3\xb6gs-\xff")
    words = ("run", "-n2", "--log-dir", logs, "--serve", "--state-dir stäte", "übung.py")
    status, out, err = command(*words, folder=odd, **environment)
    assert status == 0, err
    assert out.count(b"bung.py") == 2
    assert b"Warning" not in err
    assert b"Traceback" not in err
    title = (odd / logs / "rank-0.log").read_bytes().partition(b"\n")[0]
    assert title.endswith("übung.py".encode())
    assert (odd / "stäte").is_dir()
    assert command("ledger", "stäte", folder=odd, **environment)[0] == 0
    status, out, _ = command("config", "--state-dir", "stäte", folder=odd, **environment)
    assert (status, "stäte".encode() in out) == (0, True)


def test_a_program_that_is_missing_is_named_as_it_was_given(odd: Path) -> None:
    words = ("run", "-n1", "--log-dir", "logs", "--no-python", "--hosts", "localhost", "./fehlt-ü")
    status, _, err = command(*words, folder=odd, **PLAIN)
    assert status == 2
    assert b"there is no program './fehlt-" in err


def test_the_agent_closes_the_port_that_it_has_reserved(odd: Path) -> None:
    words = ("run", "-n1", "--coordinator", "tcp://127.0.0.1:1", "--no-python", "true")
    assert b"unclosed" not in command(*words, folder=odd, **STRICT)[2]
