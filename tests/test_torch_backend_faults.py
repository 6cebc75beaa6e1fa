"""Tests of torch.distributed's backend when something goes wrong: ranks that end, coordinators that do, wrong input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradserver.protocol.errors import WorkerLostError
from gradserver.torch.coordinator import addresses
from gradserver.torch.errors import as_torchs
from tests.cluster import BUSY, ROOT, STARTED_WITHIN, Daemon, Program, marked, wait_until
from tests.test_torch_backend import ranks

ENTRY = ROOT / "gradserver/torch/entry"
FAILED_WITHIN = 3.0


def failure(program: Program, within: float = STARTED_WITHIN) -> tuple[str, str, float]:
    """Return the class of a rank's error, its text, and the seconds until it was raised."""
    kind, text, seconds = json.loads(program.expect("failed ", within))
    return kind, text, seconds


def own_coordinators() -> list[int]:
    """Return the processes of coordinators that ranks of this process's tests have started."""
    own = marked("GRADSERVER_TEST_OWNER", str(os.getpid()))
    return [pid for pid, command in own.items() if "gradserver.torch.coordinator" in command]


OWNER = {"GRADSERVER_TEST_OWNER": str(os.getpid())}


# ── ranks that end ────────────────────────────────────────────────────────────────────────────────────────


ENDS = "killed", "frozen", "raises", "leaves"
LONG = [*ENDS[1::2], *(f"{way} {end}" for way in ("sharded", "replicated") for end in ENDS)]


ELSEWHERE = [(f"replicated {end}", 3) for end in ENDS]
"""Survivors that meet the rank in another sub-group, with another rank there."""


@pytest.mark.parametrize("how", ["killed", "raises", *(pytest.param(how, marks=pytest.mark.long) for how in LONG)])
def test_survivors_name_the_rank_that_has_ended(how: str, tmp_path: Path) -> None:
    size = 4 if "replicated" in how else 3
    with ranks("training", tmp_path, size, steps=500, pause=0.02, how=how, environment=OWNER) as programs:
        for rank in {*range(size)} - {1}:
            kind, text, seconds = failure(programs[rank])
            assert kind in ("RuntimeError", "WorkerLostError", "WorkerLeftError")
            assert f"'{socket.gethostname()}:1' (rank {0 if (how, rank) in ELSEWHERE else 1})" in text
            assert ("[in a sub-group of global ranks 1, 3, in which rank 0 is global rank 1]" in text) == (
                (how, rank) in ELSEWHERE
            )
            assert seconds < (2 * FAILED_WITHIN if "frozen" in how else FAILED_WITHIN) + BUSY
            assert programs[rank].end() == 1  # and not by a signal
    assert wait_until(lambda: not own_coordinators(), "no coordinator is left")


def test_errors_tell_which_global_ranks_the_ranks_of_a_sub_group_are() -> None:
    error = WorkerLostError("'b' (rank 0) was lost", worker="b", rank=0)
    assert str(as_torchs(error, (0, 1))) == str(error)
    told = as_torchs(error, (3, *range(20, 40)))
    assert isinstance(told, WorkerLostError)
    assert str(told).startswith("'b' (rank 0) was lost [in a sub-group of global ranks 3, 20, 21, ")
    assert str(told).endswith(", 34, …, in which rank 0 is global rank 3]")


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGINT, signal.SIGTERM))]
)
def test_coordinator_ends_with_rank_0(number: signal.Signals, tmp_path: Path) -> None:
    with ranks("training", tmp_path, 2, steps=5000, pause=0.01, environment=OWNER) as programs:
        for program in programs:
            program.expect("step 1", STARTED_WITHIN)
        assert len(own_coordinators()) == 1
        programs[0].send_signal(number)
        _, text, _ = failure(programs[1])
        assert "(rank 0)" in text
    assert wait_until(lambda: not own_coordinators(), "no coordinator is left")


def test_coordinator_ends_with_the_last_rank_that_leaves(tmp_path: Path) -> None:
    with ranks("training", tmp_path, 2, steps=3, pause=0.0, environment=OWNER) as programs:
        for program in programs:
            program.expect("ok", STARTED_WITHIN)
            assert program.end() == 0
    assert wait_until(lambda: not own_coordinators(), "no coordinator is left")


# ── coordinators that end ─────────────────────────────────────────────────────────────────────────────────


def test_training_goes_on_over_a_restart_of_the_coordinator_with_the_same_bits(tmp_path: Path) -> None:
    digests = []
    with ranks("training", tmp_path, 2, steps=40, pause=0.0, backend="gloo") as programs:
        digests += [program.expect("digest ", STARTED_WITHIN) for program in programs]
    (tmp_path / "store").unlink(missing_ok=True)
    state = str(tmp_path / "state")
    with Daemon("--state-dir", state) as first:
        port = first.url.rpartition(":")[2]
        environment = {"GRADSERVER_URL": first.url}
        with ranks("training", tmp_path, 2, steps=40, pause=0.05, environment=environment) as programs:
            for step in (4, 15, 26):
                for program in programs:
                    program.expect(f"step {step}", STARTED_WITHIN)
                first.send_signal(signal.SIGKILL)
                first.end()
                first.__exit__()
                first = Daemon("--state-dir", state)
                assert first.url.endswith(port)
            digests += [program.expect("digest ", STARTED_WITHIN) for program in programs]
        first.__exit__()
    assert len(set(digests)) == 1


# ── wrong input ───────────────────────────────────────────────────────────────────────────────────────────


def test_url_without_a_coordinator(tmp_path: Path) -> None:
    environment = {"GRADSERVER_URL": "tcp://127.0.0.1:9"}
    with ranks("failing", tmp_path, 2, timeout=2, environment=environment) as programs:
        for program in programs:
            kind, text, seconds = failure(program)
            assert kind == "CoordinatorUnreachableError"
            assert "tcp://127.0.0.1:9" in text
            assert "GRADSERVER_URL" in text
            assert seconds < 2 + BUSY


def test_url_that_is_none_is_told_to_all_ranks(tmp_path: Path) -> None:
    with (
        ranks("failing", tmp_path, 2, only=(0,), environment={"GRADSERVER_URL": "localhost"}) as (first,),
        ranks("failing", tmp_path, 2, only=(1,)) as (second,),
    ):
        kind, text, _ = failure(first)
        assert kind == "InvalidArgumentError"
        assert "localhost" in text
        kind, text, _ = failure(second)
        assert kind == "CoordinatorUnreachableError"
        assert "rank 0, on " in text


def test_url_at_some_ranks_only(tmp_path: Path) -> None:
    with (
        ranks("failing", tmp_path, 2, only=(0,), timeout=5) as (first,),
        ranks("failing", tmp_path, 2, only=(1,), environment={"GRADSERVER_URL": "tcp://127.0.0.1:9"}) as (second,),
    ):
        kind, text, _ = failure(second)
        assert kind == "DisagreementError"
        assert "GRADSERVER_URL" in text
        assert failure(first)[0] == "JoinTimeoutError"


def test_rank_twice_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with ranks("failing", tmp_path, 3, only=(0, 1), timeout=60) as programs:
        wait_until(lambda: _has(tmp_path / "store", b"rank/1"), "rank 1 is there", STARTED_WITHIN)
        with ranks("failing", tmp_path, 3, only=(1,), timeout=60) as (again,):
            kind, text, _ = failure(again)
        assert kind == "JoinRefusedError"
        assert text.startswith("rank 1 of this group is process ")
        with ranks("failing", tmp_path, 3, only=(2,), timeout=60) as (last,):
            assert [program.expect("sum ", STARTED_WITHIN) for program in (*programs, last)] == ["3"] * 3


def _has(path: Path, text: bytes) -> bool:
    return path.exists() and text in path.read_bytes()


def test_other_world_size(tmp_path: Path) -> None:
    with (
        Daemon() as daemon,
        ranks("failing", tmp_path, 2, only=(0,), timeout=5, environment={"GRADSERVER_URL": daemon.url}) as (first,),
        ranks("failing", tmp_path, 3, only=(1,), timeout=5, environment={"GRADSERVER_URL": daemon.url}) as (second,),
    ):
        found = [failure(program) for program in (first, second)]
    assert [kind for kind, text, _ in found if "world size of" in text] == ["InvalidWorldSizeError"], found


def test_elastic_group_refuses_a_sum(tmp_path: Path) -> None:
    environment = {"GRADSERVER_GROUP": "default"}
    with Daemon("--workers", "1:2", "--gather", "60") as daemon:
        environment["GRADSERVER_URL"] = daemon.url
        with ranks("elastic", tmp_path, 2, environment=environment) as programs:
            for program in programs:
                program.expect("ok", STARTED_WITHIN)


def test_mixed_devices_and_options_are_refused(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], list[str]]] = [
        ({"backend": "cpu:gloo,cuda:gradserver"}, ["cpu:gloo", "replace", "new_group"]),
        ({"pg_options": {"wire": "int8"}}, ["no options", "DistributedDataParallel"]),
    ]
    for number, (more, words) in enumerate(wrong):
        with ranks("failing", tmp_path, 1, name=f"store-{number}", **more) as (program,):
            _, text, _ = failure(program)
            assert all(word in text for word in words), text
    with ranks("failing", tmp_path, 1, environment={"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"}) as (program,):
        _, text, _ = failure(program)
        assert "TORCH_DISTRIBUTED_USE_TORCHCOMMS" in text


# ── the entry point ───────────────────────────────────────────────────────────────────────────────────────

IMPORTING = """
import sys, torch
assert not [name for name in sys.modules if name.partition(".")[0] == "gradserver"], "import torch imports gradserver"
import torch.distributed as dist
try:
    dist.init_process_group("gradserver", store=dist.HashStore(), rank=0, world_size=1)
    one = torch.ones(1)
    dist.all_reduce(one)
    print("sum", one.item())
except Exception as error:
    print(type(error).__name__, error)
"""


def imported(folder: Path, *, entry: Path = ENTRY, **environment: str) -> str:
    """Run a script in an environment in which torch finds the entry point, as it does after an installation."""
    metadata = folder / "gradserver_test-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gradserver-test\nVersion: 0\n")
    text = (ROOT / "pyproject.toml").read_text()
    groups = re.findall(r'^\[project\.entry-points\."(torch\.\S+)"\]\ngradserver = "(\S+)"$', text, re.MULTILINE)
    assert [group for group, _ in groups] == ["torch.backends", "torch.distributed.backends"]
    (metadata / "entry_points.txt").write_text("".join(f"[{group}]\ngradserver = {name}\n" for group, name in groups))
    path = os.pathsep.join(map(str, (folder, entry, ROOT)))
    result = subprocess.run(
        [sys.executable, "-c", IMPORTING],
        env={**os.environ, "GRADSERVER_URL": "", **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=STARTED_WITHIN,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_torch_finds_the_backend_without_an_import(tmp_path: Path) -> None:
    assert "sum 1.0" in imported(tmp_path)


def test_wrong_url_reaches_no_import_of_torch(tmp_path: Path) -> None:
    assert "InvalidArgumentError GRADSERVER_URL" in imported(tmp_path, GRADSERVER_URL="no url")


@pytest.mark.parametrize(
    "place", ["def _create(", pytest.param("    from torch.distributed import is_available", marks=pytest.mark.long)]
)
def test_fault_in_the_entry_point_breaks_no_import_of_torch(place: str, tmp_path: Path) -> None:
    text = (ENTRY / "gradserver_torch_entry.py").read_text()
    at = text.index(place)
    at = text.index("\n", text.index('"""Make a group', at)) if place.startswith("def") else at
    planted = text[:at] + '\n    raise OSError("a planted fault")\n' + text[at:]
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry/gradserver_torch_entry.py").write_text(planted)
    found = imported(tmp_path, entry=tmp_path / "entry")
    assert "planted" in found or "gradserver" in found
    assert "sum" not in found


# ── the address of a coordinator ──────────────────────────────────────────────────────────────────────────


def test_coordinator_listens_where_the_others_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"trainer-0": "10.1.2.3", "localhost": "127.0.0.1", "debian": "127.0.1.1", "10.1.2.3": "10.1.2.3"}
    monkeypatch.setattr("gradserver.torch.coordinator.address_towards", lambda host: own.get(host, "10.1.2.9"))
    assert addresses(None) == ("127.0.0.1", "127.0.0.1")
    assert addresses("localhost") == ("127.0.0.1", "127.0.0.1")
    assert addresses("trainer-0") == ("10.1.2.3", "10.1.2.3")
    assert addresses("elsewhere") == ("10.1.2.9", "10.1.2.9")
    assert addresses("debian") == ("0.0.0.0", "debian")
