"""DistributedDataParallel: a module whose gradients are averaged with those of its replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.errors import InvalidArgumentError, UsageError
from gradserver.protocol.limits import MIB
from gradserver.protocol.plan import Plan
from gradserver.worker.alike import check_joined_weights, check_same_tensors
from gradserver.worker.backward import Backward
from gradserver.worker.client import Worker, check_weight
from gradserver.worker.rounds import Options, Rounds
from gradserver.worker.stepping import noting_steps

Step = Callable[[], object] | Optimizer
"""What a training loop does after backward: an optimizer, or a function that steps one."""


class DistributedDataParallel(nn.Module):
    """Wraps a module so that ``backward()`` returns with the replicas' averaged gradients in every ``.grad``.

    Example::

        worker = gradserver.connect("tcp://coordinator:7411")
        model = gradserver.DistributedDataParallel(model, worker)
        with model.join(optimizer):                 # workers may have different numbers of batches
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()

    Construction agrees with all other workers on what is exchanged, and then overwrites parameters and
    buffers by those of rank 0 (see ``init_sync``). From then on the gradients live in one flat buffer per bucket,
    last transformer block first, and each bucket is exchanged as soon as backward has completed it. The gradient
    that every worker gets is ``sum(w·g) / sum(w)`` over the workers' gradients ``g`` and weights ``w`` (see
    `set_weight`), the same bytes everywhere. It is the worker's own to change, by clipping for example.

    What becomes of a gradient that is not finite, the coordinator was told (``serve --nonfinite``). By default every
    worker gets a NonFiniteError that names worker and parameter. With ``leave-out`` it does not count (`left_out`);
    with ``skip`` no worker applies the round (`skipped`); with ``propagate`` it is passed on as torch does. A
    GradScaler, which overflows on purpose to find its scale, needs that: with ``skip`` it would not hear of it.

    Exchanged is what backward computes outside of `no_sync`, in training mode and in eval mode alike, as torch has
    it. (With ``exchange_in_eval=False`` gradients stay local in eval mode.)

    A worker whose backward raises does not complete its round. It can do so without a gradient (`abandon_round`), and
    all go on. Otherwise the others do not apply anything of the round: they get an error that names this worker when
    it leaves the group, or when their wait runs out.

    Wrap a module once it is on its device, in its final element type, loaded and with its parameters frozen.
    Outputs should be tensors, or tuples, lists, dicts or dataclasses of them; with others only re-entrant
    checkpoints do not work.

    Args:
        module: floating or complex parameters on the CPU or on CUDA devices; those that require no gradient
            now are not exchanged. Sparse gradients are not supported.
        worker: from `connect` or `LocalCluster`. It may have several wrapped modules, each of which has rounds of its
            own; all workers must wrap them, and train them, in the same order.
        blocks: the transformer blocks, first to last, each of which becomes a bucket. None takes the ModuleList
            with the most parameters; an empty sequence means none.
        bucket_cap_mb: size in MiB of the buckets of a module, or part of one, that has no blocks.
        find_unused_parameters: allow parameters that the loss does not depend on. To the average they
            contribute zeros; where nobody has a gradient ``.grad`` stays None, and optimizers leave the
            parameter alone. Without it they are an error.
        static_graph: the loss depends on the same parameters in every step, equally often. The first step
            learns which these are and exchanges after backward; later ones exchange during it, also where parameters
            are unused, or used several times by re-entrant checkpoints. A change is an error.
        gradient_as_bucket_view: ``.grad`` is a view of the flat buffer. Otherwise it is a tensor of its own,
            copied in and out.
        delay_all_reduce: exchange after backward instead of during it.
        broadcast_buffers: keep buffers alike, too: after each exchange all have those of the lowest rank that
            took part with a batch. What has not changed since the last one does not travel. Otherwise they are never
            exchanged.
        buffers_to_ignore: names of buffers, as in ``module.named_buffers()``, that stay each worker's own. Names in
            the module's ``_ddp_params_and_buffers_to_ignore``, which torch's wrapper reads, are left alone as well,
            buffers and parameters.
        exchange_in_eval: exchange in eval mode, too. Without it a backward in eval mode leaves its gradients with this
            worker. All workers must then be in the same mode in each backward outside of `no_sync`: if they are not,
            each gets an error that says which are in which.
        accumulation: what becomes of gradients accumulated inside `no_sync`: their ``sum``, as torch has it,
            or their ``mean`` over the number of backwards. A mean expects gradients to be zeroed after each
            exchange.
        init_sync: let all start with the parameters and buffers of rank 0. Without it nothing is sent: all workers
            must have loaded the same, of which digests are compared. That is quicker where most weights are frozen.
        timeout: seconds that one exchange may wait for others; None takes the worker's.
        device_ids: known from torch's wrapper, and not needed: a module is exchanged on the device that it is on. It
            may name just that one, as ``output_device`` may.
        process_group: known from torch's wrapper, and refused: the group is the worker's.
        wire: what certain buckets travel as, by key: ``{"embedding": "topk:0.01", "block.0": "fp32"}``. The
            others travel as `gradserver.connect` was told. Keys are those of ``plan``.

    Attributes:
        module: the wrapped module.
        worker: the worker.

    Raises:
        PlanMismatchError: the workers' modules differ; names the first parameter that does. Nothing was overwritten.
        DivergedError: ``init_sync`` is false, and the workers' weights differ; names the first parameter that does.
        InvalidArgumentError: a module or an option that cannot be; LayoutError and DTypeError among them.
    """

    def __init__(
        self,
        module: nn.Module,
        worker: Worker | None = None,
        *,
        blocks: Iterable[nn.Module] | None = None,
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        delay_all_reduce: bool = False,
        broadcast_buffers: bool = True,
        buffers_to_ignore: Iterable[str] = (),
        exchange_in_eval: bool = True,
        accumulation: Literal["sum", "mean"] = "sum",
        init_sync: bool = True,
        timeout: float | None = None,
        wire: Mapping[str, str] | None = None,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        process_group: object | None = None,
    ) -> None:
        super().__init__()
        worker = _checked(module, worker, device_ids, output_device, process_group)
        if accumulation not in ("sum", "mean"):
            raise InvalidArgumentError(f"accumulation is 'sum' or 'mean', not {accumulation!r}")
        options = Options(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            delay_all_reduce=delay_all_reduce,
            broadcast_buffers=broadcast_buffers,
            ignored=_ignored(module, buffers_to_ignore),
            exchange_in_eval=exchange_in_eval,
            accumulation=accumulation,
            timeout=timeout,
            wire=wire or {},
        )
        self.module = module
        self.worker = worker
        self._rounds = Rounds(module, worker, options, blocks, bucket_cap_mb)
        self._backward = Backward(module, worker, options, self._rounds)
        if not worker.joins:  # who joins a group that trains already gets them with all the other state
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
        """What the module returns.

        Raises:
            OutOfStepError: an exchange, or a backward in the midst of one, failed before. In training mode only:
                evaluation goes on.
        """
        backward: Backward | None = self.__dict__.get("_backward")
        if backward is None or not torch.is_grad_enabled() or not backward.exchanges:
            return self.module(*args, **kwargs)
        if self.training:
            backward.check()
        self._rounds.before_forward()
        if self.training:
            self.worker.boundary()
        backward.armed = True
        output = self.module(*args, **kwargs)
        backward.watch(_tensors_in(output))
        return output

    def train(self, mode: bool = True) -> DistributedDataParallel:
        """Set training mode or eval mode, of this module and of all modules inside."""
        super().train(mode)
        if (backward := self.__dict__.get("_backward")) is not None:
            backward.training = mode
        return self

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate: gradients of backwards inside add up in ``.grad``, and go into the next exchange outside.

        What counts is where ``backward()`` runs; the forward may be inside or outside.
        """
        before, self._backward.syncs = self._backward.syncs, False
        try:
            yield
        finally:
            self._backward.syncs = before

    def set_weight(self, weight: float) -> None:
        """Let this worker's gradients count ``weight`` times from the next exchange on.

        With the number of samples (or tokens) that its mean loss was taken over, the average is that over
        all samples of all workers, however they are spread. A worker with weight 0 has no say, not even
        with NaN, but gets the others' average; if all have 0 it is zeros.

        Raises:
            InvalidArgumentError: ``weight`` is negative, not finite, or above 1e30.
        """
        self._rounds.weight = check_weight(weight)

    @contextmanager
    def join(self, step: Step | Sequence[Step] | None = None) -> Iterator[None]:
        """Train with a different number of batches on each worker: wrap the loop over them, on every worker.

        A worker that comes to the end of the block while others still have batches takes part in their
        exchanges with weight 0 and steps as they do, so that weights and optimizer states stay identical. When
        nobody has a batch any more, all leave the block, with every ``.grad`` None. Gradients still
        accumulated inside `no_sync` count in one more exchange. An exception is passed on at once.

        Args:
            step: what the loop does after each backward (outside of `no_sync`) to the weights: an optimizer, or a
                function that steps optimizers, schedulers and so on, or several of these. Without it the optimizers
                are those that have stepped this module's parameters in the loop, or in that of an earlier block; and
                the workers' weights are compared in the end, as the loop may have done more.

        Raises:
            UsageError: there is no ``step``, and no optimizer has stepped in the loop.
            DivergedError: there is no ``step``, and the loop does more to weights than its optimizers.
        """
        learned = self._backward.optimizers
        steps = learned if step is None else list(step) if isinstance(step, Sequence) else [step]
        self._backward.ended = max(self._backward.ended - 1, 0)
        with noting_steps(self.module, learned) if step is None else nullcontext():
            yield
        while not self._backward.ended and self._backward.shadow():
            if not steps:
                raise UsageError(
                    "model.join() steps the optimizers that the loop has stepped, and this worker's loop has stepped "
                    "none, while others still have batches: give it what to step, model.join(optimizer)"
                )
            for one in steps:
                if isinstance(one, Optimizer):
                    one.step()
                else:
                    one()
        if step is None:
            check_joined_weights(self.worker, self.module)

    def abandon_round(self) -> None:
        """Take part in the open round without a backward, or without the rest of one that failed. Then go on.

        Example::

            try:
                loss(model(inputs), targets).backward()
            except torch.OutOfMemoryError:
                model.abandon_round()
            optimizer.step()

        The others wait for this worker's part of the round. This call completes it, and returns with the averaged
        gradients in every ``.grad``, the same bytes as everywhere, so that the optimizer steps as it does there. Of
        this worker counts what its backward had pushed before it failed: whole buckets, with its weight. The other
        buckets are the mean of the others' gradients; those that nobody contributed to are zeros. Gradients that were
        accumulated in `no_sync` are thrown away with the batch.

        It also does for a forward that failed, or a batch that is left out. Where one backward goes through several
        wrapped modules, each of them needs the call. Errors of an exchange cannot be abandoned.

        Raises:
            OutOfStepError: an exchange failed before.
        """
        self._backward.abandon()

    def replay(self) -> bool:
        """Take the gradients of a round in which this worker has no part, as it has just joined; False if it had none.

        Then all others have come to the end of a block of `join`, and so has this worker.
        """
        return self._backward.shadow()

    @property
    def ended(self) -> bool:
        """Whether the others have come to the end of the present block of `join`."""
        return self._backward.ended > 0

    @property
    def has_update(self) -> bool:
        """Whether there were gradients in the last exchange: always, but for who has just joined."""
        return self._backward.anybody

    @property
    def skipped(self) -> bool:
        """Whether no worker applies the last exchange, as some gradients were not finite: every ``.grad`` is None.

        For coordinators that were started with ``--nonfinite skip``. torch's optimizers leave parameters without a
        gradient alone, so ``optimizer.step()`` does nothing; what else a loop does in each step it should leave out.
        """
        return self._rounds.skipped

    @property
    def left_out(self) -> bool:
        """Whether something that this worker gave to the last exchange was not finite, and so did not count.

        For coordinators that were started with ``--nonfinite leave-out`` or ``skip``.
        """
        return self._rounds.left_out

    # ── looking at it ─────────────────────────────────────────────────────────────────────────────────

    @property
    def exchange_seconds(self) -> float:
        """Time that the thread which calls ``backward()`` has spent pushing and waiting so far, in seconds.

        (On CUDA the pushes are made beside it and do not count.)
        """
        return self._rounds.seconds

    @property
    def plan(self) -> Plan:
        """What each round exchanges."""
        return self._rounds.plan

    def describe(self) -> str:
        """A table of what is exchanged: a line for each bucket with its key, element type, elements and MiB."""
        rows = [("bucket", "type", "elements", "MiB")]
        rows += [
            (b.key, b.dtype.name, f"{b.numel:,}", f"{b.numel * b.dtype.itemsize / MIB:.2f}") for b in self.plan.buckets
        ]
        rows.append((f"{len(self.plan.buckets)} in all", "", "", f"{self.plan.nbytes / MIB:.2f}"))
        key, kind, numel, size = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(f"{a:<{key}}  {b:<{kind}}  {c:>{numel}}  {d:>{size}}" for a, b, c, d in rows)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self, *args: Any, unwrapped: bool = False, **kwargs: Any) -> Any:
        """The module's state. Keys begin with ``module.``, as torch's wrapper has it; ``unwrapped`` leaves that off."""
        owner = self.module.state_dict if unwrapped else super().state_dict
        return owner(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state whose keys begin with ``module.``, or those of the module by itself.

        All workers must load the same state: it is not exchanged.

        Raises:
            InvalidArgumentError: ``assign`` is true, which would take the place of the parameters that are exchanged.
        """
        if assign:
            raise InvalidArgumentError("assign=True would replace the parameters: load into the module, then wrap it")
        bare, prefixed = self.module.state_dict().keys(), super().state_dict().keys()
        if len(bare & state_dict.keys()) > len(prefixed & state_dict.keys()):
            return self.module.load_state_dict(state_dict, strict)
        return super().load_state_dict(state_dict, strict)

    def unsaved_buffers(self) -> dict[str, Tensor]:
        """The buffers that are exchanged, and are not in the module's state: a worker that joins needs them too."""
        saved, exchanged = self.module.state_dict().keys(), self._rounds.buffer_names
        return {name: buffer for name, buffer in self.module.named_buffers() if name in exchanged and name not in saved}

    def __getstate__(self) -> dict[str, Any]:
        """All but the connection: a copy, also one that was pickled, has a module of its own, and exchanges nothing."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_THE_CONNECTION}

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_CONNECTION:
            raise AttributeError(
                "this is a copy of a wrapped module, which exchanges nothing: to train it, wrap its .module"
            )
        return super().__getattr__(name)


_OF_THE_CONNECTION: Final = ("worker", "_rounds", "_backward")


def _checked(
    module: object,
    worker: object,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
    process_group: object,
) -> Worker:
    """``worker``, if all this is what it should be; else an error that says what to give instead."""
    connected = "worker = gradserver.connect(); model = gradserver.DistributedDataParallel(module, worker)"
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, and must be a torch.nn.Module: {connected}")
    if process_group is not None:
        raise TypeError(f"process_group= belongs to torch.distributed. Groups are workers': {connected}")
    if worker is None:
        raise TypeError(f"there is no worker to exchange gradients with: {connected}")
    if not isinstance(worker, Worker):
        raise TypeError(f"worker is a {type(worker).__name__}, and must be what connect returns: {connected}")
    there = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    for option, devices in (("device_ids", device_ids), ("output_device", output_device)):
        for device in devices if isinstance(devices, Sequence) and not isinstance(devices, str) else (devices,):
            if device is not None and {_device(device)} != there:
                found = ", ".join(sorted(map(str, there))) or "no device"
                raise TypeError(
                    f"{option}={devices!r} is not needed, and moves nothing: this module is on {found}. Move it with "
                    f"module.to(device) first, and then wrap it; one process trains on one device"
                )
    return worker


def _device(device: int | str | torch.device) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _ignored(module: nn.Module, buffers: Iterable[str]) -> frozenset[str]:
    """Names of the parameters and buffers that are not exchanged."""
    known, named = [name for name, _ in module.named_buffers(remove_duplicate=False)], frozenset(buffers)
    for name in sorted(named.difference(known)):
        have = f"its buffers are {', '.join(map(repr, known[:16]))}" if known else "it has no buffers"
        raise InvalidArgumentError(f"buffers_to_ignore names {name!r}, which is no buffer of this module: {have}")
    return named.union(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


@torch.no_grad()
def broadcast_tensors(worker: Worker, tensors: Iterable[Tensor], chunk_bytes: int) -> None:
    """Overwrite ``tensors`` at every worker by those of rank 0; small ones travel together, in chunks."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in by_kind.values():
        chunk: list[Tensor] = []
        room = chunk_bytes
        for tensor in alike:
            size = tensor.numel() * tensor.element_size()
            if size > room and chunk:
                _broadcast_chunk(worker, chunk)
                chunk, room = [], chunk_bytes
            chunk.append(tensor)
            room -= size
        _broadcast_chunk(worker, chunk)


def _broadcast_chunk(worker: Worker, tensors: list[Tensor]) -> None:
    if len(tensors) == 1:
        worker.broadcast(tensors[0])
        return
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    worker.broadcast(packed)
    if worker.rank != 0:
        for tensor, part in zip(tensors, torch.split(packed, [t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors_in(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors_in(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for field in dataclasses.fields(output):
            yield from _tensors_in(getattr(output, field.name))
