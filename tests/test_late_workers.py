"""Tests of groups that do not wait for all, in threads and between processes."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradserver import LocalCluster
from gradserver.cli import main
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import ClosedError, InvalidArgumentError, NonFiniteError
from gradserver.protocol.plan import simple_plan
from gradserver.worker.client import Worker
from tests.cluster import PATIENCE, Daemon, Program, wait_until, worker_program

PLAN = simple_plan([("b0", 600_000), ("b1", 3)], FLOAT32)
SLOW = 3


class Round:
    """One round of one worker, in two steps."""

    def __init__(self, worker: Worker, value: float) -> None:
        self._worker = worker
        self._large, self._small = np.full(600_000, value, np.float32), np.full(3, value, np.float32)
        self._handle = worker.push(1, self._small)
        worker.push(0, self._large)

    def finish(self) -> float:
        """Finish the round. Return the result of the small bucket."""
        self._worker.finish_round()
        assert (self._small == self._small[0]).all()
        return float(self._small[0])

    def finish_all(self) -> tuple[float, float, bytes]:
        """Finish the round. Return the result of the small bucket, its weight, and the result of the large one."""
        return self.finish(), self._handle.weight, self._large.tobytes()


def cluster_of_four(**options: Any) -> LocalCluster:
    return LocalCluster(4, elastic=(1, 4), timeout=PATIENCE, **options)


@pytest.mark.parametrize("options", [{"quorum": "75%", "grace": 0.01}, {"backup": 1}], ids=str)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("late", ["keep", "drop"])
def test_a_slow_worker_is_not_waited_for_and_what_it_gave_counts_later_or_never(
    options: dict[str, Any], wire: str, late: str, caplog: pytest.LogCaptureFixture
) -> None:
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> list[tuple[float, float, bytes]]:
        worker.agree(PLAN)
        if worker.rank == SLOW:
            assert others_are_ahead.wait(PATIENCE)
        results = [Round(worker, worker.rank).finish_all() for _ in range(8)]
        others_are_ahead.set()
        worker.barrier()
        return results + [Round(worker, worker.rank).finish_all() for _ in range(3)]

    with cluster_of_four(wire=wire, late=late, **options) as cluster, caplog.at_level(logging.WARNING):
        results = cluster.run(work)
        kept = [worker._session.member.stragglers.carry._slices.get(1, {}) for worker in cluster.workers]

    assert all(row == results[0] for row in results), "not the same for all"
    assert [value for value, _, _ in results[0][:8]] == [1.0] * 8
    came = sum(value * weight for value, weight, _ in results[0])
    left = [(c.weight, c.data) for there in kept for c in there.values()]
    still_kept = sum([weight * float(data.view(np.float32)[0]) for weight, data in left if data is not None])
    given = 11 * (0 + 1 + 2 + 3)
    if late == "keep":
        assert came + still_kept == pytest.approx(given, rel=1e-5)
    else:
        assert came <= given - 8 * 3
        assert not any(kept)
    texts = [record.message for record in caplog.records]
    assert any("closed without 'worker-3' (rank 3) after" in text and "3 of 4 had come" in text for text in texts)
    chronic = next(text for text in texts if "rank 3, was late for 8 rounds in a row" in text)
    assert ("is added to what it gives next" in chronic) == (late == "keep")


def test_what_a_worker_without_a_batch_gave_too_late_counts_in_a_later_round() -> None:
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> list[tuple[float, float]]:
        worker.agree(PLAN)
        if worker.rank == SLOW:
            assert others_are_ahead.wait(PATIENCE)
        results = [Round(worker, worker.rank).finish_all()[:2]]
        others_are_ahead.set()
        while results[-1][1] > 0 or len(results) < 3:
            worker.barrier()
            small, large = np.full(3, np.nan, np.float32), np.full(600_000, np.nan, np.float32)
            handle = worker.push(1, small, weight=0.0)
            worker.push(0, large, weight=0.0)
            worker.finish_round()
            assert (large == large[0]).all()
            results.append((float(small[0]), handle.weight))
        return results

    with cluster_of_four(quorum=3, grace=0.5, late="keep") as cluster:
        results = cluster.run(work)
    assert all(row == results[0] for row in results)
    assert sum(value * weight for value, weight in results[0]) == pytest.approx(0 + 1 + 2 + 3)


def test_what_a_late_worker_keeps_is_dropped_when_it_is_too_old(caplog: pytest.LogCaptureFixture) -> None:
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> list[float]:
        worker.agree(PLAN)
        if worker.rank == SLOW:
            assert others_are_ahead.wait(PATIENCE)
        results = [Round(worker, 1.0).finish_all()[1] for _ in range(8)]
        others_are_ahead.set()
        worker.barrier()
        return [*results, Round(worker, 1.0).finish_all()[1]]

    with cluster_of_four(quorum=3, grace=0.2, late="keep", staleness=2) as cluster, caplog.at_level(logging.WARNING):
        results = cluster.run(work)
    assert results[0][:8] == [3.0] * 8
    assert results[0][8] <= 3 + 2 + 1, "two are kept of the eight that came too late"
    texts = [record.message for record in caplog.records]
    assert any(
        "rank 3, was late for rounds 0 to 2. What it gave to them is more than 2 rounds old (--staleness), and is "
        "dropped" in text
        for text in texts
    )
    cuts = [text for text in texts if "closed without 'worker-3'" in text]
    assert all(("drops what came too late" in text) == ("round 2 " in text or "round 5 " in text) for text in cuts)


def test_a_late_worker_that_dies_is_not_missed() -> None:
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> list[float] | None:
        worker.agree(PLAN)
        if worker.rank == SLOW:
            assert others_are_ahead.wait(PATIENCE)
            with pytest.raises(ClosedError):
                Round(worker, 3.0).finish()
            return None
        results = [Round(worker, worker.rank).finish() for _ in range(2)]
        if worker.rank == 0:
            cluster.kill(SLOW)
            others_are_ahead.set()
        worker.barrier()
        results.append(Round(worker, worker.rank).finish())
        assert worker.world_size == 3
        return results

    with cluster_of_four(quorum=3, grace=0.0) as cluster:
        assert cluster.run(work)[:3] == [[1.0] * 3] * 3


@pytest.mark.parametrize("late", ["keep", "drop"])
def test_a_late_gradient_that_is_not_finite_reaches_no_worker(late: str) -> None:
    others_are_ahead, it_has_come = threading.Event(), threading.Event()

    def work(worker: Worker) -> float | str:
        worker.agree(PLAN)
        if worker.rank == SLOW:
            assert others_are_ahead.wait(PATIENCE)
            assert Round(worker, np.nan).finish() == 1.0
            last = Round(worker, 3.0)
            it_has_come.set()
        else:
            assert Round(worker, worker.rank).finish() == 1.0
            others_are_ahead.set()
            assert it_has_come.wait(PATIENCE)
            last = Round(worker, worker.rank)
        try:
            return last.finish()
        except NonFiniteError as error:
            return f"{error.worker} {error.round}"

    with cluster_of_four(quorum=3, grace=0.0, late=late) as cluster:
        results = cluster.run(work)

    assert set(results) == {results[0]}
    assert results[0] == "worker-3 1" if late == "keep" else isinstance(results[0], float)


def test_a_halt_reaches_a_late_worker_in_the_round_in_which_it_was() -> None:
    others_are_ahead = threading.Event()

    def work(worker: Worker) -> str:
        worker.agree(PLAN)
        if worker.rank == SLOW:
            assert others_are_ahead.wait(PATIENCE)
        assert Round(worker, worker.rank).finish() == 1.0
        try:
            Round(worker, np.nan if worker.rank == 1 else 0.0).finish()
        except NonFiniteError as error:
            others_are_ahead.set()
            return f"{error.worker} {error.round}"
        return "nothing"

    with cluster_of_four(quorum=3, grace=0.0) as cluster:
        assert cluster.run(work) == ["worker-1 1"] * 4


def test_a_cluster_says_what_is_wrong_with_its_quorum() -> None:
    with pytest.raises(InvalidArgumentError, match="such as 75%"):
        LocalCluster(2, quorum="half")
    with pytest.raises(InvalidArgumentError, match="with a quorum or backups, backlog must be above 0"):
        LocalCluster(2, quorum=1, backlog=0)


# ── between processes ─────────────────────────────────────────────────────────────────────────────────


def told(workers: list[Program], member_ids: list[int], rounds: int) -> list[list[str]]:
    for member_id in member_ids:
        workers[member_id].tell(str(rounds))
    return [[workers[member_id].expect("result ") for _ in range(rounds)] for member_id in member_ids]


@pytest.mark.parametrize(
    ("channel", "shards"), [("tcp", 1), ("shm", 1), pytest.param("tcp", 2, marks=pytest.mark.long)]
)
def test_one_slow_process_of_four_comes_back_into_step_and_dies(
    channel: str, shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = [0, 1, 2]
    options = "--workers", "3:4", "--gather", "60", "--quorum", "3", "--grace", "0.05", "--shards", str(shards)
    with ExitStack() as stack:
        coordinator = stack.enter_context(Daemon(*options, "--state-dir", str(tmp_path)))
        workers = [
            stack.enter_context(worker_program(coordinator.url, "rounds_as_told", member_id, 4, channel, numel=600_000))
            for member_id in range(4)
        ]
        for worker in workers:
            worker.expect("ready")
        assert told(workers, fast, 3) == [["1 1"] * 3] * 3

        assert told(workers, [SLOW], 3) == [["1 1"] * 3]
        workers[SLOW].tell("1")
        wait_until(lambda: len(coordinator.group()["open"]) >= 3 - shards, "its next contribution has come")
        mean = f"{(0 + 1 + 2 + 3 * 4) / 7:.6g}"
        assert told(workers, fast, 1) == [[f"{mean} {mean}"]] * 3
        assert workers[SLOW].expect("result ") == f"{mean} {mean}"

        assert told(workers, fast, 1) == [["1 1"]] * 3
        workers[SLOW].send_signal(signal.SIGKILL)
        wait_until(lambda: coordinator.group()["world_size"] == 3, "it is gone")
        assert told(workers, fast, 2) == [["1 1"] * 2] * 3

    assert main(["ledger", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "too late" in shown
    assert main(["ledger", str(tmp_path), "--round", "1"]) == 0
    assert "(rank 3) after" in " ".join(capsys.readouterr().out.split())
