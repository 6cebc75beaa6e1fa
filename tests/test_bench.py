"""`gradserver bench`: every suite in small, what it refuses and why, and that nothing stays behind."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gradserver import cli
from gradserver.protocol import kernels
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.codecs.dense import Int8
from gradserver.tools.bench import arguments as parse, codec_suite, suites, train_suite
from gradserver.tools.bench.advice import advise
from gradserver.tools.bench.contenders import wrong
from gradserver.tools.bench.cost import Cost, Timed, per_gigabyte, processor_seconds
from gradserver.tools.bench.fleet import Fleet, Needs
from gradserver.tools.bench.member import mean_pattern, pattern
from gradserver.tools.bench.mode_plot import save_plot as save_mode_plot
from gradserver.tools.bench.mode_report import Finished, Reference, load, save, tables
from gradserver.tools.bench.modes import MODES, USUAL, Mode, Scenario, scenario_of
from gradserver.tools.bench.plot import save_plot
from gradserver.tools.bench.processes import Processes
from gradserver.tools.bench.report import Row, Table, conclusion
from gradserver.tools.bench.spec import Case, Contender, Link, Seat
from gradserver.tools.bench.stats import Stats, figures, size_name
from gradserver.tools.common import netns
from gradserver.tools.common.processes import RunError
from gradserver.tools.demo.settings import Settings as ModelSettings
from tests.cluster import Program, wait_until

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("--repetitions", "3")
QUICK_SAMPLES = (*QUICK, "--sample-ms", "2")


def start(*options: str, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **variables}
    words = [sys.executable, "-m", "gradserver", "bench", *options]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def bench(*options: str) -> str:
    """Run a bench, and return what it prints when all went well."""
    with Program("-m", "gradserver", "bench", *options) as running:
        status = running.end(100)
        out = "".join(f"{line}\n" for line in running.output())
        assert (status, running.complaints()) == (0, []), out
    return out


def document(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bench(*options, "--json"))
    assert set(found) >= {"suite", "date", "command", "settings", "machine", "versions", "units", "rows", "conclusion"}
    assert found["suite"] == options[0]
    assert found["command"][1:] == ["bench", *options, "--json"]
    assert found["machine"]["cores"] >= 1
    assert set(found["versions"]) == {"gradserver", "python", "torch", "numpy", "pyzmq", "kernels"}
    for row in found["rows"]:
        assert row["wrong"] == row["peer_wrong"] == 0
        times = row["time_s"]
        assert times["n"] == len(times["samples"]) == 3
        assert 0 < min(times["samples"]) <= times["q1"] <= times["median"] <= times["q3"] <= max(times["samples"])
        assert row["algbw"] == pytest.approx(row["bytes"] / times["median"])
        assert row["busbw"] == pytest.approx(row["algbw"] * 2 * (row["workers"] - 1) / row["workers"])
        if row["ratio"] is not None:
            assert row["ratio"] == pytest.approx(row["peer_time_s"]["median"] / times["median"])
    return found


def needs_hosts() -> None:
    """Skip where no network namespaces can be made."""
    reason = netns.why_not()
    if reason is None:
        try:
            with netns.links(2, 1e9, 1e9):
                pass
        except RunError as error:
            reason = str(error)
    if reason is not None:
        pytest.skip(reason)


# ── the suites, as a user runs them ───────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_same_host_reports_every_variant_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    found = document(
        "same-host", "--workers", "2", "--sizes", "4KiB,1MB", *QUICK, "--sample-ms", "20", "--plot", str(picture)
    )  # fmt: skip
    rows = found["rows"]
    variants = ["buckets", "plan", "ordinary", "threads"]
    assert [(row["bytes"], row["variant"]) for row in rows] == [(n, v) for n in (4096, 1_000_000) for v in variants]
    for row in rows:
        assert (row["op"], row["wire"], row["workers"]) == ("all_reduce", "fp32", 2)
        assert (row["peer"], row["limit"]) == ("gloo fp32", "memory")
        assert row["limit_s"] == row["limit_time_s"]["median"] > 0
        assert row["peer_time_s"]["n"] == row["limit_time_s"]["n"] == 3
        assert row["share_of_limit"] == pytest.approx(row["limit_s"] / row["time_s"]["median"])
        in_threads = row["variant"] == "threads"
        assert ("coordinator_s_per_gb" in row, "worker_s_per_gb" in row) == (not in_threads, not in_threads)
        assert in_threads or 0 < row["coordinator_s_per_gb"] * 2 * row["workers"] * row["bytes"] < 1e12
    assert rows[0]["operations_per_sample"] > 1
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.long
def test_loopback_prints_a_table() -> None:
    shown = bench("loopback", "--workers", "3", "--sizes", "400KB", "--variants", "plan", *QUICK_SAMPLES)
    assert "\x1b" not in shown
    assert "\r" not in shown
    lines = shown.splitlines()
    assert lines[0] == "gradserver bench loopback"
    heading = next(i for i, line in enumerate(lines) if line.startswith("3 processes over TCP"))
    names, units, row = lines[heading + 1 : heading + 4]
    expected = "size type wire time quartiles algbw #wrong gloo gloo/ours reached coord worker"
    assert names.split() == expected.split()
    assert units.split() == ["bytes", "ms", "ms", "GB/s", "ms", "s/GB", "s/GB"]
    assert re.fullmatch(r" +400,000  plan +fp32( +\S+){3} +0( +\S+) +\S+x +\S+%( +[0-9.]+){2}", row)
    assert len(names) == len(row)
    assert all(len(line) <= 120 for line in lines)
    last = " ".join(lines[heading + 5 :])
    assert re.fullmatch(r"gradserver was faster than gloo in [01] of 1 row \(.*\); every value was exact\.", last)


@pytest.mark.long
def test_latency_compares_with_plain_pyzmq() -> None:
    rows = document("latency", "--workers", "2", "--sizes", "8B,4KiB", *QUICK_SAMPLES)["rows"]
    assert [(row["bytes"], row["variant"]) for row in rows] == [(n, v) for n in (8, 4096) for v in ("default", "tcp")]
    assert {row["limit"] for row in rows} == {"plain pyzmq"}


SMALL = ("--parameters", "100K", "--context", "32", "--steps", "3", "--repetitions", "1")


@pytest.mark.long
def test_parameters_are_counted_beside_torch_and_in_threads() -> None:
    rows = document("parameters", "--counts", "5,60", "--repetitions", "3")["rows"]
    found = [(row["parameters"], row["variant"]) for row in rows]
    ways = ("gradserver", "ddp", "none", "LocalCluster")
    assert found == [(count, way) for count in (5, 60) for way in ways]
    assert not any(row["wrong"] for row in rows)
    assert all(row["time_s"]["median"] > 0 for row in rows)


@pytest.mark.long
def test_train_says_what_is_exposed_and_what_was_learnt(tmp_path: Path) -> None:
    picture = tmp_path / "train.png"
    names = "tcp/int8,direct,shm,ddp-shm,ddp,ddp/bf16,ddp/powersgd"
    found = document("train", *SMALL, "--contenders", names, "--overlap-size", "1MB", "--plot", str(picture))
    steps, overlaps = found["rows"][:8], found["rows"][8:]
    ways = [
        ("none", ""),
        ("tcp", "int8"),
        ("direct", "fp32"),
        ("shm", "fp32"),
        ("ddp-shm", "fp32"),
        ("ddp", "fp32"),
    ]
    assert [(row["variant"], row["wire"]) for row in steps] == [*ways, ("ddp", "bf16"), ("ddp", "powersgd:1")]
    alone, exact = steps[0], [row for row in steps if row["wire"] == "fp32"]
    for row in steps:
        assert (row["op"], row["steps"], row["place"]) == ("step", 5, "0.5 M parameters, loopback")
        assert row["processor_s"] > 0
        assert sum(row[f"{phase}_s"] for phase in ("forward", "gradients", "tail", "update")) > 0
    for row in steps[1:]:
        assert row["exposed_s"] == pytest.approx(row["time_s"]["median"] - alone["time_s"]["median"])
        assert row["limit_s"] == alone["time_s"]["median"]  # without links
        assert row["loss"] == pytest.approx(exact[0]["loss"], rel=0.05)
        best = min(peer["time_s"]["median"] for peer in steps if peer["variant"] == "ddp")
        assert row.get("best_ratio") == (None if row["variant"] == "ddp" else best / row["time_s"]["median"])
    assert [row["loss"] for row in exact] == pytest.approx([exact[0]["loss"]] * len(exact), rel=1e-5)
    assert all(row["distance"] <= 1e-6 for row in exact[:2])
    assert steps[4]["distance"] == 0.0
    assert alone["loss"] != exact[0]["loss"]
    assert "0.5 M parameters, loopback: choose " in found["conclusion"]
    assert [row["variant"] for row in overlaps] == ["tcp", "shm", "ddp"]
    for row in overlaps:
        assert row["limit_s"] == max(row["compute_s"], row["exchange_s"])
        assert row["time_s"]["median"] > row["compute_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_train_counts_what_the_links_of_each_rate_carry() -> None:
    needs_hosts()
    links = ("--hosts", "2", "--rate", "100mbit,1gbit", "--coordinator-rate", "200mbit,2gbit")
    rows = document("train", *SMALL, *links, "--contenders", "tcp,tcp/bf16,ddp")["rows"]
    assert len({row["place"] for row in rows}) == 2
    for number, row in enumerate(rows):
        way, nbytes = (row["variant"], row["wire"]), row["bytes"]
        if way == ("none", ""):
            assert row["sent_bytes"] < 0.01 * nbytes
            continue
        share = 0.5 if row["wire"] == "bf16" else 1.0  # of two, a ring sends as much as a coordinator takes
        assert share * nbytes < row["sent_bytes"] < 1.1 * share * nbytes
        assert ("coordinator_s" in row) == (row["variant"] not in ("ddp", "none"))
        assert row.get("coordinator_s", 1) > 0
        on_link = max(row["sent_bytes"], row["received_bytes"])
        least = on_link / (12.5e6 if number < 4 else 125e6)
        assert row["limit_s"] >= least
        assert row["time_s"]["median"] > 0.7 * least  # which no load of this machine makes shorter; links have bursts


def test_train_takes_contenders_and_sizes_by_name() -> None:
    assert parse.contender("tcp/topk:0.01") == ("tcp", "topk:0.01")
    assert [parse.contender(one) for one in ("ddp", "direct")] == [("ddp", "fp32"), ("direct", "fp32")]
    assert parse.contender("ddp/powersgd") == ("ddp", "powersgd:1")
    assert parse.contender("ddp-shm") == parse.contender("ddp-shm/fp32") == ("ddp-shm", "fp32")
    assert [parse.parameters(one) for one in ("25M", "100K", "12000")] == [25_000_000, 100_000, 12_000]
    assert [train_suite.width_of(count) for count in (25_000_000, 100_000_000, 10_000)] == [512, 1024, 64]
    for width in (512, 1024):
        found = train_suite.settings_of(argparse.Namespace(batch=1, context=128, repetitions=1), 4, width, 8)
        assert 0.97 < found.parameters / (25e6 if width == 512 else 100e6) < 1.03
    assert [train_suite.powersgd_start(steps) for steps in (1, 8, 198)] == [2, 2, 20]


def a_step(way: str, wire: str, seconds: float, loss: float = 3.0, place: str = "25 M, 1 Gbit/s") -> Row:
    return Row("step", way, wire, 4, 10**8, Stats.of([seconds]), 0, more={"loss": loss, "steps": 8.0}, place=place)


def test_advice_names_the_quickest_that_keeps_the_loss_and_what_others_cost() -> None:
    rows = [a_step("none", "", 0.5, 4.0), a_step("tcp", "fp32", 1.6), a_step("tcp", "int8", 1.0, 3.01)]
    torch = [a_step("ddp", "fp32", 2.0), a_step("ddp", "bf16", 1.2), a_step("ddp", "powersgd:1", 0.8, 3.06)]
    assert advise([*rows, *torch]) == [
        "25 M, 1 Gbit/s: choose tcp int8, with 1000 ms a step (2.00 times as quick as ddp fp32 and 1.20 times as quick "
        "as ddp bf16); to lose nothing, tcp fp32, with 1600 ms a step (1.25 times as quick as ddp fp32); "
        "ddp powersgd:1 takes 800 ms a step, but its loss after 8 steps is 2.0% higher."
    ]
    quick = [a_step("ddp", "fp32", 0.9, place="here"), a_step("tcp", "fp32", 1.8, place="here")]
    assert advise([*rows, *torch, *quick])[1] == (
        "here: choose ddp fp32, with 900 ms a step (2.00 times as quick as tcp fp32)."
    )
    assert advise(rows[1:]) == [
        "25 M, 1 Gbit/s: tcp int8 is the quickest of these, with 1000 ms a step; torch's fp32 was not measured."
    ]
    assert advise([a_row()]) == []


def test_means_are_measured_beside_the_plain_one(tmp_path: Path) -> None:
    picture = tmp_path / "means.png"
    found = document("means", "--sizes", "400KB", "--mean", "median,krum:1", *QUICK, "--plot", str(picture))
    rows = found["rows"]
    assert [(row["variant"], row["wire"]) for row in rows] == [
        (weights, rule)
        for weights in ("equal", "unequal")
        for rule in ("plain", "with norms", "compared", "median", "krum:1")
    ]
    assert all(row["wrong"] == 0 for row in rows)
    assert [row["peer"] for row in rows[:4]] == [None, "plain", "plain", "plain"]
    assert "other means took" in found["conclusion"]
    assert picture.stat().st_size > 0


def test_codecs_says_what_each_takes_loses_and_costs(tmp_path: Path) -> None:
    picture = tmp_path / "codecs.png"
    found = document("codecs", "--sizes", "400KB,2MB", "--rounds", "12", *QUICK, "--plot", str(picture))
    rows = found["rows"]
    names = ["fp32", "bf16", "fp16", "int8", "topk:0.01", "randomk:0.01"]
    having = ["numpy"] if kernels.active() is kernels.NUMPY else ["numpy", "compiled"]
    assert [(row["bytes"], row["wire"], row["variant"]) for row in rows] == [
        (size, name, how) for size in (400_000, 2_000_000) for name in names for how in having
    ]
    for row in rows:
        assert (row["op"], row["limit"], row["workers"], row["rounds"], row["peer"]) == ("codec", "memcpy", 4, 12, None)
        assert row["decode_s"] > 0 < row["combine_s"]
        assert row["bytes_per_element"] == pytest.approx(
            codec_of(row["wire"]).nbytes(row["bytes"] // 4) * 4 / row["bytes"]
        )
        assert 0 < row["error_of_rounds"] < row["error"]  # what was lost at first has come since
    errors = {row["wire"]: row["error"] for row in rows}
    assert errors["fp32"] < 1e-6 < errors["fp16"] < errors["bf16"] < 2**-8
    assert 2**-8 < errors["int8"] < 0.02 < 0.5 < errors["topk:0.01"] < errors["randomk:0.01"] < 1
    assert found["conclusion"].endswith("every element is in the payloads or in the residuals.")
    assert ("with kernels, lossy codecs combine" in found["conclusion"]) == ("compiled" in having)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_exchange_that_loses_something_for_good_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert codec_suite.account(["int8"], 2, 4)["int8"].wrong == 0
    monkeypatch.setattr(kernels, "_active", kernels.NUMPY)
    monkeypatch.setattr(Int8, "add_block", lambda *_: None)  # only the first contribution counts
    assert codec_suite.account(["int8"], 2, 4)["int8"].wrong > 100_000


@pytest.mark.long
def test_cluster_keeps_to_its_rates_and_removes_its_hosts() -> None:
    needs_hosts()
    options = ("--hosts", "2", "--rate", "200mbit", "--coordinator-rate", "1gbit", "--sizes", "1MB")
    (row,) = document("cluster", *options, *QUICK_SAMPLES)["rows"]
    assert row["limit"] == "links"
    assert row["limit_s"] == pytest.approx(1e6 / (200e6 / 8))
    # A token bucket lets a quarter of this megabyte through at once.
    assert row["time_s"]["median"] > 0.7 * row["limit_s"]
    assert row["peer_time_s"]["median"] > 0.7 * row["limit_s"]
    assert [name for name in netns.existing() if not owner_lives(name)] == []


@pytest.mark.long
def test_levels_are_measured_beside_tcp_on_hosts_that_several_workers_share() -> None:
    needs_hosts()
    options = ("--rate", "1gbit", "--width", "32", "--blocks", "1", "--repetitions", "3")
    flat, leveled = document("levels", *options)["rows"]
    assert (flat["variant"], leveled["variant"]) == ("tcp", "hierarchical")
    assert leveled["peer"] == "tcp"
    assert flat["loss"] == pytest.approx(leveled["loss"], abs=1e-5)
    assert flat["workers"] == 4


_SPOKEN = """
import socket, sys
caller = socket.socket()
caller.connect_ex((sys.argv[1], 9))  # nothing listens there, which the kernel finds out in the usual way
print(caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(bytes(1)).decode())
"""


def test_hosts_speak_tcp_with_the_congestion_control_that_was_asked_for() -> None:
    needs_hosts()
    usual = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    for name in known:
        with netns.links(2, 1e9, 1e9, None if name == usual else name) as hosts:
            command = [*hosts.worker_prefix(0), sys.executable, "-c", _SPOKEN, hosts.worker_address(1)]
            spoken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        assert spoken == name
    with pytest.raises(RunError, match="route change"), netns.links(2, 1e9, 1e9, "nonesuch"):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_interrupted_cluster_leaves_nothing_behind(number: signal.Signals, tmp_path: Path) -> None:
    needs_hosts()
    options = ("--hosts", "2", "--repetitions", "10000", "--json")
    with start("cluster", *options, TMPDIR=str(tmp_path)) as running:
        await_hosts(running, 4)
        inside = processes_in(f"gsb-{running.pid}-h1")
        running.send_signal(number)
        try:
            out, err = running.communicate(timeout=30)
        finally:
            running.kill()
    assert running.returncode == 130, out + err
    assert list(tmp_path.iterdir()) == []
    assert "have been removed" in err
    assert out == ""
    assert [name for name in netns.existing() if f"-{running.pid}-" in name] == []
    await_end(inside)


def test_hosts_of_a_killed_run_are_removed_by_the_next(tmp_path: Path) -> None:
    needs_hosts()
    options = ("--hosts", "2", "--repetitions", "10000", "--json")
    with start("cluster", *options, TMPDIR=str(tmp_path)) as running:
        await_hosts(running, 4)
        inside = processes_in(f"gsb-{running.pid}-h1")
        running.kill()
        running.communicate(timeout=30)
    assert [name for name in netns.existing() if f"-{running.pid}-" in name]
    await_end(inside)
    netns.remove_leftovers()
    assert [name for name in netns.existing() if f"-{running.pid}-" in name] == []


def await_hosts(running: subprocess.Popen[str], count: int) -> None:
    """Wait until the run has made its hosts, and started a worker on the first."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and running.poll() is None:
        mine = [name for name in netns.existing() if f"-{running.pid}-" in name]
        if len(mine) == count and processes_in(f"gsb-{running.pid}-h1"):
            return
        time.sleep(0.02)
    running.kill()
    raise AssertionError(f"no hosts: {running.communicate()}")


def await_end(pids: list[str]) -> None:
    """Wait until these processes are gone. The init process of this machine buries orphans, in its own time."""
    wait_until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "the processes are gone", 10)


def processes_in(host: str) -> list[str]:
    return subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False).stdout.split()


def owner_lives(name: str) -> bool:
    return Path(f"/proc/{name.split('-')[1]}").exists()


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the following arguments are required: SUITE"),
        (["everything"], "invalid choice: 'everything'"),
        (["same-host", "--sizes", "4XB"], "'4XB' is not a size: write 4KiB or 4K (4096 bytes), 26MB (26,000,000), 8B"),
        (["same-host", "--sizes", "6B"], "6B is 6 bytes: sizes are multiples of 4, from 8 bytes to 4 GiB"),
        (["same-host", "--sizes", "1MB,1000KB"], "'1MB,1000KB' contains a value twice"),
        (["same-host", "--workers", "1"], "1 is out of range: 2 to 64"),
        (["same-host", "--workers", "two"], "'two' is not a whole number"),
        (["same-host", "--variants", "magic"], "'magic' is unknown; the names are buckets, plan, ordinary, threads"),
        (["same-host", "--plot", "out.pdf"], "'out.pdf': the picture is a PNG; its name must end with .png"),
        (["same-host", "--plot", "/nowhere/out.png"], "'/nowhere/out.png': the folder /nowhere does not exist"),
        (["loopback", "--wire", "fp8"], "'fp8' is not a wire format; the formats are fp32, bf16, int8"),
        (
            ["cluster", "--congestion", "cubic;"],
            "'cubic;' is not the name of a congestion control, such as cubic, reno or bbr",
        ),
        (["cluster", "--rate", "fast"], "'fast' is not a rate: write 100mbit or 2.5gbit (1mbit to 400gbit)"),
        (
            ["codecs", "--wire", "int8,int4"],
            "there is no codec 'int4'; there are fp32, bf16, fp16, int8, topk[:FRACTION]",
        ),
        (["codecs", "--wire", "topk,topk:0.01"], "'topk,topk:0.01' contains a value twice"),
        (["train", "--repetitions", "0"], "0 is out of range: 1 to 100,000"),
        (
            ["train", "--contenders", "ring/fp32"],
            "'ring/fp32' is not a contender: write WAY/WIRE with auto, tcp, shm, direct",
        ),
        (["train", "--contenders", "ddp/int8"], "torch's wrapper has ddp/fp32, ddp/bf16, ddp/powersgd:RANK"),
        (["train", "--contenders", "ddp-shm/int8"], "the backend of torch.distributed has fp32 alone"),
        (["train", "--parameters", "25X"], "'25X' is not a number of parameters: write 25M (10K to 10G)"),
    ],
)
def test_wrong_arguments_say_what_is_right(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "missing", "message"),
    [
        (["latency"], "torch", "pip install 'gradserver[torch]'"),
        (["latency", "--plot", "x.png"], "matplotlib", "pip install 'gradserver[demo]'"),
        (["cluster"], "root", "network namespaces require root: run the command with sudo"),
        (["train", "--rate", "1gbit"], "root", "network namespaces require root: run the command with sudo"),
        (["cluster"], "ip", "ip not found: install iproute2"),
        (["train", "--coordinator-rate", "1gbit"], "", "--coordinator-rate requires --rate"),
        (["train", "--congestion", "cubic"], "", "--congestion requires --rate"),
        (["train", "--contenders", "ddp,direct", "--overlap-size", "1MB"], "", "requires a contender over tcp or shm"),
        (
            ["train", "--rate", "1gbit,2gbit,3gbit", "--coordinator-rate", "1gbit,2gbit"],
            "",
            "--coordinator-rate takes one rate, or one for each of --rate",
        ),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(
    options: list[str], missing: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if missing == "root" else 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == missing else tool)
    assert cli.main(["bench", *options]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("gradserver bench: ")
    assert message in shown.err
    assert shown.out == ""


def test_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys; from gradserver import cli; cli._parser().parse_args(['bench', 'latency']); "
        "print([name in sys.modules for name in ('gradserver.tools.bench.command', 'torch', 'gradserver.worker')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout == "[True, False, False]\n"


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        good = processes.start("worker 0", "-c", "import time; time.sleep(60)")
        bad = processes.start("worker 1", "-c", "import sys; sys.exit('the disk is full')")
        with pytest.raises(RunError, match="worker 1 ended with status 1\nits last output:\n  | the disk is full"):
            processes.lines([good, bad], 30)
    assert good.process.returncode == -signal.SIGTERM


def test_an_error_that_one_reports_is_not_waited_for_by_others(tmp_path: Path) -> None:
    report = """print('{"error": "ValueError: no"}', flush=True); import time; time.sleep(60)"""
    with Processes(tmp_path) as processes:
        silent = processes.start("worker 0", "-c", "import time; time.sleep(60)")
        bad = processes.start("worker 1", "-c", report)
        with pytest.raises(RunError, match="^worker 1: ValueError: no$"):
            processes.answers([silent, bad], 30)


def test_silence_is_an_error(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        silent = processes.start("worker 0", "-c", "import time; time.sleep(60)")
        with pytest.raises(RunError, match="nothing was heard from worker 0 for 0 s"):
            processes.lines([silent], 0.1)


def test_what_is_sent_to_processes_comes_back_the_same() -> None:
    case = Case(4096, (Contender("a", "rounds", "int8", "tcp", {"blocks": 3}), Contender("b", "gloo")))
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
    assert case.numel == 1024
    seat = Seat(1, 2, "tcp://h:1", (Link("bf16", "tcp"), Link()))
    fields = {name: getattr(seat, name) for name in Seat.__slots__}
    fields["links"] = [{"wire": link.wire, "channel": link.channel} for link in seat.links]
    assert Seat.from_dict(fields) == seat


def test_wrong_values_are_counted() -> None:
    world = [pattern(1000, rank, 3) for rank in range(3)]
    mean = sum(world[1:], start=world[0]) / 3
    assert wrong(mean, 0.0) == 0
    mean[7] += 2**-15
    mean[999] = math.nan
    assert wrong(mean, 0.0) == 2
    assert wrong(mean, 0.5) == 1
    assert wrong(world[0], 0.0) == 1000  # one worker's own, as if nothing had been exchanged
    assert wrong(mean_pattern(2000)[1000:], 0.5) == 1000  # another slice's


@pytest.mark.long
def test_contenders_that_no_suite_shows_without_lossy_wires(tmp_path: Path) -> None:
    """Test also that a sample of something slow is one operation."""
    contenders = (Contender("gloo bf16", "gloo", "bf16"), Contender("limit", "sockets", options={"nbytes": 200_000}))
    with Fleet(2, Needs(ring=True), tmp_path / "fleet") as fleet:
        measured = fleet.measure(Case(400_000, contenders), 2, 0.0)
    assert [(one.wrong, one.in_a_row, len(one.times.samples)) for one in measured.values()] == [(0, 1, 2)] * 2


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────────────


def test_statistics() -> None:
    stats = Stats.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (stats.median, stats.quartiles) == (3.0, (2.0, 4.0))
    assert Stats.of([7.0]).quartiles == (7.0, 7.0)
    assert Stats.of([1.0, 2.0]).to_json() == {"median": 1.5, "q1": 1.25, "q3": 1.75, "n": 2, "samples": [1.0, 2.0]}
    with pytest.raises(ValueError, match="no samples"):
        Stats.of([])


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"), (0.00012, "0.000120"), (0.01, "0.0100"), (1.0, "1.00"), (9.996, "10.0"), (12.345, "12.3"),
        (99.96, "100"), (123.4, "123"), (12345.6, "12346"), (-7.15, "-7.15"),
    ],
)  # fmt: skip
def test_figures_have_three_digits_and_no_exponent(value: float, shown: str) -> None:
    assert figures(value) == shown


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8B", 8), ("8", 8), ("4K", 4096), ("4KiB", 4096), ("4kb", 4000), ("26MB", 26_000_000), ("1.5MiB", 3 << 19)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse.size(text) == nbytes
    assert parse.size(size_name(nbytes)) == nbytes


def test_rates_are_bytes_per_second() -> None:
    assert (parse.rate("1gbit"), parse.rate("100mbit"), parse.rate("2.5Gbit")) == (125e6, 12.5e6, 312.5e6)


def test_limit_of_links() -> None:
    links = argparse.Namespace(rate=125e6, coordinator_rate=500e6)
    assert suites.link_limit(links, 2, 125e6) == 1.0  # the workers' links
    assert suites.link_limit(links, 8, 125e6) == 2.0  # the coordinator's
    assert suites.link_limit(argparse.Namespace(rate=125e6, coordinator_rate=None), 4, 125e6) == 4.0
    beside = argparse.Namespace(rate=125e6, coordinator_rate=None, shards_beside=True)
    assert suites.link_limit(beside, 4, 125e6) == 1.5  # a ring's


# ── reports ───────────────────────────────────────────────────────────────────────────────────────────────


BUSY = """
import threading, time

def work():
    while time.thread_time() < 0.2:
        pass

for thread in [threading.Thread(target=work) for _ in range(2)]:
    thread.start()
    thread.join()
print(time.process_time(), flush=True)
input()
"""
"""A process with threads that take processor time and end."""


def a_row(seconds: float = 0.01, wrong: int = 0, limit: str = "memory", nbytes: int = 1_000_000) -> Row:
    times = Stats.of([seconds, seconds, seconds])
    return Row(
        "all_reduce", "plan", "fp32", 4, nbytes, times, wrong,
        peer="gloo fp32", peer_time=Stats.of([0.02]), limit=limit, limit_time=0.005,
        more={"bytes_per_element": 4.0, "error": 0.5, "error_of_rounds": 0.0, "decode_s": 0.01, "combine_s": 0.01},
    )  # fmt: skip


def test_bandwidths_ratio_and_share() -> None:
    row = a_row()
    assert row.algbw == pytest.approx(1e8)
    assert row.busbw == pytest.approx(1.5e8)
    assert row.ratio == pytest.approx(2.0)
    assert row.share == pytest.approx(0.5)


@pytest.mark.parametrize("layout", ["all_reduce", "same-host", "latency", "step", "overlap", "codecs"])
def test_tables_are_aligned(layout: str) -> None:
    table = Table(layout)
    names, units = table.heading()
    times = (9.87e-5, 0.0456) if layout == "latency" else (9.87e-5, 0.456, 12.3)
    rows = [table.line(a_row(seconds)) for seconds in times]
    assert {len(names), *map(len, rows)} == {len(names)}
    assert len(units) <= len(names) <= 120


def test_table_line() -> None:
    assert Table("same-host").line(a_row()).split() == (
        ["1,000,000", "plan", "10.0", "10.0..10.0", "0.100", "0", "20.0", "2.00x", "50.0%", "-", "-"]
    )


def test_cost_is_of_the_operations_of_all_workers() -> None:
    timed = [Timed(1.0, 0.2, 5.0, 7.5), Timed(1.1, 0.4, 5.5, 8.0)]
    cost = Cost.of(timed, count=2)
    assert cost.coordinator == pytest.approx(1.5)  # of 5.0 to 8.0
    assert cost.worker == pytest.approx(0.15)  # the mean of 0.2 and 0.4
    assert per_gigabyte([cost], workers=2, nbytes=0.5e9) == {
        "coordinator_s_per_gb": pytest.approx(0.75),
        "worker_s_per_gb": pytest.approx(0.15),
    }


def test_processor_time_of_another_process() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        own = float(other.stdout.readline())  # it now waits for its standard input
        assert processor_seconds([other.pid]) == pytest.approx(own, abs=0.05)
        assert processor_seconds([other.pid, other.pid]) == pytest.approx(2 * own, abs=0.1)
        other.stdin.close()


@pytest.mark.parametrize("sizes", [[1_000_000], [8, 4096, 1_000_000]])
def test_pictures(sizes: list[int], tmp_path: Path) -> None:
    rows = [a_row(1e-9 * nbytes + 1e-4, nbytes=nbytes) for nbytes in sizes]
    bars = [dataclasses.replace(a_row(), op="step", variant="torch", peer_time=None, more={"compute_s": 0.004})]
    save_plot(tmp_path / "x.png", "same-host", [*rows, *bars])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_conclusions() -> None:
    assert conclusion([]) == "Nothing was measured."
    assert conclusion([a_row(), a_row(0.04)]) == (
        "gradserver was faster than gloo in 1 of 2 rows (gloo took 0.50 to 2.00 times as long); "
        "it reached 12% to 50% of the limit (memory, 1 MB and more); every value was exact."
    )
    small = conclusion([a_row(nbytes=4096)])
    assert "limit" not in small
    assert conclusion([a_row(), a_row(wrong=3)]) == ("WRONG: 3 values in 1 of 2 rows.")


# ── modes ─────────────────────────────────────────────────────────────────────────────────────────────


def a_training(
    mode: Mode = MODES[0], loss: float = 2.0, batches: Sequence[Sequence[tuple[float, int]]] = (), **other: Any
) -> Finished:
    workers = [
        {
            "began": 100.0,
            "ended": 112.0,
            "loss": loss,
            "weights": "same",
            "nbytes": 3_000_000,
            "batches": list(mine),
            "processor": 1.0,
            "staleness": 0.5,
            "most_stale": rank,
            **other,
        }
        for rank, mine in enumerate(batches or [[(102.0, 8), (110.0, 8)], [(103.0, 24), (111.0, 24)]])
    ]
    references = [Reference([2.0, 4.0], [1.8, 3.6]), Reference([2.0, 4.0], [1.8, 3.6])]
    return Finished(Scenario("slow", (3.0, 1.0), 12.5e6), mode, ModelSettings(batch=16), workers, references)


def test_modes_and_scenarios_travel_as_json() -> None:
    mode = Mode("some", "local", {"every": 16}, serve=("--quorum", "1"))
    assert Mode.from_json(mode.to_json()) == mode
    scenario = scenario_of("unequal", 3, 3.0, 12.5e6)
    assert scenario == Scenario("the first worker 3 times slower", (4.5, 1.5, 1.5))
    assert Scenario.from_json(scenario.to_json()) == scenario
    assert scenario_of("link", 2, 3.0, 12.5e6) == Scenario("links of 100 Mbit/s", (1.0, 1.0), 12.5e6)
    assert len({one.name for one in MODES}) == len(MODES)
    assert set(USUAL) <= {one.name for one in MODES}


def test_a_rate_counts_samples_behind_the_first_tenth_beside_workers_by_themselves() -> None:
    one = a_training()
    assert one.seconds == 12.0
    assert one.samples == 64
    assert one.rate == (64 - 8) / (112.0 - 102.0)  # the first 8 samples are more than a tenth
    assert (one.alone, one.together) == (6.0, 5.4)
    assert one.share == one.rate / 6.0
    assert one.is_same


def test_trainings_are_shown_by_medians_and_ranges() -> None:
    local = next(mode for mode in MODES if mode.name == "local")
    found = [a_training(local, loss) for loss in (2.02, 1.96, 2.10)] + [a_training()]
    lines = tables(found)
    assert lines[1] == "slow"
    assert lines[3].split()[:3] == ["sync", "2.0000", "+0.0%"]
    assert lines[4].split()[:6] == ["local", "2.0200", "+1.0%", "(-2.0%", "…", "+5.0%)"]
    assert lines[-1] == "  all at once, without exchange: 90% of that"


def test_trainings_of_several_runs_come_into_one_file(tmp_path: Path) -> None:
    path, one = tmp_path / "modes.json", a_training()
    assert load(path, one.settings) == []
    save(path, {"runs": [one.to_json()]})
    (again,) = load(path, one.settings)
    assert json.dumps(again.to_json()) == json.dumps(one.to_json())
    assert again.rate == one.rate
    with pytest.raises(RunError, match="other settings"):
        load(path, ModelSettings(batch=8))
    path.write_text("{}")
    with pytest.raises(RunError, match="has no trainings"):
        load(path, one.settings)


def test_picture_has_a_panel_for_each_scenario(tmp_path: Path) -> None:
    save_mode_plot(tmp_path / "modes.png", [a_training(mode) for mode in MODES[:3]])
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_every_mode_trains_and_says_what_it_costs(tmp_path: Path) -> None:
    path, names = tmp_path / "modes.json", ["sync", "bounded", "async", "local", "streaming-auto", "streaming-int8"]
    words = ("--quick", "--batch", "4", "--steps", "16", "--scenarios", "unequal", "--add", str(path))
    bench("modes", *words, "--modes", "sync,local", "--json")
    first = {one["mode"]["name"]: one for one in json.loads(path.read_text())["runs"]}
    found = json.loads(bench("modes", *words, "--modes", ",".join(names), "--json"))["runs"]
    runs = {one["mode"]["name"]: one for one in found}
    assert sorted(one["mode"]["name"] for one in found) == sorted(names)
    assert first.items() <= runs.items()  # they were not trained again
    assert all(one["same_bits"] for one in found)
    for one in found:
        assert sum(count for worker in one["workers"] for _, count in worker["batches"]) == 16 * 2 * 4
    nbytes = {name: one["workers"][0]["nbytes"] for name, one in runs.items()}
    assert nbytes["streaming-int8"] < nbytes["local"] < nbytes["sync"] / 10


@pytest.mark.long
def test_modes_for_unequal_workers_give_more_to_the_faster() -> None:
    chosen = ("--modes", "balanced,ranges,cadence,local-balanced", "--scenarios", "unequal", "--slow", "6")
    found = json.loads(bench("modes", "--quick", "--batch", "4", "--steps", "48", *chosen, "--json"))
    for one in found["runs"]:
        slow, fast = ([count for _, count in worker["batches"]] for worker in one["workers"])
        assert sum(slow) + sum(fast) == 48 * 2 * 4
        assert sum(slow) < sum(fast), one["mode"]["name"]
        assert one["mode"]["name"] != "balanced" or len(slow) == len(fast) == 48


# ── a large model ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_large_model_trains_over_each_channel(dtype: str) -> None:
    small = ("--width", "64", "--blocks", "2", "--vocabulary", "512", "--context", "8", "--steps", "2")
    found = json.loads(bench("large", "--dtype", dtype, *small, "--json"))
    tcp, shm = found["runs"]
    assert [run["workers"][0]["channel"] for run in (tcp, shm)] == ["tcp", "shm"]
    assert tcp["workers"][0]["losses"] == shm["workers"][0]["losses"]
    for run in (tcp, shm):
        assert run["same_bits"]
        assert len(run["workers"]) == 2
        assert run["workers"][0]["nbytes"] == run["parameters"] * (4 if dtype == "fp32" else 2)


@pytest.mark.long
def test_large_model_is_shown_as_a_table() -> None:
    small = ("--width", "64", "--blocks", "1", "--vocabulary", "64", "--context", "8", "--steps", "1")
    lines = bench("large", "--channel", "shm", "--devices", "cpu", *small).splitlines()
    assert lines[0] == "gradserver bench large: 0 million parameters, 1 worker"
    assert lines[-1].startswith("shm     fp32  cpu ")
    assert lines[-1].endswith("  yes")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_432_million_parameters_are_exchanged() -> None:
    """Test the size that is known to be too much for messages of 100 MB: its head alone has 134 MB."""
    with start("large", "--steps", "2", "--json") as running:
        out, err = running.communicate(timeout=1100)
    assert running.returncode == 0, err
    for run in json.loads(out)["runs"]:
        assert run["same_bits"]
        assert run["workers"][0]["nbytes"] == 1_728_385_024
        assert all(4 < loss < 40 for worker in run["workers"] for loss in worker["losses"])
