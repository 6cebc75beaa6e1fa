"""Tests of audits: workers that compute the same samples agree, one that is wrong is named, and samples count once."""

from __future__ import annotations

import json
import logging
import math
import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from gradserver import DataRanges, DistributedDataParallel, Job, LocalCluster, cli
from gradserver.engine.commands import Contribution, Reduce, Repeated
from gradserver.engine.control.audits import Audits, verdict
from gradserver.engine.data.rounds import Round
from gradserver.engine.data.witnesses import Witnesses
from gradserver.engine.records import Compared, RoundRecord, pack_round, unpack_round
from gradserver.json_text import json_text
from gradserver.protocol.audits import NO_AUDIT, TOGETHER, Audit, audit_of, holder_of, witness_weight
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.errors import GradServerError, InvalidArgumentError, MalformedMessageError, UsageError
from gradserver.protocol.limits import MAX_WORLD_SIZE
from gradserver.protocol.means import PLAIN, mean_of
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.repeated import compare_repeated
from gradserver.worker.client import Worker
from tests.cluster import Daemon, joined, together
from tests.seeded import seeded

torch.set_num_threads(1)
LENGTH, NUMEL = 60, 300_000
PLAN = simple_plan([("a", 7), ("b", NUMEL)], FLOAT32)
NOISE = np.random.default_rng(3).standard_normal(NUMEL, np.float32)
Array = np.ndarray[Any, Any]
Fault = Callable[[int, Array], Array]


def healthy(_rank: int, gradient: Array) -> Array:
    return gradient


def gradient_of(indices: Array) -> Array:
    """Return the mean over samples, of which each has a gradient of its own."""
    total = np.zeros(NUMEL, np.float32)
    for index in indices:
        total += np.roll(NOISE, int(index))
    return total / np.float32(max(len(indices), 1))


def epoch(worker: Worker, fault: Fault = healthy, wire: str = "fp32") -> list[tuple[int, float]]:
    """Use an epoch up. Return of each round the number of samples that counted, and those that this worker took."""
    worker.agree(with_codec(PLAN, codec_of(wire)))
    data = DataRanges(LENGTH, worker, batch_size=3, seed=5, shuffle=False)
    found = []
    while not data.finished():
        indices = data.take()
        weight = float(len(indices))
        worker.push(0, np.full(7, weight, np.float32), weight=weight)
        handle = worker.push(1, fault(worker.rank, gradient_of(indices)), weight=weight)
        worker.finish_round()
        handle.wait()
        found.append((len(indices), handle.weight))
    return found


def audit(cluster: LocalCluster) -> dict[str, Any]:
    groups: Any = cluster._engine.snapshot(0.0)["groups"]
    found: dict[str, Any] = groups["local"]["audit"]
    return found


# ── policy ────────────────────────────────────────────────────────────────────────────────────────────


def test_policies_have_names() -> None:
    assert audit_of("off") == audit_of("0") == NO_AUDIT
    assert audit_of("0.01") == Audit(0.01)
    assert audit_of("1:0.001") == Audit(1.0, 0.001)
    for name in ("off", "0.01", "1:0.001"):
        assert str(audit_of(name)) == name
    for name in ("1.5", "-1", "0.1:0", "0.1:2", "nan", "often", "0.1:"):
        with pytest.raises(InvalidArgumentError, match="an audit is off, or SHARE"):
            audit_of(name)


def test_rounds_and_members_are_drawn_by_the_seed() -> None:
    policy = Audit(0.1)
    picked = [number for number in range(10_000) if policy.picks(7, number)]
    assert 850 < len(picked) < 1150
    assert picked != [number for number in range(10_000) if policy.picks(8, number)]
    drawn = Counter(member for number in range(3000) for member in policy.members(7, number, range(5), PLAIN))
    assert sum(drawn.values()) == 9000
    assert all(1600 < count < 2000 for count in drawn.values())
    assert policy.members(7, 0, [3], PLAIN) == ()
    assert sorted(policy.members(7, 0, [3, 1], PLAIN)) == [1, 3]
    assert len(policy.members(7, 0, range(4), mean_of("median"))) == 2, "three contributions are left for the median"
    assert policy.members(7, 0, range(3), mean_of("median")) == ()


@pytest.mark.parametrize("holder", [0, 1, MAX_WORLD_SIZE - 1])
def test_a_weight_says_whose_witness_a_contribution_is(holder: int) -> None:
    assert holder_of(witness_weight(holder)) == holder
    assert 1.0 + witness_weight(holder) == 1.0


def test_weights_of_others_are_no_witnesses() -> None:
    assert [holder_of(weight) for weight in (0.0, 1e-300, 1e-30, 1.0, 64.0)] == [-1] * 5


def pair(one: int, other: int, difference: float) -> Compared:
    return Compared(one, other, 0, difference**2, 1.0, 0.1)


@pytest.mark.parametrize(
    ("pairs", "differs", "wrong"),
    [
        ([(0, 1, 0.0)], False, -1),
        ([(0, 1, 0.3)], True, -1),
        ([(0, 1, 0.3), (0, 2, 0.3), (1, 2, 0.05)], True, 0),
        ([(0, 1, 0.05), (0, 2, 0.3), (1, 2, float("inf"))], True, 2),
        ([(0, 1, 0.3), (0, 2, 0.3), (1, 2, 0.3)], True, -1),
        ([(0, 1, 0.3), (0, 2, 0.05), (1, 2, 0.05)], True, -1),
    ],
)
def test_two_that_agree_say_that_the_third_is_wrong(
    pairs: list[tuple[int, int, float]], differs: bool, wrong: int
) -> None:
    found = verdict([pair(*one) for one in pairs])
    assert (found.differs, found.wrong) == (differs, wrong)


def test_a_record_of_an_audit_is_read_as_it_was_written() -> None:
    record = RoundRecord(3, (1.0, 1.0), 0.0, 1.0, 1, section=2, compared=(pair(0, 1, 0.5),))
    assert unpack_round(pack_round(record), opened=0.0) == record
    for broken in ([b"", b""], [b"\0" * 24], [b"\0" * 8, b"\0" * 8], [1, 2], [b"\0" * 24, b"\0" * 16]):
        packed = [*pack_round(record)[:-1], broken]
        if broken == [b"", b""]:
            assert unpack_round(packed, opened=0.0).compared == ()
            continue
        with pytest.raises(MalformedMessageError):
            unpack_round(packed, opened=0.0)


# ── groups ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "int8"])
def test_healthy_workers_agree_in_each_codec_and_samples_count_once(wire: str) -> None:
    with LocalCluster(3, audit="0.5") as cluster:
        rounds = cluster.run(epoch, wire=wire)
        found = audit(cluster)
    assert found["rounds"] >= 3
    assert found["differing"] == 0, found
    assert (found["largest"] > 0) == (wire != "fp32"), "residuals are each worker's own"
    assert {len(one) for one in rounds} == {len(rounds[0])}
    assert sum(weight for _, weight in rounds[0]) == LENGTH, "each sample is in one mean"
    assert sum(taken for one in rounds for taken, _ in one) > LENGTH, "and some were computed several times"


def flipped(_rank: int, gradient: Array) -> Array:
    """Flip a bit of the exponent of the largest element."""
    gradient.view(np.uint32)[np.argmax(np.abs(gradient))] ^= 1 << 28
    return gradient


FAULTS: dict[str, Fault] = {
    "flipped bit": flipped,
    "wrong data": lambda rank, _gradient: np.random.default_rng(rank).standard_normal(NUMEL, np.float32),
    "scaled loss": lambda _rank, gradient: gradient * np.float32(1.2),
    "nothing": lambda _rank, gradient: gradient * np.float32(0),
}


@pytest.mark.parametrize(
    ("fault", "wire"), [*((fault, "fp32") for fault in FAULTS), ("scaled loss", "int8"), ("flipped bit", "bf16")]
)
def test_a_wrong_worker_is_named(fault: str, wire: str, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(rank: int, gradient: Array) -> Array:
        return FAULTS[fault](rank, gradient) if rank == 1 else gradient

    with LocalCluster(3, audit="0.5") as cluster, caplog.at_level(logging.WARNING, "gradserver"):
        cluster.run(epoch, wrong, wire)
        found = audit(cluster)
    assert found["rounds"] == found["differing"] >= 3
    assert found["wrong"] == {"worker-1": found["differing"]}
    assert found["doubtful"] == {}
    assert "worker-1" in caplog.text
    assert "which agree" in caplog.text
    assert "in bucket 'b'" in caplog.text


def test_of_two_that_differ_none_is_said_to_be_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with LocalCluster(2, audit="1") as cluster, caplog.at_level(logging.WARNING, "gradserver"):
        cluster.run(epoch, lambda rank, gradient: gradient * np.float32(1 + 1e-3 * rank))
        found = audit(cluster)
    assert found["wrong"] == {}
    assert set(found["doubtful"]) == {"worker-0", "worker-1"}
    assert found["largest"] == pytest.approx(1e-3, rel=0.01)
    assert "no third worker tells which" in caplog.text


def test_a_tolerance_allows_for_unlike_devices() -> None:
    with LocalCluster(2, audit="1:0.002") as cluster:
        cluster.run(epoch, lambda rank, gradient: gradient * np.float32(1 + 1e-3 * rank))
        assert audit(cluster)["differing"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_each_sample_counts_once_with_deaths(seed: int) -> None:
    used: Counter[int] = Counter()
    lock = threading.Lock()
    plan = simple_plan([("one-hot", LENGTH)], FLOAT32)

    with LocalCluster(4, elastic=(1, 4), audit="0.6") as cluster:

        def work(worker: Worker) -> None:
            member_id, chance = worker.rank, random.Random(f"{seed} {worker.rank}")
            fatal = chance.randint(0, 4) if member_id else -1
            worker.agree(plan)
            data = DataRanges(LENGTH, worker, batch_size=chance.randint(1, 4), seed=seed, prefetch=chance.randint(0, 2))
            while not data.finished():
                indices = data.take()
                gradient = np.zeros(LENGTH, np.float32)
                gradient[indices] = 1.0 / max(len(indices), 1)
                handle = worker.push(0, gradient, weight=float(len(indices)))
                worker.finish_round()
                handle.wait()
                if member_id == 0:  # sums of one-hot vectors say what counted
                    with lock:
                        used.update({i: round(float(v) * handle.weight) for i, v in enumerate(gradient) if v})
                if worker.round == fatal:
                    if chance.random() < 0.5:
                        data.take()
                    cluster.kill(worker.rank)

        cluster.run(work)
        assert audit(cluster)["differing"] == 0
    assert used == dict.fromkeys(range(LENGTH), 1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_training_with_a_loader_that_reads_ahead_is_audited(num_workers: int) -> None:
    dataset = TensorDataset(torch.randn(LENGTH, 3), torch.arange(LENGTH))
    losses: list[float] = []

    def train(worker: Worker) -> list[float]:
        model = DistributedDataParallel(seeded(3, lambda: nn.Linear(3, 1)), worker)
        data = DataRanges(LENGTH, worker, batch_size=4, seed=17)
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.01), data=data)
        for inputs, _ in job.batches(dataset, epochs=2, num_workers=num_workers):
            model.set_weight(len(inputs))
            scale = 2 if worker.rank == 2 else 1
            (scale * (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()).backward()
            job.step()
            if worker.rank == 0:
                losses.append(model.total_weight)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    with LocalCluster(3, audit="0.5") as cluster:
        weights = cluster.run(train)
        found = audit(cluster)
    assert weights[0] == weights[1] == weights[2]
    assert found["rounds"] == found["differing"] > 0
    assert set(found["wrong"]) == {"worker-2"}
    assert LENGTH < sum(losses) <= 2 * LENGTH, "of rounds in which this worker had a batch"


# ── warnings, figures that are not finite, liars ───────────────────────────────────────────────────────────


def record_at(seconds: float, *pairs: tuple[int, int, float]) -> RoundRecord:
    return RoundRecord(3, (1.0,) * 3, seconds - 1, seconds, 1, compared=tuple(pair(*one) for one in pairs))


def test_a_warning_is_told_once_in_a_while_for_each_worker() -> None:
    audits = Audits()

    def told(seconds: float, wrong: int) -> str:
        others = sorted({0, 1, 2} - {wrong})
        apart = [(*sorted((wrong, other)), 0.5) for other in others]
        record = record_at(seconds, *apart, (*others, 0.0))  # type: ignore[arg-type]
        return audits.count(record, None, lambda member_id: f"w{member_id}", "g")

    assert "w1 differs from w0 and w2" in told(0.0, 1)
    assert told(1.0, 1) == told(9.0, 1) == ""
    assert "w2 differs" in (other := told(9.5, 2)), "it was not named before"
    assert "rounding (and in 2 more rounds since the last warning). They" in other
    assert told(10.5, 1) == ""
    assert "(and in 1 more round since the last warning)" in told(20.0, 1)
    assert (audits.differing, audits.wrong) == (6, {1: 5, 2: 1})


def test_figures_that_are_not_finite_are_no_numbers_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, log = simple_plan([("a", 7)], BY_NAME["float64"]), tmp_path / "ledger"

    def work(worker: Worker) -> None:
        worker.agree(plan)
        data = DataRanges(LENGTH, worker, batch_size=6, seed=5)
        while not data.finished():
            weight = float(len(data.take()))
            worker.push(0, np.full(7, 1e200 * (1 + worker.rank)), weight=weight)  # its square has no room in float64
            worker.finish_round()

    with Daemon("--workers", "2", "--audit", "1", "--state-dir", str(log)) as daemon, joined(daemon.url, 2) as workers:
        together(workers, work)
        assert cli.main(["status", "--json", daemon.url]) == 0
        found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["groups"]["default"]["audit"]
        assert cli.main(["status", daemon.url]) == 0
        assert "a difference that is not finite; " in capsys.readouterr().out
    assert found["rounds"] == found["differing"] >= 3
    assert found["largest"] is None
    assert "relative difference not finite in bucket 'a'" in found["last"]
    assert cli.main(["ledger", str(log), "--json"]) == 0
    lines = [json.loads(line, parse_constant=pytest.fail) for line in capsys.readouterr().out.splitlines()]
    audited = [line for line in lines if line["kind"] == "round" and line["audit"]]
    assert {one["difference"] for line in audited for one in line["audit"]} == {None}
    assert cli.main(["ledger", str(log), "--round", str(audited[0]["round"])]) == 0
    assert "not finite" in capsys.readouterr().out


def test_json_has_null_for_what_is_not_finite() -> None:
    assert json_text({"a": (1.5, float("nan")), "b": [{"c": -math.inf}]}) == '{"a": [1.5, null], "b": [{"c": null}]}'
    with pytest.raises(TypeError):
        json_text({"a": object()})


@pytest.mark.parametrize("policy", ["off", "0.01"])
def test_liars_cost_no_more_than_the_policy_allows(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, compared = 60, Counter[int]()

    def counted(command: Reduce, repeated: Repeated) -> None:
        compared[command.key.number] += 1
        assert len(repeated.rows) <= TOGETHER
        compare_repeated(command, repeated)

    def lie(worker: Worker) -> float:
        worker.agree(simple_plan([("a", 4)], FLOAT32))
        total = 0.0
        for _ in range(rounds):
            gradient = np.full(4, 1.0 + worker.rank, np.float32)
            worker.push(0, gradient, weight=witness_weight(0) if worker.rank else 1.0)
            worker.finish_round()
            total += float(gradient[0])
        return total

    monkeypatch.setattr("gradserver.reducer.compare_repeated", counted)
    with LocalCluster(5, audit=policy) as cluster:
        assert cluster.run(lie) == [float(rounds)] * 5
        assert audit(cluster)["rounds"] == 0
    assert len(compared) == (0 if policy == "off" else 18), "of 60, 16 and twice the share, about"


def test_of_a_round_the_same_contributions_are_compared_in_all_slices() -> None:
    witnesses, current = Witnesses(0.5), Round(0.0)
    ids = (1, 3, 4, 6)
    given = [Contribution(0, 1.0, b"")] + [Contribution(i, witness_weight(0), b"") for i in ids]
    for start in range(3):
        rest, repeated = witnesses.sort_out(7, current, given[:1] + given[1 + start :])
        assert rest == given[:1]
        found = [] if repeated is None else [one.member_id for one in repeated.rows]
        assert found == [[0, 1, 3], [0, 3], []][start]


# ── shards, restarts, ledger ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("channel", ["tcp", "shm"])
def test_shards_add_up_what_they_compare(channel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "ledger"
    options = ("--workers", "3", "--audit", "0.5", "--shards", "2", "--state-dir", str(log))
    with Daemon(*options) as daemon, joined(daemon.url, 3, channel=channel) as workers:
        together(workers, epoch, lambda rank, gradient: gradient * np.float32(1.2 if rank == 2 else 1))
        found = daemon.group()["audit"]
        assert cli.main(["status", daemon.url]) == 0
        assert "'w2' was wrong in" in capsys.readouterr().out
    assert set(found["wrong"]) == {"w2"}
    assert found["rounds"] == found["differing"] >= 3
    assert found["largest"] == pytest.approx(0.2 / (1.22**0.5), rel=1e-3), "of all elements, wherever they are reduced"
    assert cli.main(["ledger", str(log), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    audited = [line for line in lines if line["kind"] == "round" and line["audit"]]
    assert len(audited) == found["rounds"]
    assert cli.main(["ledger", str(log), "--round", str(audited[0]["round"])]) == 0
    shown = capsys.readouterr().out
    assert "these computed the same samples: w2 is wrong" in shown
    assert "differ" in shown


# ── what cannot be ────────────────────────────────────────────────────────────────────────────────────


def test_a_sparse_wire_is_refused() -> None:
    with LocalCluster(2, audit="1") as cluster:
        for error in (pytest.raises(GradServerError, match="is audited, and gradients travel as topk:0.01"),):
            with error:
                cluster.run(epoch, wire="topk:0.01")


@pytest.mark.parametrize("options", [{"quorum": 2}, {"backup": 1}, {"mode": "async"}])
def test_a_mode_that_does_not_wait_for_all_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="an audit needs rounds to which all workers contribute"):
        LocalCluster(3, audit="0.1", **options)


def test_several_batches_for_one_exchange_are_refused() -> None:
    def accumulate(worker: Worker) -> None:
        worker.agree(PLAN)
        data = DataRanges(LENGTH, worker, batch_size=3, seed=5)
        while not data.finished():
            weight = float(len(data.take()) + len(data.take()))
            for part, numel in enumerate((7, NUMEL)):
                worker.push(part, np.ones(numel, np.float32), weight=weight)
            worker.finish_round()

    with LocalCluster(2, audit="1") as cluster, pytest.raises(UsageError, match="exchange gradients after each batch"):
        cluster.run(accumulate)
