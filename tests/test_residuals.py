"""Tests of the coordinator's residuals of lossy codecs: made once more, and taken over by the next one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from gradserver.engine.commands import Contribution, Memory, Reduce
from gradserver.engine.declared import Kind
from gradserver.engine.events import Sifted
from gradserver.engine.records import Closed, Durable, Plan
from gradserver.lossy import reduce_lossy
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import ExchangeKey, Stream
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.residuals import Residuals

NUMEL = 40_000
PLAN = with_codec(simple_plan([("b0", NUMEL), ("exact", 10)], FLOAT32), codec_of("int8"))
RECORDS: tuple[Kind, ...] = (Durable("g", "secret"), Plan("g", 1, 0, PLAN))


def opened(directory: Path) -> Residuals:
    residuals = Residuals(directory)
    residuals.restore(RECORDS)
    return residuals


def command_of(residuals: Residuals, number: int, given: list[Contribution]) -> Reduce:
    """Return the reduction of a round by a coordinator that knows nothing but ``residuals``."""
    operation = PLAN.buckets[0].operation
    key = ExchangeKey(Stream.BUCKET, number, 0)
    command = Reduce("g", 1, key, 0, operation, 0, operation.codec.nbytes(NUMEL), NUMEL, Memory(), given, [], True)
    residuals.provide(command)
    return command


def result(residuals: Residuals, number: int) -> bytes:
    """Return the result of a round with two contributions."""
    operation = PLAN.buckets[0].operation
    given = []
    for rank in range(2):
        values = np.random.default_rng((number, rank)).standard_normal(NUMEL).astype(np.float32)
        given.append(Contribution(rank, 1.0, operation.codec.encode(values)))
    outcome = reduce_lossy(command_of(residuals, number, given))
    assert isinstance(outcome, memoryview)
    return bytes(outcome)


def test_whatever_round_a_coordinator_dies_in_the_next_one_makes_the_same_results(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    undisturbed = opened(tmp_path / "a")
    expected = [result(undisturbed, number) for number in range(6)]

    for number in range(6):
        assert result(opened(tmp_path / "b"), number) == expected[number]  # by one that died before any member heard
        assert result(opened(tmp_path / "b"), number) == expected[number]


def test_what_a_void_result_has_left_is_in_no_later_one(tmp_path: Path) -> None:
    """Test rounds that are made again: with nothing in one, and two of them, as in a group with a quorum."""
    for name in "abcd":
        (tmp_path / name).mkdir()
    empty, other, twice, reset = (opened(tmp_path / name) for name in "abcd")
    for number in range(3):
        result(empty, number)
        result(twice, number)
    assert reduce_lossy(command_of(empty, 2, [])) == Sifted(None, ())
    result(other, 0)
    result(other, 1)
    assert reduce_lossy(command_of(other, 2, [])) == Sifted(None, ())
    assert result(empty, 3) == result(other, 3)

    assert [result(twice, number) for number in (1, 2, 3)] == [result(reset, number) for number in (1, 2, 3)]


def test_what_is_owed_matters(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = opened(tmp_path / "a")
    result(first, 0)
    assert result(first, 1) != result(opened(tmp_path / "b"), 1)


def test_it_is_known_whether_something_was_kept_and_what_is_over_is_deleted(tmp_path: Path) -> None:
    assert Residuals(tmp_path).restore(RECORDS) == frozenset()
    residuals = Residuals(tmp_path)
    assert residuals.restore(RECORDS) == {"g"}
    residuals.take(Plan("g", 1, 7, PLAN))
    assert len(list(tmp_path.iterdir())) == 1
    residuals.take(Closed("g", 1, 8, "all have left"))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_and_disturbs_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    residuals = opened(tmp_path)
    assert result(residuals, 0) != result(residuals, 1)
    assert "no space left on device. If this coordinator dies, the residuals of lossy codecs are lost" in caplog.text
    assert list(tmp_path.iterdir()) == []
