"""Checkpoints on disk: whole or not there, whatever becomes of the writer and of the disk."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradserver.protocol.errors import InvalidArgumentError, StateError
from gradserver.worker.job import checkpoint
from gradserver.worker.job.checkpoint import Directory, File, check_resume, read, write
from gradserver.worker.tree import pack
from tests.checkpoint_writer import NUMEL
from tests.cluster import Program

torch.set_num_threads(1)

STATE: dict[str, Any] = {
    "round": 812,
    "model": {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "empty": torch.zeros(0, 4)},
    "rng": np.arange(5, dtype=np.uint32),
    "lr": [1e-3, None],
}
NOBODY = 65534


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def numbered(number: int) -> Any:
    return pack({"round": number})


# ── one file ─────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "one.gsckpt"
    write(file, pack(STATE))
    loaded = read(file)

    assert loaded.path == file
    assert loaded.digest == file.read_bytes()[-32:]
    assert torch.equal(loaded.tree["model"]["w"], STATE["model"]["w"])
    assert loaded.tree["model"]["empty"].shape == (0, 4)
    assert loaded.tree["rng"].tolist() == [0, 1, 2, 3, 4]
    assert (loaded.tree["round"], loaded.tree["lr"]) == (812, [1e-3, None])
    loaded.tree["model"]["w"].zero_()  # its own memory, which may be written to
    assert names(tmp_path) == ["one.gsckpt"]


def test_equal_states_have_equal_digests_and_others_have_not(tmp_path: Path) -> None:
    for name, state in (("a", STATE), ("b", STATE), ("c", {**STATE, "round": 813})):
        write(tmp_path / name, pack(state))
    a, b, c = (read(tmp_path / name).digest for name in "abc")
    assert a == b != c


def test_larger_than_what_is_written_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_WRITE_BYTES", 1000)
    values = np.random.default_rng(0).normal(size=10_001)
    write(tmp_path / "f", pack([values, "x", values[:7]]))
    back = read(tmp_path / "f").tree
    assert np.array_equal(back[0], values)
    assert np.array_equal(back[2], values[:7])


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write(file, pack(STATE))
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(StateError, match="f is not a whole checkpoint: it (has|says).*. Load another one"):
            read(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(StateError, match=f"it says that it has {len(whole)} bytes, and has {len(whole) + 1}"):
        read(file)


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "f"
    write(file, pack(STATE))
    whole = file.read_bytes()
    for at in range(len(whole)):
        for damage in (0x01, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= damage
            file.write_bytes(damaged)
            with pytest.raises(StateError, match="f is not a whole checkpoint: "):
                read(file)


def test_tails_of_zeros_are_noticed(tmp_path: Path) -> None:
    """Test what a power failure can make of a file with its length on the disk before its contents."""
    file = tmp_path / "f"
    write(file, pack(STATE))
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 7):
        file.write_bytes(whole[:length] + bytes(len(whole) - length))
        with pytest.raises(StateError, match="f is not a whole checkpoint: "):
            read(file)


def test_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot read the checkpoint .*/none: no such file or directory"):
        read(tmp_path / "none")


# ── a directory ──────────────────────────────────────────────────────────────────────────────────────


def test_the_last_ones_are_kept_and_the_link_names_the_last(tmp_path: Path) -> None:
    directory = Directory(tmp_path / "runs" / "7", keep=2)
    assert directory.latest() is None
    for number in (5, 10, 15):
        assert directory.write(number, numbered(number)) == directory.latest()
    assert names(directory.path) == ["latest", "round-000000010.gsckpt", "round-000000015.gsckpt"]
    assert os.readlink(directory.path / "latest") == "round-000000015.gsckpt"


def test_a_job_that_goes_back_to_an_older_round_continues_from_there(tmp_path: Path) -> None:
    directory = Directory(tmp_path, keep=2)
    for number in (100, 200, 50):
        directory.write(number, numbered(number))
    latest = directory.latest()
    assert latest is not None
    assert read(latest).tree == {"round": 50}
    assert names(tmp_path) == ["latest", "round-000000050.gsckpt", "round-000000200.gsckpt"]


def test_same_round_again_replaces(tmp_path: Path) -> None:
    directory = Directory(tmp_path, keep=1)
    directory.write(3, pack("first"))
    assert read(directory.write(3, pack("second"))).tree == "second"
    assert names(tmp_path) == ["latest", "round-000000003.gsckpt"]


def test_without_the_link_it_is_the_newest(tmp_path: Path) -> None:
    directory = Directory(tmp_path, keep=3)
    for number in (2, 3, 1):
        path = directory.write(number, numbered(number))
        os.utime(path, ns=(0, 1000 * {2: 1, 3: 2, 1: 3}[number]))
    (tmp_path / "latest").unlink()
    assert directory.latest() == tmp_path / "round-000000001.gsckpt"


def test_others_files_are_left_alone_and_remains_are_removed(tmp_path: Path) -> None:
    for name in ("notes.txt", "best.gsckpt", "round-000000001.gsckpt.tmp", "latest.tmp"):
        (tmp_path / name).write_text("")
    directory = Directory(tmp_path, keep=1)
    directory.write(1, numbered(1))
    directory.write(2, numbered(2))
    assert names(tmp_path) == ["best.gsckpt", "latest", "notes.txt", "round-000000002.gsckpt"]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, None])
def test_keep_is_a_number(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a number of checkpoints, at least 1"):
        Directory(tmp_path, keep)


# ── when writing fails ───────────────────────────────────────────────────────────────────────────────


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Limit files of this process to ``nbytes``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("limit", [0, 5, 100, 3000, 4020])
def test_no_room_is_an_error_that_names_the_file_and_costs_nothing_else(tmp_path: Path, limit: int) -> None:
    directory = Directory(tmp_path, keep=1)
    directory.write(1, numbered(1))
    with largest_file(limit), pytest.raises(StateError, match="round-000000002.gsckpt: file too large") as caught:
        directory.write(2, pack(np.zeros(1000, np.float32)))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EFBIG
    assert names(tmp_path) == ["latest", "round-000000001.gsckpt"]
    latest = directory.latest()
    assert latest is not None
    assert read(latest).tree == {"round": 1}


@contextmanager
def nobodys_directory() -> Iterator[Path]:
    """Yield an empty directory, with the rights of its owner only: root could write everywhere."""
    was = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        if was == 0:
            os.chown(name, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            os.seteuid(was)


def test_directory_that_must_not_be_written_to() -> None:
    with nobodys_directory() as path:
        directory = Directory(path, keep=1)
        directory.write(1, numbered(1))
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(StateError, match="cannot write the checkpoint .*round-000000002.gsckpt: permission denied"):
            directory.write(2, numbered(2))
        assert names(path) == ["latest", "round-000000001.gsckpt"]
        path.chmod(stat.S_IRWXU)


def test_file_and_directory_are_flushed_before_and_after_the_file_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test what no kill shows: power failures."""
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(descriptor: int) -> None:
        done.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noting_replace(path: Path, target: Path) -> Path:
        done.append(f"rename to {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    Directory(tmp_path / "runs", keep=1).write(1, numbered(1))
    assert done == [
        "flush round-000000001.gsckpt.tmp",
        "rename to round-000000001.gsckpt",
        "flush runs",
        "rename to latest",
        "flush runs",
    ]


def test_a_shared_directory_is_known_by_any_path_and_a_copy_is_another_one(tmp_path: Path) -> None:
    one = Directory(tmp_path / "one", keep=1)
    identity = one.identity()
    assert identity
    (tmp_path / "mounted").symlink_to("one")
    assert Directory(tmp_path / "mounted", keep=1).identity() == identity == one.identity()
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert Directory(tmp_path / "copy", keep=1).identity() not in ("", identity)
    (tmp_path / "file").write_text("")
    assert Directory(tmp_path / "file", keep=1).identity() == ""
    assert names(tmp_path / "one") == [".directory"]


def damaged(path: Path) -> Path:
    """Change a byte in the middle of a file."""
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    return path


def test_a_damaged_checkpoint_names_the_newest_whole_one_which_is_taken_if_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Directory(tmp_path, keep=4)
    for number in (1, 2, 3, 4):
        directory.write(number, pack({**STATE, "round": number}))
    bad = damaged(tmp_path / "round-000000004.gsckpt")
    damaged(tmp_path / "round-000000003.gsckpt")
    whole = tmp_path / "round-000000002.gsckpt"
    with pytest.raises(StateError) as caught:
        directory.find()
    assert str(caught.value).startswith(f"{bad} is not a whole checkpoint: its contents do not have the digest")
    assert f"The newest whole one beside it is {whole}: Job(…, resume='newest-whole')" in str(caught.value)
    assert "gradserver run --resume newest-whole" in str(caught.value)

    found = directory.find(whole=True)
    assert found is not None
    assert (found.path, found.tree["round"]) == (whole, 2)
    assert f"The job goes on from {whole}" in caplog.text
    with pytest.raises(StateError, match=f"{bad} is not .*: job.load\\('{whole}'\\) takes it"):
        File(bad).find()

    damaged(tmp_path / "round-000000001.gsckpt")
    damaged(whole)
    for takes in (False, True):
        with pytest.raises(StateError, match=f"{bad} is not a whole .* has no other one that is whole"):
            directory.find(whole=takes)


def test_the_choice_of_the_environment_holds_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADSERVER_RESUME", raising=False)
    assert check_resume(None) == "latest"
    monkeypatch.setenv("GRADSERVER_RESUME", "newest-whole")
    assert (check_resume(None), check_resume("latest")) == ("newest-whole", "latest")
    monkeypatch.setenv("GRADSERVER_RESUME", "newest")
    with pytest.raises(InvalidArgumentError, match="GRADSERVER_RESUME is 'newest', and must be 'latest' or 'newest-wh"):
        check_resume(None)
    with pytest.raises(InvalidArgumentError, match="resume is 'x'"):
        check_resume("x")


def test_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = Directory(tmp_path / "file" / "runs", keep=1)
    with pytest.raises(StateError, match="cannot make the directory .*/file/runs for checkpoints: not a directory"):
        directory.write(1, numbered(1))


def test_killed_at_any_instant_of_writing(tmp_path: Path) -> None:
    """Test that the last checkpoint that was announced, or a later one, can be loaded, and that nothing piles up."""
    chance, announced, torn = random.Random(5), -1, 0
    for attempt in itertools.count():
        if attempt >= 12 and torn:  # one kill at least came while a file was being written
            break
        assert attempt < 200, "no kill came while a file was being written"
        with Program("-m", "tests.checkpoint_writer", str(tmp_path)) as program:
            announced = int(program.expect("written "))
            time.sleep(chance.uniform(0.0, 0.05))
            program.send_signal(signal.SIGKILL)
            assert program.end() == -signal.SIGKILL
            announced = max(announced, *(int(line.split()[1]) for line in program.output()))
        torn += any(name.endswith(".tmp") for name in names(tmp_path))
        latest = Directory(tmp_path, keep=2).latest()
        assert latest is not None
        loaded = read(latest).tree
        assert loaded["round"] >= announced
        assert np.array_equal(loaded["weights"], np.full(NUMEL, loaded["round"], np.float32))
        assert sum(name.endswith(".gsckpt") for name in names(tmp_path)) <= 3
