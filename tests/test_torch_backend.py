"""Tests of torch.distributed's backend "gradserver": real processes, each a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import STARTED_WITHIN, Program

PROGRAM = str(Path(__file__).with_name("torch_backend_program.py"))


@contextmanager
def ranks(
    program: str,
    folder: Path,
    size: int,
    /,
    *,
    only: tuple[int, ...] | None = None,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[list[Program]]:
    """Start the ranks of a program, or ``only`` some."""
    told = {"GRADSERVER_URL": "", **(environment or {})}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Program(
                    *(PROGRAM, program, str(folder), str(rank), str(size), json.dumps(arguments)),
                    environment={"LOCAL_RANK": str(rank), **told},
                    loaded="torch",
                )
            )
            for rank in (range(size) if only is None else only)
        ]


def run(name: str, folder: Path, size: int, **arguments: Any) -> None:
    with ranks(name, folder, size, **arguments) as programs:
        for program in programs:
            program.expect("ok", STARTED_WITHIN)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("operations", 2),
        ("means_and_more", 3),
        ("spellings", 2),
        ("futures", 2),
        ("deadlines", 2),
        ("monitored", 4),
        ("groups", 3),
        ("any_source", 3),
        ("forked", 2),
        ("wrong_tensors", 2),
    ],
)
def test_ranks(name: str, size: int, tmp_path: Path) -> None:
    """Test by the program of that name, which says what it does."""
    run(name, tmp_path, size)


@pytest.mark.parametrize(("name", "size"), [("ddp", 2), ("sharded", 2), ("composed", 2)])
def test_parts_of_trainers(name: str, size: int, tmp_path: Path) -> None:
    run(name, tmp_path, size)


@pytest.mark.long
@pytest.mark.parametrize(("name", "size"), [("operations", 4), ("ddp", 3), ("sharded", 4)])
def test_more_ranks(name: str, size: int, tmp_path: Path) -> None:
    run(name, tmp_path, size)


@pytest.mark.parametrize("what", ["shape", "dtype", "order", "reduction", "root"])
def test_ranks_that_disagree(what: str, tmp_path: Path) -> None:
    run("disagreeing", tmp_path, 2, what=what)
