"""The words of a worker about itself: with and without torch, devices and a driver that works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gradserver
from gradserver import connect
from gradserver.protocol.errors import (
    BackendUnavailableError,
    DisagreementError,
    InvalidArgumentError,
    JoinRefusedError,
)
from gradserver.protocol.limits import MAX_TROUBLE
from gradserver.protocol.offers import Device, Offer, pack_offers, unpack_offers
from gradserver.status import render
from gradserver.transport.server import TcpServer
from gradserver.worker.offer import is_nccl_available, offer_of
from tests.cluster import Daemon, Task, coordinator, joined, together, wait_until

GIB = 1024**3


def identity(index: int) -> str:
    """Return the UUID of a device, as torch tells it."""
    return f"{index:08x}-8ff3-c2dc-3b0d-fafd804516ae"


class Cuda(SimpleNamespace):
    """torch.cuda of a machine with some devices."""

    def __init__(self, count: int, current: int | None = None, trouble: Exception | None = None) -> None:
        super().__init__()
        self.count, self.current, self.trouble = count, current, trouble
        self.nccl = SimpleNamespace(version=lambda: (2, 27, 3))

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.current is not None

    def current_device(self) -> int:
        assert self.current is not None, "to ask this would begin with CUDA"
        return self.current

    def get_device_properties(self, index: int) -> SimpleNamespace:
        if self.trouble is not None:
            raise self.trouble
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid=identity(index), total_memory=80 * GIB)


def torch_with(cuda: Cuda, **other: Any) -> SimpleNamespace:
    """Return a torch with this torch.cuda; it stands in for one of a machine with devices."""
    has = {"is_available": lambda: True, "is_gloo_available": lambda: True, "is_nccl_available": lambda: True}
    made = SimpleNamespace(
        __version__="2.11.0+cu128",
        cuda=cuda,
        distributed=SimpleNamespace(**has),
        version=SimpleNamespace(cuda="12.8", hip=None),
    )
    return SimpleNamespace(**{**vars(made), **other})


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES", "GRADSERVER_PLANE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def offered(monkeypatch: pytest.MonkeyPatch, torch: Any, plane: str = "auto") -> Offer:
    monkeypatch.setitem(sys.modules, "torch", torch)
    offer = offer_of(plane)
    assert unpack_offers(pack_offers((offer,))) == (offer,), "whatever it says can travel"
    return offer


# ── devices ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_with_devices_says_which_and_its_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = offered(monkeypatch, torch_with(Cuda(3, current=2)))

    assert offer.devices == tuple(
        Device("NVIDIA H100 80GB HBM3", f"GPU-{identity(index)}", 80 * GIB) for index in (2, 0, 1)
    )
    assert (offer.torch, offer.nccl, offer.backends) == ("2.11.0+cu128", "2.27.3", ("gloo", "nccl"))
    assert offer.trouble == ""
    assert offer.host
    assert offer.host_id


@pytest.mark.parametrize(("place", "own"), [("1", 1), ("5", 1), ("", 0), ("x", 0)])
def test_before_a_device_is_set_the_place_on_the_host_tells_it(
    place: str, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", place)
    assert offered(monkeypatch, torch_with(Cuda(2))).devices[0].uuid == f"GPU-{identity(own)}"
    assert offered(monkeypatch, torch_with(Cuda(2, current=0))).devices[0].uuid == f"GPU-{identity(own)}"


def test_a_torch_that_does_not_tell_the_identity_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in ("\x81", None):
        cuda, properties = Cuda(1), SimpleNamespace(name="T4", uuid=number, total_memory=GIB)
        monkeypatch.setattr(cuda, "get_device_properties", lambda _, properties=properties: properties)
        assert offered(monkeypatch, torch_with(cuda)).devices == (Device("T4", "", GIB),)


def test_more_devices_than_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [device.uuid for device in offered(monkeypatch, torch_with(Cuda(40, current=30))).devices[:2]] == [
        f"GPU-{identity(index)}" for index in (30, 0)
    ]


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (
            torch_with(Cuda(1, trouble=RuntimeError("CUDA driver initialization failed\nmore"))),
            "CUDA cannot be used: CUDA",
        ),
        (torch_with(Cuda(1, trouble=OSError())), "CUDA cannot be used: OSError"),
        (torch_with(Cuda(1, trouble=RuntimeError("\x1b[2J" + "ü" * 999))), "CUDA cannot be used: ?[2J????"),
        (torch_with(Cuda(0)), "the driver shows none"),
        (torch_with(Cuda(0), version=SimpleNamespace(cuda=None, hip=None)), "torch 2.11.0+cu128 is built without CUDA"),
        (SimpleNamespace(), "torch cannot be imported: 'types.SimpleNamespace' object has no attribute '__version__'"),
        (torch_with(Cuda(1), distributed=None), "this torch is built without NCCL"),
        (torch_with(None), "CUDA cannot be used: 'NoneType' object has no attribute 'device_count'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_broken_makes_a_reason_and_no_exception(torch: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = offered(monkeypatch, torch)
    assert offer.trouble.startswith(said)
    assert len(offer.trouble) <= MAX_TROUBLE
    assert not offer.nccl
    available = is_nccl_available()
    assert not available
    assert available.reason == offer.trouble


def test_devices_that_are_hidden_are_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert offered(monkeypatch, torch_with(Cuda(0))).trouble == "CUDA_VISIBLE_DEVICES hides all devices"


def test_nccl_is_available_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(Cuda(1)))
    available = gradserver.is_nccl_available()
    assert available
    assert available.reason == "NCCL 2.27.3 of torch 2.11.0+cu128, on NVIDIA H100 80GB HBM3"


def test_a_plane_of_the_coordinator_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offered(monkeypatch, torch_with(Cuda(1)), "tcp").devices == ()


def test_the_direct_plane_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailableError, match=r"plane is 'direct', which needs torch .*: torch cannot be imp"):
        offer_of("direct")


def test_here_torch_says_what_it_is() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    offer = offer_of("auto")
    assert offer.torch == torch.__version__
    assert "gloo" in offer.backends
    if torch.version.cuda is None:
        assert offer.trouble == f"torch {torch.__version__} is built without CUDA"
        assert not gradserver.is_nccl_available()


PROGRAM = """
import json, sys
import gradserver
worker = gradserver.connect(sys.argv[1], world_size=1)
print(json.dumps(["torch" in sys.modules, worker.plane, worker.plane_reason]))
worker.close()
"""


def test_a_worker_with_numpy_alone_stays_without_torch() -> None:
    with Daemon() as daemon:
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, daemon.url], capture_output=True, text=True, check=True, timeout=60
        )
    assert json.loads(ran.stdout) == [False, "shm", f"{_name(ran)} is alone"]


def _name(ran: subprocess.CompletedProcess[str]) -> str:
    return repr(json.loads(ran.stdout)[2].split("'")[1])


# ── through a coordinator ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def server() -> Iterator[TcpServer]:
    with coordinator() as server:
        yield server


def test_workers_know_the_plane_and_why(server: TcpServer) -> None:
    with joined(server.url, 2) as workers:
        for worker in workers:
            assert worker.plane == "shm"
            assert worker.plane_reason.startswith("'w0' has no")
        assert server._runtime.snapshot()["groups"]["default"]["plane"]["name"] == "shm"  # type: ignore[index]


def test_the_first_rank_logs_the_plane_and_the_devices(server: TcpServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "gradserver"), joined(server.url, 2):
        pass
    coordinators, workers = [text for text in caplog.messages if "devices:" in text]
    assert workers == coordinators
    assert workers.startswith("group 'default': plane shm, because 'w0' has no")
    assert workers.endswith("; devices: 2 × CPU, on 1 host")


def test_one_that_demands_a_plane_demands_it_of_all(server: TcpServer) -> None:
    tasks = [
        Task(connect, server.url, rank, 2, name=f"w{rank}", plane=plane, timeout=10.0)
        for rank, plane in enumerate(("auto", "tcp"))
    ]
    workers = [task.result() for task in tasks]
    assert [(worker.plane, worker.channel, worker.plane_reason) for worker in workers] == [
        ("tcp", "tcp", "'w1' demands it")
    ] * 2
    assert [list(one) for one in together(workers, lambda worker: worker.all_reduce(np.ones(3)))] == [[1, 1, 1]] * 2
    for worker in workers:
        worker.close()


def test_different_demands_are_an_error_that_names_both(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Task(connect, server.url, 0, 2, name="w0", plane="shm", timeout=1.5)
    wait_until(lambda: server._runtime.snapshot()["groups"], "the first has come")
    monkeypatch.setenv("GRADSERVER_PLANE", "tcp")
    with pytest.raises(DisagreementError, match=r"'w1' demands plane 'tcp' .* and 'w0' demands 'shm'"):
        connect(server.url, 1, 2, name="w1", timeout=3.0)
    first.error(Exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plane": "nccl"}, r"plane is 'nccl', and must be one of auto, tcp, shm, in_process, direct"),
        ({"plane": "in_process"}, r"plane is 'in_process', which is for threads of one process: use gradserver.LocalC"),
        ({"plane": "tcp", "channel": "shm"}, r"plane is 'tcp' and channel is 'shm': give one of them, or both alike"),
    ],
)
def test_a_wrong_plane_is_refused_at_the_call(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        connect("tcp://127.0.0.1:1", **options)


def test_the_coordinator_can_demand_a_plane() -> None:
    with Daemon("--plane", "tcp") as daemon:
        with joined(daemon.url, 2, channel="auto") as workers:
            assert {worker.channel for worker in workers} == {"tcp"}
            assert workers[0].plane_reason == "the coordinator (serve --plane) demands it"
        with pytest.raises(DisagreementError, match="channel is 'shm', and the plane of group 'default' is 'tcp'"):
            connect(daemon.url, world_size=1, channel="shm")
        with pytest.raises(DisagreementError, match=r"the coordinator \(serve --plane\) demands 'tcp'"):
            connect(daemon.url, world_size=1, plane="shm")


def test_direct_is_refused_where_rounds_leave_stragglers_behind() -> None:
    pytest.importorskip("torch", reason="without torch the worker refuses it by itself")
    with (
        Daemon("--workers", "2", "--quorum", "1") as daemon,
        pytest.raises(
            JoinRefusedError, match=r"rounds are closed without stragglers. To go by it, start the coordinat"
        ),
    ):
        connect(daemon.url, plane="direct")
    command = [sys.executable, "-m", "gradserver", "serve", "--workers", "2", "--quorum", "1", "--plane", "direct"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 2
    assert ran.stderr == (
        "gradserver: group 'default': --plane direct is not possible with --quorum 1: workers that reduce among "
        "themselves wait for all. Leave out --plane, or --quorum\n"
    )


@pytest.mark.parametrize("mode", ["bounded", "async"])
@pytest.mark.parametrize("plane", ["direct", "hierarchical"])
def test_planes_among_workers_are_refused_in_modes_that_wait_for_none(mode: str, plane: str) -> None:
    command = [sys.executable, "-m", "gradserver", "serve", "--workers", "2:4", "--mode", mode, "--plane", plane]
    ran = subprocess.run(
        [*command, *(["--staleness", "2"] if mode == "bounded" else [])],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr == (
        f"gradserver: group 'default': --plane {plane} is not possible with --mode {mode}: workers that reduce among "
        f"themselves wait for all. Leave out --plane, or use --mode sync\n"
    )


@pytest.mark.parametrize(
    ("plane", "text"),
    [
        ("direct", "  noise scale, norms and cosines: not measured on plane direct, as gradients do not come"),
        ("hierarchical", "  norms and cosines of workers: not measured on plane hierarchical, where those of hosts"),
        ("in_process", None),
    ],
)
def test_the_status_says_what_is_not_measured(plane: str, text: str | None) -> None:
    with gradserver.LocalCluster(2) as cluster:
        snapshot: Any = cluster.snapshot()
    snapshot["groups"]["local"]["plane"]["name"] = plane
    shown = render({"uptime": 0.0, "groups": {}, "url": ""}, {"uptime": 1.0, "url": "", **snapshot})
    found = [line for line in shown if "not measured" in line]
    assert len(found) == (text is not None)
    assert all(line.startswith(text or "") for line in found)


def test_threads_of_one_process_have_a_plane_too() -> None:
    with gradserver.LocalCluster(2) as cluster:
        assert cluster.run(lambda worker: worker.plane) == ["in_process"] * 2
        assert cluster.workers[1].plane_reason == "'worker-0' is a thread of the coordinator's process"
