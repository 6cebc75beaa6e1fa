"""Tests of torch.distributed's backend "gradserver": real processes, each a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import STARTED_WITHIN, Program, coordinator

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


def run(names: str, folder: Path, size: int, url: str, ended: int = 0, **arguments: Any) -> None:
    """Run programs one after the other. The last ``ended`` ranks end within."""
    with ranks(names, folder, size, environment={"GRADSERVER_URL": url}, **arguments) as programs:
        for name in names.split(","):
            for program in programs[: size - ended]:
                program.expect(f"ok {name}", STARTED_WITHIN)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with coordinator() as server:
        yield server.url


@pytest.mark.parametrize(
    ("names", "size", "ended"),
    [
        ("operations,spellings,futures,profiles,wrong_tensors,deadlines", 2, 0),
        ("means_and_more,groups,any_source", 3, 1),
        ("monitored", 4, 0),
        ("forked", 2, 0),
    ],
)
def test_ranks(names: str, size: int, ended: int, url: str, tmp_path: Path) -> None:
    """Test by the programs of these names, which say what they do."""
    run(names, tmp_path, size, url, ended)


@pytest.mark.parametrize("names", ["ddp,sharded,composed"])
def test_parts_of_trainers(names: str, url: str, tmp_path: Path) -> None:
    run(names, tmp_path, 2, url)


@pytest.mark.long
@pytest.mark.parametrize(("names", "size"), [("operations", 4), ("ddp", 3), ("sharded", 4)])
def test_more_ranks(names: str, size: int, url: str, tmp_path: Path) -> None:
    run(names, tmp_path, size, url)


def test_ranks_that_disagree(url: str, tmp_path: Path) -> None:
    names = ",".join(f"other_{what}" for what in ("shape", "dtype", "order", "reduction", "root"))
    run(names, tmp_path, 2, url)
