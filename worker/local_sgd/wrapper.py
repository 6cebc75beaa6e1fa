"""LocalSGD: a module that each worker trains by itself, and that the group averages every few steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MIB
from gradserver.protocol.nearest import names_keywords
from gradserver.protocol.plan import Plan
from gradserver.protocol.plan_codecs import check_names
from gradserver.protocol.whole import whole_number
from gradserver.worker.client import Worker, check_weight
from gradserver.worker.local_sgd.averaging import Averaging
from gradserver.worker.local_sgd.fragments import Fragment, make_fragments
from gradserver.worker.local_sgd.group_buffers import OPTION
from gradserver.worker.local_sgd.outer import Outer, make_outer
from gradserver.worker.local_sgd.pace import LocalPace, most_times
from gradserver.worker.local_sgd.schedule import Schedule
from gradserver.worker.torch_ddp.alike import broadcast_tensors
from gradserver.worker.torch_ddp.composition import Composition
from gradserver.worker.torch_ddp.module_buffers import (
    BufferWatch,
    check_parameters,
    exchanged_buffers,
    startable_buffers,
)
from gradserver.worker.torch_ddp.wrapped import WrappedModule
from gradserver.worker.torch_ddp.wrapping import check_is_optimizer, check_mode, checked_worker, ignored_names
from gradserver.worker.tree import Tree

_CHUNK_BYTES: Final = 25 * MIB


class LocalSGD(WrappedModule):
    """Wrapper of a module that workers train by themselves, and average every few steps.

    For example:

        worker = gradserver.connect("tcp://coordinator:7411")
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4)
        model = gradserver.LocalSGD(module, worker, optimizer, every=16)
        with model.join():                          # workers may have different numbers of batches
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()                    # each 16th of these exchanges what the parameters have changed by

    Each worker steps its own optimizer, the *inner* one. Every ``every`` steps the workers' changes since the last
    exchange are averaged, as gradients are in other modes. The mean is the gradient of the *outer* optimizer, which
    moves the group's weights, and the worker goes on from these. All members have the same group's weights, bit by bit,
    and the same state of the outer optimizer. Parameters of workers differ between two exchanges.

    The mean is weighed by the steps that each worker has done since, each with `set_weight`. Workers may have
    different ``every``: a worker that is half as fast takes half as many steps. Rounds are then due at the same time.
    With ``balance``, that follows from what is measured.

    With ``fragments``, parts of the module are exchanged at different steps, so that a slow link is used all the time.
    With ``delay``, a part is on its way while the worker computes so many steps. Then its parameters become ``mixing``
    times the worker's own and ``1 - mixing`` times the group's. That is Streaming DiLoCo (Douillard et al. 2025).

    Each parameter of float32 costs 12 bytes more: the group's weight, its place in a bucket, and the outer momentum.
    With a lossy wire it costs 4 more for what the codec has lost. A parameter of bfloat16 or float16 costs the same,
    as all of these are in float32.

    Args:
        module: module with floating or complex parameters on the CPU or on CUDA devices. Parameters that are frozen
            are not exchanged. A parameter that several layers share is exchanged once.
        worker: worker from `connect` or `LocalCluster`.
        optimizer: the inner optimizer. Its steps are counted. None if the loop calls `step` after each.
        every: steps between two exchanges of a parameter.
        outer: the outer optimizer. ``nesterov`` has learning rate 0.7 and momentum 0.9, as DiLoCo (Douillard et al.
            2023). ``average`` takes the mean as it is. Or a function that makes an optimizer of a list of parameters.
        fragments: number of parts that are exchanged one after the other, within ``every`` steps.
        delay: steps from the sending of a fragment to the taking of its mean: at most ``every // fragments``. With 0
            the worker waits for the mean. With ``auto`` it is as many as fragments need, by what is measured at this
            worker, and `delay` has it.
        mixing: part of the worker's own parameters when a mean is taken. None for 0 without a delay, and else 0.5.
            With short intervals 0.5 is better without a delay, too.
        max_every: the longest interval. With it the interval grows while exchanges take more than a tenth of the time,
            unless parameters change more and more (`ConvergenceGuard`). None to keep ``every``.
        average_buffers: true to average what workers change in floating buffers, such as running statistics, with the
            last fragment. Others become those of the lowest rank that has changed them. A buffer that no worker
            changes does not travel. If false, buffers stay local.
        buffers_to_ignore: names of buffers that stay local to each worker. They may be None yet.
        timeout: seconds that one exchange may wait for others. None takes the worker's.
        wire: formats of single buckets, by key: ``{"fragment.0": "int8"}``. The others travel in the format given to
            `gradserver.connect`.
        balance: for unequal workers: the slowest one makes ``every`` steps between two exchanges of a parameter, and
            each other one as many as it can meanwhile, by what is measured. True, or the most times ``every`` that a
            worker may step; True is 4. It must be the same at all workers.

    Attributes:
        module: the wrapped module, with this worker's parameters.
        worker: the worker.

    Raises:
        PlanMismatchError: the workers' modules, or their fragments, differ. Nothing was overwritten.
        InvalidArgumentError: the module or an option is not possible.
        UsageError: rounds of the group do not wait for all workers (``serve --mode``).
    """

    of_the_connection = (
        "worker",
        "_watch",
        "_composition",
        "_schedule",
        "_fragments",
        "_outer",
        "_averaging",
        "_unhook",
    )

    @names_keywords
    def __init__(
        self,
        module: nn.Module,
        worker: Worker | None = None,
        optimizer: Optimizer | None = None,
        *,
        every: int = 16,
        outer: Outer = "nesterov",
        fragments: int = 1,
        delay: int | str = 0,
        mixing: float | None = None,
        max_every: int | None = None,
        average_buffers: bool = True,
        buffers_to_ignore: Iterable[str] = (),
        timeout: float | None = None,
        wire: Mapping[str, str] | None = None,
        balance: float | bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.worker: Worker = checked_worker(module, worker, None, None, None, "LocalSGD(module, worker, optimizer)")
        check_mode(self.worker, "LocalSGD")
        self._schedule = Schedule(every, fragments, delay)
        ignored = ignored_names(module, buffers_to_ignore)
        check_parameters(module, ignored)
        exchanged = exchanged_buffers(module, ignored) if average_buffers else []
        self._watch = BufferWatch(module, exchanged, ignored, OPTION) if average_buffers else None
        self._fragments = make_fragments(module, fragments, exchanged, ignored)
        named = _known(wire or {}, self._fragments)
        self._outer = make_outer(outer, [part.weight for one in self._fragments for part in one.parts])
        share, longest = _share(mixing, delay), _longest(max_every, every)
        most = most_times(balance)
        pace = None if most is None else LocalPace(self.worker, self._schedule.every, most)
        self._averaging = Averaging(
            self.worker, self._fragments, self._schedule, self._outer, share, longest, timeout, named, pace
        )
        self._averaging.steps_with(optimizer)
        parts = [(part.name, part.local) for one in self._fragments for part in one.parts]
        self._composition = Composition(module, parts, kinds=False)
        self._weight = 1.0
        self._unhook = _hooked(self, optimizer)
        if not self.worker.joins:  # a learner gets them with all the other state
            parameters = [one for name, one in module.named_parameters() if name not in ignored]
            broadcast_tensors(self.worker, [*parameters, *startable_buffers(module, ignored)], _CHUNK_BYTES)
            self._averaging.begin_from_module()

    # ── training ──────────────────────────────────────────────────────────────────────────────────────

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, and return its result.

        Raises:
            UsageError: the module has not the parameters that it was wrapped with, or a buffer has come since. Another
                shape or type of a buffer is a SizeMismatchError or a DTypeError.
        """
        if "_watch" not in self.__dict__ or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._check()
        output = self.module(*args, **kwargs)
        self._check()  # a forward may make parameters and buffers
        return output

    def _check(self) -> None:
        if (watch := self.__dict__.get("_watch")) is not None:
            watch.check()
        if self.training and (composition := self.__dict__.get("_composition")) is not None:
            composition.check(self.module)

    def set_weight(self, weight: float) -> None:
        """Set the weight of each step from now on, for example the number of samples of a batch.

        Raises:
            InvalidArgumentError: ``weight`` is negative, not finite, or above 1e30.
        """
        self._weight = check_weight(weight)

    @property
    def every(self) -> int:
        """Steps between two exchanges of a parameter; with ``balance``, of the slowest worker.

        It may be set. Without ``balance`` each worker may have its own, and with it all set the same.
        """
        return self._averaging.every

    @every.setter
    def every(self, every: int) -> None:
        self._averaging.set_every(every)

    @property
    def steps(self) -> int:
        """Steps of this worker between two exchanges of a parameter: `every`, or more with ``balance``."""
        return self._schedule.every

    @property
    def delay(self) -> int:
        """Steps of this worker from the sending of a fragment to the taking of its mean."""
        return self._schedule.delay

    @property
    def round(self) -> int:
        """Number of exchanges that are over, of all fragments. It is the same at all members at the same boundary."""
        return self._schedule.round

    def step(self) -> None:
        """Count a step of the inner optimizer, and exchange what is due.

        The wrapper calls it itself if it knows the optimizer.

        Raises:
            OutOfStepError: an exchange failed before.
            GradServerError: an exchange failed, for example with NonFiniteError.
            UsageError: the module has not the parameters that it was wrapped with.
        """
        self._check()
        self._averaging.step(self._weight)

    def sync(self) -> None:
        """Average all parameters now. Each worker then has the group's weights.

        All members call it after the same round. These exchanges take the mean of what each worker has changed since
        the last ones. They leave the outer optimizer alone, since its momentum is that of whole intervals.
        """
        self._averaging.sync()

    @contextmanager
    def join(self, _step: object = None) -> Iterator[None]:
        """Train with a different number of batches on each worker: wrap the loop over the batches, on every worker.

        At the end of the block a worker takes part in the others' exchanges until none has a batch any more. Changes
        that were not exchanged yet count. Then each worker has the group's weights. An exception is passed on at once.
        """
        self._averaging.begin_block()
        yield
        while not self.ended and self.replay():
            pass

    def replay(self) -> bool:
        """Take part in an exchange with what was not exchanged yet. Return false if no member has a batch any more."""
        return self._averaging.replay()

    @contextmanager
    def group_weights(self) -> Iterator[None]:
        """Put the group's weights into the module for the block, for example to evaluate them."""
        own = [part.local.detach().clone() for one in self._fragments for part in one.parts]
        with torch.no_grad():
            for fragment in self._fragments:
                fragment.merge(0.0)
        try:
            yield
        finally:
            locals_ = [part.local for one in self._fragments for part in one.parts]
            with torch.no_grad():
                for parameter, before in zip(locals_, own, strict=True):
                    parameter.copy_(before)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ended(self) -> bool:
        """True if the others have reached the end of the present block of `join`."""
        return self._averaging.ended > 0

    @property
    def guard_holds(self) -> bool:
        """True if the interval must not grow, as parameters change more and more."""
        return self._averaging.guard.holds

    @property
    def is_whole(self) -> bool:
        """True if each fragment was exchanged equally often."""
        return self._schedule.fragment == 0

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The content of each fragment's exchange."""
        return tuple(fragment.plan for fragment in self._fragments)

    @property
    def outer(self) -> Optimizer:
        """The outer optimizer, of the group's weights."""
        return self._outer

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the group's weights by the names of parameters, in the order of the module. Do not change them."""
        found = {part.name: part.weight for one in self._fragments for part in one.parts}
        return {name: found.get(name, parameter).detach() for name, parameter in self.module.named_parameters()}

    def on_boundary(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` after each exchange, before the next one begins. `gradserver.Job` does."""
        self._averaging.on_boundary(listener)

    def count_by_hand(self) -> None:
        """Count no steps of the optimizer any more: the caller calls `step`. `gradserver.Job` does."""
        self._unhook()

    def state_dict(self, *args: Any, unwrapped: bool = False, **kwargs: Any) -> Any:
        """Return the module's state, with the group's weights. Unless ``unwrapped``, keys begin with ``module.``.

        A copy has the weights that its worker had.
        """
        state = super().state_dict(*args, unwrapped=unwrapped, **kwargs)
        prefix = "" if unwrapped else "module."
        fragments: list[Fragment] = self.__dict__.get("_fragments", [])
        found = {id(part.local): part.weight for one in fragments for part in one.parts}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) in found and prefix + name in state:
                state[prefix + name] = found[id(parameter)].detach().to(parameter.dtype)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state as the group's weights, with or without ``module.`` in front of its keys.

        All workers must load the same.

        Raises:
            InvalidArgumentError: ``assign`` is true. It would replace the parameters that are averaged.
        """
        loaded = super().load_state_dict(state_dict, strict, assign)
        if "_averaging" in self.__dict__:
            self._averaging.begin_from_module()
        return loaded

    def unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are not in the module's state. A worker that joins needs them too."""
        saved = self.module.state_dict().keys()
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in saved}

    def outer_state(self) -> Tree:
        """Return the group's weights that are wider than their parameters, the outer optimizer, and the schedule.

        The inner optimizer's state is no part of it, and neither is that of the module.
        """
        return self._averaging.state(self.module.state_dict().keys())

    def load_outer_state(self, state: Tree) -> None:
        """Go on from an `outer_state`. The module has its parameters already."""
        self._averaging.load_state(state)


def _share(mixing: float | None, delay: int | str) -> float:
    if mixing is None:
        return 0.5 if delay else 0.0
    if not isinstance(mixing, int | float) or not 0.0 <= mixing < 1.0:
        raise InvalidArgumentError(
            f"mixing is {mixing!r}, and must be a number from 0 to below 1: the part of a worker's own parameters"
        )
    return mixing


def _longest(max_every: int | None, every: int) -> int | None:
    if max_every is None:
        return None
    if whole_number(max_every, "max_every", 1) < every:
        raise InvalidArgumentError(
            f"max_every={max_every} is below every={every}, the interval to begin with: give at least {every}"
        )
    return max_every


def _known(wire: Mapping[str, str], fragments: list[Fragment]) -> Mapping[str, str]:
    check_names(wire, fragments[0].plan.buckets[0].key)
    keys = {bucket.key for one in fragments for bucket in one.plan.buckets}
    if unknown := sorted(wire.keys() - keys):
        raise InvalidArgumentError(f"wire names {unknown[0]!r}, and the buckets are {', '.join(sorted(keys))}")
    return wire


def _hooked(model: LocalSGD, optimizer: Optimizer | None) -> Callable[[], None]:
    """Have the steps of ``optimizer`` counted. Return a function that ends this."""
    if optimizer is None:
        return lambda: None
    check_is_optimizer(optimizer)
    mine = {id(parameter) for parameter in model.module.parameters()}
    if not any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise InvalidArgumentError("the optimizer steps no parameter of the module: make it with module.parameters()")
    me = weakref.ref(model)

    def count(*_: object) -> None:
        if (found := me()) is not None:
            found.step()

    return optimizer.register_step_post_hook(count).remove
