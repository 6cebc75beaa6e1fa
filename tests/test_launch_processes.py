"""`gradserver run` with real processes: output, failures, signals, kills, restarts, and hosts behind a remote shell."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from gradserver.status import fetch
from tests.cluster import PATIENCE, ROOT, Program, marked, wait_until

Write = Callable[[str], str]
NOBODY = ("--coordinator", "tcp://127.0.0.1:1")
"""Options of runs with workers that never connect: no coordinator is started."""


@pytest.fixture
def script(tmp_path: Path) -> Write:
    """Return a function that writes a training script, and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(f"import os, sys, time, signal\nrank = int(os.environ['RANK'])\n{text}")
        return str(path)

    return write


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADSERVER_URL", "GRADSERVER_NAME", "RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def launched(*arguments: str, **environment: str) -> Iterator[Program]:
    """Start the command. Nothing of it is left behind, or the test fails."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    words = ("-m", "gradserver", "run", *arguments)
    try:
        with Program(*words, environment={"LAUNCHED": mark, "GRADSERVER_URL": "", **environment}) as program:
            yield program
        wait_until(lambda: not marked("LAUNCHED", mark), "all processes have ended")
    finally:
        for pid in marked("LAUNCHED", mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def shell_command(*arguments: str) -> subprocess.Popen[bytes]:
    """Start the command with pipes that the test reads itself."""
    command = [sys.executable, "-m", "gradserver", "run", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)


def run(*arguments: str, **environment: str) -> tuple[int, list[str], list[str]]:
    """Run the command to its end. Return its exit status, its output, and its messages."""
    with launched(*arguments, **environment) as program:
        return program.end(), program.output(), program.complaints()


def verdict(messages: list[str]) -> list[str]:
    """Return the end of the messages, from the first failure on."""
    (begin,) = [index for index, line in enumerate(messages) if "failed first" in line]
    return messages[begin:]


# ── output ────────────────────────────────────────────────────────────────────────────────────────────


def test_output_has_the_rank_in_front_and_keeps_its_stream(script: Write) -> None:
    train = script("print('out', sys.argv[1:]); print('err', file=sys.stderr)")
    status, output, messages = run("--nproc", "2", *NOBODY, train, "--lr", "1", "--", "--nproc=3")
    assert status == 0
    assert sorted(output) == [f"[{rank}] out ['--lr', '1', '--', '--nproc=3']" for rank in (0, 1)]
    assert messages[0].endswith(
        "--nproc=3 is behind the script, so that the script gets it. Options of this command come first"
    )
    assert "2 workers on " in messages[1]
    assert messages[1].endswith(f"; coordinator {NOBODY[1]}")
    assert sorted(messages[2:4]) == ["[0] err", "[1] err"]
    assert messages[4].startswith(f"gradserver run: no coordinator has answered at {NOBODY[1]}")


def test_output_is_shown_when_it_is_printed(script: Write) -> None:
    with launched(*NOBODY, "-n1", script("print('early'); time.sleep(60)")) as program:
        assert program.expect("[0] ") == "early"
        program.send_signal(signal.SIGTERM)
        assert program.end() == 143


def test_every_byte_of_any_output_is_kept(script: Write, tmp_path: Path) -> None:
    """Test a flood, bytes that are no text, and an end without a line end, of two workers at once."""
    train = script(
        "line = bytes(range(32, 127)) * 10 + b'\\n'\nsys.stdout.buffer.write(line * 5_000 + b'\\xff\\xe2\\x82 half')\n"
    )
    with shell_command("--nproc", "2", "--log-dir", str(tmp_path / "logs"), *NOBODY, train) as process:
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    line = bytes(range(32, 127)) * 10 + b"\n"
    lines = output.splitlines(keepends=True)
    for rank in (0, 1):
        title, _, kept = (tmp_path / "logs" / f"rank-{rank}.log").read_bytes().partition(b"\n")
        assert title.startswith(b"=== 20")
        assert f"rank {rank} of 2, host {socket.gethostname()}, process ".encode() in title
        assert kept == line * 5_000 + b"\xff\xe2\x82 half"
        prefix = f"[{rank}] ".encode()
        assert [one for one in lines if one.startswith(prefix)] == [prefix + line] * 5_000 + [
            prefix + b"\xff\xe2\x82 half\n"
        ]


def test_logs_of_an_earlier_run_stay(script: Write, tmp_path: Path) -> None:
    train = script("print('life')")
    for options in ((), NOBODY):
        assert run("--log-dir", str(tmp_path / "logs"), *options, train)[0] == 0
    text = (tmp_path / "logs" / "rank-0.log").read_text()
    assert [line for line in text.splitlines() if not line.startswith("===")] == ["life", "life"]
    assert (tmp_path / "logs" / "coordinator.log").read_text().count("stopped") == 1


def test_a_folder_that_cannot_be_written_is_named(script: Write, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, _, messages = run("--log-dir", str(tmp_path / "file"), "-n1", *NOBODY, script(""))
    assert (status, messages) == (1, [f"gradserver run: --log-dir {tmp_path / 'file'} cannot be written: File exists"])


def test_a_terminal_shows_colours_and_interrupts(script: Write) -> None:
    train = script(
        "try:\n"
        "    print('ready', sys.stdin.read() == '')\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: print('interrupted'); raise\n"
    )
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    command = [sys.executable, "-m", "gradserver", "run", "-n2", *NOBODY, train]
    process = subprocess.Popen(command, env=environment, preexec_fn=partial(os.login_tty, terminal))
    os.close(terminal)
    seen = b""
    while seen.count(b"ready True") < 2:
        seen += os.read(controller, 1 << 16)
    assert b"\x1b[1mgradserver run:\x1b[0m 2 workers on " in seen
    assert b"\x1b[36m[0]\x1b[0m ready" in seen
    assert b"\x1b[33m[1]\x1b[0m ready" in seen
    os.write(controller, b"\x03")
    with contextlib.suppress(OSError):  # the end of a terminal
        while data := os.read(controller, 1 << 16):
            seen += data
    assert b"SIGINT was passed on to 2 workers." in seen
    assert seen.count(b" interrupted") == 2, "the agent passes the signal on, and does not get it itself"
    assert process.wait(PATIENCE) == 130
    os.close(controller)


def test_nobody_waits_for_a_reader_that_is_gone(script: Write) -> None:
    train = script("for _ in range(1000): print('x' * 1000)\nprint('trained', file=sys.stderr)")
    with shell_command("-n1", *NOBODY, train) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, messages = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert b"[0] trained\n" in messages
    assert b"standard output is closed, so that what workers print there is lost. Training goes on\n" in messages


def test_a_reader_that_has_stopped_holds_up_the_workers_and_nobody_elses_end(script: Write, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    train = script(
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "for count in range(1_000_000):\n"
        "    print('x' * 100_000)\n"
        "    with open(sys.argv[1], 'a') as file: file.write('.')\n"
    )

    def stalls() -> bool:
        """Return whether the worker has printed something, and prints no more for a while."""
        begun = time.monotonic()
        size = progress.stat().st_size if progress.exists() else 0
        while time.monotonic() < begun + 0.5:
            if size == 0 or progress.stat().st_size != size:
                return False
            time.sleep(0.01)
        return True

    with shell_command("-n1", *NOBODY, train, str(progress)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        wait_until(stalls, "the worker waits for the reader")
        assert progress.stat().st_size < 60, "6 MB wait at most: a little more than 1 MiB at agent and launcher each"
        assert b"1 worker on " in process.stderr.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            assert b"SIGINT" in process.stderr.readline()
        assert process.wait(PATIENCE) == 130


# ── what workers are told ─────────────────────────────────────────────────────────────────────────────


def test_workers_average_through_a_coordinator_that_is_started_for_them(script: Write, tmp_path: Path) -> None:
    train = script(
        "import gradserver, numpy\n"
        "with gradserver.connect(timeout=30) as worker:\n"
        "    total = worker.all_reduce(numpy.ones(1), 'sum')\n"
        "    print(worker.rank, worker.world_size, total.tolist(), worker.name == os.environ['GRADSERVER_NAME'])\n"
        "    print('url', os.environ['GRADSERVER_URL'])\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    )
    seen = tmp_path / "seen"
    with launched("--nproc", "2", train, str(seen)) as program:
        assert program.expect("[0] ") == "0 2 [2.0] True"
        url = program.expect("[0] url ")
        assert len(fetch(url)["groups"]["default"]["members"]) == 2
        seen.touch()
        assert program.end() == 0
        assert f"; coordinator {url}, started here" in program.complaints()[0]


def test_each_worker_has_a_device_of_its_own(script: Write) -> None:
    train = script("print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'])")
    _, output, messages = run(*NOBODY, train, CUDA_VISIBLE_DEVICES="4,7")
    assert sorted(output) == ["[0] 4 0", "[1] 7 1"]
    assert "2 workers on " in messages[0]
    assert ", a GPU each" in messages[0]
    _, output, messages = run("--gpus", "all", "-n3", *NOBODY, train, CUDA_VISIBLE_DEVICES="4,7")
    assert sorted(output) == ["[0] 4,7 0", "[1] 4,7 1", "[2] 4,7 2"]


def test_more_workers_than_devices_share_them(script: Write) -> None:
    train = script("print(os.environ['CUDA_VISIBLE_DEVICES'])")
    _, output, messages = run("-n3", *NOBODY, train, CUDA_VISIBLE_DEVICES="0")
    assert sorted(output) == [f"[{rank}] 0" for rank in range(3)]
    assert "which share GPUs (3 on 1 GPU): NCCL needs one for each" in messages[0]


def test_rank_0_can_listen_at_the_port_of_the_rendezvous(script: Write) -> None:
    train = script(
        "import socket\n"
        "address = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])\n"
        "if rank == 0:\n"
        "    with socket.create_server(address) as server: print(server.accept()[0].recv(9).decode())\n"
        "else:\n"
        "    while True:\n"
        "        try: socket.create_connection(address).sendall(b'met'); break\n"
        "        except ConnectionRefusedError: time.sleep(0.01)\n"
    )
    assert run("-n2", *NOBODY, train)[:2] == (0, ["[0] met"])


def test_programs_and_modules_run_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run("-n1", *NOBODY, "-m", "package.train", "-x", PYTHONPATH=f"{ROOT}:{tmp_path}")[1] == [
        "[0] __main__ ['-x']"
    ]
    assert run("-n1", *NOBODY, "--no-python", "sh", "-c", "echo $RANK; exit 4")[:2] == (4, ["[0] 0"])


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_failure_is_shown_last_and_alone(script: Write) -> None:
    train = script(
        "import gradserver; worker = gradserver.connect(timeout=30)\n"
        "worker.barrier()\n"
        "if rank == 1:\n"
        '    raise ValueError("boom")\n'
        "worker.barrier()\n"
    )
    status, _, messages = run("--nproc", "3", train)
    assert status == 1
    assert "[1] ValueError: boom" in messages
    page = (ROOT / "docs" / "launching.md").read_text()
    (told,) = re.findall(r"```text\n(gradserver run: rank 1 failed first.*?)```", page, re.DOTALL)
    real = "\n".join(verdict(messages)).replace(train, "/home/me/train.py").replace(socket.gethostname(), "box")
    assert without_figures(real) == without_figures(told.rstrip())


def without_figures(text: str) -> str:
    return re.sub(r"process \d+|after \d+\.\d s", "#", text)


@pytest.mark.parametrize(
    ("text", "status", "fate"),
    [
        ("sys.exit(7)", 7, "exit status 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
        ("import nothing_of_this_name", 1, "exit status 1"),
    ],
)
def test_the_exit_status_is_that_of_the_failed_worker(script: Write, text: str, status: int, fate: str) -> None:
    found, _, messages = run("--nproc", "2", *NOBODY, script(text))
    assert found == status
    assert f"failed first: {fate} (" in verdict(messages)[0]
    assert verdict(messages)[-1].endswith("failed in the same way")


def test_workers_that_are_left_are_asked_to_end_and_then_killed(script: Write, tmp_path: Path) -> None:
    train = script(
        "if rank == 2: signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').close()\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "if rank == 0: sys.exit(3)\n"
        "time.sleep(60)\n"
    )
    status, _, messages = run("--nproc", "3", "--grace", "0.5", *NOBODY, train, str(tmp_path / "ready"))
    assert status == 3
    assert "gradserver run: ranks 1, 2: asked to end (SIGTERM)" in messages
    assert "gradserver run: rank 2: not ended within 0.5 s, and killed (SIGKILL)" in messages
    assert messages[-1] == "gradserver run: ranks 1, 2 were ended"


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/shell\n")
    program.chmod(0o755)
    status, _, messages = run("-n2", *NOBODY, "--no-python", str(program))
    assert status == 127
    assert verdict(messages)[0].startswith("gradserver run: rank 0 failed first: exit status 127")
    assert verdict(messages)[1] == f"  there is no program {str(program)!r}"


def test_a_coordinator_that_cannot_start_says_why(script: Write) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        status, _, messages = run("-n2", "--bind", url, script(""))
    assert status == 1
    assert messages[0] == "gradserver run: the coordinator could not start:"
    assert f"cannot listen on {url}: the port is in use" in messages[1]


def test_a_coordinator_that_dies_is_the_first_failure(script: Write) -> None:
    train = script(
        "import gradserver\n"
        "worker = gradserver.connect(timeout=30)\n"
        "worker.barrier()\n"
        "print('parent', os.getppid()) if rank == 0 else None\n"
        "while True: worker.barrier()\n"
    )
    with launched("-n2", train) as program:
        agent = int(program.expect("[0] parent "))
        (coordinator,) = children(program.pid) - {agent}
        os.kill(coordinator, signal.SIGKILL)
        assert program.end() == 137
        lines = verdict(program.complaints())
    assert lines[0].startswith("gradserver run: the coordinator failed first: killed by SIGKILL (process ")
    assert lines[-1] == "gradserver run: ranks 0, 1 failed as a consequence"


def children(pid: int) -> set[int]:
    """Return the children of a process."""
    found = (path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return {int(child) for some in found for child in some}


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("number", "text", "status"),
    [
        (signal.SIGINT, "", 130),
        (signal.SIGTERM, "", 143),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))", 0),
        (signal.SIGUSR1, "signal.signal(signal.SIGUSR1, lambda *_: (print('saved'), sys.exit(0)))", 0),
    ],
    ids=["interrupt", "terminate", "save", "user"],
)
def test_signals_are_passed_on(script: Write, number: signal.Signals, text: str, status: int) -> None:
    with launched("-n1", *NOBODY, script(f"{text}\nprint('ready'); time.sleep(60)")) as program:
        program.expect("[0] ready")
        program.send_signal(number)
        if status == 0:
            program.expect("[0] saved")
        assert program.end() == status
        messages = program.complaints()
    assert not [line for line in messages if "failed" in line]
    passed = f"gradserver run: {number.name} was passed on to 1 worker. Those that have not ended in 30 s are killed; "
    assert any(line.startswith(passed) for line in messages) is (number is not signal.SIGUSR1)


def test_a_second_interrupt_kills(script: Write) -> None:
    train = script("signal.signal(signal.SIGINT, lambda *_: print('no'))\nprint('ready')\nwhile True: time.sleep(1)")
    with launched("-n1", *NOBODY, train) as program:
        program.expect("[0] ready")
        program.send_signal(signal.SIGINT)
        program.expect("[0] no")
        program.send_signal(signal.SIGINT)
        assert program.end() == 130
        assert program.complaints()[-1] == "gradserver run: SIGINT: all that is left is killed"


FAMILY = """
import subprocess
sleeper = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
           "print('child', flush=True); time.sleep(600)"]
for is_apart in (False, True):  # one of them in a session of its own
    child = subprocess.Popen(sleeper, start_new_session=is_apart, stdout=subprocess.PIPE)
    child.stdout.readline()
"""


@pytest.mark.parametrize(
    ("text", "options"),
    [("", ()), ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", NOBODY)],
    ids=["with a coordinator", "with workers that ignore SIGTERM"],
)
def test_a_killed_launcher_leaves_nobody_behind(script: Write, text: str, options: tuple[str, ...]) -> None:
    train = script(f"{text}\n{FAMILY}\nprint('ready')\ntime.sleep(600)")
    with launched("-n1", "--grace", "0.5", *options, train) as program:
        program.expect("[0] ready")
        program.send_signal(signal.SIGKILL)
        program.end()


def test_a_killed_agent_leaves_nobody_behind(script: Write) -> None:
    train = script(f"{FAMILY}\nprint('parent', os.getppid())\ntime.sleep(600)")
    with launched("-n1", *NOBODY, train) as program:
        os.kill(int(program.expect("[0] parent ")), signal.SIGKILL)
        assert program.end() == 137
        lines = verdict(program.complaints())
        assert lines[1] == "  the host was lost: its agent ended (killed by SIGKILL)"


def test_a_worker_does_not_outlive_launcher_and_agent(script: Write) -> None:
    train = script("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('parent', os.getppid())\ntime.sleep(600)")
    with launched("-n1", *NOBODY, train) as program:
        agent = int(program.expect("[0] parent "))
        os.kill(agent, signal.SIGSTOP)  # it notices nothing
        program.send_signal(signal.SIGKILL)
        program.end()
        os.kill(agent, signal.SIGKILL)


def test_children_of_a_worker_that_has_ended_do_not_hold_up_the_end(script: Write) -> None:
    """Test children that keep the worker's output open."""
    text = FAMILY.replace("stdout=subprocess.PIPE", "stderr=subprocess.PIPE").replace(
        "    child.stdout.readline()\n", ""
    )
    status, output, _ = run("-n1", "--grace", "0.2", *NOBODY, script(f"{text}\nprint('done')"))
    assert status == 0
    assert "[0] done" in output


@pytest.mark.parametrize("status", [0, 5])
def test_children_of_a_worker_that_has_ended_end_while_others_go_on(script: Write, tmp_path: Path, status: int) -> None:
    child = tmp_path / "child"
    train = script(
        "import pathlib, subprocess\n"
        "file, status = pathlib.Path(sys.argv[1]), int(sys.argv[2])\n"
        "ignoring = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "sleeper = ignoring + 'print(1, flush=True); time.sleep(600)'\n"
        "if rank == 0:\n"
        "    child = subprocess.Popen([sys.executable, '-c', sleeper], stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "    file.with_suffix('.new').write_text(str(child.pid))\n"
        "    file.with_suffix('.new').rename(file)\n"
        "    os._exit(status)\n"
        "while not file.exists(): time.sleep(0.01)\n"
        "while os.path.exists(f'/proc/{file.read_text()}'): time.sleep(0.01)\n"
        "print('ended')\n"
    )
    found, output, _ = run("-n2", "--min=1", "--grace=0.2", *NOBODY, train, str(child), str(status))
    assert (found, output) == (0, ["[1] ended"])


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────

ELASTIC = """
import gradserver, numpy
life, total = int(os.environ["GRADSERVER_RESTARTS"]), numpy.zeros(2)  # rounds, and contributions to them
with gradserver.connect(timeout=30) as worker:
    if worker.joins:
        worker.enter(lambda state: numpy.copyto(total, state["total"]))
    worker.serve_state(lambda: {"total": total})
    lives = count = 0
    while not (lives and count == 2):
        lives, count = worker.all_reduce(numpy.array([life, 1.0]), "sum").tolist()
        total += [1, count]
        worker.next_round()
        if rank == 1 and life == 0 and total[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    print("rank", worker.rank, "life", life, "total", total.tolist())
"""


def test_a_worker_that_dies_is_started_again_and_joins_the_others(script: Write) -> None:
    status, output, messages = run("-n2", "--restart", "1", script(ELASTIC))
    assert status == 0, messages
    first, second = sorted(output)
    assert first.startswith("[0] rank 0 life 0 total [")
    assert second.startswith("[1] rank 1 life 1 total [")
    assert first.partition("total")[2] == second.partition("total")[2], "it has the others' state"
    (line,) = [line for line in messages if "started again" in line]
    assert line.startswith("gradserver run: rank 1: killed by SIGKILL, after ")


def test_a_coordinator_that_keeps_its_state_is_started_again(script: Write, tmp_path: Path) -> None:
    train = script(
        "import gradserver, numpy\n"
        "with gradserver.connect(timeout=30) as worker:\n"
        "    print('parent', os.getppid()) if rank == 0 else None\n"
        "    while not os.path.exists(sys.argv[1]): worker.next_round()\n"
        "    print('rounds go on')\n"
    )
    over, state = tmp_path / "over", tmp_path / "state"
    with launched("-n2", "--restart", "1", "--serve", f"--state-dir {state}", train, str(over)) as program:
        agent = int(program.expect("[0] parent "))
        (coordinator,) = children(program.pid) - {agent}
        os.kill(coordinator, signal.SIGKILL)
        wait_until(lambda: children(program.pid) - {agent, coordinator}, "another coordinator")
        over.touch()
        assert program.end() == 0
        assert any("It is started again (1 of 1), and the workers go on" in line for line in program.complaints())


def test_a_worker_is_started_again_so_many_times(script: Write) -> None:
    train = script("print('life', os.environ['GRADSERVER_RESTARTS'])\nsys.exit(5)")
    status, output, messages = run("-n1", "--restart", "2", *NOBODY, train)
    assert (status, output) == (5, ["[0] life 0", "[0] life 1", "[0] life 2"])
    again = [line for line in messages if "started again" in line]
    assert [line.rpartition(" (")[2] for line in again] == ["1 of 2)", "2 of 2)"]
    assert verdict(messages)[0].startswith("gradserver run: rank 0 failed first: exit status 5")


def test_a_worker_is_not_started_again_when_another_is_done(script: Write, tmp_path: Path) -> None:
    train = script(
        "import pathlib\n"
        "other = pathlib.Path(sys.argv[1])\n"
        "print('life')\n"
        "if rank == 0:\n"
        "    other.with_suffix('.new').write_text(str(os.getpid()))\n"
        "    other.with_suffix('.new').rename(other)\n"
        "else:\n"
        "    while not other.exists() or os.path.exists(f'/proc/{other.read_text()}'): time.sleep(0.01)\n"
        "    sys.exit(5)\n"
    )
    status, output, _ = run("-n2", "--restart", "2", *NOBODY, train, str(tmp_path / "other"))
    assert (status, sorted(output)) == (5, ["[0] life", "[1] life"])


def test_a_run_goes_on_while_enough_workers_are_left(script: Write) -> None:
    train = script("if rank == 1: sys.exit(5)\nprint('done')")
    status, output, messages = run("-n3", "--min", "2", *NOBODY, train)
    assert (status, sorted(output)) == (0, ["[0] done", "[2] done"])
    assert any(line.endswith("The others go on without it") for line in messages)
    assert run("-n3", "--min", "3", *NOBODY, train)[0] == 5
    assert run("-n3", "--min", "4", *NOBODY, train)[::2] == (
        2,
        ["gradserver run: --min 4 is more than there are workers: 3"],
    )


# ── hosts ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def rsh(tmp_path: Path) -> str:
    """Return a remote shell that reaches this machine under every name, with another environment."""
    path = tmp_path / "rsh"
    path.write_text(
        "#!/bin/sh\n"
        "host=$1; shift\n"
        "[ $host = down ] && { echo 'no route to it' >&2; exit 255; }\n"
        "echo Welcome to $host; echo be careful >&2\n"
        "cd /\n"
        'exec env -i PATH=/usr/bin:/bin HOME=/home/$host LAUNCHED=$LAUNCHED SSH_CONNECTION="127.0.0.1 9 127.0.0.2 22" '
        'sh -c "$*"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_workers_run_on_all_hosts_in_the_same_folder_and_environment(script: Write, rsh: str) -> None:
    names = "RANK LOCAL_RANK GROUP_RANK GRADSERVER_NAME MASTER_ADDR HOME LR"
    train = script(f"print(*(os.environ[name] for name in '{names}'.split()), os.getcwd(), sys.argv[1:])")
    status, output, messages = run("--hosts", "a,b:2", "--rsh", rsh, *NOBODY, "-n1", train, "it's $HOME", LR="1 2")
    assert (status, sorted(output)) == (
        0,
        [
            f'[0] 0 0 0 a:0 127.0.0.2 /home/a 1 2 {ROOT} ["it\'s $HOME"]',
            f'[1] 1 0 1 b:0 127.0.0.2 /home/b 1 2 {ROOT} ["it\'s $HOME"]',
            f'[2] 2 1 1 b:1 127.0.0.2 /home/b 1 2 {ROOT} ["it\'s $HOME"]',
        ],
    )
    (message,) = messages
    assert "3 workers on 2 hosts (a: 1, b: 2), no GPU, " in message


def test_workers_of_all_hosts_reach_the_coordinator(script: Write, rsh: str) -> None:
    train = script(
        "import gradserver, numpy\n"
        "with gradserver.connect(timeout=30) as worker: print(worker.all_reduce(numpy.ones(1), 'sum').tolist())\n"
    )
    bind = ("--bind", "tcp://127.0.0.1:0")
    status, output, _ = run("--hosts", "a,localhost", "--rsh", rsh, *bind, "-n1", train)
    assert (status, sorted(output)) == (0, ["[0] [2.0]", "[1] [2.0]"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts a,down", "host down cannot be used: the remote shell ended (exit status 255). It must work without"),
        ("--hosts a --remote-python /no/python", "host a cannot be used: the remote shell ended (exit status 127)"),
        ("--hosts a --rsh nothing", "'nothing' cannot be run: No such file or directory. --rsh names it"),
    ],
)
def test_hosts_that_cannot_be_used_are_named(script: Write, rsh: str, options: str, message: str) -> None:
    status, _, messages = run("--rsh", rsh, *options.split(), *NOBODY, "-n1", script(""))
    assert status == 1
    assert messages[0].startswith(f"gradserver run: {message}")
    assert "down" not in options or messages[1] == "  no route to it"


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ("encode(Kind.HELLO, {'version': '0.0.0'})", "gradserver is 0.0.0 there and "),
        ("b'something else'", "what answers there is not an agent of gradserver "),
    ],
)
def test_an_agent_of_another_version_is_refused(script: Write, tmp_path: Path, frames: str, message: str) -> None:
    shell = tmp_path / "shell"
    lines = f"from gradserver.tools.launch.frames import *\nsys.stdout.buffer.write(MARK + {frames})"
    shell.write_text(f"#!{sys.executable}\nimport sys\n{lines}\nsys.stdout.flush()\nsys.stdin.read()\n")
    shell.chmod(0o755)
    status, _, (line,) = run("--hosts", "a", "--rsh", str(shell), *NOBODY, script(""))
    assert status == 1
    assert line.startswith(f"gradserver run: host a: {message}")


def test_a_lost_connection_ends_the_workers_behind_it(script: Write, rsh: str) -> None:
    """Test a remote shell that dies: the agent behind it reads the end, and ends its workers."""
    Path(rsh).write_text(Path(rsh).read_text().replace("exec env", "env"))  # the shell stays between
    train = script(f"{FAMILY}\nprint('agent', os.getppid())\ntime.sleep(600)")
    with launched("--hosts", "a", "--rsh", rsh, "--grace", "0.5", *NOBODY, "-n1", train) as program:
        program.expect("[0] agent ")
        (shell,) = children(program.pid)
        os.kill(shell, signal.SIGKILL)
        assert program.end() == 137
        assert verdict(program.complaints())[1] == "  the host was lost: its agent ended (killed by SIGKILL)"


# ── with torch ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_the_readmes_session_is_as_it_is_shown() -> None:
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^gradserver run (.*)$", readme, re.MULTILINE)
    (shown,) = re.findall(r"^```text\n(\[0\] epoch .*?)^```", readme, re.DOTALL | re.MULTILINE)
    status, output, _ = run(*command.split())
    assert status == 0

    def stems(lines: list[str]) -> list[str]:
        return sorted(re.sub(r"(loss|weights) \S+", r"\1", line) for line in lines)

    assert stems(output) == stems(shown.splitlines())


@pytest.mark.long
def test_torch_finds_its_rendezvous(script: Write) -> None:
    train = script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total); print(total.item()); dist.destroy_process_group()\n"
    )
    status, output, _ = run("-n2", *NOBODY, train)
    assert (status, sorted(output)) == (0, ["[0] 2.0", "[1] 2.0"])
