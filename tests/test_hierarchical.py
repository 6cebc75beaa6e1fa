"""The hierarchical plane over gloo: one mean for all by way of one leader of each host, and what survives of it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from gradserver.protocol.errors import NonFiniteError
from gradserver.protocol.limits import MIB, SLICE_BYTES
from gradserver.status import fetch
from gradserver.worker.client import Worker
from gradserver.worker.planes import pieces
from gradserver.worker.planes.communicator import Communicator, Reduction, Signal
from gradserver.worker.planes.epochs import Directs
from gradserver.worker.planes.levels import Levels
from gradserver.worker.planes.pieces import Pieces, cut
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from tests.cluster import TIMEOUT, coordinator, joined, members, together
from tests.elastic_course import lose, survivors_of
from tests.elastic_training import FATAL, VICTIM, WORLD, alone
from tests.hosts import hosted
from tests.replicas import distance
from tests.test_direct import GOES_ON_WITHIN, PROGRAM, floats, skipped_by_place, train

WIDE = 256
"""Width of a layer with more than the 64 KiB from which on a wire format counts."""
LARGE = 800
"""Width of a layer with 2 MiB and some, of which the last slice is a short one."""


@pytest.mark.parametrize(
    "hosts", ["aabb", *(pytest.param(one, marks=pytest.mark.long) for one in ("abab", "aab", "aaa"))]
)
def test_members_of_several_hosts_get_the_bits_of_one_mean_as_the_coordinator_gives_it_within_rounding(
    hosts: str,
) -> None:
    with hosted(hosts) as workers:
        assert {worker.plane for worker in workers} == {"hierarchical"}
        leveled = together(workers, train)
        joint = [Directs.of(worker).joint for worker in workers]
        assert [isinstance(one, Levels) and one.leads for one in joint] == [
            hosts.index(host) == rank for rank, host in enumerate(hosts)
        ]
        assert {Directs.of(worker).voids for worker in workers} == {0}
    with members("memory", len(hosts)) as workers:
        reduced = together(workers, train)
    assert len(set(leveled)) == len(set(reduced)) == 1
    assert torch.allclose(floats(leveled[0]), floats(reduced[0]), rtol=0, atol=1e-5)


def step(worker: Worker, steps: int = 4, wide: int = WIDE) -> torch.Tensor:
    """Train a layer that is large enough for a wire format. Return its weights."""
    layer = nn.Linear(wide, wide, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(wide, wide, generator=torch.Generator().manual_seed(7)) / 16)
    model = DistributedDataParallel(layer, worker)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chance = torch.Generator().manual_seed(1000 + worker.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model.set_weight(1.0 + worker.rank)
        model(torch.randn(6, wide, generator=chance)).square().mean().backward()
        optimizer.step()
    return layer.weight.detach()


def test_leaders_exchange_the_first_pieces_of_a_bucket_before_the_host_has_summed_up_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Test that members, which give the last piece when the result of the first has come, do not wait in vain."""
    has_come = threading.Event()
    reduce, come = Communicator.reduce, Pieces.come

    def reduced(self: Communicator, tensor: torch.Tensor, rank: int, signal: Signal) -> Reduction:
        if self._rank > 0 and tensor.numel() == LARGE**2 % (MIB // 4):
            assert has_come.wait(TIMEOUT), "no result has come"
        return reduce(self, tensor, rank, signal)

    def noted(self: Pieces, start: int, stop: int) -> None:
        come(self, start, stop)
        has_come.set()

    monkeypatch.setattr(pieces, "PIECE_BYTES", MIB)
    monkeypatch.setattr(Communicator, "reduce", reduced)
    monkeypatch.setattr(Pieces, "come", noted)
    with hosted("aabb") as workers:
        leveled = together(workers, step, steps=1, wide=LARGE)
        assert {Directs.of(worker).voids for worker in workers} == {0}
    with members("memory", 4) as workers:
        expected = together(workers, step, steps=1, wide=LARGE)[0]
    assert all(torch.equal(leveled[0], one) for one in leveled)
    assert torch.allclose(leveled[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("channel", "wire"), [("shm", "fp32"), ("tcp", "topk:0.1")])
def test_the_size_of_pieces_changes_no_bit(channel: str, wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test it on hosts of two members and of one: sums of two are the same in any order."""
    found = []
    for nbytes in (MIB, 4 * MIB):
        monkeypatch.setattr(pieces, "PIECE_BYTES", nbytes)
        with hosted("aab", channel=channel, wire=wire) as workers:
            found += together(workers, step, steps=3, wide=LARGE)
            assert {Directs.of(worker).voids for worker in workers} == {0}
    assert all(torch.equal(found[0], one) for one in found)


def test_a_piece_has_come_when_all_of_its_bytes_have_in_whatever_order() -> None:
    bucket = Pieces(torch.empty(5 * MIB // 4), Signal())
    assert [len(piece) for piece in bucket.tensors] == [2 * MIB // 4, 2 * MIB // 4, MIB // 4]
    seen = []
    for start in (1, 4, 2, 3, 0):
        bucket.come(start * MIB, (start + 1) * MIB)
        seen.append([bucket.has_come(number) for number in range(3)])
    assert seen == [[False] * 3, [False, False, True], [False, False, True], [False, True, True], [True] * 3]


@pytest.mark.parametrize(("mib", "count"), [(0, 1), (2, 1), (3, 2), (64, 32), (65, 17), (640, 32)])
def test_a_bucket_has_some_pieces_and_each_is_of_whole_slices(mib: int, count: int) -> None:
    tensors = cut(torch.empty(mib * MIB, dtype=torch.uint8, device="meta"))
    assert len(tensors) == count
    assert all(len(tensor) % SLICE_BYTES == 0 for tensor in tensors)


def test_leaders_alone_send_to_the_coordinator_in_the_wire_format_of_the_group() -> None:
    """Test that its traffic falls by the number of workers of a host, and int8 makes a quarter of that."""
    traffic: dict[tuple[str, str], int] = {}
    weights: dict[tuple[str, str], torch.Tensor] = {}
    for plane, wire in (("tcp", "fp32"), ("hierarchical", "fp32"), ("hierarchical", "int8")):
        with coordinator() as server, hosted("aabb", server.url, plane=plane, wire=wire) as workers:
            found = together(workers, step)
            groups = fetch(server.url)["groups"].values()
            assert all(torch.equal(found[0], one) for one in found)
            weights[plane, wire] = found[0]
            traffic[plane, wire] = sum(group["bytes_in"] + group["bytes_out"] for group in groups)
    begins = 4 * WIDE * WIDE * 4  # the parameters are broadcast when the module is wrapped, from one to three
    rounds = {key: nbytes - begins for key, nbytes in traffic.items()}
    assert rounds["hierarchical", "fp32"] == rounds["tcp", "fp32"] / 2
    assert rounds["hierarchical", "int8"] < rounds["hierarchical", "fp32"] / 3
    assert torch.allclose(weights["tcp", "fp32"], weights["hierarchical", "fp32"], rtol=0, atol=1e-6)
    assert torch.allclose(weights["tcp", "fp32"], weights["hierarchical", "int8"], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("hosts", "where", "options"),
    [
        ("aabb", "reducing", ()),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("aabb", "committing", ()),
                ("abab", "reducing", ()),
                ("aaba", "reducing", ()),
                ("aabb", "reducing", ("--shards", "2")),
            )
        ),
    ],
    ids=["a leader", "a leader at its commit", "a member that does not lead", "the only one of a host", "2 shards"],
)
def test_a_worker_killed_in_a_round_costs_one_contribution_and_no_step(
    hosts: str, where: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    gone = [VICTIM]
    fell, group = train_and_lose(hosts, where, gone, signal.SIGKILL, tmp_path, *options)
    assert fell == [f"[{FATAL}]"] * (WORLD - len(gone)), "the rounds behind it go by levels again"
    assert group["plane"]["name"] == "hierarchical"


@pytest.mark.long
def test_a_whole_host_killed_in_a_round_costs_its_contributions_and_no_step(tmp_path: Path) -> None:
    """Test that the host that is left goes on. It has two workers, and so the plane is possible."""
    _, group = train_and_lose("aabb", "reducing", [2, 3], signal.SIGKILL, tmp_path)
    assert group["plane"]["name"] == "hierarchical"


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["aabb", "abab"], ids=["a leader", "a member that does not lead"])
def test_a_stopped_worker_is_left_out_and_the_others_go_on(hosts: str, tmp_path: Path) -> None:
    train_and_lose(hosts, "reducing", [VICTIM], signal.SIGSTOP, tmp_path)


def train_and_lose(
    hosts: str, where: str, gone: list[int], how: signal.Signals, folder: Path, *options: str
) -> tuple[list[str], dict[str, Any]]:
    """Train by four processes of which some are lost in a round. Check what the others have.

    Return the rounds in which each of these fell to the coordinator's plane, and its snapshot of the group behind that.
    """
    course = lose(
        PROGRAM,
        folder,
        "fell ",
        GOES_ON_WITHIN,
        where,
        "hierarchical",
        options=options,
        gone=gone,
        how=how,
        environment=lambda member_id: {"GRADSERVER_HOST": hosts[member_id]},
    )
    expected = alone(lambda step, _: range(WORLD) if step < FATAL else survivors_of(gone))
    assert distance(course.state, expected) < 1e-5
    return course.ends, course.group


def test_leaders_that_do_not_find_each_other_go_over_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    with hosted("aabb") as workers, pytest.MonkeyPatch.context() as patch:

        def lost(*_: Any, **__: Any) -> None:
            raise ConnectionError("no route")

        patch.setattr("gradserver.worker.planes.levels.split", lost)
        weights = together(workers, train)
    assert len(set(weights)) == 1
    assert "the 2 leaders of hosts could not exchange: ConnectionError: no route" in caplog.text


def test_a_closed_worker_ends_its_levels() -> None:
    with hosted("aab") as workers:
        together(workers, train)
        leaders = cast(Levels, Directs.of(workers[0]).joint).among
        assert leaders is not None
    assert all(Directs.of(worker).joint is None for worker in workers)
    assert leaders.closed


@pytest.mark.long
def test_workers_of_which_each_has_a_host_go_by_the_coordinator() -> None:
    with hosted("ab") as workers:
        assert [worker.plane for worker in workers] == ["tcp", "tcp"]
        assert workers[0].plane_reason == "'w0' demands hierarchical, and each host has one worker"
        assert len(set(together(workers, train))) == 1


def test_gradserver_host_says_on_which_host_a_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSERVER_HOST", "rack-1")
    with coordinator() as server, joined(server.url, 2) as workers:
        assert {offer.host_id for offer in workers[0]._session.membership.offers} == {"rack-1"}


def poisoned(worker: Worker) -> tuple[bytes, bool]:
    """Train with a NaN from the last rank in one round. Return the weights, and whether a round was skipped."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    model, skipped = DistributedDataParallel(layer, worker), False
    chance = torch.Generator().manual_seed(worker.rank)
    for number in range(3):
        layer.weight.grad = None
        model.set_weight(1.0 + worker.rank)
        scale = float("nan") if number == 1 and worker.rank == worker.world_size - 1 else 1.0
        (model(torch.randn(3, 4, generator=chance)).square().mean() * scale).backward()
        skipped |= worker.skipped
        if layer.weight.grad is not None:
            layer.weight.data -= 0.1 * layer.weight.grad
    return layer.weight.detach().numpy().tobytes(), skipped


@pytest.mark.parametrize(
    "policy", ["leave-out", *(pytest.param(one, marks=pytest.mark.long) for one in ("skip", "propagate"))]
)
def test_a_gradient_that_is_not_finite_ends_as_the_policy_says(policy: str) -> None:
    with hosted("aabb", nonfinite=policy) as workers:
        leveled = together(workers, poisoned)
        assert {Directs.of(worker).voids for worker in workers} == {0}
    with members("memory", 4, nonfinite=policy) as workers:
        reduced = together(workers, poisoned)
    assert len(set(leveled)) == len(set(reduced)) == 1
    assert leveled[0][1] == reduced[0][1] == (policy == "skip")
    weights, expected = (torch.frombuffer(bytearray(one[0][0]), dtype=torch.float32) for one in (leveled, reduced))
    assert torch.allclose(weights, expected, rtol=0, atol=1e-5, equal_nan=True)
    assert bool(expected.isnan().all()) == (policy == "propagate")


def test_all_members_of_a_host_know_what_one_finds_in_its_part_of_a_mean() -> None:
    with hosted("aab", nonfinite="skip") as workers:
        assert together(workers, skipped_by_place) == [[True] * 12 + [False]] * 3


@pytest.mark.long
def test_a_group_that_halts_names_the_worker_and_the_parameter_that_is_not_finite() -> None:
    def work(worker: Worker) -> str:
        with pytest.raises(NonFiniteError) as caught:
            poisoned(worker)
        return caught.value.message

    with hosted("aabb") as workers:
        said = together(workers, work)
    assert all("'w3'" in one and "weight" in one for one in said), said
