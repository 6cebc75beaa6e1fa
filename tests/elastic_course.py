"""A training by four processes of which some are lost in the middle of a round: its course, and what all have then."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.cluster import PATIENCE, STARTED_WITHIN, Daemon, Program
from tests.elastic_training import FATAL, STEPS, VICTIM, WORLD
from tests.replicas import same

FROZEN_AFTER = 3.0
"""Seconds after which a stopped worker counts as frozen."""


@dataclass(frozen=True)
class Course:
    """A training in which some were lost.

    Attributes:
        group: the coordinator's snapshot of the group behind the round of the loss.
        places: what each survivor says of itself in that round.
        ends: what each survivor says at last.
        state: the weights, which all survivors have.
    """

    group: dict[str, Any]
    places: list[list[str]]
    ends: list[str]
    state: dict[str, Tensor]


def survivors_of(gone: Sequence[int] = (VICTIM,)) -> list[int]:
    """Return the members that are left."""
    return [member_id for member_id in range(WORLD) if member_id not in gone]


def lose(
    program: Path,
    folder: Path,
    last: str,
    goes_on_within: float,
    *arguments: str,
    options: Sequence[str] = (),
    gone: Sequence[int] = (VICTIM,),
    how: signal.Signals = signal.SIGKILL,
    environment: Callable[[int], Mapping[str, str]] = lambda _: {},
    as_usual: bool = False,
) -> Course:
    """Train, and lose some workers in the middle of a round. Check that the others go on in time, and end alike.

    Args:
        program: what each worker runs with the URL, its member id, a file for its weights, and ``arguments``.
        folder: where these files are.
        last: the beginning of the last line of a survivor.
        goes_on_within: seconds from the loss to the end of its round. For a stopped worker, its silence is added.
        arguments: the program's own.
        options: the coordinator's.
        gone: the members that are lost; the victim of the program is one of them.
        how: the signal that they get.
        environment: that of each member.
        as_usual: whether the processes take their interpreters to pieces.
    """
    survivors = survivors_of(gone)
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon("--workers", "2:8", "--gather", "60", *options))

        def start(member_id: int) -> Program:
            words = str(program), daemon.url, str(member_id), str(folder / f"{member_id}"), *arguments
            here = environment(member_id)
            return stack.enter_context(Program(*words, environment=here, loaded="torch", as_usual=as_usual))

        workers = [start(member_id) for member_id in range(WORLD)]
        workers[VICTIM].expect("halfway", STARTED_WITHIN)
        lost = time.monotonic()
        for member_id in gone:
            workers[member_id].send_signal(how)
        steps = [workers[member_id].expect(f"step {FATAL} ", PATIENCE).split() for member_id in survivors]
        group = daemon.group()
        for member_id in survivors:
            workers[member_id].tell()
        for member_id in survivors:
            workers[member_id].expect(f"step {STEPS - 1} ")
        ends = [workers[member_id].expect(last) for member_id in survivors]
        assert [workers[member_id].end() for member_id in survivors] == [0] * len(survivors)

    silence = FROZEN_AFTER if how is signal.SIGSTOP else 0.0
    assert max(float(moment) for moment, *_ in steps) - lost < goes_on_within + silence
    states = [torch.load(folder / f"{member_id}") for member_id in survivors]
    assert all(same(states[0], other) for other in states[1:])
    return Course(group, [place for _, *place in steps], ends, states[0])
