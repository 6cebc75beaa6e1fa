"""DistributedDataParallel: a module with gradients averaged over its replicas."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.cadence import CadenceOptions
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MIB
from gradserver.protocol.plan import Plan
from gradserver.worker.client import Worker, check_weight
from gradserver.worker.data.balanced import BalancedSampler
from gradserver.worker.data.ranges import DataRanges
from gradserver.worker.norms import check_limit
from gradserver.worker.torch_ddp.alike import broadcast_tensors, check_same_tensors
from gradserver.worker.torch_ddp.backward import Backward
from gradserver.worker.torch_ddp.clipping import WithNorms
from gradserver.worker.torch_ddp.grouping import described
from gradserver.worker.torch_ddp.joining import GivenGradients, check_alike
from gradserver.worker.torch_ddp.pacing import Balance, Pacing, pacing_of
from gradserver.worker.torch_ddp.rounds import Options, Rounds
from gradserver.worker.torch_ddp.stepping import Stepper, noting_steps, step_once, steppers
from gradserver.worker.torch_ddp.torch_names import LikeTorch, TorchOptions, check_join, check_keywords
from gradserver.worker.torch_ddp.wrapped import WrappedModule
from gradserver.worker.torch_ddp.wrapping import checked_worker, ignored_names, tensors_in


class DistributedDataParallel(WithNorms, LikeTorch, WrappedModule):
    """Wrapper of a module: ``backward()`` returns with the replicas' averaged gradients in every ``.grad``.

    For example:

        worker = gradserver.connect("tcp://coordinator:7411")
        model = gradserver.DistributedDataParallel(model, worker)
        with model.join(optimizer):                 # workers may have different numbers of batches
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()

    Construction agrees with all other workers on what is exchanged. Then it overwrites parameters and buffers by those
    of rank 0 (see ``init_sync``). From then on, the gradients live in one flat buffer per bucket, last transformer
    block first. Each bucket is exchanged as soon as backward has completed it. Every worker gets the gradient
    ``sum(w·g) / sum(w)`` over the workers' gradients ``g`` and weights ``w`` (see `set_weight`). The bytes are the same
    everywhere. A worker may change its copy, by clipping for example.

    The coordinator decides what happens to a gradient that is not finite (``serve --nonfinite``). By default every
    worker gets a NonFiniteError that names worker and parameter. With ``leave-out`` such a gradient does not count
    (`left_out`). With ``skip`` no worker applies the round (`skipped`). With ``propagate`` it is passed on, as torch
    does. A GradScaler overflows on purpose to find its scale, and needs ``propagate``. With ``skip`` it would not see
    the overflow.

    Backwards outside of `no_sync` are exchanged, in training mode and in eval mode, as with torch. With
    ``exchange_in_eval=False``, gradients stay local in eval mode.

    A worker with a backward that raises does not complete its round. It can complete the round without a gradient
    (`abandon_round`), and all continue. Otherwise the others apply nothing of the round. They get an error that names
    this worker when it leaves the group, or when their wait runs out.

    Wrap a module when it is on its device, in its final element type, loaded, and with its parameters frozen. Outputs
    should be tensors, or tuples, lists, dicts or dataclasses of tensors. With other outputs, only re-entrant
    checkpoints do not work.

    Args:
        module: module with floating or complex parameters on the CPU or on CUDA devices. Parameters that require no
            gradient now are not exchanged. Sparse gradients are not supported.
        worker: worker from `connect` or `LocalCluster`. It may have several wrapped modules, each with rounds of its
            own. All workers must wrap them, and train them, in the same order.
        blocks: the transformer blocks, first to last. Each becomes a bucket. None takes the ModuleList with the most
            parameters. An empty sequence means none.
        bucket_cap_mb: size in MiB of the buckets of a module, or of a part of one, that has no blocks.
        find_unused_parameters: true to allow parameters that the loss does not depend on. They contribute zeros to the
            average. If no worker has a gradient, ``.grad`` stays None, and optimizers skip the parameter. If false,
            such parameters are an error.
        static_graph: true if the loss depends on the same parameters in every step, equally often. The first step
            learns them, and exchanges after backward. Later steps exchange during backward. This also works if
            parameters are unused, or if re-entrant checkpoints use them several times. A change is an error.
        gradient_as_bucket_view: true if ``.grad`` is a view of the flat buffer. Otherwise it is a tensor of its own,
            copied in and out.
        delay_all_reduce: true to exchange after backward instead of during it.
        broadcast_buffers: true to keep buffers alike. After each exchange, all have those of the lowest rank that
            took part with a batch. A buffer that has not changed does not travel. If false, buffers are never
            exchanged.
        buffers_to_ignore: names of buffers, as in ``module.named_buffers()``, that stay local to each worker. They may
            be None yet. Buffers
            and parameters in the module's ``_ddp_params_and_buffers_to_ignore``, which torch's wrapper reads, stay
            local too.
        exchange_in_eval: true to exchange in eval mode, too. If false, a backward in eval mode leaves its gradients
            with this worker. All workers must then be in the same mode in each backward outside of `no_sync`. Otherwise
            each gets an error that lists the modes.
        accumulation: result of gradients accumulated inside `no_sync`: their ``sum``, as with torch, or their ``mean``
            over the number of backwards. A mean expects gradients to be zeroed after each exchange.
        init_sync: true to start all workers with the parameters and buffers of rank 0. If false, nothing is sent. All
            workers must then have loaded the same values; their digests are compared. That is quicker if most weights
            are frozen.
        timeout: seconds that one exchange may wait for others. None takes the worker's.
        device_ids: known from torch's wrapper, and not needed. It may name only the module's own device.
        output_device: known from torch's wrapper, and not needed, too.
        process_group: known from torch's wrapper, and refused: the group is the worker's.
        **of_torch: further options of torch's wrapper. Values that would do something there are refused.
        wire: formats of single buckets, by key: ``{"embedding": "topk:0.01", "block.0": "fp32"}``. The others travel
            in the format given to `gradserver.connect`. Keys are those of ``plan``.
        cadence: True, or `gradserver.CadenceOptions`, for unequal workers: the faster, the more batches between two
            exchanges. Only some backwards exchange then (`exchanged`): the mean of a worker's batches, by their number.
        balance: for unequal workers: batches with sizes that follow from what is measured. A `BalancedSampler` or
            `DataRanges` of this worker, or a `gradserver.Balance` of one with further options. Gradients weigh as much
            as the batch has samples.
        clip_grad_norm: limit of the norm of the averaged gradients, before ``backward()`` returns (`clip_grad_norm_`).
        max_grad_norm: limit of the norm of what this worker gives, before it is weighed and averaged. With it nothing
            is exchanged before the end of backward, when that norm is known.

    Attributes:
        module: the wrapped module.
        worker: the worker.

    Raises:
        PlanMismatchError: the workers' modules differ. The error names the first different parameter. Nothing was
            overwritten.
        DivergedError: ``init_sync`` is false, and the workers' weights differ. The error names the first different
            parameter.
        InvalidArgumentError: the module or an option is not possible. LayoutError and DTypeError are among these
            errors.
    """

    of_the_connection: ClassVar[tuple[str, ...]] = ("worker", "_rounds", "_backward")
    _rounds: Rounds

    def __init__(
        self,
        module: nn.Module,
        worker: Worker | None = None,
        *,
        blocks: Iterable[nn.Module] | None = None,
        bucket_cap_mb: float | None = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        delay_all_reduce: bool = False,
        broadcast_buffers: bool | None = True,
        buffers_to_ignore: Iterable[str] = (),
        exchange_in_eval: bool = True,
        accumulation: Literal["sum", "mean"] = "sum",
        init_sync: bool = True,
        timeout: float | None = None,
        wire: Mapping[str, str] | None = None,
        cadence: CadenceOptions | bool = False,
        balance: Balance | BalancedSampler | DataRanges | None = None,
        clip_grad_norm: float | None = None,
        max_grad_norm: float | None = None,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        process_group: object | None = None,
        **of_torch: Unpack[TorchOptions],
    ) -> None:
        super().__init__()
        check_keywords(DistributedDataParallel, of_torch)
        bucket_cap_mb = 25.0 if bucket_cap_mb is None else bucket_cap_mb  # None is torch's default
        broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers
        worker = checked_worker(module, worker, device_ids, output_device, process_group)
        if accumulation not in ("sum", "mean"):
            raise InvalidArgumentError(f"accumulation is 'sum' or 'mean', not {accumulation!r}")
        options = Options(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            delay_all_reduce=delay_all_reduce,
            broadcast_buffers=broadcast_buffers,
            ignored=ignored_names(module, buffers_to_ignore),
            exchange_in_eval=exchange_in_eval,
            accumulation=accumulation,
            timeout=timeout,
            wire=wire or {},
            pacing=pacing_of(worker, cadence, balance),
            clip_grad_norm=check_limit(clip_grad_norm, "clip_grad_norm"),
            max_grad_norm=check_limit(max_grad_norm, "max_grad_norm"),
        )
        self.module = module
        self.worker = worker
        self._ignored, self._bucket_cap_mb = options.ignored, bucket_cap_mb
        self._rounds = Rounds(module, worker, options, blocks, bucket_cap_mb)
        self._backward = Backward(module, worker, options, self._rounds)
        self._backward.owner = weakref.ref(self)
        if not worker.joins:  # a learner gets them with all the other state
            named = [*module.named_parameters(), *(module.named_buffers() if broadcast_buffers else ())]
            tensors = {name: tensor for name, tensor in named if name not in options.ignored}
            if init_sync:
                broadcast_tensors(worker, tensors.values(), int(bucket_cap_mb * MIB))
            else:
                check_same_tensors(worker, tensors)
            self._rounds.adopt_buffers()
        self.train(module.training)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and return its result.

        Raises:
            OutOfStepError: an exchange, or a backward in the midst of one, failed before. This is raised in training
                mode only, so that evaluation continues.
            UsageError: the module has not the parameters that it was wrapped with, or a buffer has come since. Another
                shape or type of a buffer is a SizeMismatchError or a DTypeError. In eval mode ``backward()`` raises the
                former.
        """
        backward: Backward | None = self.__dict__.get("_backward")
        if backward is None or not torch.is_grad_enabled() or not backward.exchanges:
            return self.module(*args, **kwargs)
        if self.training:
            backward.check(self.module)
        self._rounds.before_forward()
        if self.training:
            self.worker.boundary()
        backward.armed = True
        output = self.module(*args, **kwargs)
        self._rounds.after_forward()
        if self.training:  # a forward may make parameters
            backward.composition.check_members(self.module)
        backward.watch(tensors_in(output))
        return output

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set training mode or eval mode, of this module and of all modules inside."""
        super().train(mode)
        if (backward := self.__dict__.get("_backward")) is not None:
            backward.training = mode
        return self

    def set_weight(self, weight: float) -> None:
        """Set the weight of this worker's gradients, from the next backward on. With ``balance`` it is known.

        With the number of samples (or tokens) behind its mean loss as the weight, the average is that over all samples
        of all workers. A worker with weight 0 does not count, not even with NaN, but gets the others' average. If all
        have weight 0, the average is zeros.

        Raises:
            InvalidArgumentError: ``weight`` is negative, not finite, or above 1e30.
        """
        self._rounds.weight = check_weight(weight)

    @contextmanager
    def join(
        self,
        step: Stepper | Sequence[Stepper] | None = None,
        *,
        enable: bool = True,
        divide_by_initial_world_size: bool = False,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with a different number of batches on each worker.

        Wrap the loop over the batches in this block, on every worker.

        At the end of the block, a worker may find that others still have batches. It then takes part in their exchanges
        with weight 0, and steps as they do. So weights and optimizer states stay identical. When no worker has a batch
        any more, all leave the block, with every ``.grad`` None. Gradients still accumulated inside `no_sync` count in
        one more exchange. An exception is passed on at once.

        Args:
            step: what the loop does to the weights after each backward (outside of `no_sync`). It is an optimizer, a
                function that steps optimizers and schedulers, or several of these. The default is the optimizers that
                have stepped this module's parameters in the loop, or in that of an earlier block. A loop that clips,
                unscales, or changes weights or an average of them, needs a function that does all of this. At the end
                of the block, weights and optimizers are compared.
            enable: False to do nothing, as with torch's wrapper: all workers have equally many batches.
            divide_by_initial_world_size: known from torch's wrapper, and refused: a mean is over workers with a batch.
            throw_on_early_termination: known from torch's wrapper, and refused.

        Raises:
            InvalidArgumentError: an optimizer's step needs a closure, as that of ``torch.optim.LBFGS``.
            UsageError: there is no ``step``, and no optimizer has stepped in the loop. Or the loop changes the averaged
                gradients, and ``step`` does not.
            DivergedError: the loop changes weights, or an optimizer, by more than ``step``.
        """
        check_join(divide_by_initial_world_size, throw_on_early_termination)
        if not enable:
            yield
            return
        stepped: list[Stepper] = self._backward.optimizers
        block = stepped if step is None else steppers(step)
        if step is not None:
            stepped = []
        with self._following(block, stepped):
            yield
        check_alike(self.worker, self.module, self._ignored, [*block, *stepped])

    @contextmanager
    def _following(self, block: Sequence[Stepper], stepped: list[Stepper]) -> Iterator[None]:
        """Take part in the others' rounds behind the body. Add the optimizers that step to ``stepped``."""
        backward = self._backward
        backward.begin_block(block)
        leaves_alone = self.worker.mode == "sync" and (not block or isinstance(block[0], Optimizer))
        backward.given = GivenGradients() if leaves_alone else None
        try:
            with noting_steps(self.module, stepped, None if backward.given is None else backward.given.check):
                yield
                while not backward.ended and backward.shadow():
                    for one in backward.steps():
                        step_once(one)
        finally:
            backward.block = backward.given = None

    def abandon_round(self) -> None:
        """Complete the open round without a backward, or without the rest of one that failed.

        For example:

            try:
                loss(model(inputs), targets).backward()
            except torch.OutOfMemoryError:
                model.abandon_round()
            optimizer.step()

        The others wait for this worker's part of the round. This call completes it, and returns with the averaged
        gradients in every ``.grad``. The bytes are the same everywhere, so that the optimizer steps as it does there.
        The buckets that the backward had pushed before it failed count, with this worker's weight. The other buckets
        are the mean of the others' gradients, or zeros if there are none. Gradients that were accumulated in `no_sync`
        are thrown away with the batch.

        The call is also right for a forward that failed, or a batch that is omitted. If one backward goes through
        several wrapped modules, each of them needs the call. Errors of an exchange cannot be abandoned.

        Raises:
            OutOfStepError: an exchange failed before.
        """
        self._backward.abandon()

    def updates(self) -> Iterator[DistributedDataParallel]:
        """Yield for each update that the last backward leads to, with its averaged gradients in every ``.grad``.

        For example:

            loss(model(inputs), targets).backward()
            for _ in model.updates():
                optimizer.step()

        In mode "sync" that is once, and the loop can as well step its optimizer without it. In modes "bounded" and
        "async" (``serve --mode``) rounds do not wait for all workers. Then come all updates up to the one in which
        this worker's gradients count, in the order that all workers have. There is none if the gradients are too old
        (``serve --staleness``). `Job.step` does all this.

        It yields the model that is updated. In these modes that may be any model of the worker, and no other one has
        gradients meanwhile: ``for one in generator.updates(): optimizers[one].step()``.
        """
        while (updated := self._backward.next_update()) is not None:
            owner = None if updated.owner is None else updated.owner()
            assert isinstance(owner, DistributedDataParallel)
            yield owner

    @property
    def waits(self) -> bool:
        """True if gradients of this worker wait for their round: `updates` has more to yield."""
        return self._backward.deferred.has(self._backward)

    def replay(self) -> bool:
        """Take the gradients of a round in which this worker has no part, as it has just joined. False without one.

        False means that all others have reached the end of a block of `join`, and so has this worker.
        """
        return self._backward.shadow()

    @property
    def ended(self) -> bool:
        """True if the others have reached the end of the present block of `join`."""
        return self._backward.ended > 0

    @property
    def exchanged(self) -> bool:
        """True if the latest backward exchanged gradients. It is false inside `no_sync`, and between with a cadence."""
        return self._backward.exchanged

    @property
    def pacing(self) -> Pacing | None:
        """Parts of all ranks in the work: ``pacing.counts``, ``pacing.ratios``. None without cadence or balance."""
        return self._rounds.pacing

    @property
    def has_update(self) -> bool:
        """True if there were gradients in the last exchange. It is false only for a worker that has just joined."""
        return self._backward.anybody

    @property
    def total_weight(self) -> float:
        """Sum of the weights in the last exchange, the same at all workers: as a rule, its samples (`set_weight`)."""
        return self._rounds.total_weight

    @property
    def skipped(self) -> bool:
        """True if no worker applies the last exchange, as some gradients were not finite. Every ``.grad`` is None then.

        This needs a coordinator with ``--nonfinite skip``. torch's optimizers skip parameters without a gradient, so
        ``optimizer.step()`` does nothing. The loop should omit its other actions of a step.
        """
        return self._rounds.skipped

    @property
    def left_out(self) -> bool:
        """True if a part of this worker's gradients in the last exchange was not finite, and so did not count.

        This needs a coordinator with ``--nonfinite leave-out`` or ``skip``.
        """
        return self._rounds.left_out

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    @property
    def exchange_seconds(self) -> float:
        """Seconds that the thread which calls ``backward()`` has spent so far, pushing (not on CUDA) and waiting."""
        return self._rounds.seconds

    def _figures(self) -> dict[str, float]:
        own = self.own_grad_norm
        return {
            "exchange_seconds": self.exchange_seconds,
            "total_weight": self.total_weight,
            "grad_norm": self.grad_norm,
            "own_grad_norm": math.nan if own is None else own,
            "skipped": self.skipped,
            "left_out": self.left_out,
        }

    @property
    def plan(self) -> Plan:
        """The content of each round's exchange."""
        return self._rounds.plan

    def describe(self) -> str:
        """Return a table of what is exchanged: for each bucket its key, element type, elements and MiB."""
        return described(self.plan)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────

    def unsaved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are exchanged and not in the module's state. A worker that joins needs them too."""
        saved, exchanged = self.module.state_dict().keys(), self._rounds.buffer_names
        return {name: buffer for name, buffer in self.module.named_buffers() if name in exchanged and name not in saved}
