"""Tests of the commands: what they print, on which stream, and with which exit status they end."""

from __future__ import annotations

import gc
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import gradserver
from gradserver.cli import main
from gradserver.engine.control.access import Access
from gradserver.protocol.compiled import loader
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import JoinRefusedError, WorkerLostError
from gradserver.protocol.messages import Ping, Status
from gradserver.protocol.offers import Device, Offer
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.wire import encode
from gradserver.status import fetch
from gradserver.worker.client import Worker
from gradserver.worker.connect import connect
from tests.cluster import PATIENCE, ROOT, Daemon, Program, Task, coordinator, joined, together, wait_until
from tests.strangers import impostor, plain_server

PLAN = simple_plan([("b0", 250_000), ("b1", 3)], FLOAT32)


def exchange(worker: Worker) -> None:
    for index, bucket in enumerate(PLAN.buckets):
        worker.push(index, np.ones(bucket.numel, np.float32))
    worker.finish_round()


def free_url() -> str:
    """Return a URL without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


# ── serve ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_daemon_says_where_it_listens_and_nothing_else_until_a_signal_ends_it(number: signal.Signals) -> None:
    with Daemon(loaded="") as daemon:
        with joined(daemon.url, 2) as workers:
            together(workers, lambda worker: worker.barrier())
        wait_until(lambda: not daemon.group(), "all have left")
        daemon.send_signal(number)

        assert daemon.end() == 0
        assert daemon.output() == [f"listening on {daemon.url}"]
        assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9][0-9]+", daemon.url)
        log = "\n".join(daemon.complaints())
        for event in (
            "'w0' joined",
            "complete with 2 workers",
            ") left",
            "the last worker",
            "stopped",
        ):
            assert event in log


def test_quiet_daemon_logs_only_what_went_wrong() -> None:
    with Daemon("--quiet") as daemon:
        with joined(daemon.url, 2) as (zero, one):
            zero.abort("out of memory")
            with pytest.raises(WorkerLostError):
                one.barrier()
        wait_until(lambda: not daemon.group(), "all have left")
        daemon.send_signal(signal.SIGTERM)

        assert daemon.end() == 0
        (line,) = daemon.complaints()
        assert "group 'default' is broken: 'w0' (rank 0) was lost and is needed to go on: out of memory" in line


def test_daemon_listens_on_the_port_that_it_was_given() -> None:
    with Daemon("--quiet") as first:
        first.send_signal(signal.SIGTERM)
        assert first.end() == 0
    with Program("-m", "gradserver", "serve", "--bind", first.url) as second:
        assert second.expect("listening on ") == first.url


def test_world_size_may_be_said_to_the_daemon() -> None:
    with Daemon("--quiet", "--workers", "2", "--group", "mine", "--credit", "2") as daemon:
        workers = together(range(2), lambda _: connect(daemon.url, group="mine"))
        for worker in workers:
            assert worker.world_size == 2
            worker.close()


def test_port_in_use_is_one_line_that_says_what_to_do() -> None:
    with plain_server() as url, Program("-m", "gradserver", "serve", "--bind", url) as second:
        assert second.end() == 1
        assert second.output() == []
        (line,) = second.complaints()

    assert line == (
        f"gradserver: cannot listen on {url}: the port is in use, perhaps by another `gradserver serve`. "
        f"Stop that one, name another port, or use port 0 for any free one"
    )


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("127.0.0.1:7411", "'127.0.0.1:7411' is not a coordinator's URL: expected tcp://HOST:PORT"),
        ("udp://127.0.0.1:7411", "expected tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "is not a coordinator's URL: expected tcp://HOST:PORT"),
        ("tcp://:7411", "is not a coordinator's URL: expected tcp://HOST:PORT"),
        ("tcp://::1:7411", "with IPv6 tcp://[::1]:PORT"),
        ("tcp://127.0.0.1:70000", "has the port '70000': a port is a number from 0 to 65535"),
        ("tcp://127.0.0.1:http", "has the port 'http'"),
    ],
)
def test_what_is_no_address_is_a_mistake_in_the_command(
    bind: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--bind", bind])

    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("gradserver serve: argument --bind: ")
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        ("tcp://192.0.2.1:0", "cannot listen on tcp://192.0.2.1:0: this machine has no such address"),
        ("tcp://nowhere.invalid:0", "cannot listen on 'nowhere.invalid': "),
    ],
)
def test_address_that_cannot_be_listened_on_is_one_line(
    bind: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--bind", bind]) == (2 if "nowhere" in bind else 1)

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradserver: ")
    assert message in err
    assert err.count("\n") == 1


# ── status ────────────────────────────────────────────────────────────────────────────────────────────


def status(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["status", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def status_when(pattern: str, capsys: pytest.CaptureFixture[str], url: str) -> str:
    """Return the status as soon as it looks like ``pattern``."""

    def look() -> str:
        text = status(capsys, url, "--interval", "0.05")
        return text if re.search(pattern, text, re.DOTALL) else ""

    return wait_until(look, f"the status shows {pattern}")


def test_status_of_an_idle_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server:
        first, kernels, groups = status(capsys, server.url).splitlines()
        assert first == f"coordinator at {server.url}, up 0 s"
        assert kernels == f"kernels: {loader.standing()}"
        assert groups == "no groups: no worker is connected"


def test_status_of_a_forming_group_shows_waiting_workers(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server:
        waiting = [
            Task(connect, server.url, 2, 3, name="trainer-c", timeout=10.0),
            Task(connect, server.url, world_size=3, name="trainer-x", timeout=10.0),
        ]
        text = status_when("2 of 3", capsys, server.url)
        with connect(server.url, world_size=3):
            for task in waiting:
                task.result().close()

    assert "group 'default': forming, 2 of 3 workers" in text
    assert re.search(r"^ +2 +trainer-c +\d\.\d s$", text, re.M)
    assert re.search(r"^ +any +trainer-x +\d\.\d s$", text, re.M)


def test_status_of_a_group_at_work_shows_members_round_and_rates(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 2) as workers:
        together(workers, lambda worker: worker.agree(PLAN))
        enough = threading.Event()

        def train(worker: Worker) -> None:
            go_on = np.ones(1, np.int8)
            while go_on:
                exchange(worker)
                go_on[:] = not enough.is_set()
                worker.broadcast(go_on)

        tasks = [Task(train, worker) for worker in workers]
        text = status(capsys, server.url, "--interval", "0.3")
        enough.set()
        for task in tasks:
            task.result()

    assert "group 'default': active, 2 of 2 workers, membership epoch 1" in text
    rates = re.search(r"round (\d+), ([\d.]+) rounds/s, ([\d.]+) MB/s in, ([\d.]+) MB/s out", text)
    assert rates is not None
    rounds, inwards, outwards = (float(rates[index]) for index in (2, 3, 4))
    assert rounds > 0
    assert inwards == pytest.approx(2 * rounds * PLAN.nbytes / 1e6, rel=0.5)
    assert outwards == pytest.approx(inwards, rel=0.5)
    assert "plan: 2 buckets, 1.0 MB a round" in text
    assert re.search(r"^ +0 +w0 +[\d.]+ MB", text, re.M)
    assert re.search(r"^ +1 +w1 +[\d.]+ MB", text, re.M)


def test_status_shows_missing_workers_and_what_is_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 3, channel="tcp") as workers:
        together(workers, lambda worker: worker.agree(PLAN))
        together(workers, exchange)
        handles = [worker.push(0, np.ones(250_000, np.float32)) for worker in (workers[0], workers[2])]

        text = status_when(r"w0 +1\.0 MB.*w2 +1\.0 MB", capsys, server.url)
        workers[1].push(0, np.ones(250_000, np.float32))
        for handle in handles:
            handle.wait()

    assert re.search(r"^  waits for 'w1' \(rank 1\): \d+\.\d s so far, in round 1$", text, re.M)
    assert re.search(r"w1 +0\.0 MB", text)
    assert "round 1, 0.0 rounds/s" in text


def test_status_shows_the_plane_its_reason_and_the_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device("NVIDIA H100", "GPU-1", 80 * 1024**3)
    offers = [Offer(host="a", torch="2.11.0", devices=(device,), nccl="2.27.3"), Offer(host="b", torch="2.11.0")]
    with coordinator() as server:
        tasks = []
        for rank, offer in enumerate(offers):
            monkeypatch.setattr("gradserver.worker.connect.offer_of", lambda _, offer=offer: offer)
            channel = ("tcp", "auto")[rank]
            tasks.append(Task(connect, server.url, rank, 2, name=f"w{rank}", channel=channel))
            wait_until(lambda: fetch(server.url)["groups"], "a worker has come")
        workers = [task.result() for task in tasks]
        text = status(capsys, server.url)
        for worker in workers:
            worker.close()

    assert "  plane: tcp, because 'w1' has no CUDA device\n" in text
    assert "  devices: 1 × NVIDIA H100 (80 GiB), 1 × CPU, heterogeneous, on 2 hosts\n" in text
    assert re.search(r"rank +worker +no result yet +device +channel\n", text)
    assert re.search(r"0 +w0 +0\.0 MB +NVIDIA H100 +tcp\n +1 +w1 +0\.0 MB +CPU +shm\n", text)


def test_watch_shows_the_status_again_until_it_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("gradserver.status.time.sleep", pause)
    with coordinator() as server:
        assert main(["status", server.url, "--watch", "0.5"]) == 0
    assert pauses == [0.5] * 3
    assert capsys.readouterr().out.count("no groups: no worker is connected") == 2


def test_status_shows_what_broke_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 2) as (zero, _):
        zero.abort("out of memory")

        text = status_when("broken", capsys, server.url)

    assert "group 'default': broken, 1 of 2 workers" in text
    assert "broken: 'w0' (rank 0) was lost and is needed to go on: out of memory" in text


def test_status_as_json_is_one_snapshot(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 2, group="mine") as workers:
        together(workers, lambda worker: worker.agree(PLAN))
        together(workers, exchange)

        snapshot: dict[str, Any] = json.loads(status(capsys, server.url, "--json"))

    group = snapshot["groups"]["mine"]
    assert snapshot["url"] == server.url
    assert (group["state"], group["world_size"], group["round"]) == ("active", 2, 1)
    assert [member.pop("offer")["channel"] for member in group["members"]] == ["shm", "shm"]
    for member in group["members"]:
        member.pop("held_up", None)  # of one of them
    alike = {"norm_ratio": 1.0, "cosine": 1.0, "off": None}
    assert [member.pop("gradients") for member in group["members"]] == [alike, alike]
    assert group["members"] == [{"rank": 0, "name": "w0", "seat": 0}, {"rank": 1, "name": "w1", "seat": 1}]
    assert group["bytes_in"] == group["bytes_out"] == 2 * PLAN.nbytes
    assert group["last_round"]["weights"] == [1.0, 1.0]


def test_asking_disturbs_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 2) as workers:

        def work(worker: Worker) -> None:
            for number in range(200):
                assert worker.all_reduce(np.full(3, worker.rank + number, np.float32)).tolist() == [number + 0.5] * 3

        tasks = [Task(work, worker) for worker in workers]
        for _ in range(20):
            status(capsys, server.url, "--json")
        for task in tasks:
            task.result()


@pytest.mark.parametrize(
    ("options", "taken", "refused"),
    [
        (["--workers", "1"], ["default"], ["mine"]),
        (["--workers", "1", "--group", "mine"], ["mine"], ["default"]),
        (["--groups", "mine, theirs"], ["mine", "theirs"], ["default"]),
        (["--workers", "1", "--groups", "default,mine"], ["default", "mine"], ["theirs"]),
        (["--workers", "1", "--groups", "any"], ["default", "mine"], []),
        (["--workers", "mine=1", "--workers", "theirs=1:2"], ["mine", "theirs"], ["default"]),
        (["--workers", "*=1:4"], ["default", "mine"], []),
        ([], ["default", "mine"], []),
    ],
)
def test_groups_are_founded_under_allowed_names_only(
    options: list[str], taken: list[str], refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    access: list[Access] = []

    def serve(*_: object, groups: frozenset[str] | None, **__: object) -> int:
        access.append(Access(groups))
        return 0

    monkeypatch.setattr("gradserver.daemon.serve", serve)
    assert main(["serve", *options]) == 0
    for name in taken:
        access[0].check_group(name)
    for name in refused:
        with pytest.raises(JoinRefusedError, match=f"and no group '{name}'"):
            access[0].check_group(name)


def test_a_group_that_is_not_allowed_is_refused_with_what_to_do() -> None:
    with Daemon("--quiet", "--workers", "1") as daemon:
        with pytest.raises(JoinRefusedError) as caught:
            connect(daemon.url, 0, 1, "mine", timeout=PATIENCE)
        with connect(daemon.url, 0, 1, timeout=PATIENCE) as worker:
            worker.barrier()
    assert str(caught.value) == (
        "this coordinator serves group 'default', and no group 'mine': join one of these, "
        "or start it with `gradserver serve --groups NAME,…` (`--groups any` for any name)"
    )


def test_workers_of_a_group_that_groups_does_not_name_are_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--workers", "1", "--groups", "mine"]) == 2
    assert "--workers has group 'default', which --groups does not allow" in capsys.readouterr().err
    assert main(["serve", "--workers", "1", "--workers", "default=1:2"]) == 2
    assert "--workers has group 'default' twice: name another group, as NAME=MIN:MAX" in capsys.readouterr().err


def complaint(capsys: pytest.CaptureFixture[str], url: str, status: int = 1) -> str:
    """Return the one line in which ``status`` says what is wrong."""
    assert main(["status", url]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_status_without_a_listener(capsys: pytest.CaptureFixture[str]) -> None:
    url = free_url()

    assert complaint(capsys, url) == (
        f"gradserver: no coordinator answers at {url} (connection refused). "
        f"Is `gradserver serve` running there, and is the port right?\n"
    )


def test_status_of_a_host_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "tcp://nowhere.invalid:7411")
    assert "no coordinator answers at tcp://nowhere.invalid:7411 (" in said
    assert "Is the name of the host right?" in said
    assert "gradserver serve" not in said


def test_status_of_something_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gradserver.status._PATIENCE", 0.2)

    with plain_server() as url:
        assert complaint(capsys, url) == (
            f"gradserver: the process that listens at {url} did not answer as a gradserver coordinator within 0.2 s\n"
        )


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([b"hello"], "not a gradserver message: it begins with b'hello'"),
        ([encode(Ping())], "a Ping instead of a Status"),
        ([encode(Status()), b"no JSON"], "Expecting value"),
        ([b"GS\x63" + encode(Ping())[3:]], "the peer speaks protocol version 99, this side version"),
    ],
)
def test_status_of_something_that_answers_something_else(
    capsys: pytest.CaptureFixture[str], reply: list[bytes], message: str
) -> None:
    with impostor(zmq.ROUTER, lambda _: reply) as url:
        text = complaint(capsys, url)

    assert f"{url} answers, but not as a gradserver coordinator: " in text
    assert message in text


@pytest.mark.parametrize("url", ["tcp://*:7411", "tcp://127.0.0.1:0"])
def test_status_needs_one_host_and_port(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert f"{url!r} names no single coordinator: give its host and port" in complaint(capsys, url, 2)


def test_status_of_no_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'localhost' is not a coordinator's URL" in complaint(capsys, "localhost", 2)


# ── all of them ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ledger"], "the following arguments are required: FILE|DIR"),
        (["train"], "invalid choice: 'train'"),
        (["serve", "--groups", "a,,b"], "'a,,b' is not a list of names, separated by commas"),
        (["serve", "--groups", "a" * 129], "is longer than 128 bytes"),
        (["serve", "--workers", "0"], "0 is out of range: a number of workers is 1 to 1024"),
        (["serve", "--workers", "two"], "'two' is not a number of workers"),
        (["serve", "--credit", "1"], "1 is out of range: a number of MiB is 2 to "),
        (["status", "--interval", "0"], "0 is out of range: a number of seconds is 0.05 to 3600"),
        (["status", "--interval", "nan"], "nan is out of range"),
        (["serve", "extra"], "unrecognized arguments: extra"),
        (["serv"], "invalid choice: 'serv': did you mean 'serve'? (choose from serve, config, "),
        (["serve", "--quorumm", "3"], "unrecognized arguments: --quorumm 3: did you mean '--quorum'?"),
        (["serve", "--worker", "2"], "unrecognized arguments: --worker 2: did you mean '--workers'?"),
        (["config", "--worker=2"], "unrecognized arguments: --worker=2: did you mean '--workers'?"),
        (["status", "--js"], "unrecognized arguments: --js"),
        (["ledger", "d", "--verif"], "unrecognized arguments: --verif: did you mean '--verify'?"),
        (["doctor", "--jso"], "unrecognized arguments: --jso: did you mean '--json'?"),
        (["demo", "--quik"], "unrecognized arguments: --quik: did you mean '--quick'?"),
        (["chaos", "--see", "3"], "unrecognized arguments: --see 3: did you mean '--seed'?"),
        (["run", "--nprc", "2", "a.py"], "unrecognized arguments: --nprc: did you mean '--nproc'?"),
        (["run", "--restar", "2", "a.py"], "unrecognized arguments: --restar: did you mean '--restart'?"),
        (
            ["serve", "--mode", "asyn"],
            "invalid choice: 'asyn': did you mean 'async'? (choose from sync, bounded, async)",
        ),
    ],
)
def test_arguments_that_cannot_be_right_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"(gradserver( [a-z]+)?): .+[.?] `\1 --help` shows the options\n", err)
    assert message in err


@pytest.mark.parametrize(
    "words",
    [
        "--workers 2:8 --workers critics=1:4",
        "--workers *=1:8",
        "--workers 4 --quorum 75%",
        "--bind tcp://0.0.0.0:7411",
        "--rate 10",
        "--rate 200mbit",
        "--mean trimmed:0.25",
        "--workers 8 --mean krum:2",
        "--audit 0.01:1e-5",
        "--state-dir d --ledger-keep 500MiB",
        "--state-dir d --ledger-keep 2GiB --journal-quota 0KiB --sync round",
        "--groups any",
        "--join tcp://10.0.0.1:7411",
    ],
)
def test_examples_of_the_help_hold(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words.split()]) == 0
    assert capsys.readouterr().err == ""


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert "run a coordinator" in err
    assert "gradserver demo" in err


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"gradserver {gradserver.__version__}\n"


@pytest.mark.parametrize("command", ["serve", "status", "demo"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


def test_no_command_loads_what_others_need() -> None:
    code = (
        "import sys; from gradserver import cli; cli._parser().parse_args(['serve']); import gradserver.daemon; "
        "unneeded = {'gradserver.tools.bench', 'gradserver.tools.demo', 'gradserver.transport.shard_link'}; "
        "print(sorted(unneeded & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_collections_that_wait_for_the_start_come_back_when_it_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--bind", "tcp://192.0.2.1:0"]) == 1
    assert "no such address" in capsys.readouterr().err
    assert gc.isenabled()


# ── where it is started ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "closed"),
    [("config", ">&-"), ("config", "2>&-"), ("run --nproc 1 --no-python touch done", "<&- >&- 2>&-")],
)
def test_streams_may_be_closed(command: str, closed: str, tmp_path: Path) -> None:
    """Test that a command ends as it does with them, and what it starts too, as under cron or a daemon."""
    words = f"{sys.executable} -m gradserver {command} {closed}"
    ended = subprocess.run(["sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "done").exists() is command.startswith("run")


def test_a_run_in_a_folder_that_was_removed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["run", "--nproc", "1", sys.executable]) == 2
    assert "the present folder, in which workers would begin, has been removed" in capsys.readouterr().err


def test_a_state_directory_may_begin_at_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a file of settings, where no shell expands the path."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "gradserver.toml").write_text('state-dir = "~/state"\n')
    with Daemon("--config", str(tmp_path / "gradserver.toml")) as daemon:
        assert daemon.snapshot()
    assert (tmp_path / "home" / "state").is_dir()
