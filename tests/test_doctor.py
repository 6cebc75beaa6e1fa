"""`gradserver doctor`: what it finds of a machine, its devices, a coordinator and the link to it; and what it costs."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gradserver.cli import main
from gradserver.engine import Engine
from gradserver.engine.control.access import Access
from gradserver.protocol.errors import DeadlineError, InvalidWorldSizeError
from gradserver.protocol.limits import MIB, PROBE_GROUP, PROBE_SECONDS, PROBE_WORLD
from gradserver.protocol.messages import Failure, Join, Welcome
from gradserver.protocol.offers import Offer
from gradserver.tools.common import netns
from gradserver.tools.doctor import command, devices, link, machine
from gradserver.tools.doctor.report import Report
from tests.cluster import ROOT, Daemon, Task, coordinator, joined, together, wait_until
from tests.engine_harness import SEATS, Harness
from tests.strangers import plain_server
from tests.test_bench import needs_hosts
from tests.test_offer import Cuda, torch_with
from tests.test_planes import CPU, gpu

GIB = 1024**3


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRADSERVER_URL", "GRADSERVER_PLANE", "GRADSERVER_CHANNEL", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status, and the report."""
    status = main(["doctor", "--json", *arguments])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["status"] == status
    return status, report


def said(report: dict[str, Any]) -> str:
    return "\n".join(f"{one['what']}: {one['change']}" for one in report["findings"])


# ── a coordinator ─────────────────────────────────────────────────────────────────────────────────────


def test_of_a_coordinator_it_finds_version_rates_and_planes(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator({"mine": 3}) as server, joined(server.url, 3, group="mine", channel="tcp"):
        status, report = doctor(capsys, server.url)

    there = report["coordinator"]
    assert (there["reachable"], there["version"]) == (True, report["machine"]["gradserver"]["version"])
    for channel in ("tcp", "shm"):
        rates = there[f"{channel}_rates"]
        assert 0 < rates["round_trip"] < 5
        assert min(rates["to_it"], rates["from_it"]) > 0.001
        assert 0 < rates["nbytes"] <= link.BUSY_BYTES, "a group trains"
    group = report["plane"]["group_mine"]
    assert (group["now"], group["with_this_worker"]) == ("tcp", "tcp")
    assert status == (1 if report["findings"] else 0)


def test_it_measures_where_only_named_groups_may_be_opened_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Daemon("--workers", "2", "--plane", "shm", "--quorum", "1") as daemon:
        _, report = doctor(capsys, daemon.url)
        assert report["coordinator"]["tcp_rates"]["nbytes"] <= link.IDLE_BYTES
        wait_until(lambda: not daemon.snapshot()["groups"], "the group of the measurement has gone")


def test_a_training_beside_it_gets_the_same_results(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon() as daemon, joined(daemon.url, 2) as workers:
        stop = np.zeros(1, np.int8)

        def train(worker: Any) -> int:
            count, flag = 0, np.zeros(1, np.int8)
            while not flag[0]:
                assert worker.all_reduce(np.full(1000, worker.rank + 1.0)).tolist() == [1.5] * 1000
                flag[:] = stop
                worker.broadcast(flag)
                count += 1
            return count

        tasks = [Task(train, worker) for worker in workers]
        _, report = doctor(capsys, daemon.url)
        stop[:] = 1
        assert min(task.result() for task in tasks) > 10
    assert report["coordinator"]["tcp_rates"]["nbytes"] <= link.BUSY_BYTES


def test_two_at_once_wait_for_one_another() -> None:
    with coordinator({"mine": 2}) as server:
        found = together(range(2), lambda _: link.measure(server.url, "tcp", MIB))
    assert all(one.to_it > 0 for one in found)


@pytest.mark.parametrize(
    ("to_it", "from_it", "said"),
    [
        (0.9, 0.8, "0.90 Gbit/s to it, 0.80 Gbit/s from it, round trip 0.50 ms"),
        (0.1, 0.3, "0.10 Gbit/s to it, at least 0.30 Gbit/s from it, round trip 0.50 ms"),
        (9.0, 2.0, "at least 9.00 Gbit/s to it, 2.00 Gbit/s from it, round trip 0.50 ms"),
    ],
)
def test_a_rate_that_the_other_way_bounds_is_a_lower_bound(to_it: float, from_it: float, said: str) -> None:
    assert str(link.Rates(0.0005, to_it, from_it)) == said


@pytest.mark.long
def test_the_rates_are_those_of_the_link() -> None:
    """Test on an emulated link of 0.2 Gbit/s each way. A busy machine measures less, and none measures much more."""
    needs_hosts()
    with netns.links(1, 25e6, 125e6) as hosts:
        url = f"tcp://{hosts.coordinator_address()}:7411"
        serve = [*hosts.coordinator_prefix(), sys.executable, "-m", "gradserver", "serve", "--bind", url]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as daemon:
            try:
                assert daemon.stdout is not None
                assert daemon.stdout.readline() == f"listening on {url}\n"
                examine = [sys.executable, "-m", "gradserver", "doctor", url, "--json"]
                ran = subprocess.run(
                    [*hosts.worker_prefix(0), *examine], capture_output=True, text=True, check=False, timeout=120
                )
            finally:
                daemon.terminate()
    rates = json.loads(ran.stdout)["coordinator"]["tcp_rates"]
    assert 0.02 < rates["to_it"] < 0.23
    assert 0.02 < rates["from_it"] < 0.23


def test_without_rates_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server:
        status, report = doctor(capsys, server.url, "--no-rates")
    assert "tcp_rates" not in report["coordinator"]
    assert status in (0, 1)


def test_the_url_can_be_in_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with coordinator() as server:
        monkeypatch.setenv("GRADSERVER_URL", server.url)
        assert doctor(capsys, "--no-rates")[1]["coordinator"]["reachable"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_coordinator_that_is_not_there_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = doctor(capsys, f"tcp://127.0.0.1:{free_port()}")
    assert status == 2
    assert "accepts no connection (connection refused): start `gradserver serve` there" in said(report)
    assert "workers_like_this_one" in report["plane"], "the rest is examined"


def test_something_else_than_a_coordinator_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with plain_server() as url:
        status, report = doctor(capsys, url)
    assert status == 2
    assert f"no coordinator answers at {url}: " in said(report)
    assert "check the port, start `gradserver serve` there" in said(report)


def test_a_host_without_an_address_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = doctor(capsys, "tcp://no-such-host.invalid:7411")
    assert status == 2
    assert "'no-such-host.invalid' cannot be resolved" in said(report)


def test_a_data_shard_is_not_the_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon("--shards", "2") as daemon:
        (shard,) = [one for one in daemon.snapshot()["shards"] if one["number"]]
        status, report = doctor(capsys, shard["url"])
        _, whole = doctor(capsys, daemon.url)
    assert status == 2
    assert f"is data shard 1: give the coordinator's address, {daemon.url}" in said(report)
    assert whole["coordinator"]["data_shards"] == [shard["url"]]
    assert whole["coordinator"]["tcp_rates"]["to_it"] > 0


@pytest.mark.parametrize("url", ["localhost", "tcp://0", "tcp://host:0"])
def test_a_url_that_is_none_is_status_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 2
    assert capsys.readouterr().err.startswith(f"gradserver: {url!r} ")


def test_a_broken_group_is_spoken_of(capsys: pytest.CaptureFixture[str]) -> None:
    with coordinator() as server, joined(server.url, 2) as (zero, _):
        zero.abort("out of memory")
        wait_until(lambda: server._runtime.snapshot()["groups"]["default"]["broken"], "it is broken")  # type: ignore[index]
        status, report = doctor(capsys, server.url, "--no-rates")
    assert status == 1
    assert "group 'default' is broken ('w0' (rank 0) was lost" in said(report)


# ── the group of the measurement ──────────────────────────────────────────────────────────────────────


def harness(**options: Any) -> Harness:
    made = Harness({"default": 2})
    made.engine = Engine(made.worlds, made.credit, access=Access(frozenset({"default"})), **options)
    return made


def join(made: Harness, rank: int, world: int = PROBE_WORLD, offer: Offer = CPU) -> None:
    made.receive(SEATS + rank, Join(PROBE_GROUP, f"d{rank}", rank, world, 3600.0, offer))


def told(made: Harness, rank: int) -> list[Any]:
    return [message.exception() for message, _ in made.inbox[SEATS + rank] if isinstance(message, Failure)]


def test_its_group_ends_by_itself_whether_it_is_complete_or_not() -> None:
    for count in (2, PROBE_WORLD):
        made = harness()
        for rank in range(count):
            join(made, rank)
        made.wait(PROBE_SECONDS - 0.1)
        assert not any(told(made, rank) for rank in range(count))

        made.wait(0.2)

        for rank in range(count):
            (error,) = told(made, rank)
            assert type(error) is DeadlineError
            assert error.message == f"group {PROBE_GROUP!r} is for `gradserver doctor`, and ends after 20 s"
        assert not made.engine.snapshot(made.now)["groups"]


def test_its_group_has_one_size_and_goes_by_no_demanded_plane() -> None:
    made = harness(plane="direct")
    join(made, 0, PROBE_WORLD + 1)
    assert [type(error) for error in told(made, 0)] == [InvalidWorldSizeError]
    for rank in range(1, PROBE_WORLD + 1):
        made.receive(SEATS + rank, Join(PROBE_GROUP, f"d{rank}", -1, 0, 60.0, CPU))
    (welcome,) = [message for message, _ in made.inbox[SEATS + 1] if isinstance(message, Welcome)]
    assert welcome.plane == "tcp"


def test_other_groups_are_still_refused() -> None:
    made = harness()
    made.receive(SEATS, Join("gradserver-doctors", "d", -1, PROBE_WORLD, 60.0))
    assert "this coordinator serves group 'default'" in told(made, 0)[0].message


# ── this machine ──────────────────────────────────────────────────────────────────────────────────────


def examined() -> Report:
    report = Report()
    machine.examine(report)
    return report


def test_the_machine_is_described() -> None:
    report = examined().as_json()
    assert report["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["memory"]["memory"] > 0


def test_a_small_dev_shm_is_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=64 * MIB, free=60 * MIB)
    monkeypatch.setattr("gradserver.tools.doctor.machine.shutil.disk_usage", lambda _: usage)
    report = examined()
    assert report.status == 1
    assert report.findings[-1].what == "/dev/shm has 64 MiB, which NCCL and DataLoader workers can exceed"


def test_memory_that_cannot_be_shared_is_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    (finding,) = [one for one in examined().findings if "cannot share memory" in one.what]
    assert "memfd_create: [Errno 1] Operation not permitted" in finding.what


def test_few_open_files_are_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    (finding,) = [one for one in examined().findings if "files" in one.what]
    assert finding.change == "raise the hard limit to 4096 or more (ulimit -Hn, LimitNOFILE= of systemd)"


@pytest.mark.parametrize(("text", "limit"), [("max\n", None), ("1073741824\n", GIB), (None, None)])
def test_the_limit_of_a_container_is_read(text: str | None, limit: int | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    assert machine._cgroup_limit(tmp_path) == limit


# ── devices ───────────────────────────────────────────────────────────────────────────────────────────


class Event(SimpleNamespace):
    """An event of a device on which each copy takes 4 ms."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, _: Event) -> float:
        return 4.0


class Copying(Cuda):
    """torch.cuda of a machine with two devices, of which the second one has no memory left."""

    Event = Event

    def can_device_access_peer(self, one: int, other: int) -> bool:
        return (one, other) == (0, 1)

    def device(self, _: int) -> Any:
        return contextlib.nullcontext()


class Block:
    """A tensor that can be copied to."""

    def copy_(self, source: Block, *, non_blocking: bool) -> None:
        assert non_blocking
        assert isinstance(source, Block)


def empty(_: int, *, dtype: str, device: str = "cpu", pin_memory: bool = False) -> Block:
    assert (dtype, pin_memory) == ("uint8", device == "cpu")
    if device == "cuda:1":
        raise RuntimeError("CUDA out of memory.\nmore")
    return Block()


def test_copies_and_peers_of_devices_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(Copying(2), empty=empty, uint8="uint8"))
    two = gpu(0, devices=(*gpu(0).devices, *gpu(1).devices))
    report = Report()

    devices.examine(report, two, copies=True)

    shown = report.as_json()["devices"]
    assert shown["copies_0"] == {"to_device": pytest.approx(16.777216), "to_host": pytest.approx(16.777216)}
    assert shown["copies_1"] is None
    assert shown["peer_access"] == [[0, 1]]
    assert [one.what for one in report.findings] == ["nothing can be copied to device 1 (CUDA out of memory.)"]


def test_a_driver_that_is_broken_is_to_change() -> None:
    report = Report()
    devices.examine(report, CPU._replace(trouble="CUDA cannot be used: driver too old"), copies=True)
    assert report.status == 1
    assert report.findings[0].what == "CUDA cannot be used: driver too old"


def test_a_machine_without_torch_is_fine() -> None:
    report = Report()
    devices.examine(report, Offer(trouble="torch cannot be imported: No module named 'torch'"), copies=True)
    assert report.status == 0


# ── the report ────────────────────────────────────────────────────────────────────────────────────────


def test_the_text_is_aligned_and_what_fails_comes_first() -> None:
    report = Report()
    section = report.section("one", "one thing")
    section.add("a", 1)
    section.add("long_name", None, "word " * 40)
    report.find("this is slow", "make it faster")
    report.find("that is missing", "bring it", breaks=True)

    text = "\n".join(report.lines())

    assert text.startswith("one thing\n  a          1\n  long name  word word")
    assert max(map(len, text.splitlines())) <= 118
    assert text.endswith("to change\n  FAILS  that is missing: bring it\n  -      this is slow: make it faster")
    assert report.status == 2
    assert Report().status == 0
    assert list(Report().lines()) == ["nothing to change"]


def test_the_page_shows_the_facts_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    shown = (ROOT / "docs" / "doctor.md").read_text().partition("```text\n")[2].partition("```")[0]
    with Daemon() as daemon:
        main(["doctor", daemon.url])
    text = capsys.readouterr().out
    may_lack = {"dev shm", "back ends"}
    facts = {line[2:23].strip() for line in shown.partition("to change")[0].splitlines() if line.startswith("  ")}
    assert len(facts) > 15
    for fact in facts - may_lack:
        assert f"\n  {fact} " in text, fact
    headings = [line.partition(" at ")[0] for line in shown.splitlines() if line and line[0] != " "]
    assert [one for one in headings[:-1] if f"\n{one}" not in f"\n{text}"] == []


def test_the_help_says_what_it_costs_and_what_the_status_means(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        f"sends {link.IDLE_BYTES // MIB} MiB each way at most, and {link.BUSY_BYTES // MIB} MiB if a group trains"
        in text
    )
    assert f"ends after {PROBE_SECONDS:g} seconds" in text
    assert command._STATUS in text
