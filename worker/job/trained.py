"""The models that a job trains, each with its optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from gradserver.protocol.errors import InvalidArgumentError, StateError, UsageError
from gradserver.protocol.messages import Opened
from gradserver.worker.local_sgd.wrapper import LocalSGD
from gradserver.worker.torch_ddp.ddp import DistributedDataParallel
from gradserver.worker.torch_ddp.module_buffers import restore_buffers
from gradserver.worker.torch_ddp.stepping import check_steps_alone
from gradserver.worker.tree import Tree

T = TypeVar("T")
Wrapped: TypeAlias = DistributedDataParallel | LocalSGD
"""A model of a job. Several models are wrapped by `DistributedDataParallel`."""
_MOST: Final = 60
"""Models of one job, at most. The updated ones travel as the bits of a number."""


class Stateful(Protocol):
    """An object that a job can save: a scheduler, an average of weights, a scaler, a generator, and so on."""

    def state_dict(self) -> Any:
        """Return the state, made of what `gradserver.worker.tree` knows."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Continue from a state."""


class Scheduler(Stateful, Protocol):
    """A scheduler that steps after each update, without arguments."""

    def step(self) -> Any:
        """Go to the next step."""


@dataclass(eq=False)
class Trained:
    """One model of a job. ``name`` is empty if it is the only one."""

    name: str
    model: Wrapped
    optimizer: Optimizer
    scheduler: Scheduler | None
    dropped: bool = False
    """True if its gradients are gone: they came with those of a model that was updated without it."""

    @property
    def synchronous(self) -> DistributedDataParallel:
        """The model, if it exchanges gradients."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model

    @property
    def waits(self) -> bool:
        """True if gradients of this worker wait for their round."""
        return isinstance(self.model, DistributedDataParallel) and self.model.waits

    @property
    def replicated(self) -> list[Tensor]:
        """The weights that all members have alike."""
        if isinstance(self.model, LocalSGD):
            return list(self.model.weights().values())
        return list(self.model.module.parameters())

    def settle(self, rounds: int | None = None) -> None:
        """Exchange what was not exchanged yet, before a checkpoint: in all rounds of that, or the last ``rounds``."""
        if isinstance(self.model, LocalSGD):
            self.model._averaging.sync(rounds)

    @property
    def left(self) -> int:
        """Number of rounds that are left of `settle`."""
        return self.model._averaging.left if isinstance(self.model, LocalSGD) else 0

    def outer_state(self) -> Tree:
        """Return the state of a model with an outer optimizer; None without one."""
        return self.model.outer_state() if isinstance(self.model, LocalSGD) else None

    def load(self, module: Tree, outer: Tree) -> None:
        """Load the module's state, and that of the outer optimizer, if there is one."""
        restore_buffers(self.model.module, module)
        if not isinstance(self.model, LocalSGD):
            self.model.module.load_state_dict(module)
            return
        self.model.load_state_dict(module)
        if outer is not None:  # else it is from a job that has exchanged gradients
            self.model.load_outer_state(outer)

    @property
    def number(self) -> int:
        """The number of its section in the group's plan."""
        return self.synchronous._rounds.agreement.number

    @property
    def fresh(self) -> bool:
        """True if it has the mean gradients of an exchange, and was not updated by them."""
        return self.synchronous._backward.fresh

    def join(self, step: Callable[..., object]) -> AbstractContextManager[None]:
        """Join as `DistributedDataParallel.join`. A job compares weights when it saves."""
        if isinstance(self.model, LocalSGD):
            return self.model.join()
        return self.model._following([step], [])

    def begin_block(self) -> None:
        """Begin a block of `DistributedDataParallel.join`."""
        self.synchronous._backward.begin_block()

    def update(self) -> None:
        """Step optimizer and scheduler."""
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def clip(self, limit: float | None) -> None:
        """Clip its mean gradients to this norm, unless it is None."""
        if limit is not None:
            self.synchronous.clip_grad_norm_(limit)

    def clear(self) -> None:
        """Drop its gradients."""
        self.optimizer.zero_grad()
        self.synchronous._backward.fresh = False

    def gradients(self) -> Tree:
        """Return the gradients that are not applied yet, for a worker that joins in between; None if there are none."""
        return [slot.parameter.grad for slot in self.synchronous._rounds.slots] if self.fresh else None

    def set_gradients(self, found: Tree) -> None:
        """Take the gradients of another member."""
        if found is not None:
            for slot, gradient in zip(self.synchronous._rounds.slots, found, strict=True):
                slot.parameter.grad = gradient
            self.synchronous._backward.fresh = True


def trained(model: Any, optimizer: Any, scheduler: Any) -> tuple[Trained, ...]:
    """Return the models of a job, from the arguments of `gradserver.Job`.

    Raises:
        InvalidArgumentError: they do not belong together.
    """
    if isinstance(model, DistributedDataParallel | LocalSGD):
        if isinstance(optimizer, Mapping | Sequence):
            raise InvalidArgumentError("one model has one optimizer: several of both make a job of several models")
        _check_optimizer(model, optimizer, "")
        return (Trained("", model, optimizer, scheduler),)
    models = _named(model, "model")
    if not 1 <= len(models) <= _MOST:
        raise InvalidArgumentError(f"a job has 1 to {_MOST} models, not {len(models)}")
    optimizers = _matched(models, optimizer, "optimizer")
    schedulers = dict.fromkeys(models) if scheduler is None else _matched(models, scheduler, "scheduler")
    for name, one in models.items():
        if isinstance(one, LocalSGD):
            raise InvalidArgumentError(
                f"model {name!r} is a LocalSGD, and the models of a job of several exchange gradients: wrap each in "
                f"gradserver.DistributedDataParallel(module, worker), or make a job of this one alone"
            )
        if not isinstance(one, DistributedDataParallel):
            raise InvalidArgumentError(
                f"model {name!r} is a {type(one).__name__}: wrap it first, in "
                f"gradserver.DistributedDataParallel(module, worker)"
            )
    for name, one in models.items():
        _check_optimizer(one, optimizers[name], f" {name!r}")
    if len({id(one.worker) for one in models.values()}) > 1:
        raise InvalidArgumentError("the models of a job share one worker; models of other workers need other jobs")
    if len({id(one) for one in models.values()}) < len(models):
        raise InvalidArgumentError("a model is in this job twice")
    found = [Trained(name, models[name], optimizers[name], schedulers[name]) for name in models]
    return tuple(sorted(found, key=lambda one: one.number))


def _check_optimizer(model: Wrapped, optimizer: Optimizer, name: str) -> None:
    """Refuse an optimizer that a job cannot step, or one with parameters that are not exchanged."""
    check_steps_alone(optimizer, "a job")
    whose = f"those of model{name}" if name else "the model's"
    own = {id(parameter) for parameter in model.module.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise InvalidArgumentError(
                    f"parameter {number} of the optimizer's group {index}, of shape {tuple(parameter.shape)}, is none "
                    f"of {whose}: make the optimizer with model.parameters()"
                )


def _named(several: Any, what: str) -> dict[str, Any]:
    if isinstance(several, Mapping):
        return {str(name): one for name, one in several.items()}
    if isinstance(several, list | tuple):
        return {str(number): one for number, one in enumerate(several)}
    raise InvalidArgumentError(
        f"{what} is a {type(several).__name__}: wrap it first, in gradserver.DistributedDataParallel(module, worker)"
        if what == "model"
        else f"with several models {what} is a list or a mapping as model is, not a {type(several).__name__}"
    )


def _matched(models: Mapping[str, Any], several: Any, what: str) -> dict[str, Any]:
    found = _named(several, what)
    if found.keys() != models.keys():
        raise InvalidArgumentError(f"{what} has {sorted(found)}, and model has {sorted(models)}: one of each is needed")
    return found


def chosen(parts: Sequence[Trained], which: Sequence[object]) -> list[Trained]:
    """Return those of ``parts`` that are named, by the model or its name; all if none is named."""
    if not which:
        return list(parts)
    found = []
    for one in which:
        part = next((part for part in parts if part.model is one or (part.name and part.name == one)), None)
        if part is None:
            known = ", ".join(repr(part.name) for part in parts if part.name) or "one, which needs no name"
            raise InvalidArgumentError(f"this job has no model {one!r:.80}: it has {known}")
        found.append(part)
    return sorted(found, key=parts.index)


def together(parts: Sequence[Trained], updated: Sequence[Trained]) -> list[Trained]:
    """Return those that were not ``updated``, and got their gradients in the same backward as one that was."""
    backwards = {part.synchronous._backward.latest for part in updated if part.fresh}
    return [p for p in parts if p not in updated and p.fresh and p.synchronous._backward.latest in backwards]


def check_updated(parts: Sequence[Trained]) -> None:
    """Raise UsageError if the gradients of one of these were dropped."""
    for part in parts:
        if part.dropped and not part.fresh:
            raise UsageError(
                f"model {part.name!r} has no gradients: they came in the same backward as those of a model that was "
                f"updated alone, and were dropped. Update both at once: job.step({part.name!r}, …)"
            )


def bits(parts: Sequence[Trained], which: Sequence[Trained]) -> int:
    """Encode these of ``parts`` as the bits of a number."""
    return sum(1 << place for place, part in enumerate(parts) if part in which)


def of_bits(parts: Sequence[Trained], number: int) -> list[Trained]:
    """Decode what `bits` has encoded."""
    return [part for place, part in enumerate(parts) if number >> place & 1]


def part_of(parts: Sequence[Trained], news: Opened) -> Trained:
    """Return the model of the round that the others have begun; UsageError if it is none of ``parts``."""
    found = next((part for part in parts if part.number == news.section), None)
    if news.ended:
        return parts[0]
    if found is None:
        raise UsageError(
            f"round {news.round} is of a module that is not this job's: give the job all that the loop trains"
        )
    return found


def states(parts: Sequence[Trained], of: Callable[[Trained], Tree]) -> Tree:
    """Return the state of each of ``parts``, by its name; of a single one its state alone."""
    return of(parts[0]) if not parts[0].name else {part.name: of(part) for part in parts}


def state_of(part: Trained, tree: Tree) -> Tree:
    """Return the state of ``part`` in what `states` has returned."""
    return tree[part.name] if part.name else tree


def check_parts(parts: Sequence[Trained], tree: Tree) -> None:
    """Raise StateError unless ``tree`` is the state of a job with models and schedulers of these names."""
    several = [part.name for part in parts if part.name]
    if several and (type(tree["scheduler"]) is not dict or sorted(tree["scheduler"]) != sorted(several)):
        raise StateError(f"it is not the state of a job that trains the models {several}")
    for part in parts:
        saved = state_of(part, tree["scheduler"])
        if (saved is None) != (part.scheduler is None):
            whose = f" for model {part.name!r}" if part.name else ""
            raise StateError(f"it was saved {'without' if saved is None else 'with'} scheduler={whose}")
