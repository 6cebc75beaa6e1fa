"""The exchange below DistributedDataParallel, for trainers that own their gradients and push them by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gradserver.protocol.dtypes import dtype_of
from gradserver.protocol.errors import (
    DisagreementError,
    InvalidArgumentError,
    LayoutError,
    OutOfStepError,
    SizeMismatchError,
    StateError,
)
from gradserver.protocol.plan import Bucket, Component, Plan
from gradserver.protocol.plan_codecs import with_named_codecs
from gradserver.protocol.whole import whole_number
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.norms import check_limit, clip_factor, norm_of, scale, squares_in
from gradserver.worker.tensors import is_torch
from gradserver.worker.torch_ddp.flatten import (
    COMPONENT_NAMES,
    NON_BLOCK_COMPONENTS,
    BlockShape,
    flatten as flatten,
    local_mean as local_mean,
    unflatten as unflatten,
)
from gradserver.worker.tree import Tree

if TYPE_CHECKING:
    from gradserver.worker.torch_ddp.block_rounds import BlockRounds

LM_HEAD: Final = NON_BLOCK_COMPONENTS.index("lm_head")
FINAL_NORM: Final = NON_BLOCK_COMPONENTS.index("final_norm")
EMBEDDING: Final = NON_BLOCK_COMPONENTS.index("embedding")

Sizes = BlockShape | Sequence[int]
"""Elements of each component of a block, in order."""


class GradientExchange:
    """Average of the gradients of a transformer among all workers, block by block.

    A whole training step:

        exchange = GradientExchange(worker, num_blocks, BlockShape(hidden, kv_dim, intermediate),
                                    lm_head=lm_head.size, final_norm=final_norm.size, embedding=embedding.size)
        for step in range(steps):
            count = forward_and_backward(shard)             # 1. sums over this worker's `count` valid sequences
            for gradient in (*blocks, lm_head, final_norm, embedding):
                local_mean(gradient, count)                 # 2. means over them
            for index in reversed(range(num_blocks)):
                exchange.push_block(step, index, blocks[index])             # 3. last block first
            for component, gradient in enumerate((lm_head, final_norm, embedding)):
                exchange.push_non_block(step, component, gradient)          # 4.
            exchange.finish()                               # the workers' mean is in all of them
            count = 1                                       # 5. and nothing is divided twice
            optimizer_step()                                # 6.

    Every worker pushes every bucket that is not empty, in any order, and then calls `finish`. A push returns at once,
    so that the next block's backward can run beside it. Steps are matched strictly.

    A flat gradient is a one-dimensional numpy array or torch tensor. A gradient that is contiguous and on the CPU is
    exchanged in its own memory. Leave it alone until `finish` (or the handle's ``wait``) has returned. Any other
    gradient is exchanged through a copy, which is then written back.

    Args:
        worker: worker from `connect` or `LocalCluster`. It may have several exchanges, and wrapped modules, each with
            steps of its own. All workers must make and use them in the same order.
        num_blocks: number of blocks; may be 0.
        component_sizes: elements of each component of a block, in order; or one such sequence for each block.
        lm_head: elements of the head's gradient; 0 if there is none.
        final_norm: elements of the final norm's gradient.
        embedding: elements of the embedding's gradient.
        dtype: name of the element type.
        step: the first step, the same on all workers.
        timeout: seconds to wait for others; None takes the worker's.
        device: device of the gradients, the same kind on all workers; None for the CPU. On the direct plane, gradients
            on a CUDA device stay there. Gradients that are elsewhere are copied.
        wire: codecs by bucket, as in `DistributedDataParallel`. Keys are ``block.0`` and so on, and the names above.
        clip_grad_norm: limit of the norm of all means together, to which `finish` clips them. None: none.

    Attributes:
        step: the step that is open.
        plan: the content of a step's exchange.
        grad_norm: norm of all means of the last step together, before clipping; NaN if the step was skipped.
        grad_norms: norm of each bucket's mean, by its key.

    Raises:
        PlanMismatchError: the workers' sizes differ. The error names the first different component.
        DisagreementError: the workers begin at different steps.
        InvalidArgumentError: a number or a size is not possible.
    """

    def __init__(
        self,
        worker: Worker,
        num_blocks: int,
        component_sizes: Sizes | Sequence[Sizes],
        *,
        lm_head: int = 0,
        final_norm: int = 0,
        embedding: int = 0,
        dtype: str = "float32",
        step: int = 0,
        timeout: float | None = None,
        wire: Mapping[str, str] | None = None,
        device: Any = None,
        clip_grad_norm: float | None = None,
    ) -> None:
        self._worker = worker
        self._timeout = timeout
        self._num_blocks = whole_number(num_blocks, "num_blocks")
        self._sizes = _per_block(component_sizes, self._num_blocks)
        self._given: list[list[Any]] = []
        """The buckets pushed in this step."""
        self._handles: dict[str, tuple[Handle, Any]] = {}
        """Handles of these buckets, and where their means are."""
        self._clip = check_limit(clip_grad_norm, "clip_grad_norm")
        self.grad_norm, self.grad_norms = math.nan, dict[str, float]()
        self.step = whole_number(step, "step")
        element = dtype_of(dtype)
        buckets = [
            Bucket(f"block.{index}", element, _components(index, self._sizes[index]))
            for index in reversed(range(self._num_blocks))
        ]
        for name, size in zip(NON_BLOCK_COMPONENTS, (lm_head, final_norm, embedding), strict=True):
            buckets.append(Bucket(name, element, (Component(name, (whole_number(size, name),)),)))
        self._agreement = worker.agree_beside(with_named_codecs(Plan(tuple(buckets)), wire or {}), timeout)
        self.plan = self._agreement.plan
        self._rounds = self._planed(device)
        if not worker.joins:  # a learner hears of the step from the others
            self._check_first_step()

    def _planed(self, device: Any) -> BlockRounds | None:
        """Return the rounds on the plane that wrapped modules have; None where they can only be the coordinator's."""
        if not self._worker._session.membership.commits:
            return None
        import torch

        from gradserver.worker.torch_ddp.block_rounds import BlockRounds  # some builds of torch lack what it needs

        clips = self._clip is not None
        return BlockRounds(self._worker, self._agreement, torch.device(device or "cpu"), self._timeout, clips)

    def serve_state(self, snapshot: Callable[[], Tree]) -> None:
        """Let workers join an elastic group: each gets what ``snapshot()`` returns, and the step.

        Args:
            snapshot: function that returns all state, as plain values and tensors. It is called between two steps.
        """
        self._worker.serve_state(lambda: {"step": self.step, "state": snapshot()})

    def enter(self, install: Callable[[Tree], object]) -> None:
        """Enter the group that this worker joins: ``install`` gets a member's state, and `step` becomes theirs.

        The others wait meanwhile, and this worker's later pushes count.

        Args:
            install: function that is called with the result of a member's ``snapshot()``. It is called again if that
                member is lost meanwhile.

        Raises:
            DeadlineError: no step of the group ended in time.
            UsageError: this worker does not join, or no member has called `serve_state`.
            StateError: the received state is not that of such an exchange.
        """

        def take(tree: Tree) -> None:
            if not isinstance(tree, dict) or not isinstance(tree.get("step"), int) or "state" not in tree:
                raise StateError("this state is not that of a GradientExchange: a member serves something else")
            install(tree["state"])
            self.step = tree["step"]

        self._worker.enter(take, waits=True)

    def _check_first_step(self) -> None:
        steps = self._worker.all_gather(np.array([self.step])).reshape(-1).tolist()
        if len(set(steps)) > 1:
            each = ", ".join(f"{name!r} at {step}" for name, step in zip(self._worker.names[:16], steps, strict=False))
            raise DisagreementError(f"the workers begin at different steps: {each}")

    def push_block(
        self, step: int, index: int, gradient: Any, *, component_sizes: Sizes | None = None, weight: float = 1.0
    ) -> Handle:
        """Contribute the gradient of block ``index``.

        Args:
            step: the step that is open.
            index: 0 to num_blocks - 1.
            gradient: flat, or a list of the components, of any shapes. Either gets the mean.
            component_sizes: sizes of the components of ``gradient``, checked against what was agreed on.
            weight: weight of this worker, such as its number of samples; the same for the whole step. With 0 its
                gradient does not count, and still becomes the mean of the others.

        Returns:
            A handle. `finish` waits for all of them.

        Raises:
            OutOfStepError: another step is open, or this block was already pushed.
            SizeMismatchError: the gradient has another size than agreed. Nothing was sent.
            DTypeError: the gradient has another element type than agreed. Nothing was sent.
            LayoutError: the gradient has a layout that cannot be sent. Nothing was sent.
        """
        self._check_step(step, f"block {index}")
        if not 0 <= index < self._num_blocks:
            raise InvalidArgumentError(f"there is no block {index}: this exchange has {self._num_blocks}")
        if component_sizes is not None:
            _check_sizes(_sizes_of(component_sizes), self._sizes[index], gradient, index)
        return self._push(f"block.{index}", gradient, weight)

    def push_non_block(self, step: int, component: int, gradient: Any, *, weight: float = 1.0) -> Handle:
        """Contribute the gradient of lm head (component 0), final norm (1) or embedding (2). See `push_block`."""
        if component not in range(len(NON_BLOCK_COMPONENTS)):
            raise InvalidArgumentError(f"component is 0 (lm head), 1 (final norm) or 2 (embedding), not {component!r}")
        self._check_step(step, NON_BLOCK_COMPONENTS[component])
        return self._push(NON_BLOCK_COMPONENTS[component], gradient, weight)

    def finish(self, timeout: float | None = None) -> None:
        """Wait until every gradient of the step is its mean, and open the next step.

        Args:
            timeout: seconds; None takes the exchange's.

        Raises:
            OutOfStepError: some buckets were not pushed. The error names them.
            GradServerError: a bucket failed, for example with NonFiniteError or WorkerLostError.
        """
        self._agreement.check()
        if self._rounds is None:
            self._agreement.finish(self._timeout if timeout is None else timeout)
        else:
            self._rounds.finish(timeout)
        given, self._given = self._given, []
        handles, self._handles = self._handles, {}
        self._take_norms(handles)
        if self._worker.skipped:
            for part in (part for parts in given for part in parts):
                _clear(part)
        elif self._clip is not None and (factor := clip_factor(self.grad_norm, self._clip)) is not None:
            for part in (part for parts in given for part in parts):
                scale(part, factor)
        self.step += 1

    def _take_norms(self, handles: Mapping[str, tuple[Handle, Any]]) -> None:
        """Take the norms of a step that is over, which came with its results."""
        if self._worker.skipped:
            self.grad_norm, self.grad_norms = math.nan, dict.fromkeys(handles, math.nan)
            return
        found = {key: [n for pair in handle.squares.values() for n in pair] for key, (handle, _) in handles.items()}
        means = {key: data for key, (handle, data) in handles.items() if handle.present and not handle.squares}
        if means:  # of the direct plane, where members compute them, and may round differently
            found.update((key, [squares_in(data)]) for key, data in means.items())
            if self._clip is not None:
                keys = sorted(found)
                largest = np.array([math.fsum(found[key]) for key in keys])
                self._worker.all_reduce(largest, op="max")
                found = {key: [float(squares)] for key, squares in zip(keys, largest, strict=True)}
        self.grad_norms = {key: norm_of(squares) for key, squares in found.items()}
        self.grad_norm = norm_of(number for squares in found.values() for number in squares)

    @property
    def skipped(self) -> bool:
        """True if no worker applies the last step, as some gradients were not finite. All gradients are zeros then.

        This needs a coordinator with ``--nonfinite skip``.
        """
        return self._worker.skipped

    @property
    def left_out(self) -> bool:
        """True if a part of this worker's gradients in the last step was not finite, and so did not count."""
        return self._worker.left_out

    def _check_step(self, step: int, what: str) -> None:
        if step != self.step:
            raise OutOfStepError(f"{what} came for step {step}, but step {self.step} is due")

    def _push(self, key: str, gradient: Any, weight: float) -> Handle:
        self._agreement.check()
        bucket = self.plan.index(key)
        parts = list(gradient) if isinstance(gradient, (list, tuple)) else None
        if parts is not None:
            flat, sizes = flatten(parts)
            if sizes != self.plan.buckets[bucket].sizes:
                raise SizeMismatchError(
                    f"the components of {key} have {sizes} elements, agreed on were {self.plan.buckets[bucket].sizes}"
                )
        else:
            flat, parts = gradient, [gradient]
        if not all(is_torch(part) or part.flags.writeable for part in parts):
            raise LayoutError(f"the mean of {key} cannot be written into a read-only array")
        data = _exchangeable(flat, None if self._rounds is None else self._rounds.device)
        if self._rounds is None:
            handle = self._worker.push(self._agreement.first + bucket, data, weight=weight)
        else:
            handle = self._rounds.push(bucket, data, weight)
        self._given.append(parts)
        self._handles[key] = handle, data
        if data is not gradient:
            handle.then(lambda: _write_back(data, parts))
        return handle


def _sizes_of(sizes: Sizes) -> tuple[int, ...]:
    if isinstance(sizes, BlockShape):
        return sizes.component_sizes
    return tuple(whole_number(size, f"size of component {i}") for i, size in enumerate(sizes))


def _per_block(sizes: Sizes | Sequence[Sizes], num_blocks: int) -> list[tuple[int, ...]]:
    """Return the component sizes of every block, from one list for all or one for each."""
    if isinstance(sizes, BlockShape) or not any(isinstance(each, (BlockShape, Sequence)) for each in sizes):
        return [_sizes_of(sizes)] * num_blocks  # type: ignore[arg-type]  # plain numbers, as was just seen
    if len(sizes) != num_blocks:
        raise InvalidArgumentError(f"there are component sizes for {len(sizes)} blocks, but {num_blocks} blocks")
    return [_sizes_of(each) for each in sizes]  # type: ignore[arg-type]


def _components(index: int, sizes: tuple[int, ...]) -> tuple[Component, ...]:
    names: Iterable[object] = COMPONENT_NAMES if len(sizes) == len(COMPONENT_NAMES) else range(len(sizes))
    return tuple(Component(f"block.{index}.{name}", (size,)) for name, size in zip(names, sizes, strict=True))


def _check_sizes(given: tuple[int, ...], agreed: tuple[int, ...], gradient: Any, index: int) -> None:
    length = sum(map(_numel, gradient)) if isinstance(gradient, (list, tuple)) else _numel(gradient)
    if sum(given) != length:
        raise SizeMismatchError(
            f"component sizes of block {index} sum to {sum(given)}, but its gradient has {length} elements"
        )
    if given != agreed:
        raise SizeMismatchError(f"block {index} has component sizes {given}, agreed on were {agreed}")


def _exchangeable(flat: Any, device: Any = None) -> Any:
    """Return ``flat`` if the worker can exchange it where it lies, else a copy on ``device``; None for the CPU."""
    if not is_torch(flat):
        flat = np.ascontiguousarray(flat)
        if device is None or device.type == "cpu":
            return flat
        flat = _on_host(flat)
    kind = "cpu" if device is None else device.type
    if flat.device.type == kind and flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
        return flat
    return flat.detach().to(device or "cpu", copy=True).resolve_conj().resolve_neg().contiguous()


def _on_host(array: Any) -> Any:
    """Return an array as a tensor of torch's, on the CPU."""
    from gradserver.worker.torch_ddp.block_rounds import tensor_of

    return tensor_of(array)


def _clear(part: Any) -> None:
    if is_torch(part):
        part.detach().zero_()
    else:
        part[...] = 0


def _numel(array: Any) -> int:
    return int(array.numel() if is_torch(array) else array.size)


def _write_back(data: Any, parts: list[Any]) -> None:
    for part, mean in zip(parts, unflatten(data, [_numel(part) for part in parts]), strict=True):
        if is_torch(part):
            part.detach().copy_(mean.view(part.shape))
        else:
            part[...] = (mean.numpy(force=True) if is_torch(mean) else mean).reshape(part.shape)
