"""Every error that gradserver raises, in one tree. Branches are by the side at fault.

GradServerError
├── InvalidArgumentError          the caller's: this call cannot be right (also a ValueError)
│   ├── InvalidRankError
│   │   └── SendToSelfError
│   ├── InvalidWorldSizeError
│   ├── SizeMismatchError
│   ├── DTypeError
│   ├── LayoutError               a device or memory layout that cannot travel
│   └── UnsupportedOperationError
├── UsageError                    the caller's: the right call at the wrong time (also a RuntimeError)
│   ├── ClosedError               use after close
│   └── OutOfStepError            pushed twice, or not the round that is due
├── JoinRefusedError              the job's: this worker may not enter the group (rank taken, full, …)
├── QuotaExceededError            the job's: its group has had too much written into the coordinator's journal
├── DisagreementError             the job's: members of one group want different things
│   ├── PlanMismatchError
│   ├── CollectiveMismatchError
│   ├── DeadlockError             each member waits for something that only another waiting one could give
│   ├── AbandonedError            between a data shard and a worker: a member went on without this exchange
│   ├── DivergedError             replicas that must hold the same weights do not
│   ├── MembershipChangedError    the membership of the group changed during this call: call it again
│   └── RoundVoidError            members could not reduce a round among themselves: it goes over the coordinator
├── PeerError                     another worker's
│   ├── WorkerLostError           it died, or its connection broke
│   ├── WorkerLeftError           it left politely, but was still needed
│   ├── LeftOutError              this worker, for the others: they continue without it
│   ├── NonFiniteError            it contributed NaN or Inf
│   └── OutlierError              it contributed something else than the others, for several rounds
├── DeadlineError                 that of workers that did not come in time; it names them (also a TimeoutError)
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
    """Root of the error tree. ``fields`` carries the typed facts of an error across the wire.

    A subclass declares its facts as annotated class attributes. They are given by keyword and read as attributes. A
    fact that was not given reads as its default.
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
        """Return a new instance with the same text and facts, so that each raise has a traceback of its own."""
        return type(self)(self.message, **self.fields)


class InvalidArgumentError(GradServerError, ValueError):
    """An argument that can never be right."""


class InvalidRankError(InvalidArgumentError):
    """A rank outside of ``0 … world_size - 1``."""


class SendToSelfError(InvalidRankError):
    """A worker sends to itself, or receives from itself."""


class InvalidWorldSizeError(InvalidArgumentError):
    """A world size that is not a positive number, or not this group's."""


class SizeMismatchError(InvalidArgumentError):
    """Two lengths that must be equal and are not."""


class DTypeError(InvalidArgumentError):
    """An element type that cannot travel, or not through this operation."""


class LayoutError(InvalidArgumentError):
    """A tensor on a device, or in a memory layout, that cannot travel."""


class UnsupportedOperationError(InvalidArgumentError):
    """An operation that does not exist for this element type."""


class UsageError(GradServerError, RuntimeError):
    """A call that would be right at another time."""


class ClosedError(UsageError):
    """Use of a worker, or of a cluster, after it was closed."""


class OutOfStepError(UsageError):
    """A bucket pushed twice in one round, or a round begun before the last one was exchanged."""


class JoinRefusedError(GradServerError):
    """The coordinator does not let this worker into the group. The message gives the reason."""


class QuotaExceededError(GradServerError):
    """A group has caused more writing into the coordinator's journal than it may. The message gives the amount."""


class DisagreementError(GradServerError):
    """Members of one group ask for different things. The message shows both sides."""


class PlanMismatchError(DisagreementError):
    """The members' plans differ. The message names the first different parameter."""


class CollectiveMismatchError(DisagreementError):
    """The members call different collectives, or the same one on different tensors."""


class DeadlockError(DisagreementError):
    """Each member waits for something that only another waiting member could give. The message says which for what.

    Attributes:
        waits: a sentence on each member: what it waits for, and which members that lacks.
    """

    waits: tuple[str, ...] = ()


class AbandonedError(DisagreementError):
    """A member continued without this exchange, as it does when the exchange has failed at another data shard.

    A data shard reports this to a worker. The worker raises what the other shard reports.
    """

    def when_nothing_failed(self) -> CollectiveMismatchError:
        """Return what this means when no shard reports a failure: the member has called something else."""
        return CollectiveMismatchError(f"{self.message}: the members have called different collectives")


class DivergedError(DisagreementError):
    """Replicas that must hold the same weights do not. The message names those that differ from most."""


class MembershipChangedError(DisagreementError):
    """A worker left the group, or was lost, during a collective that cannot continue without it.

    The collective raises this at every member, once. Rank and world size are those of ``epoch`` from then on. The call
    can be repeated.

    Attributes:
        epoch: number of the new membership.
    """

    epoch: int = 0


class RoundVoidError(DisagreementError):
    """A round that members reduced among themselves does not count. Its gradients go over the coordinator instead.

    Attributes:
        epoch: number of a membership. From this round on, what members began in memberships before it is void. With 0
            this round alone is void.
    """

    epoch: int = 0


class PeerError(GradServerError):
    """An error that another worker caused.

    Attributes:
        worker: name of that worker.
        rank: its rank; -1 if it is not known.
    """

    worker: str = ""
    rank: int = -1


class WorkerLostError(PeerError):
    """A worker died, or the connection to it did."""


class WorkerLeftError(PeerError):
    """A worker closed while others still needed it."""


class LeftOutError(PeerError):
    """The others continue without this worker, which did not come in time."""


class NonFiniteError(PeerError):
    """A worker contributed NaN or Inf. Nothing of that bucket changed any weights.

    Attributes:
        bucket: name of the bucket.
        parameter: name of the parameter.
        round: number of the round.
    """

    bucket: str = ""
    parameter: str = ""
    round: int = -1


class OutlierError(PeerError):
    """The gradients of a worker are far off those of the others: its group halts, or goes on without it.

    Attributes:
        round: number of the round.
    """

    round: int = -1


class DeadlineError(GradServerError, TimeoutError):
    """A wait ran out.

    Attributes:
        missing: names of the workers that did not come.
        bucket: name of the bucket that was waited for; empty if it was something else.
        round: number of the round; -1 if it was something else.
    """

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
    """The coordinator was stopped, and announced it."""


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
    """A file of a job's or a coordinator's state, or its directory, cannot be used. The message names it."""


class BackendUnavailableError(GradServerError):
    """A fast path that this machine, or this build, does not have. The message gives the reason."""


def _tree(root: type[GradServerError]) -> dict[str, type[GradServerError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS: dict[str, type[GradServerError]] = _tree(GradServerError)
"""Every class of the tree by name. The name is what travels."""

for _class in ERRORS.values():
    _class.__module__ = "gradserver"  # the place to import them from, and so what a traceback shows

__all__ = ["ERRORS", *ERRORS]  # noqa: PLE0604 - the names are the keys, all of them strings


def reason_of(error: OSError) -> str:
    """Return the system's reason, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def raised(error: BaseException) -> str:
    """Say of a worker that ``error`` ended its script."""
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted (Ctrl-C)"
    return f"it raised {type(error).__name__}: {error}".removesuffix(": ")
