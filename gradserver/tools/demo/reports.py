"""Reports of the processes of a run to their parent: one JSON object per line of standard output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """The text is read and the model is built. Training begins when all processes are ready."""

    corpus_sha256: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one process. `loss` is the mean over this process's own rows, in nats per byte."""

    step: int  # from 0
    loss: float
    gradient_norm: float  # norm of the gradient before it is clipped
    seconds: float
    exchange_seconds: float  # part of `seconds` that was spent waiting for the exchange of gradients


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker has joined its group. If there is a donor, the group was training already."""

    at: float  # time on the clock that all processes of a machine share, in seconds
    donor: str = ""  # name of the member that sent it the state
    nbytes: int = 0
    seconds: float = 0.0  # duration of this transfer


@dataclass(frozen=True, slots=True)
class TooLate:
    """A worker could not join its group any more."""

    reason: str
    at: float  # as above


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a group with changing members, as one of them reports it."""

    number: int  # from 0
    loss: float | None  # mean over its samples, in nats per byte; None if it had none
    samples: list[int]  # numbers of its samples in this round
    used: int  # number of samples that all members have used so far
    workers: int  # members of the group behind this round
    seconds: float
    exchange_seconds: float
    at: float  # time of its end, as above


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the training."""

    sha256: str  # hash of the model's state
    validation_loss: float | None = None  # mean over held-out text, in nats per byte; rank 0 only
    sample: str | None = None  # continuation of the prompt; worker 0 only


Report = Ready | Step | Joined | TooLate | Round | Done
_KINDS: dict[str, type[Report]] = {kind.__name__: kind for kind in (Ready, Step, Joined, TooLate, Round, Done)}


def to_line(report: Report) -> str:
    """Convert the report to one line, without its end."""
    return json.dumps({"report": type(report).__name__, **asdict(report)})


def from_line(line: str) -> Report:
    """Read the report that `to_line` wrote. ValueError for anything else."""
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("report")](**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a report: {line[:200]!r}") from error
