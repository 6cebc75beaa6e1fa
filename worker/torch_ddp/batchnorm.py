"""BatchNorm over the batches of all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradserver.worker.client import Worker
from gradserver.worker.member.learner import Stage


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

    @classmethod
    def of(cls, plain: _BatchNorm, worker: Worker) -> SyncBatchNorm:
        """Return the replacement for ``plain``, with the same parameters and buffers."""
        made = cls(plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats)
        made._parameters = plain._parameters
        made._buffers = plain._buffers
        made.train(plain.training)
        made._worker = worker
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
        result: Tensor = normalize(inputs, self.weight, self.bias, self.eps, worker, self._take_statistics)
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


class _Normalize(torch.autograd.Function):
    """The normalization. Sums over all workers are in float64, as differences of large numbers depend on them."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, worker: Worker, take: Any
    ) -> Tensor:
        rows, channels = _by_channel(inputs), inputs.shape[1]
        wide = rows.double()
        sums = torch.cat([wide.sum(1), wide.square().sum(1), wide.new_full((1,), rows.shape[1])])
        worker.all_reduce(sums, "sum")
        count = float(sums[-1])
        mean = sums[:channels] / count
        variance = (sums[channels:-1] / count - mean.square()).clamp_(min=0.0)
        take(mean, variance, count)
        kind = torch.promote_types(inputs.dtype, torch.float32)
        mean, scale = mean.to(kind), (variance + eps).rsqrt().to(kind)
        normal = (rows.to(kind) - mean[:, None]) * scale[:, None]
        ctx.save_for_backward(normal, scale, weight)
        ctx.worker, ctx.count, ctx.shape, ctx.has_bias = worker, count, inputs.shape, bias is not None
        result = normal if weight is None else normal * weight[:, None].to(kind)
        result = result if bias is None else result + bias[:, None].to(kind)
        return _from_channels(result.to(inputs.dtype), inputs.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normal, scale, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows = _by_channel(gradient).to(normal.dtype)
        of_bias, of_weight = rows.sum(1), (rows * normal).sum(1)
        result = None
        if ctx.needs_input_grad[0]:
            channels = len(scale)
            sums = torch.cat([of_bias, of_weight]).double()
            ctx.worker.all_reduce(sums, "sum")
            means = (sums / ctx.count).to(normal.dtype)
            centred = rows - means[:channels, None] - normal * means[channels:, None]
            factor = scale if weight is None else scale * weight.to(normal.dtype)
            result = _from_channels((centred * factor[:, None]).to(gradient.dtype), ctx.shape)
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        return result, of_weight, of_bias.to(gradient.dtype) if ctx.has_bias else None, None, None, None


def _by_channel(tensor: Tensor) -> Tensor:
    """Return (N, C, …) as (C, elements)."""
    return tensor.transpose(0, 1).reshape(tensor.shape[1], -1)


def _from_channels(rows: Tensor, shape: torch.Size) -> Tensor:
    """Undo `_by_channel`."""
    return rows.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1).contiguous()
