"""Tests of a coordinator's directory: neither a crash nor a disk can make it say anything wrong."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import signal
import stat
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings, strategies as st

from gradserver.cli import main
from gradserver.engine.declared import Kind
from gradserver.engine.journal_state import Dated
from gradserver.engine.records import Closed, Durable, Epoch, Gap, Group, Plan, Round, RoundRecord, Snapshot, Start
from gradserver.ledger import files, state
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import HEADER_BYTES, MAGIC, Entry, Fault, frame, header, number_of, scan
from gradserver.ledger.state import EVERY_ROUND, StateDir
from gradserver.protocol.codecs import codec_of
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.errors import StateError
from gradserver.protocol.plan import simple_plan
from gradserver.protocol.plan_codecs import with_codec
from gradserver.residuals import Residuals
from tests.cluster import Daemon, Program, wait_until, worker_program
from tests.engine_harness import plan_of
from tests.examples import examples


def round_record(number: int, group: str = "g") -> Round:
    return Round(group, 1, RoundRecord(number, (1.0, 1.0), 5.0, 6.0, 1, ((5.0, 5.5), (5.0, 6.0)), (1, 2), (2**63 + 3,)))


LOSSY = with_codec(simple_plan([("b0", 40_000)], FLOAT32), codec_of("int8"))
FOUNDED: list[Kind] = [
    Group("g", 2, 60.0),
    Epoch("g", 1, 0, ((0, "a"), (1, "b")), "complete"),
    Plan("g", 1, 0, plan_of(3)),
]


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[StateDir]:
    found = StateDir(path, "0.1.0", **options)
    try:
        yield found
    finally:
        found.close()


def items(path: Path) -> list[Kind | Fault]:
    """Return the content of a file."""
    data = path.read_bytes()
    number_of(path, data)
    return [item.read().record if isinstance(item, Entry) else item for item in scan(data)]


def newest(path: Path) -> Path:
    return files_of(path)[-1][1]


def rounds_in(path: Path) -> list[int]:
    """Return the numbers of the rounds in all files, without what they restate."""
    found = []
    for _, file in files_of(path):
        restated = 0
        for item in items(file):
            if isinstance(item, Snapshot):
                restated = item.restated
            elif restated:
                restated -= 1
            elif isinstance(item, Round):
                found.append(item.record.round)
    return found


def starts_in(path: Path) -> list[int]:
    return [item.incarnation for _, file in files_of(path) for item in items(file) if isinstance(item, Start)]


# ── rights to read it ─────────────────────────────────────────────────────────────────────────────────


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_handed() -> Iterator[None]:
    """Let this process allow all users to read and write what it makes, if it is not told otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_handed")
def test_what_has_secrets_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "in" / "state"
    with opened(path, file_bytes=200) as found:
        found.keep_port(7411)
        for record in FOUNDED:
            found.append(record)
        for number in range(5):
            found.append(round_record(number))
        residuals = Residuals(path)
        for record in (Durable("g", "secret"), Plan("g", 1, 0, LOSSY)):
            residuals.take(record)

    assert mode_of(path) == 0o700
    names = {file.name.partition("-")[0] for file in path.iterdir()}
    assert names == {"lock", "port", "ledger", "residuals"}
    assert {mode_of(file) for file in path.iterdir()} == {0o600}


def test_what_was_more_open_before_is_closed_to_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path):
        pass
    newest(tmp_path).chmod(0o644)
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING), opened(tmp_path):
        pass
    tmp_path.chmod(0o700)

    assert mode_of(newest(tmp_path)) == 0o600
    assert caplog.messages == [
        f"{tmp_path} can be written by other users (mode 777), which can put files there: run chmod go-w on it"
    ]


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_format_is_what_it_is() -> None:
    """Test fixed bytes: ledgers outlive versions."""
    body = b"\x94\xa1g\x01\x08\xa4left"
    assert header(7) == b"GSLEDG3\n\x07\0\0\0"
    checked = struct.pack("<Bd", 9, 2.5) + body
    assert frame(Dated(2.5, Closed("g", 1, 8, "left"))) == struct.pack("<II", 9 + 10, zlib.crc32(checked)) + checked


def test_what_is_appended_is_there_at_once_and_in_order(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as found:
        for record in [*FOUNDED, round_record(0)]:
            found.append(record)
        first, start, *rest = items(tmp_path / "a" / "b" / "ledger-000001.gsl")
    assert first == Snapshot(0)
    assert isinstance(start, Start)
    assert (start.incarnation, start.version, start.pid) == (1, "0.1.0", os.getpid())
    assert abs(start.wall - time.time()) < 60
    assert abs(start.clock - time.monotonic()) < 60
    assert rest == [*FOUNDED, round_record(0)]


def test_the_next_one_goes_on_in_the_same_file_and_counts(tmp_path: Path) -> None:
    for incarnation in range(1, 4):
        with opened(tmp_path) as found:
            found.append(round_record(incarnation))
    assert [file.name for _, file in files_of(tmp_path)] == ["ledger-000001.gsl"]
    assert starts_in(tmp_path) == [1, 2, 3]
    assert rounds_in(tmp_path) == [1, 2, 3]


# ── crashes ───────────────────────────────────────────────────────────────────────────────────────────


def a_file() -> tuple[bytes, list[int]]:
    """Return a file, and the ends of its records."""
    data, ends = header(1), []
    for record in [Snapshot(0), Start(1, "0.1.0", 5, 1.7e9, 3.0), *FOUNDED, round_record(0), round_record(1)]:
        data += frame(Dated(1.0, record))
        ends.append(len(data))
    return data, ends


def test_a_file_that_is_torn_at_any_byte_says_all_that_was_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, ends = a_file()
    for size in range(HEADER_BYTES, len(data)):
        file = tmp_path / f"{size}" / "ledger-000001.gsl"
        file.parent.mkdir()
        file.write_bytes(data[:size])
        whole = [end for end in ends if end <= size]
        caplog.clear()
        with opened(file.parent, sync=None) as found:
            found.append(round_record(9))
        entries = items(file)
        assert len(entries) == len(whole) + 2
        assert not any(isinstance(item, Fault) for item in entries)
        assert entries[-1] == round_record(9)
        torn = size - (whole[-1] if whole else HEADER_BYTES)
        assert ([f"its last {torn} bytes were removed" in message for message in caplog.messages] == [True]) == bool(
            torn
        )


@pytest.mark.parametrize("zeros", [1, 8, 9, 100, 5000])
def test_zeros_at_the_end_are_torn_too(tmp_path: Path, zeros: int) -> None:
    data, ends = a_file()
    for cut in (ends[-1], ends[-1] - 3, ends[-2], ends[-2] + 8):
        file = tmp_path / f"{cut}" / "ledger-000001.gsl"
        file.parent.mkdir()
        file.write_bytes(data[:cut] + bytes(zeros))
        with opened(file.parent, sync=None):
            pass
        assert not any(isinstance(item, Fault) for item in items(file))
        assert len(items(file)) == len([end for end in ends if end <= cut]) + 1


def test_a_file_of_zeros_or_of_nothing_is_passed_over(tmp_path: Path) -> None:
    data, _ = a_file()
    (tmp_path / "ledger-000001.gsl").write_bytes(data)
    for number, content in ((2, b""), (3, bytes(4096))):
        (tmp_path / f"ledger-{number:06}.gsl").write_bytes(content)
    with opened(tmp_path) as found:
        found.append(round_record(2))
    assert starts_in(tmp_path) == [1, 2]
    assert rounds_in(tmp_path) == [0, 1, 2]
    assert len(files_of(tmp_path)) == 1


@given(st.data())
@settings(max_examples=examples(100))
def test_any_changed_byte_is_noticed_and_says_where(data: st.DataObject) -> None:
    whole, ends = a_file()
    at = data.draw(st.integers(HEADER_BYTES, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    begins = [HEADER_BYTES, *ends]
    place = max(begin for begin in begins if begin <= at)
    faults = [item for item in scan(bytes(changed)) if isinstance(item, Fault)]
    assert [(fault.at, fault.torn) for fault in faults] == [(place, at >= ends[-2])]
    kept = [item for item in scan(bytes(changed)) if isinstance(item, Entry)]
    assert len(kept) == len(ends) - 1


@given(st.binary(max_size=3000))
def test_whatever_follows_is_read_without_harm(tail: bytes) -> None:
    data, ends = a_file()
    found = list(scan(data + tail))
    assert [item.at for item in found if isinstance(item, Entry)][: len(ends)] == [HEADER_BYTES, *ends[:-1]]
    stops = [item.stop if isinstance(item, Fault) else item.at + 17 + len(item.body) for item in found]
    assert (stops or [0])[-1] == len(data + tail)


def test_a_record_that_promises_too_much_is_not_waited_for() -> None:
    started = time.monotonic()
    data = header(1) + b"".join(struct.pack("<IIBd", 1 << 22, 0, 1, 0.0) for _ in range(200_000))
    assert list(scan(data)) == [Fault(HEADER_BYTES, len(data), True)]
    assert time.monotonic() - started < 20


def test_damage_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    data, ends = a_file()
    file = tmp_path / "ledger-000001.gsl"
    file.write_bytes(data[: ends[2]] + b"\xff" + data[ends[2] + 1 :])
    with pytest.raises(StateError, match=rf"{file} is damaged at byte {ends[2]}: .*gradserver ledger --verify"):
        StateDir(tmp_path, "0.1.0")
    assert file.read_bytes()[ends[2]] == 0xFF
    file.rename(tmp_path / "aside")
    with opened(tmp_path):
        assert starts_in(tmp_path) == [1]


@pytest.mark.parametrize("content", [b"GSLEDG", b"#!/bin/sh", MAGIC + b"\1"])
def test_what_is_no_ledger_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ledger-000001.gsl"
    file.write_bytes(content)
    with pytest.raises(StateError, match=f"{file} is not a ledger file"):
        StateDir(tmp_path, "0.1.0")
    assert file.read_bytes() == content


@pytest.mark.parametrize("what", [[], ["--repair"], ["--verify"]])
def test_a_ledger_in_another_format_is_named_and_left_alone(tmp_path: Path, what: list[str]) -> None:
    file = tmp_path / "ledger-000001.gsl"
    file.write_bytes(b"GSLEDG9\n\x01\0\0\0")

    with pytest.raises(StateError, match="in format 9, and this gradserver reads format 3: use the version"):
        StateDir(tmp_path, "0.1.0")

    assert main(["ledger", str(tmp_path), *what]) == 1
    assert file.read_bytes() == b"GSLEDG9\n\x01\0\0\0"


# ── another version's, and damage that is mended ──────────────────────────────────────────────────────


def of_a_later_version(kind: int = 60) -> bytes:
    """Return a record of a kind that this version does not know."""
    body: bytes = msgpack.packb(["g", 1])
    check = zlib.crc32(body, zlib.crc32(struct.pack("<Bd", kind, 7.0)))
    return struct.pack("<IIBd", 9 + len(body), check, kind, 7.0) + body


def a_story() -> list[bytes]:
    """Return a file in pieces: its header, and a record each."""
    written: list[Kind] = [Snapshot(1), Start(1, "0.9.9", 7, 0.0, 0.0), *FOUNDED]
    written += [round_record(number) for number in range(4)]
    return [header(1), *(frame(Dated(float(at), record)) for at, record in enumerate(written))]


def test_a_record_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ledger-000001.gsl").write_bytes(b"".join(a_story()) + of_a_later_version())

    with pytest.raises(StateError) as refused:
        StateDir(tmp_path, "0.1.0")

    for part in (
        "there is no kind of record 60: a later version may have written it",
        "It was written by gradserver 0.9.9: start that version with this --state-dir",
        f"gradserver ledger {tmp_path} --repair",
        f"gradserver ledger {tmp_path} --export FILE",
    ):
        assert part in str(refused.value)


def test_what_another_version_wrote_besides_is_left_out_by_repair_and_all_else_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = a_story()
    before = b"".join([*pieces[:-1], of_a_later_version(), pieces[-1]])
    file = tmp_path / "ledger-000001.gsl"
    file.write_bytes(before)

    assert main(["ledger", str(tmp_path), "--repair"]) == 0

    out = capsys.readouterr().out
    assert "9 records kept, 21 bytes in 1 place lost; the original file is now ledger-000001.gsl.damaged" in out
    assert "after round 2 of group 'g', before round 3 of group 'g'" in out
    assert "there is no kind of record 60" in out
    assert file.read_bytes() == b"".join(pieces)
    assert (tmp_path / "ledger-000001.gsl.damaged").read_bytes() == before
    assert mode_of(file) == 0o600
    with opened(tmp_path) as found:
        assert found.incarnation == 2


@pytest.mark.parametrize(("lost", "told"), [(7, "round 1"), (slice(7, 9), "rounds 1 to 2")])
def test_repair_keeps_what_is_whole_and_says_which_rounds_are_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: int | slice, told: str
) -> None:
    pieces = a_story()
    which = range(len(pieces))[lost if isinstance(lost, slice) else slice(lost, lost + 1)]
    damaged = [bytes(len(piece)) if at in which else piece for at, piece in enumerate(pieces)]
    file = tmp_path / "ledger-000001.gsl"
    file.write_bytes(b"".join(damaged))

    assert main(["ledger", str(file), "--repair"]) == 0

    out = capsys.readouterr().out
    start = sum(map(len, pieces[: which[0]]))
    assert f"bytes {start} to {start + sum(len(pieces[at]) for at in which) - 1}, after round 0 of group 'g'" in out
    assert f"are not a record; {told} missing in group 'g'" in out
    assert file.read_bytes() == b"".join(piece for at, piece in enumerate(pieces) if at not in which)
    assert main(["ledger", str(tmp_path), "--repair"]) == 0
    assert "ledger-000001.gsl: " in (said := capsys.readouterr().out)
    assert "records, intact" in said
    with opened(tmp_path):
        pass


def test_a_snapshot_counts_what_is_left_of_what_it_restated(tmp_path: Path) -> None:
    pieces = a_story()
    pieces[2] = bytes(len(pieces[2]))
    (tmp_path / "ledger-000001.gsl").write_bytes(b"".join(pieces))

    assert main(["ledger", str(tmp_path), "--repair"]) == 0

    assert items(tmp_path / "ledger-000001.gsl")[0] == Snapshot(0)


@given(st.data())
@settings(max_examples=examples(30))
def test_whatever_is_changed_in_a_file_a_mended_one_can_be_used(data: st.DataObject) -> None:
    whole = b"".join(a_story())
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = data.draw(st.binary(min_size=1, max_size=40))
    with TemporaryDirectory() as name:
        file = Path(name) / "ledger-000001.gsl"
        file.write_bytes(whole[:at] + changed + whole[at + len(changed) :])
        if main(["ledger", name, "--repair"]):
            assert re.match(rb"GSLEDG[^3]", file.read_bytes()), "of another format"
            return
        with opened(Path(name), sync=None):
            assert not [item for item in items(file) if isinstance(item, Fault)]


def test_a_directory_that_is_in_use_is_not_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path):
        assert main(["ledger", str(tmp_path), "--repair"]) == 1

    assert "is in use by the coordinator with process id" in capsys.readouterr().err


def test_all_that_can_be_read_is_exported_and_what_cannot_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = a_story()
    pieces.insert(-1, of_a_later_version())
    pieces[7] = bytes(len(pieces[7]))
    (tmp_path / "ledger-000001.gsl").write_bytes(b"".join(pieces) + frame(Dated(9.0, Durable("g", "a secret"))))
    (tmp_path / "ledger-000002.gsl").write_bytes(b"GSLEDG9\n\x01\0\0\0")
    target = tmp_path / "all.jsonl"

    assert main(["ledger", str(tmp_path), "--export", str(target)]) == 0

    lines = [json.loads(line) for line in target.read_text().splitlines()]
    kinds = Counter(line["kind"] for line in lines)
    assert kinds == {"group": 1, "epoch": 1, "plan": 1, "round": 3, "durable": 1, "damage": 3, "start": 1}
    assert [line["round"] for line in lines if line["kind"] == "round"] == [0, 2, 3]
    assert "secret" not in target.read_text()
    assert "10 records" not in capsys.readouterr().err
    assert mode_of(target) == 0o600


# ── rotation ──────────────────────────────────────────────────────────────────────────────────────────


def test_every_file_says_what_still_matters_and_nothing_is_lost_between_them(tmp_path: Path) -> None:
    with opened(tmp_path, file_bytes=2000, sync=None) as found:
        for record in FOUNDED:
            found.append(record)
        for number in range(100):
            found.append(round_record(number))
    files = files_of(tmp_path)
    assert [number for number, _ in files] == list(range(1, len(files) + 1))
    assert len(files) > 3
    assert rounds_in(tmp_path) == list(range(100))
    for number, file in files[1:]:
        assert number_of(file, file.read_bytes()) == number
        snapshot, start, *restated = items(file)[:6]
        assert snapshot == Snapshot(5)
        assert isinstance(start, Start)
        assert restated[:3] == FOUNDED
        assert isinstance(restated[3], Round)
        assert file.stat().st_size < 2000 + 200
    assert not list(tmp_path.glob("*.tmp"))


def test_the_oldest_files_are_deleted_but_never_the_last_two(tmp_path: Path) -> None:
    with opened(tmp_path, file_bytes=2000, keep=7000, sync=None) as found:
        for number in range(200):
            found.append(round_record(number))
    files = files_of(tmp_path)
    assert 2000 < sum(file.stat().st_size for _, file in files) <= 7000 + 2200
    assert rounds_in(tmp_path)[-1] == 199
    assert rounds_in(tmp_path) == list(range(rounds_in(tmp_path)[0], 200))
    with opened(tmp_path, file_bytes=2000, keep=0, sync=None) as found:
        for number in range(200, 300):
            found.append(round_record(number))
    assert len(files_of(tmp_path)) == 2
    assert starts_in(tmp_path)[-1] == 2


# ── disks ─────────────────────────────────────────────────────────────────────────────────────────────


class Disk:
    """A disk between `StateDir` and the kernel: it fails when it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.failure: int | None = None
        self.room = 0
        """Bytes that a failing disk still takes."""
        self._write = os.write
        patch.setattr(os, "write", self.write)

    def write(self, fd: int, data: memoryview | bytes) -> int:
        if self.failure is None:
            return self._write(fd, data)
        if not self.room:
            raise OSError(self.failure, os.strerror(self.failure))
        taken = self._write(fd, data[: self.room])
        self.room -= taken
        return taken


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 1, 50])
def test_a_disk_that_fails_leaves_whole_records_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: int, room: int
) -> None:
    disk = Disk(monkeypatch)
    caplog.set_level(logging.INFO)
    with opened(tmp_path, retry=0.0, sync=None) as found:
        for record in [*FOUNDED, round_record(0)]:
            found.append(record)
        before = newest(tmp_path).read_bytes()
        disk.failure, disk.room = failure, room
        for number in range(1, 6):
            found.append(round_record(number))
        assert newest(tmp_path).read_bytes() == before
        assert found.snapshot() == {"file": str(newest(tmp_path)), "trouble": os.strerror(failure).lower(), "lost": 5}
        (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        why = os.strerror(failure).lower()
        assert f"cannot write {newest(tmp_path)}: {why}. Training continues" in warning.getMessage()
        disk.failure = None
        found.append(round_record(6))
        assert found.snapshot()["trouble"] is None
        found.append(round_record(7))
    first, second = [file for _, file in files_of(tmp_path)]
    assert first.read_bytes() == before
    snapshot, _, *restated = items(second)
    assert snapshot == Snapshot(5)
    assert restated[:4] == [*FOUNDED, round_record(5)]
    assert isinstance(restated[4], Gap)
    assert (restated[4].lost, restated[4].reason) == (5, why)
    assert restated[5:] == [round_record(6), round_record(7)]
    assert f"{second} can be written again: 5 records before it were lost" in caplog.messages
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_has_failed_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with opened(tmp_path, retry=1000.0, sync=None) as found:
        disk.failure = errno.ENOSPC
        found.append(round_record(0))
        disk.failure = None
        found.append(round_record(1))
        assert found.snapshot()["lost"] == 2
    assert rounds_in(tmp_path) == []


class Clock:
    """The time that a directory sees, which a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))


def test_a_disk_that_has_failed_is_tried_again_soon_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = Disk(monkeypatch), Clock(monkeypatch)
    with opened(tmp_path, sync=None) as found:
        disk.failure = errno.ENOSPC
        for number in range(8):
            found.append(round_record(number))
            clock.now += 0.5
        disk.failure = None
        clock.now += 1.0
        found.append(round_record(8))
        assert found.snapshot()["trouble"] is None
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    assert rounds_in(tmp_path) == [8]


def test_a_disk_that_takes_long_to_fail_is_tried_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = Disk(monkeypatch), Clock(monkeypatch)
    attempts: list[float] = []

    def begins(_: StateDir) -> None:
        attempts.append(clock.now)
        clock.now += 5.0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path, sync=None) as found:
        monkeypatch.setattr(StateDir, "_begin", begins)
        disk.failure = errno.EIO
        for number in range(600):
            found.append(round_record(number))
            clock.now += 1.0
    assert 4 <= len(attempts) <= 7


def test_a_disk_that_is_full_at_the_start_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    lock = files.lock

    def locked(path: Path) -> int:
        fd = lock(path)
        disk.failure = errno.ENOSPC
        return fd

    monkeypatch.setattr(state, "lock", locked)
    with opened(tmp_path, retry=0.0) as found:
        found.append(round_record(0))
        assert found.snapshot()["trouble"] == "no space left on device"
        disk.failure = None
        found.append(round_record(1))
    assert starts_in(tmp_path) == [1]
    assert rounds_in(tmp_path) == [1]


def test_what_is_written_is_synced_as_often_as_was_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    sync = os.fdatasync

    def counted(fd: int) -> None:
        synced.append(fd)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    with opened(tmp_path / "none", sync=None) as found:
        found.append(round_record(0))
    assert not synced
    with opened(tmp_path / "round", sync=EVERY_ROUND) as found:
        found.append(FOUNDED[0])
        assert not synced
        found.append(round_record(0))
        assert len(synced) == 1
    synced.clear()
    with opened(tmp_path / "seconds", sync=0.01) as found:
        wait_until(lambda: synced, "what was written at the start is synced")
        time.sleep(0.05)
        count = len(synced)
        time.sleep(0.1)
        assert len(synced) == count  # there is nothing new
        found.append(round_record(0))
        wait_until(lambda: len(synced) > count, "a round is synced")


def test_a_sync_that_fails_is_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(tmp_path, sync=0.01, retry=1000.0) as found:
        monkeypatch.setattr(os, "fdatasync", broken)
        found.append(round_record(0))

        def noticed() -> bool:
            found.append(round_record(1))
            return found.snapshot()["trouble"] is not None

        wait_until(noticed, "the failure is noticed")
        assert found.snapshot()["trouble"] == "input/output error"


def test_a_file_that_is_full_is_synced_later_if_no_descriptor_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_is_free(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    synced: list[int] = []
    with opened(tmp_path, sync=1000.0, file_bytes=1000) as found:
        first = found._fd
        for number in range(100):
            found.append(round_record(number))
        assert found._fd != first
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", none_is_free)
            with pytest.raises(OSError, match="Too many open files"):
                found._sync_all()
            patch.undo()
            patch.setattr(os, "fdatasync", synced.append)
            found._sync_all()

    assert first in synced


# ── directories ───────────────────────────────────────────────────────────────────────────────────────


def test_a_directory_has_one_owner_until_that_one_ends(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(StateError, match=f"{tmp_path} is in use by the coordinator with process id {os.getpid()}"):
            StateDir(tmp_path, "0.1.0")
        assert starts_in(tmp_path) == [1]
    with opened(tmp_path):
        assert starts_in(tmp_path) == [1, 2]


def test_directories_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path, why in (
        (file, "it is not a directory"),
        (file / "below", "not a directory"),
        (Path("/proc/nowhere"), ""),
    ):
        with pytest.raises(StateError, match=f"cannot keep a ledger in {path}: {why}"):
            StateDir(path, "0.1.0")


# ── daemons ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_daemon_on_a_directory_is_refused(tmp_path: Path) -> None:
    with Daemon("--state-dir", str(tmp_path)) as daemon:
        command = "-m", "gradserver", "serve", "--bind", "tcp://127.0.0.1:0", "--state-dir", str(tmp_path)
        with Program(*command) as second:
            assert second.end() == 1
            (complaint,) = second.complaints()
            assert complaint == (
                f"gradserver: {tmp_path} is in use by the coordinator with process id {daemon.pid}: "
                "each coordinator needs its own directory"
            )
    with Daemon("--state-dir", str(tmp_path)):  # the first was killed: nothing is left of its lock
        assert starts_in(tmp_path) == [1, 2]


def test_a_daemon_that_is_killed_under_load_leaves_every_round_up_to_the_last(tmp_path: Path) -> None:
    for incarnation in range(1, 4):
        with Daemon("--state-dir", str(tmp_path), "--sync", "none") as daemon:
            workers = [
                worker_program(daemon.url, "rounds", rank, 2, count=10**6, buckets=2, numel=100) for rank in (0, 1)
            ]
            wait_until(lambda: daemon.group().get("round", 0) > 50, "some rounds are done")
            seen = daemon.group()["round"]
            daemon.send_signal(signal.SIGKILL)
            daemon.end()
            for worker in workers:
                with worker:
                    pass
        (file,) = [file for _, file in files_of(tmp_path)]
        everything = items(file)
        begin = max(index for index, item in enumerate(everything) if isinstance(item, Group))
        numbers = [item.record.round for item in everything[begin:] if isinstance(item, Round)]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= seen
        assert starts_in(tmp_path) == list(range(1, incarnation + 1))


def test_training_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    with Daemon("--state-dir", str(tmp_path)) as daemon:
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (8192, 8192))
        workers = [worker_program(daemon.url, "rounds", rank, 2, count=300, buckets=2, numel=100) for rank in (0, 1)]
        for worker in workers:
            with worker:
                assert worker.end() == 0
        daemon.send_signal(signal.SIGTERM)
        assert daemon.end() == 0
        complaints = [line for line in daemon.complaints() if "cannot write" in line]
    # After a second it tries another file, which a slow machine fills, too.
    written = [file for _, file in files_of(tmp_path)]
    assert len(complaints) in (len(written), len(written) - 1)
    for file, complaint in zip(written, complaints, strict=False):
        assert f"cannot write {file}: file too large. Training continues" in complaint
    assert all(file.stat().st_size <= 8192 for file in written)
    numbers = [item.record.round for file in written for item in items(file) if isinstance(item, Round)]
    steps = [later - earlier for earlier, later in pairwise(numbers)]
    assert numbers[0] == 0
    assert min(steps) == 1
    assert sum(step > 1 for step in steps) < len(written)
    assert 10 < len(numbers) < 300
    with Daemon("--state-dir", str(tmp_path)):
        assert starts_in(tmp_path)[-1] == 2


def test_the_ledger_needs_neither_torch_nor_workers() -> None:
    code = "import sys, gradserver.ledger.state, gradserver.ledger; "
    code += "print(not {'torch', 'gradserver.worker'} & set(sys.modules))"
    with Program("-c", code) as program:
        assert program.end() == 0
        assert program.output() == ["True"]
