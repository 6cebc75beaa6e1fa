"""Tests of the oracle of `tests.churn_ranges`: each law finds what breaks it, and a right end breaks none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.churn_ranges import KINDS, draw, judge
from tests.churn_training import CELLS, ROWS, Case

CASE = Case(0, "plain", (), False, False, 1, True, "fp32", ())
"""A case in which nothing may lack: there are two rows at least."""
QUORUM = CASE._replace(options=("--quorum", "2"))
LATE = CASE._replace(options=("--quorum", "2", "--late", "drop"))


@pytest.fixture(autouse=True)
def log(tmp_path: Path) -> Path:
    """Return the file of what the processes of a course printed."""
    path = tmp_path / "log"
    path.touch()
    return path


def end(folder: Path, name: str = "w1", change: Callable[[Any, Any], object] = lambda _used, _hits: None) -> None:
    """Write down the end of a replica in which each sample counted once, but for a ``change``."""
    used, hits = (np.ones((1 + ROWS, CELLS), np.float32) for _ in range(2))
    change(used, hits)
    np.savez(folder / f"{name}.npz", born="0.1", round=7, used=used.ravel(), hits=hits.ravel(), chain=used[0])


def put(value: float, rows: Any = slice(None)) -> Callable[[Any, Any], object]:
    """Return a change: sample 5 counted so much in these rows."""

    def change(used: Any, hits: Any) -> None:
        used[rows, 5] = value
        hits[rows, 5] = np.ceil(value)

    return change


def test_replicas_in_which_each_sample_counted_once_are_right(tmp_path: Path) -> None:
    end(tmp_path, "w1")
    end(tmp_path, "w2")
    (tmp_path / "0-w3.error").write_text("LeftOutError at w3 in part 0\n…")
    assert list(judge(CASE, tmp_path, False)) == []


@pytest.mark.parametrize(
    ("case", "lost", "change", "said"),
    [
        (CASE, False, put(0.0), "counted never"),
        (CASE, True, put(0.0), "counted never"),
        (CASE, True, put(2.0, 0), "counted more than once"),
        (LATE, True, put(2.0), "counted more than once"),
        (QUORUM, False, put(2.0, 0), "counted more than once"),
        (CASE, False, put(0.0, 0), "counted in some elements only"),
        (CASE, True, put(0.5, 0), "counted in part"),
    ],
)
def test_samples_that_did_not_count_once_are_named(
    case: Case, lost: bool, change: Callable[[Any, Any], object], said: str, tmp_path: Path
) -> None:
    end(tmp_path, "w1", change)
    first, *_ = judge(case, tmp_path, lost)
    assert first == f"w1 (round 7): 1 samples {said}: [5]"


@pytest.mark.parametrize(("case", "change"), [(CASE, put(0.0, 0)), (LATE, put(2.0, 0))])
def test_what_a_lost_worker_explains_is_right(case: Case, change: Callable[[Any, Any], object], tmp_path: Path) -> None:
    end(tmp_path, "w1", change)
    assert list(judge(case, tmp_path, True)) == []


def test_samples_that_a_warning_says_to_be_dropped_may_count_again(log: Path, tmp_path: Path) -> None:
    end(tmp_path, "w1", put(2.0, 0))
    log.write_text("old (--staleness), and is dropped. Give it smaller batches\n")
    assert list(judge(QUORUM, tmp_path, False)) == []
    assert list(judge(CASE, tmp_path, False)) == ["w1 (round 7): 1 samples counted more than once: [5]"]


def test_unequal_replicas_and_other_errors_and_no_end_are_named(tmp_path: Path) -> None:
    assert list(judge(CASE, tmp_path, False)) == ["no worker has come to the end"]
    end(tmp_path, "w1")
    end(tmp_path, "w2", lambda used, _: np.multiply(used, 1.0001, out=used))
    (tmp_path / "0-w3.error").write_text("DeadlineError at w3 in part 0\nit waited")
    assert list(judge(CASE, tmp_path, True)) == [
        "DeadlineError at w3 in part 0\nit waited",
        "w2 and w1 differ in used, in rounds 7 and 7",
        "w2 and w1 differ in chain, in rounds 7 and 7",
    ]


def test_consecutive_seeds_have_all_modes_and_kinds() -> None:
    cases = [draw(seed) for seed in range(len(KINDS))]
    assert len({(case.kind, case.options) for case in cases}) == len(KINDS)
    assert {case.kind for case in cases} == {"plain", "job", "local"}
    assert any(case.halts for case in cases)
