"""Processes of a fork server are like those that `subprocess.Popen` starts, and none outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradserver.tools.common.forks import ForkServer
from gradserver.tools.common.processes import Child, Family, RunError, inherited_environment
from tests.cluster import PATIENCE, ROOT, wait_until

PROGRAM = "tests.forked_program"


def environment() -> dict[str, str]:
    return {**inherited_environment(), "PYTHONPATH": str(ROOT), "GRADSERVER_TEST_SAYS": "this"}


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer(["json", "gradserver.protocol.errors"], environment(), tmp_path / "forks.log")
    server.await_ready(PATIENCE)
    yield server
    server.close()


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    with Family(tmp_path, environment()) as made:
        yield made


def start(family: Family, forks: ForkServer, name: str, *arguments: str) -> Child:
    child = family.start(name, "-m", PROGRAM, *arguments, starter=forks.start)
    await_line(family, child)
    return child


def await_line(family: Family, child: Child) -> None:
    def has_come() -> bool:
        family.hear(0.1)
        return bool(child.lines)

    wait_until(has_come, f"{child.name} says something")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "none"


def test_a_process_has_its_own_id_session_arguments_pipes_and_log(family: Family, forks: ForkServer) -> None:
    children = [start(family, forks, f"w{number}", "echo", f"{number}") for number in range(2)]
    for number, child in enumerate(children):
        pid, session, said, *arguments = child.lines.pop().split()
        assert int(pid) == int(session) == child.process.pid != os.getpid()
        assert (said, arguments) == ("this", ["echo", f"{number}"])
        assert child.process.poll() is None
        child.say(f"line {number}")
    for number, child in enumerate(children):
        await_line(family, child)
        assert child.lines == [f"line {number}"]
        assert child.last_words(1) == [f"heard line {number}"]
        child.hang_up()
        assert child.process.wait(PATIENCE) == 3
        assert child.process.poll() == child.process.returncode == 3
        assert child.fate() == "ended with status 3"
        child.process.kill()  # of a process that has ended: nothing happens


def test_signals_reach_it_and_show_in_its_end(family: Family, forks: ForkServer) -> None:
    killed, ended, failed = (start(family, forks, f"w{number}", "echo") for number in range(3))
    killed.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(killed.process.pid) == "T", "it is stopped")
    with pytest.raises(subprocess.TimeoutExpired):
        killed.process.wait(0.0)
    killed.process.kill()
    assert killed.process.wait(PATIENCE) == -signal.SIGKILL
    ended.process.terminate()
    assert ended.process.wait(PATIENCE) == -signal.SIGTERM
    failed.say("fail")
    assert failed.process.wait(PATIENCE) == 1
    assert failed.last_words(1) == ["ValueError: it was told to"]
    assert killed.fate() == "was killed by SIGKILL"


def test_processes_end_with_their_fork_server(family: Family, forks: ForkServer) -> None:
    child = start(family, forks, "w0", "echo")
    forks.close()
    assert child.process.wait(PATIENCE) == -signal.SIGKILL
    wait_until(lambda: state_of(child.process.pid) in ("Z", "none"), "it has ended")
    with pytest.raises(RunError, match="the fork server has ended"):
        family.start("w1", "-m", PROGRAM, starter=forks.start)


@pytest.mark.parametrize("which", ["run", "server"])
def test_nothing_outlives_a_run_or_a_fork_server_that_is_killed(which: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", PROGRAM, "run", str(tmp_path)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        server, *forked = (int(pid) for pid in run.stdout.readline().split())
        assert len(forked) == 2
        os.kill(run.pid if which == "run" else server, signal.SIGKILL)
        wait_until(lambda: all(state_of(pid) in ("Z", "none") for pid in (server, *forked)), "all have ended")
        run.kill()


def test_a_module_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    server = ForkServer(["gradserver.absent"], environment(), tmp_path / "forks.log")
    with pytest.raises(RunError, match=r"No module named 'gradserver\.absent'"):
        server.await_ready(PATIENCE)
    server.close()


def test_a_module_that_starts_a_thread_cannot_be_forked(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text("import threading\nthreading.Thread(target=input, daemon=True).start()\n")
    own = {**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    server = ForkServer(["threaded"], own, tmp_path / "forks.log")
    with pytest.raises(RunError, match="importing threaded has started 1 thread"):
        server.await_ready(PATIENCE)
    server.close()
