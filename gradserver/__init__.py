"""gradserver keeps the replicas of a data-parallel training job in step over ordinary networks.

This package is the one place to import from:

    import gradserver

    worker = gradserver.connect("tcp://coordinator:7411")
    model = gradserver.DistributedDataParallel(model, worker)

The names below are imported when they are first used. So `import gradserver` stays light, and the coordinator runs on a
machine without PyTorch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from gradserver.protocol.version import __version__ as __version__

if TYPE_CHECKING:
    from types import FrameType

    from gradserver.alone import connect as connect, setup as setup
    from gradserver.local import LocalCluster as LocalCluster
    from gradserver.protocol.balance import (
        ThroughputTracker as ThroughputTracker,
        shard_ratios as shard_ratios,
        shard_sizes as shard_sizes,
    )
    from gradserver.protocol.cadence import Cadence as Cadence, CadenceOptions as CadenceOptions
    from gradserver.protocol.convergence import ConvergenceGuard as ConvergenceGuard
    from gradserver.protocol.errors import (
        AbandonedError as AbandonedError,
        BackendUnavailableError as BackendUnavailableError,
        ClosedError as ClosedError,
        CollectiveMismatchError as CollectiveMismatchError,
        ConnectionLostError as ConnectionLostError,
        CoordinatorError as CoordinatorError,
        CoordinatorStoppedError as CoordinatorStoppedError,
        CoordinatorUnreachableError as CoordinatorUnreachableError,
        DeadlineError as DeadlineError,
        DeadlockError as DeadlockError,
        DisagreementError as DisagreementError,
        DivergedError as DivergedError,
        DTypeError as DTypeError,
        GradServerError as GradServerError,
        InvalidArgumentError as InvalidArgumentError,
        InvalidRankError as InvalidRankError,
        InvalidWorldSizeError as InvalidWorldSizeError,
        JoinRefusedError as JoinRefusedError,
        JoinTimeoutError as JoinTimeoutError,
        LayoutError as LayoutError,
        LeftOutError as LeftOutError,
        LimitExceededError as LimitExceededError,
        MalformedMessageError as MalformedMessageError,
        MembershipChangedError as MembershipChangedError,
        NonFiniteError as NonFiniteError,
        OutlierError as OutlierError,
        OutOfStepError as OutOfStepError,
        PeerError as PeerError,
        PlanMismatchError as PlanMismatchError,
        ProtocolError as ProtocolError,
        QuotaExceededError as QuotaExceededError,
        RoundVoidError as RoundVoidError,
        SendToSelfError as SendToSelfError,
        SizeMismatchError as SizeMismatchError,
        StateError as StateError,
        UnexpectedMessageError as UnexpectedMessageError,
        UnsupportedOperationError as UnsupportedOperationError,
        UsageError as UsageError,
        VersionMismatchError as VersionMismatchError,
        WorkerLeftError as WorkerLeftError,
        WorkerLostError as WorkerLostError,
    )
    from gradserver.protocol.messages import Membership as Membership
    from gradserver.worker.client import Worker as Worker
    from gradserver.worker.data.balanced import BalancedSampler as BalancedSampler
    from gradserver.worker.data.ranges import DataRanges as DataRanges
    from gradserver.worker.data.sampler import ShardSampler as ShardSampler
    from gradserver.worker.data.sharding import shard_batches as shard_batches
    from gradserver.worker.data_parallel.wrapper import DataParallel as DataParallel
    from gradserver.worker.handle import Handle as Handle
    from gradserver.worker.job.job import Job as Job
    from gradserver.worker.local_sgd.wrapper import LocalSGD as LocalSGD
    from gradserver.worker.member.requests import Turn as Turn
    from gradserver.worker.norms import clip_local_norm as clip_local_norm
    from gradserver.worker.offer import is_nccl_available as is_nccl_available
    from gradserver.worker.torch_ddp.batchnorm import (
        SyncBatchNorm as SyncBatchNorm,
        convert_sync_batchnorm as convert_sync_batchnorm,
    )
    from gradserver.worker.torch_ddp.blocks import GradientExchange as GradientExchange
    from gradserver.worker.torch_ddp.ddp import DistributedDataParallel as DistributedDataParallel
    from gradserver.worker.torch_ddp.flatten import (
        BlockShape as BlockShape,
        flatten as flatten,
        local_mean as local_mean,
        unflatten as unflatten,
    )
    from gradserver.worker.torch_ddp.pacing import Balance as Balance
    from gradserver.worker.training import Training as Training

_HOME = {
    "connect": "gradserver.alone",
    "setup": "gradserver.alone",
    "Training": "gradserver.worker.training",
    "Worker": "gradserver.worker.client",
    "Handle": "gradserver.worker.handle",
    "Turn": "gradserver.worker.member.requests",
    "DistributedDataParallel": "gradserver.worker.torch_ddp.ddp",
    "DataParallel": "gradserver.worker.data_parallel.wrapper",
    "LocalSGD": "gradserver.worker.local_sgd.wrapper",
    "SyncBatchNorm": "gradserver.worker.torch_ddp.batchnorm",
    "convert_sync_batchnorm": "gradserver.worker.torch_ddp.batchnorm",
    "Job": "gradserver.worker.job.job",
    "GradientExchange": "gradserver.worker.torch_ddp.blocks",
    "flatten": "gradserver.worker.torch_ddp.flatten",
    "unflatten": "gradserver.worker.torch_ddp.flatten",
    "clip_local_norm": "gradserver.worker.norms",
    "local_mean": "gradserver.worker.torch_ddp.flatten",
    "BlockShape": "gradserver.worker.torch_ddp.flatten",
    "ThroughputTracker": "gradserver.protocol.balance",
    "shard_ratios": "gradserver.protocol.balance",
    "shard_sizes": "gradserver.protocol.balance",
    "Cadence": "gradserver.protocol.cadence",
    "ConvergenceGuard": "gradserver.protocol.convergence",
    "CadenceOptions": "gradserver.protocol.cadence",
    "Balance": "gradserver.worker.torch_ddp.pacing",
    "BalancedSampler": "gradserver.worker.data.balanced",
    "shard_batches": "gradserver.worker.data.sharding",
    "DataRanges": "gradserver.worker.data.ranges",
    "ShardSampler": "gradserver.worker.data.sampler",
    "LocalCluster": "gradserver.local",
    "Membership": "gradserver.protocol.messages",
    "is_nccl_available": "gradserver.worker.offer",
}
"""Module of each lazy name. The error classes are not listed: `gradserver.protocol.errors` says which there are."""


__all__ = [
    "AbandonedError",
    "BackendUnavailableError",
    "Balance",
    "BalancedSampler",
    "BlockShape",
    "Cadence",
    "CadenceOptions",
    "ClosedError",
    "CollectiveMismatchError",
    "ConnectionLostError",
    "ConvergenceGuard",
    "CoordinatorError",
    "CoordinatorStoppedError",
    "CoordinatorUnreachableError",
    "DTypeError",
    "DataParallel",
    "DataRanges",
    "DeadlineError",
    "DeadlockError",
    "DisagreementError",
    "DistributedDataParallel",
    "DivergedError",
    "GradServerError",
    "GradientExchange",
    "Handle",
    "InvalidArgumentError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "Job",
    "JoinRefusedError",
    "JoinTimeoutError",
    "LayoutError",
    "LeftOutError",
    "LimitExceededError",
    "LocalCluster",
    "LocalSGD",
    "MalformedMessageError",
    "Membership",
    "MembershipChangedError",
    "NonFiniteError",
    "OutOfStepError",
    "OutlierError",
    "PeerError",
    "PlanMismatchError",
    "ProtocolError",
    "QuotaExceededError",
    "RoundVoidError",
    "SendToSelfError",
    "ShardSampler",
    "SizeMismatchError",
    "StateError",
    "SyncBatchNorm",
    "ThroughputTracker",
    "Training",
    "Turn",
    "UnexpectedMessageError",
    "UnsupportedOperationError",
    "UsageError",
    "VersionMismatchError",
    "Worker",
    "WorkerLeftError",
    "WorkerLostError",
    "clip_local_norm",
    "connect",
    "convert_sync_batchnorm",
    "flatten",
    "is_nccl_available",
    "local_mean",
    "setup",
    "shard_batches",
    "shard_ratios",
    "shard_sizes",
    "unflatten",
]


def _error_classes() -> dict[str, object]:
    errors = import_module("gradserver.protocol.errors")
    return {name: getattr(errors, name) for name in errors.__all__ if name.endswith("Error")}


def _load(name: str) -> object:
    """The object behind a lazy name."""
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "torch":
            raise
        text = f"gradserver.{name} needs PyTorch, which is not installed here: pip install 'gradserver[torch]'"
        if _is_import_statement(sys._getframe(2)):  # Python would say there that this name does not exist
            raise ImportError(text, name="torch") from error
        raise AttributeError(text, name=name) from error  # so hasattr(gradserver, name) is False


def _is_import_statement(frame: FrameType) -> bool:
    """Return true if ``from gradserver import …`` looks for a name."""
    return frame.f_globals.get("__name__") == "importlib._bootstrap"


if not TYPE_CHECKING:  # type checkers go by the imports above, and so report a name that does not exist

    def __getattr__(name: str) -> object:
        if name in _HOME:
            value = _load(name)
        elif not name.startswith("_") and name in (errors := _error_classes()):
            value = errors[name]
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_error_classes()})
