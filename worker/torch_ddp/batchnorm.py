"""BatchNorm over the batches of all workers."""

from __future__ import annotations

from itertools import count
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradserver.protocol.errors import DisagreementError
from gradserver.worker.client import Worker
from gradserver.worker.member.learner import Stage

_PLACES: Final = 1000.0
"""Places of a layer in a graph of derivatives, at most."""
_numbers: WeakKeyDictionary[Worker, count[int]] = WeakKeyDictionary()


def convert_sync_batchnorm(module: nn.Module, worker: Worker) -> nn.Module:
    """Replace every BatchNorm in ``module`` by one that normalizes over the batches of all workers.

    Args:
        module: module to change, unless it is a BatchNorm itself. Parameters and buffers are kept, so that optimizers
            that hold them stay valid.
        worker: a worker of the group that takes part.

    Returns:
        The module, or its replacement if it is a BatchNorm itself.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return SyncBatchNorm.of(module, worker)
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child, worker))
    return module


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with the statistics of all workers' batches together, whatever their sizes.

    In training mode, forward and backward make one collective each, also inside `DistributedDataParallel.no_sync`. So
    all workers must run it equally often, with equally many batches, and in the same mode. `ShardSampler` gives equally
    many batches. In eval mode it is a plain BatchNorm. So is a copy of it, which has no worker.

    `convert_sync_batchnorm` creates it. Inputs have the shape (N, C) or (N, C, …), are floating, and on any device.
    """

    _worker: Worker | None = None
    _number = 0
    """The number of the layer among those of its worker, the same at all workers."""

    @classmethod
    def of(cls, plain: _BatchNorm, worker: Worker) -> SyncBatchNorm:
        """Return the replacement for ``plain``, with the same parameters and buffers."""
        made = cls(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        made._parameters = plain._parameters
        made._buffers = plain._buffers
        made.train(plain.training)
        made._worker = worker
        made._number = next(_numbers.setdefault(worker, count(1)))
        return made

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the normalized input, of the same shape and element type."""
        self._check_input_dim(inputs)
        worker = self._worker
        if worker is None or not (self.training or self.running_mean is None):
            return super().forward(inputs)
        # A learner takes part in collectives when its first round is over.
        if worker.world_size == 1 or worker._session.stage is not Stage.MEMBER:
            return super().forward(inputs)
        normalize: Any = _Normalize.apply
        result: Tensor = normalize(inputs, self.weight, self.bias, self.eps, self, worker)
        return result

    def _take_statistics(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics by those of one batch of ``count`` elements for each channel."""
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share or 0.0)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share or 0.0)

    def _check_input_dim(self, inputs: Tensor) -> None:
        if inputs.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {inputs.dim()}")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_worker"}


class _Sum(torch.autograd.Function):
    """The sum of a tensor over all workers. The sum of all losses depends on it through each worker's copy."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, worker: Worker, known: Tensor | None, place: float | None) -> Tensor:
        ctx.worker, ctx.place = worker, place
        if known is not None:
            return known.clone()
        if place is None:
            total = own.clone(memory_format=torch.contiguous_format)
            worker.all_reduce(total, "sum")
            return total
        total = torch.cat([own, own.new_full((1,), place)])
        worker.all_reduce(total, "sum")
        if float(total[-1]) != place * worker.world_size:
            raise DisagreementError(
                "workers differentiate other graphs through a SyncBatchNorm, and so not the same sums: do the same "
                "with each batch. Of a batch without samples, torch omits some derivatives of a third or higher order"
            )
        return total[:-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _summed(gradients[0], ctx.worker, place=ctx.place + 1.0), None, None, None


def _summed(own: Tensor, worker: Worker, known: Tensor | None = None, place: float | None = None) -> Tensor:
    """Return the sum of ``own`` over all workers, with its derivatives.

    A sum that is ``known`` is not exchanged. With a ``place`` in the graph workers compare where they are.
    """
    apply: Any = _Sum.apply
    total: Tensor = apply(own, worker, known, place)
    return total


class _Moments(NamedTuple):
    """Sums over all workers' batches: of each channel's elements and of their squares, and the number of these.

    They are in float64, as differences of large numbers depend on them.
    """

    sums: Tensor
    rows: float

    @classmethod
    def of(cls, rows: Tensor, worker: Worker, known: _Moments | None = None, place: float = 0.0) -> _Moments:
        """Return the sums over the ``rows`` of all workers, with their derivatives if they are ``known``."""
        wide = rows.double()
        own = torch.cat([wide.sum(1), wide.square().sum(1)])
        if known is not None:
            return cls(_summed(own, worker, known.sums, place), known.rows)
        total = _summed(torch.cat([own, wide.new_full((1,), rows.shape[1])]), worker)
        return cls(total[:-1], float(total[-1]))

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each channel."""
        mean, of_squares = (self.sums / self.rows).chunk(2)
        return mean, (of_squares - mean.square()).clamp(min=0.0)

    def normalize(self, rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``rows`` with mean 0 and variance 1, in float32 or wider, and the factor of each channel."""
        kind = torch.promote_types(rows.dtype, torch.float32)
        mean, variance = self.mean_and_variance()
        scale = (variance + eps).rsqrt().to(kind)
        return (rows.to(kind) - mean.to(kind)[:, None]) * scale[:, None], scale


class _Normalize(torch.autograd.Function):
    """The normalization. Its backward can be differentiated again, as often as wanted.

    Each derivative makes its collectives in the order of the graph, which is the same at all workers, whatever the
    sizes of their batches are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        layer: SyncBatchNorm,
        worker: Worker,
    ) -> Tensor:
        rows = _by_channel(inputs)
        moments = _Moments.of(rows, worker)
        layer._take_statistics(*moments.mean_and_variance(), moments.rows)
        normal, _ = moments.normalize(rows, eps)
        ctx.save_for_backward(inputs, weight, moments.sums)
        ctx.worker, ctx.count, ctx.eps, ctx.has_bias = worker, moments.rows, eps, bias is not None
        ctx.place = layer._number * _PLACES
        result = normal if weight is None else normal * weight[:, None].to(normal.dtype)
        result = result if bias is None else result + bias[:, None].to(normal.dtype)
        return _from_channels(result.to(inputs.dtype), inputs.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, weight, sums = ctx.saved_tensors
        (gradient,) = gradients
        own, moments = _by_channel(inputs), _Moments(sums, ctx.count)
        if torch.is_grad_enabled():  # a derivative of this backward: its own depend on the inputs through the sums
            moments = _Moments.of(own, ctx.worker, moments, ctx.place)
        normal, scale = moments.normalize(own, ctx.eps)
        rows = _by_channel(gradient).to(normal.dtype)
        of_bias, of_weight = rows.sum(1), (rows * normal).sum(1)
        result: Tensor | None = None
        if ctx.needs_input_grad[0]:
            place = ctx.place + _PLACES / 2 if torch.is_grad_enabled() else None
            total = _summed(torch.cat([of_bias, of_weight]).double(), ctx.worker, place=place)
            mean, slope = (total / ctx.count).to(normal.dtype).chunk(2)
            if weight is not None:
                scale = scale * weight.to(normal.dtype)
            centred = rows - mean[:, None] - normal * slope[:, None]
            result = _from_channels((centred * scale[:, None]).to(gradient.dtype), inputs.shape)
        slopes = None if weight is None else of_weight.to(weight.dtype)
        return result, slopes, of_bias.to(gradient.dtype) if ctx.has_bias else None, None, None, None


def _by_channel(tensor: Tensor) -> Tensor:
    """Return (N, C, …) as (C, elements)."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1)


def _from_channels(rows: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_by_channel`."""
    return rows.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1).contiguous()
