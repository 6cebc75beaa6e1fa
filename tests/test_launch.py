"""The parts of `gradserver run`: lines of output, the first failure, devices, hosts, and what workers are told."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from gradserver.cli import main
from gradserver.protocol.errors import ConnectionLostError, InvalidArgumentError
from gradserver.protocol.messages import Welcome
from gradserver.tools.launch import hosts, places
from gradserver.tools.launch.devices import find_devices, visible_to
from gradserver.tools.launch.failures import Failure, Tail, describe, diagnose, first, shown
from gradserver.tools.launch.frames import Decoder, FrameError, Kind, Outbox, encode, encode_output
from gradserver.tools.launch.hosts import Host, parse_hosts
from gradserver.tools.launch.output import Lines
from gradserver.tools.launch.places import Hello, assign, counts, environment_of
from gradserver.tools.launch.report import listed, ranks
from gradserver.worker.transport.farewell import out_before_entry
from tests.commands import parse

# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], [b"one", b"two"]),
        ([b"on", b"e\nt", b"wo\n"], [b"one", b"two"]),
        ([b"no end"], [b"no end"]),
        ([b"\n\n"], [b"", b""]),
        ([b"\xe2\x82", b"\xac\n"], ["€".encode()]),
        ([b"\xff\xfe\n"], [b"\xff\xfe"]),
        ([b"dos\r\n", b"half\r", b"\n"], [b"dos", b"half"]),
        ([b" 10%\r 20%\r", b" 30%\r\n"], [b" 30%"]),
        ([b"\r 10%", b"\r 20%", b"\r100%\ndone\n"], [b"100%", b"done"]),
        ([b"x" * 200_000, b"y\n"], [b"x" * 200_000, b"y"]),
    ],
)
def test_lines_are_whole_wherever_the_pieces_end(pieces: list[bytes], lines: list[bytes]) -> None:
    found = Lines()
    shown = [line for piece in pieces for line in found.feed(piece, 0.0)]
    assert shown + found.end() == lines
    assert found.end() == []


def test_a_line_without_an_end_is_shown_after_a_while_and_characters_stay_whole() -> None:
    lines = Lines()
    assert lines.feed(b"loading \xe2\x82", 10.0) == []
    assert lines.unfinished(11.9) == []
    assert lines.deadline() == 12.0
    assert lines.unfinished(12.0) == [b"loading "]
    assert lines.feed(b"\xac now\n", 13.0) == ["€ now".encode()]
    assert lines.deadline() is None


def test_a_progress_bar_is_shown_now_and_then() -> None:
    lines, seen = Lines(), []
    for tenth in range(100):
        assert lines.feed(b"\r%d" % tenth, tenth / 10) == []
        seen += lines.unfinished(tenth / 10)
    assert seen == [b"20", b"41", b"62", b"83"]


# ── frames ────────────────────────────────────────────────────────────────────────────────────────────


def test_frames_arrive_in_pieces_of_any_size() -> None:
    data = encode(Kind.START, {"number": 3}) + encode_output(3, 2, b"\x00\xff") + encode(Kind.ENDED, {"status": -9})
    for size in (1, 2, 7, len(data)):
        decoder = Decoder()
        pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
        start, output, end = [frame for piece in pieces for frame in decoder.feed(piece)]
        assert (start.kind, start.fields()) == (Kind.START, {"number": 3})
        assert output.output() == (3, 2, b"\x00\xff")
        assert end.fields() == {"status": -9}


@pytest.mark.parametrize("data", [b"Welcome to gpu1\n", b"\x02\xff\xff\xff\xff", b"\x00" * 8])
def test_bytes_that_are_no_frame_are_an_error(data: bytes) -> None:
    with pytest.raises(FrameError, match="expected a frame"):
        list(Decoder().feed(data))


def test_a_pipe_that_nobody_reads_blocks_nobody() -> None:
    reader, writer = os.pipe()
    outbox = Outbox(writer)
    outbox.put(b"x" * 1_000_000)
    assert outbox.size > 500_000
    received = b""
    while outbox.size:
        received += os.read(reader, 1 << 20)
        outbox.flush()
    assert len(received + os.read(reader, 1 << 20)) == 1_000_000
    os.close(reader)
    outbox.put(b"more")
    assert outbox.is_broken
    os.close(writer)


# ── failures ──────────────────────────────────────────────────────────────────────────────────────────

BOOM = b'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    boom()\nValueError: boom\n'
LOST = (
    b'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    barrier()\n'
    b"gradserver.WorkerLostError: 'vm:1' (rank 1) was lost and is needed to go on: it raised ValueError: boom\n"
)
CHAINED = BOOM + b"\nDuring handling of the above exception, another exception occurred:\n\n" + BOOM
GLOO = BOOM.replace(b"ValueError: boom", b"RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [::1]:9")
GROUP = b"  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two (2 sub-exceptions)\n"
FAULT = b"Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File x\n"


def failure(errors: bytes, status: int = 1, at: float = 10.0, seen: float = 5.0, output: bytes = b"") -> Failure:
    """Diagnose a worker that ended at ``at``, with standard error that was read at ``seen``."""
    tails = Tail(), Tail()
    tails[0].feed(errors, seen)
    tails[1].feed(output, seen)
    found = Failure("rank 1", "host a", status, at)
    diagnose(found, *tails)
    return found


@pytest.mark.parametrize(
    ("errors", "status", "report"),
    [
        (b"epoch 3\n" + BOOM, 1, BOOM),
        (BOOM + b"going on\n" + CHAINED, 1, CHAINED),
        (BOOM + b"going on\n" + GROUP, 1, GROUP),
        (BOOM + b"going on\n" + FAULT, -signal.SIGSEGV, FAULT),
        (b"  File x, line 1\n    x = = 3\nSyntaxError: invalid syntax\n", 1, None),
        (BOOM + b"handled\n", 3, None),
        (b"", -signal.SIGKILL, b"last words"),
    ],
)
def test_a_failure_is_explained_by_the_last_traceback_or_the_last_words(
    errors: bytes, status: int, report: bytes | None
) -> None:
    found = failure(errors, status, output=b"last words\n")
    assert found.report == (errors.rstrip(b"\n") if report is None else report)


def test_the_first_failure_is_the_first_traceback_and_not_the_first_end() -> None:
    """Test that a worker which takes long to end is found, although the others end before it."""
    caused = [failure(LOST, at=8.0, seen=6.0), failure(GLOO, at=7.0, seen=5.5)]
    cause = failure(BOOM, at=9.0, seen=5.5)
    killed = failure(b"", -signal.SIGKILL, at=5.4)
    assert [one.follows for one in caused] == [True, True]
    assert first([*caused, cause]) is cause
    assert first([*caused, cause, killed]) is killed
    assert first(caused) is caused[1]


def test_the_end_of_a_worker_that_was_about_to_join_is_told_apart() -> None:
    welcome = Welcome("g", 0, 1, 1, ("a",), member_ids=(0,), joins=True)
    words = str(out_before_entry(welcome, ConnectionLostError("lost the coordinator"))).encode()
    told = LOST.rpartition(b"gradserver.")[0] + b"gradserver.LeftOutError: " + words + b"\n"
    assert failure(told).was_joining
    assert not any(failure(other).was_joining for other in (LOST, BOOM, told + BOOM, b"about to join\n"))


def test_a_traceback_in_pieces_counts_from_its_first_line() -> None:
    tail = Tail()
    for moment, byte in enumerate(CHAINED):
        tail.feed(bytes([byte]), float(moment))
    assert tail.traceback() == CHAINED
    assert tail.traceback_at is not None
    assert tail.traceback_at <= BOOM.index(b"\n")


def test_a_flood_of_output_leaves_the_traceback() -> None:
    found = failure(b"noise\n" * 100_000 + BOOM)
    assert found.report == BOOM


def test_long_reports_are_cut_and_made_harmless() -> None:
    text = shown(b"\x1b[31mred\n" + b"line\n" * 200)
    assert "\x1b" not in text
    assert len(text.splitlines()) == 61
    assert "… 141 lines …" in text


@pytest.mark.parametrize(
    ("status", "text", "exit_status"),
    [(3, "exit status 3", 3), (-9, "killed by SIGKILL", 137), (-63, "killed by signal 63", 191)],
)
def test_statuses_have_names(status: int, text: str, exit_status: int) -> None:
    assert describe(status) == text
    assert Failure("rank 0", "host a", status, 0.0).exit_status == exit_status


@pytest.mark.parametrize(
    ("errors", "status", "hint"),
    [
        (b"", -signal.SIGKILL, "memory runs out"),
        (BOOM.replace(b"boom", b"CUDA error: invalid device ordinal"), 1, "--gpus all"),
        (BOOM.replace(b"boom", b"No module named 'torch'"), 1, "pip install 'gradserver[torch]'"),
        (BOOM, 1, None),
    ],
)
def test_common_failures_have_a_hint(errors: bytes, status: int, hint: str | None) -> None:
    hints = failure(errors, status).hints
    assert len(hints) == (hint is not None)
    assert hint is None or hint in hints[0]


def test_ranks_are_listed_in_runs() -> None:
    assert ranks([3]) == "rank 3"
    assert ranks([5, 0, 1, 2, 7, 8]) == "ranks 0 to 2, 5, 7, 8"
    assert listed(["rank 0", "the coordinator", "rank 1"]) == "ranks 0, 1, the coordinator"


# ── devices ───────────────────────────────────────────────────────────────────────────────────────────

LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-4c09-a1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-4c09-a2)
  MIG 1g.10gb     Device  0: (UUID: MIG-90c8)
  MIG 1g.10gb     Device  1: (UUID: MIG-90c9)
"""


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ("", []),
        ("-1", []),
        ("2,5", ["2", "5"]),
        (" 1 , 0 ", ["1", "0"]),
        ("0,-1,2", ["0"]),
        ("0,0", ["0"]),
        ("GPU-4c09,MIG-90c8/1/0", ["GPU-4c09", "MIG-90c8/1/0"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(told: str, found: list[str], tmp_path: Path) -> None:
    assert find_devices({"CUDA_VISIBLE_DEVICES": told}, tmp_path) == found


def host_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> Path:
    """Make a system with a driver, two device nodes and an nvidia-smi of our making."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"):
        (tmp_path / "dev" / name).touch()
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{tool}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


def test_devices_are_those_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = host_with(tmp_path, monkeypatch, f"cat <<'E'\n{LISTED}E")
    assert find_devices({}, root) == ["0", "MIG-90c8", "MIG-90c9"]


@pytest.mark.parametrize("tool", ["exit 9", "kill -9 $$"])
def test_devices_are_counted_if_the_drivers_tool_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    assert find_devices({}, host_with(tmp_path, monkeypatch, tool)) == ["0", "1"]


def test_a_host_without_a_driver_has_no_devices(tmp_path: Path) -> None:
    assert find_devices({}, tmp_path) == []


def test_workers_get_devices_in_turn() -> None:
    assert [visible_to(local_rank, ["4", "7"]) for local_rank in range(3)] == ["4", "7", "4"]
    assert visible_to(0, []) is None


# ── hosts ─────────────────────────────────────────────────────────────────────────────────────────────


def test_hosts_are_parsed() -> None:
    found = parse_hosts("gpu1, me@gpu2.example:4,[fe80::1%eth0]:2")
    assert found == (Host("gpu1"), Host("me@gpu2.example", 4), Host("[fe80::1%eth0]", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' in '' is not a host"),
        ("a,,b", "'' in 'a,,b' is not a host"),
        ("a b", "'a b' in 'a b' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("a:0", "0 is out of range: the number of workers on a is 1 to 1024"),
        ("a:x", "'x' is not the number of workers on a"),
        ("a:2,b,a", "'a' is named twice: write a:N for N workers there"),
    ],
)
def test_hosts_that_cannot_be_right_are_named(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        parse_hosts(text)
    assert message in str(caught.value)


def test_this_host_needs_no_remote_shell() -> None:
    assert [Host(name).is_here for name in ("", "localhost", socket.gethostname(), "elsewhere")] == [True] * 3 + [False]
    assert hosts.own_address([Host("localhost")]) == "127.0.0.1"


# ── places ────────────────────────────────────────────────────────────────────────────────────────────


def hello(devices: int = 0, cores: int = 8) -> Hello:
    return Hello("box", "", tuple(map(str, range(devices))), cores, 4711)


@pytest.mark.parametrize(
    ("asked", "found"), [(None, [1, 2, 4]), (3, [3, 3, 4])], ids=["one for each GPU", "as many as asked"]
)
def test_numbers_of_workers(asked: int | None, found: list[int]) -> None:
    assert counts([Host("a"), Host("b"), Host("c", 4)], [hello(), hello(2), hello(2)], asked) == found


def test_numbers_of_workers_that_cannot_be_right() -> None:
    with pytest.raises(InvalidArgumentError, match=r"--nproc gpu: b has no GPU, .* --nproc 2"):
        counts([Host("a"), Host("b")], [hello(1), hello()], "gpu")
    with pytest.raises(InvalidArgumentError, match="1200 workers are too many: a group has 1024 at most"):
        counts([Host("a"), Host("b")], [hello(), hello()], 600)


def environment(rank: int, own: Mapping[str, str], all_gpus: bool = False) -> dict[str, str]:
    """Return what a worker is told: two on host a with two GPUs, one on host b without."""
    both = [hello(2), hello(cores=3)]
    given = assign([Host("a"), Host("me@b")], both, [2, 1], all_gpus)
    return environment_of(given[rank], given, both[given[rank].host], ("10.0.0.1", 4711), "tcp://10.0.0.9:1", own)


def test_workers_are_told_what_torchrun_tells_them_and_what_gradserver_needs() -> None:
    assert environment(1, {}) == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "GRADSERVER_URL": "tcp://10.0.0.9:1",
        "GRADSERVER_NAME": "a:1",
        "OMP_NUM_THREADS": "4",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    other = environment(2, {"GRADSERVER_NAME": "spot", "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": ""})
    assert {"RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "1", "GRADSERVER_NAME": "spot:2"}.items() <= other.items()
    assert other.keys().isdisjoint({"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES"})
    assert environment(2, {})["GRADSERVER_NAME"] == "b:0"


def test_workers_that_select_a_gpu_themselves_see_all() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in environment(1, {}, all_gpus=True)


def test_other_hosts_get_the_environment_without_what_belongs_to_this_one() -> None:
    own = {"LR": "1", "HOME": "/root", "SSH_AUTH_SOCK": "x", "PATH": "/venv/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert places.carried(own) == {"LR": "1", "PATH": "/venv/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert places.carried({"CUDA_VISIBLE_DEVICES": "GPU-4c09"}) == {}


# ── the command line ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "script", "arguments"),
    [
        ("train.py --nproc 3 -m", "train.py", ["--nproc", "3", "-m"]),
        ("-n2 -- train.py --lr 1", "train.py", ["--lr", "1"]),
        ("-n2 train.py -- --lr 1", "train.py", ["--", "--lr", "1"]),
        ("-n2 -- train.py -- --lr 1", "train.py", ["--", "--lr", "1"]),
        ("-n2 -- --odd.py", "--odd.py", []),
        ("--nproc-per-node=2 -m train x", "train", ["x"]),
    ],
)
def test_what_stands_behind_the_script_is_the_scripts(words: str, script: str, arguments: list[str]) -> None:
    parsed = parse("run", *words.split())
    assert (parsed.script, parsed.arguments) == (script, arguments)
    assert parsed.nproc == (None if words.startswith("train") else 2)


# ── mistakes ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: SCRIPT. `gradserver run --help` shows the options"),
        ("--nproc 2", "the following arguments are required: SCRIPT"),
        ("--nproc 2 --", "SCRIPT"),
        ("trian.py", "there is no script 'trian.py' in "),
        ("train", "there is no script 'train' in . For a module give -m train"),
        ("python train.py", "name the script itself, without 'python' in front; other programs need --no-python"),
        ("sh train.sh", "there is no script 'sh' in . For the program of this name give --no-python"),
        ("./train.sh", "'./train.sh' is a program, and not for Python: give --no-python"),
        ("--no-python nothing", "there is no program 'nothing', here or on PATH"),
        ("folder", "'folder' is a folder: name the script in it"),
        ("-m --no-python x", "-m is for modules of Python, and --no-python for other programs: give one of them"),
        (
            "--coordinator tcp://a:1 --bind tcp://b:1 train.py",
            "--bind is for a coordinator that is started, and --coordinator names one that runs: tcp://a:1",
        ),
        ("--nproc 0 train.py", "argument --nproc/-n: 0 is out of range: a number of workers is 1 to 1024"),
        ("--nproc two train.py", "argument --nproc/-n: 'two' is neither a number of workers nor 'gpu'"),
        ("--coordinator a:1 train.py", "'a:1' is not a coordinator's URL: expected tcp://HOST:PORT"),
        ("--serve '--quorum' train.py", "argument --serve: expected one argument"),
        ("--lr 1 train.py", "unrecognized arguments: --lr"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADSERVER_URL", raising=False)
    (tmp_path / "train.py").touch()
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (tmp_path / "folder").mkdir()
    try:
        status = main(["run", *words.replace("'", "").split()])
    except SystemExit as refused:
        status = int(str(refused.code))
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradserver run: ")
    assert message in line.replace(str(tmp_path), "")
