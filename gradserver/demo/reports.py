"""What the processes of a run tell their parent: one JSON object per line of standard output."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """The text is read and the model is built; training begins when all have come so far."""

    corpus_bytes: int
    corpus_sha256: str


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of one process did. `loss` is the mean over this process's own rows, in nats per byte."""

    step: int  # from 0
    loss: float
    gradient_norm: float  # of the gradient that the optimizer is given, before it is clipped
    seconds: float
    exchange_seconds: float  # the part of `seconds` that was spent waiting for the exchange of gradients


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker has come into its group; one that trained already if there is a donor."""

    at: float  # on the clock that all processes of a machine share, in seconds
    donor: str = ""  # the name of the member whose state it got
    nbytes: int = 0
    seconds: float = 0.0  # that this took


@dataclass(frozen=True, slots=True)
class TooLate:
    """A worker could not come into its group any more."""

    reason: str
    at: float  # as above


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of a group whose members change was to one of them."""

    number: int  # from 0
    loss: float | None  # mean over its samples, in nats per byte; None if there were none for it
    samples: list[int]  # that it was given for this round, by number
    used: int  # samples that all together have used so far
    workers: int  # members of the group behind this round
    seconds: float
    exchange_seconds: float
    at: float  # when it was over, as above


@dataclass(frozen=True, slots=True)
class Done:
    """The end of the training."""

    sha256: str  # of the model's state
    validation_loss: float | None = None  # mean over held-out text, in nats per byte; rank 0 only
    sample: str | None = None  # how the model continues the prompt; worker 0 only


Report = Ready | Step | Joined | TooLate | Round | Done
_KINDS: dict[str, type[Report]] = {kind.__name__: kind for kind in (Ready, Step, Joined, TooLate, Round, Done)}


def to_line(report: Report) -> str:
    """The report as one line without its end."""
    return json.dumps({"report": type(report).__name__, **asdict(report)})


def from_line(line: str) -> Report:
    """The report that `to_line` wrote. ValueError for anything else."""
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("report")](**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a report: {line[:200]!r}") from error
