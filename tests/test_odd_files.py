"""Files that are none: pipes, links, and files of any size, where a checkpoint, a ledger or a configuration is read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

from gradserver import cli
from gradserver.configuration import read
from gradserver.ledger.files import MAX_FILE_BYTES, keep_to_owner, lock
from gradserver.ledger.journal import header
from gradserver.protocol.errors import InvalidArgumentError, MalformedMessageError, StateError
from gradserver.worker.job import checkpoint
from gradserver.worker.tree import pack, unpack


def quickly(call: Callable[[], object], kind: type[Exception], match: str, seconds: float = 5.0) -> None:
    began = time.process_time()
    with pytest.raises(kind, match=match):
        call()
    assert time.process_time() - began < seconds


def test_a_pipe_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, state = tmp_path / "pipe", tmp_path / "state"
    os.mkfifo(pipe)
    state.mkdir(mode=0o700)
    os.mkfifo(state / "ledger-000001.gsl")
    quickly(lambda: checkpoint.read(pipe), StateError, "not a regular file")
    quickly(lambda: checkpoint.read(Path("/dev/zero")), StateError, "not a regular file")
    quickly(lambda: read(pipe), InvalidArgumentError, "not a regular file")
    quickly(lambda: read(Path("/dev/zero")), InvalidArgumentError, "not a regular file")
    for words in (["serve", "--bind", "tcp://127.0.0.1:0", "--state-dir"], ["ledger"]):
        assert cli.main([*words, str(state)]) == 1
        assert "not a regular file" in capsys.readouterr().err


def test_a_ledger_of_no_size_that_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ledger-000001.gsl"
    file.write_bytes(header(1))
    os.truncate(file, MAX_FILE_BYTES + 1)  # it takes no room on the disk
    file.chmod(0o600)
    tmp_path.chmod(0o700)
    for words in (["serve", "--bind", "tcp://127.0.0.1:0", "--state-dir"], ["ledger"], ["ledger", "--repair"]):
        assert cli.main([*words, str(tmp_path)]) == 1
        assert f"{MAX_FILE_BYTES:,} is the limit" in capsys.readouterr().err


def test_links_in_a_state_directory_are_not_followed(tmp_path: Path) -> None:
    target, state = tmp_path / "target", tmp_path / "state"
    target.write_text("precious")
    target.chmod(0o644)
    state.mkdir(mode=0o700)
    for name in ("lock", "ledger-000001.gsl"):
        (state / name).symlink_to(target)
    with pytest.raises(StateError, match="cannot keep a ledger"):
        lock(state)
    keep_to_owner(state)
    assert target.read_text() == "precious"
    assert target.stat().st_mode & 0o777 == 0o644
    (tmp_path / "model.tmp").symlink_to(target)
    with pytest.raises(StateError, match="cannot write the checkpoint"):
        checkpoint.write(tmp_path / "model", pack({}))
    assert target.read_text() == "precious"


@pytest.mark.parametrize("kind", ["integers", "pairs"])
def test_keys_that_are_made_to_collide_are_refused(kind: str) -> None:
    prime = (1 << 61) - 1
    keys = [[5, (number * prime).to_bytes(16, "little", signed=True)] for number in range(40_000)]
    node = [2, *(part for key in keys for part in (key if kind == "integers" else [1, key, 0], None))]
    quickly(lambda: unpack(msgpack.packb(node), lambda _: b""), MalformedMessageError, "keys with the same hash")
    quickly(lambda: pack({number * prime: None for number in range(100)}), InvalidArgumentError, "with the same hash")


def test_keys_of_honest_trees_are_taken() -> None:
    tree: dict[object, object] = {number << shift: number for shift in (0, 32, 70, 200) for number in range(1, 3000)}
    tree |= {(number, str(number)): None for number in range(3000)} | {number / 8: 1 for number in range(1, 999, 8)}
    packed = pack(tree)
    assert unpack(packed.manifest, lambda _: b"") == tree


@pytest.mark.parametrize(
    "text",
    [
        "workers = " + "[" * 20_000 + "]" * 20_000,
        "workers = " + "{a=" * 10_000 + "1" + "}" * 10_000,
        "workers = " + "9" * 10_000,
        "workers = 0x" + "f" * 10_000,
        "groups = [0x" + "f" * 10_000 + "]",
        ".".join("a" * 20_000) + " = 1",
        "workers = {" + ".".join("a" * 20_000) + " = 1}",
        ".".join("a" * 900) + " = 1",
        "".join(f"[group.x{number}]\n" for number in range(20_000)),
        "".join(f"[group.x{number}]\n" for number in range(4_000)),
        "#" * 70_000,
    ],
)
def test_a_configuration_of_odd_form_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    quickly(lambda: read(file), InvalidArgumentError, "serve.toml")
