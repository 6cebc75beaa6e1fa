"""Every error that gradserver raises, told apart by whose fault it is.

GradServerError
├── InvalidArgumentError          the caller's: this call cannot be right (also a ValueError)
│   ├── InvalidRankError
│   │   └── SendToSelfError
│   ├── InvalidWorldSizeError
│   ├── SizeMismatchError
│   ├── DTypeError
│   ├── LayoutError               a device or memory layout that cannot go
│   └── UnsupportedOperationError
├── UsageError                    the caller's: the right call at the wrong time (also a RuntimeError)
│   ├── ClosedError               use after close
│   └── OutOfStepError            pushed twice, or not the round that is due
├── JoinRefusedError              the job's: this worker may not enter the group (rank taken, full, …)
├── QuotaExceededError            the job's: its group has had too much written into the coordinator's journal
├── DisagreementError             the job's: members of one group want different things
│   ├── PlanMismatchError
│   ├── CollectiveMismatchError
│   ├── AbandonedError            between a data shard and a worker: a member went on without this exchange
│   ├── DivergedError             replicas that must hold the same weights do not
│   └── MembershipChangedError    an elastic group is not the one that this call was made in: call it again
├── PeerError                     another worker's
│   ├── WorkerLostError           died, or its connection did
│   ├── WorkerLeftError           left politely, but was still needed
│   ├── LeftOutError              this one, for the others: they go on without it
│   └── NonFiniteError            contributed NaN or Inf
├── DeadlineError                 someone's who did not come in time; it names them (also a TimeoutError)
│   └── JoinTimeoutError
├── CoordinatorError              the coordinator's, or the way to it (also a ConnectionError)
│   ├── CoordinatorUnreachableError
│   ├── ConnectionLostError
│   └── CoordinatorStoppedError
├── ProtocolError                 the bytes are not gradserver's
│   ├── VersionMismatchError
│   ├── MalformedMessageError
│   ├── LimitExceededError
│   └── UnexpectedMessageError    well formed, but not now or not from this sender
├── StateError                    the disk's: a checkpoint, the ledger, or a directory of theirs; it names which
└── BackendUnavailableError       a fast path that this machine does not have
"""

from __future__ import annotations

import inspect
from typing import ClassVar


class GradServerError(Exception):
    """Root of the tree. ``fields`` carries the typed facts of an error across the wire.

    A subclass declares its facts as annotated class attributes; they are given by keyword and
    read as attributes, and one that was not given reads as its default.
    """

    _FIELDS: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        own = {name for name in inspect.get_annotations(cls) if not name.startswith("_")}
        cls._FIELDS = frozenset(cls._FIELDS | own)

    def __init__(self, message: str, **fields: object) -> None:
        unknown = fields.keys() - self._FIELDS
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {sorted(unknown)}")
        super().__init__(message)
        self.fields = fields
        for name, value in fields.items():
            setattr(self, name, value)

    @property
    def message(self) -> str:
        """The text alone."""
        return str(self.args[0])

    def again(self) -> GradServerError:
        """A fresh instance that says the same, so that each raise has a traceback of its own."""
        return type(self)(self.message, **self.fields)


class InvalidArgumentError(GradServerError, ValueError):
    """An argument that can never be right."""


class InvalidRankError(InvalidArgumentError):
    """A rank outside of ``0 … world_size - 1``."""


class SendToSelfError(InvalidRankError):
    """A worker cannot send to, or receive from, itself."""


class InvalidWorldSizeError(InvalidArgumentError):
    """A world size that is not a positive number, or not this group's."""


class SizeMismatchError(InvalidArgumentError):
    """Two lengths that must agree do not."""


class DTypeError(InvalidArgumentError):
    """An element type that cannot travel, or not through this operation."""


class LayoutError(InvalidArgumentError):
    """A tensor on a device, or in a memory layout, that cannot travel."""


class UnsupportedOperationError(InvalidArgumentError):
    """This operation does not exist for this element type."""


class UsageError(GradServerError, RuntimeError):
    """A call that would be right at another time."""


class ClosedError(UsageError):
    """The worker, or the cluster, was closed."""


class OutOfStepError(UsageError):
    """A bucket pushed twice in one round, or a round begun before the last one was exchanged."""


class JoinRefusedError(GradServerError):
    """The coordinator does not let this worker into the group; the message says why."""


class QuotaExceededError(GradServerError):
    """A group has had more written into the coordinator's journal than it may; the message says how much."""


class DisagreementError(GradServerError):
    """Members of one group asked for different things; the message shows both sides."""


class PlanMismatchError(DisagreementError):
    """The members' plans differ; the message names the first parameter that does."""


class CollectiveMismatchError(DisagreementError):
    """The members called different collectives, or the same one on different tensors."""


class AbandonedError(DisagreementError):
    """A member went on without this exchange, as it does when the exchange has failed at another data shard.

    A data shard says so to a worker. The worker raises what the other shard says.
    """

    def when_nothing_failed(self) -> CollectiveMismatchError:
        """Tell what this means when no shard says of a failure: that member has called something else."""
        return CollectiveMismatchError(f"{self.message}: the members have called different collectives")


class DivergedError(DisagreementError):
    """Replicas that must hold the same weights do not; the message names those that differ from most."""


class MembershipChangedError(DisagreementError):
    """Somebody left an elastic group, or was lost, in the midst of a collective that cannot go on without him.

    It raises this at every member, once. Rank and world size are those of ``epoch`` from then on, and the call can
    be repeated.
    """

    epoch: int = 0


class PeerError(GradServerError):
    """Something that another worker did, or stopped doing."""

    worker: str = ""
    rank: int = -1


class WorkerLostError(PeerError):
    """A worker died, or the connection to it did."""


class WorkerLeftError(PeerError):
    """A worker closed while others still needed it."""


class LeftOutError(PeerError):
    """The others of an elastic group go on without this worker, which did not come in time."""


class NonFiniteError(PeerError):
    """A worker contributed NaN or Inf; nothing of that bucket reached anyone's weights."""

    bucket: str = ""
    parameter: str = ""
    round: int = -1


class DeadlineError(GradServerError, TimeoutError):
    """A wait ran out; ``missing`` names the workers that did not come."""

    missing: tuple[str, ...] = ()
    bucket: str = ""
    round: int = -1


class JoinTimeoutError(DeadlineError):
    """The group was not complete in time."""


class CoordinatorError(GradServerError, ConnectionError):
    """The coordinator, or the way to it, failed."""


class CoordinatorUnreachableError(CoordinatorError):
    """No coordinator answers at the URL."""


class ConnectionLostError(CoordinatorError):
    """The connection to the coordinator broke."""


class CoordinatorStoppedError(CoordinatorError):
    """The coordinator was stopped and said so."""


class ProtocolError(GradServerError):
    """Bytes or messages that break the protocol."""


class VersionMismatchError(ProtocolError):
    """The other side speaks another version of the protocol."""


class MalformedMessageError(ProtocolError):
    """Bytes that are no message."""


class LimitExceededError(ProtocolError):
    """A message larger than the protocol allows."""


class UnexpectedMessageError(ProtocolError):
    """A well-formed message that this sender may not send now."""


class StateError(GradServerError):
    """A file of a job's or a coordinator's state, or its directory, cannot be used; the message names it."""


class BackendUnavailableError(GradServerError):
    """A fast path that this machine, or this build, does not have; the message says why."""


def _tree(root: type[GradServerError]) -> dict[str, type[GradServerError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS: dict[str, type[GradServerError]] = _tree(GradServerError)
"""Every class of the tree by name: the name is what travels."""

for _class in ERRORS.values():
    _class.__module__ = "gradserver"  # where people import them from, and so what a traceback shows

__all__ = ["ERRORS", *ERRORS]  # noqa: PLE0604 - the names are the keys, all of them strings


def reason_of(error: OSError) -> str:
    """What the system says, as a part of a sentence."""
    return (error.strerror or str(error)).lower()
