"""`gradserver run` and its coordinator: workers that never join are told of, and options that need their number."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.serving import sized
from tests.cluster import PATHS
from tests.torchrun_program import entry_points

EARLY = """
import sys
from gradserver.cli import main
from gradserver.tools.launch import attendance

attendance.JOIN_SECONDS, come = {}, {}
deadline = attendance.Attendance.deadline
attendance.Attendance.deadline = lambda self: deadline(self) if len(self._seen) >= come else None
sys.exit(main(sys.argv[1:]))
"""
"""The command, with another time until workers are missed, and not before so many have come."""
WAITS = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
JOINS = "import gradserver, os, sys, time\nworker = gradserver.connect(timeout=60)\nworker.barrier()\n"
TRAINS = JOINS + (
    "import torch\n"
    "model = gradserver.DistributedDataParallel(torch.nn.Linear(2, 1), worker)\n"
    "for _ in range(3): model(torch.ones(1, 2)).sum().backward()\n"
)
OVER_TORCH = (
    "import sys\nsys.path[:0] = {}\n"
    "import os, time, torch, torch.distributed as dist\n"
    "dist.init_process_group('gradserver')\n"
    "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
    "for step in range(3):\n"
    "    if os.environ['RANK'] == '1' and step == {}: raise ValueError('boom')\n"
    "    model(torch.ones(1, 2)).sum().backward()\n"
    "time.sleep(1.5)\n"
    "dist.destroy_process_group()\n"
)
"""A script with torch's own wrapper, in which rank 1 fails in a step."""
GLOO = "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('sum', dist.get_world_size())\n"


def run(tmp_path: Path, script: str, *options: str, seconds: float = 30.0) -> tuple[int, list[str]]:
    """Run a script with two workers to its end. Return the status, and the lines of the launcher."""
    path = tmp_path / "train.py"
    path.write_text(script)
    command = [sys.executable, "-c", EARLY.format(seconds, 0), "run", "--nproc", "2", *options, str(path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVER_")}
    environment["PYTHONPATH"] = PATHS
    ran = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, timeout=90)
    start = "gradserver run: "
    return ran.returncode, [line.removeprefix(start) for line in ran.stderr.splitlines() if line.startswith(start)]


def told_of(tmp_path: Path, script: str, word: str, come: int) -> str:
    """Run two workers that stay until the launcher has said ``word``. Return that line."""
    (tmp_path / "train.py").write_text(script)
    seen = tmp_path / "seen"
    command = [sys.executable, "-c", EARLY.format(1.0, come), "run", "--nproc", "2", "train.py", str(seen)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRADSERVER_")}
    environment["PYTHONPATH"] = PATHS
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if word in line:
                seen.touch()
        process.wait(30)
    return next((line for line in lines if word in line), f"no line with {word!r}: {lines}")


# ── workers that do not come ──────────────────────────────────────────────────────────────────────────


def test_workers_that_train_beside_the_coordinator_are_told_so(tmp_path: Path) -> None:
    told = told_of(tmp_path, GLOO + WAITS, "after 1 s", 0)
    assert re.match(r"gradserver run: no worker has joined a group at tcp://127\.0\.0\.1:\d+ after 1 s\. ", told)
    assert "transformers.Trainer" in told
    assert "gradserver.connect()" in told
    assert "init_process_group('gradserver')" in told
    assert "torchrun" in told


def test_a_plain_script_that_ends_soon_is_told_at_its_end_alone(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "print('trained')")
    assert status == 0
    assert len(lines) == 2
    assert re.match(
        r"no worker has joined a group at tcp://127\.0\.0\.1:\d+\. A script joins by gradserver\.connect\(\)", lines[1]
    )


def test_a_run_that_fails_says_nothing_of_workers_that_had_not_joined(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "raise SystemExit(3)")
    assert status == 3
    assert not [line for line in lines if "joined" in line]


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    script = "import gradserver, os\nif os.environ['RANK'] == '0': w = gradserver.connect(group='own', world_size=1)\n"
    told = told_of(tmp_path, script + WAITS, "come to the coordinator", 1)
    assert "1 of 2 workers has come to the coordinator after 1 s; rank 1 has not. Group 'own' has " in told


def test_groups_in_which_workers_wait_for_each_other_are_named(tmp_path: Path) -> None:
    script = (
        "import os, threading, gradserver\n"
        "name = 'ab'[int(os.environ['RANK'])]\n"
        "threading.Thread(target=gradserver.connect, kwargs={'group': name}, daemon=True).start()\n"
    )
    told = told_of(tmp_path, script + WAITS, "come to the coordinator", 2)
    assert re.search(
        r"2 of 2 workers have come to the coordinator after 1 s\. Group '[ab]' has '.*'\. Group '[ab]' has", told
    )


def test_a_coordinator_that_never_answers_is_told_of(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "", "--coordinator", "tcp://127.0.0.1:1")
    assert status == 0
    assert lines[1] == "no coordinator has answered at tcp://127.0.0.1:1, so no worker can have joined a group there"


# ── workers that come ─────────────────────────────────────────────────────────────────────────────────


def test_a_run_says_when_all_have_joined_and_at_the_end_what_it_was(tmp_path: Path) -> None:
    status, lines = run(tmp_path, TRAINS + "time.sleep(1.5)\n")
    assert status == 0
    assert lines[1] == "all 2 workers have joined"
    assert re.fullmatch(r"3 rounds in \d+\.\d s, no worker was lost", lines[2])


def test_workers_that_join_by_torch_distributed_have_joined(tmp_path: Path) -> None:
    status, lines = run(tmp_path, OVER_TORCH.format(entry_points(tmp_path / "entry"), -1))
    assert status == 0
    assert lines[1:] == ["all 2 workers have joined"]


def test_the_worker_that_fails_first_is_known_under_torch_distributed(tmp_path: Path) -> None:
    status, lines = run(tmp_path, OVER_TORCH.format(entry_points(tmp_path / "entry"), 2))
    assert status == 1
    told = [line for line in lines if "fail" in line]
    assert told[0].startswith("rank 1 failed first: exit status 1")
    assert told[1:] == ["rank 0 failed as a consequence"]


def test_workers_that_come_and_leave_at_once_are_not_missed(tmp_path: Path) -> None:
    status, lines = run(tmp_path, JOINS + "worker.close()\n")
    assert status == 0
    assert not [line for line in lines if "no worker" in line or "has not" in line]


def test_workers_of_another_group_are_no_news(tmp_path: Path) -> None:
    """Test names of the script's own, which the launcher does not know."""
    script = JOINS.replace("timeout=60", "timeout=60, name=f'me{os.environ[chr(82) + chr(65) + chr(78) + chr(75)]}'")
    status, lines = run(tmp_path, script)
    assert status == 0
    assert not [line for line in lines if "no worker has" in line or "has not" in line]


# ── options that need the number of workers ───────────────────────────────────────────────────────────

FILE = '[group.default]\nquorum = "50%"\n[group.critics]\nworkers = 1\n'


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["--quorum", "75%", "--state-dir", "state"], ["--workers", "*=4"]),
        (["--backup", "1"], ["--workers", "*=4"]),
        (["--mode", "bounded", "--staleness", "2"], ["--workers", "*=4"]),
        (["--gather", "3"], ["--workers", "*=4"]),
        (["--rejoin-for", "3"], ["--workers", "*=4"]),
        (["--backlog", "0"], ["--workers", "*=4"]),
        (["--state-timeout", "3"], ["--workers", "*=4"]),
        (["--state-rate", "3"], ["--workers", "*=4"]),
        (["--mode", "sync", "--nonfinite", "skip"], []),
        (["--mean", "median"], []),
        (["--workers", "2:4", "--quorum", "2"], []),
        (["--workers", "*=1:4", "--quorum", "1"], []),
        (["--config", "FILE"], ["--workers", "default=4"]),
        ([], []),
    ],
)
def test_the_number_of_workers_is_given_where_options_need_it(
    words: list[str], more: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "file.toml"
    file.write_text(FILE)
    assert sized([str(file) if word == "FILE" else word for word in words], 4) == more


def test_options_that_do_not_fit_the_number_of_workers_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="quorum is 9, and must be at most 4 in a group of 4 workers"):
        sized(["--quorum", "9"], 4)


def test_the_example_of_the_help_trains(tmp_path: Path) -> None:
    status, lines = run(tmp_path, JOINS, "--serve", "--quorum 75% --state-dir state")
    assert status == 0, lines
    assert (tmp_path / "state").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--quorum 9", "--serve '--quorum 9': group '*': quorum is 9, and must be at most 2 in a group of 2 workers"),
        ("--quorumm 9", "--serve: unrecognized arguments: --quorumm 9: did you mean '--quorum'?"),
        ("--quorum two", "--serve: argument --quorum: 'two' is not a number of workers (or a share such as 75%)"),
        ("--join tcp://h:1", "--serve '--join …' would start a data shard"),
        ("--config nowhere.toml", "--serve: cannot read the configuration file nowhere.toml: no such file"),
    ],
)
def test_wrong_options_of_the_coordinator_are_a_wrong_command(words: str, message: str, tmp_path: Path) -> None:
    status, lines = run(tmp_path, "", "--serve", words)
    assert status == 2
    assert lines[0].startswith(message), lines
