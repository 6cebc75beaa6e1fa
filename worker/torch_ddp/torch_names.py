"""Members of torch's DistributedDataParallel that scripts read, set or call: what each is here, in one table.

A member has a value here, or is refused with what to write in its place. None can be set, as a wrapper that took a
value and did nothing with it would train otherwise than the script says. `LikeTorch` has what can be set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypedDict

import torch
from torch import nn

from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MIB
from gradserver.protocol.nearest import did_you_mean


class Name(NamedTuple):
    """A member: what to do in its place, or where its value comes from; and how to read it, unless it is refused."""

    says: str
    read: Callable[[Any], Any] | None = None


def _given(name: str) -> Name:
    return Name("as given at construction", lambda model: getattr(model._rounds._options, name))


def _first(model: Any) -> torch.device:
    device: torch.device = model._rounds.slots[0].parameter.device
    return device


def _refuse_static_graph(model: Any) -> Callable[[], None]:
    def set_static_graph() -> None:
        if not model.static_graph:
            raise AttributeError(f"_set_static_graph(): {NAMES['_set_static_graph'].says}")

    return set_static_graph


_BUFFERS: Final = (
    "buffers follow after each exchange: `broadcast_buffers=`, `buffers_to_ignore=`, `model.module.buffers()`"
)
_INPUTS: Final = "nothing is moved: move inputs with `inputs.to(device)`"
_HOOKS: Final = "formats of gradients on their way are `gradserver.connect(wire=…)`; see also `max_grad_norm=`"
_BUCKETS: Final = "`model.plan` and `model.describe()` tell what is exchanged"
_GROUP: Final = "the group is that of `model.worker`; a part of it is `worker.subgroup(ranks)`"
_LOG: Final = "`model.describe()`, `model.exchange_seconds` and `gradserver status` tell of exchanges"
_JOIN: Final = "`with model.join(optimizer):`, around the loop of each model"

NAMES: Final[Mapping[str, Name]] = {
    "device": Name("device of the first parameter", _first),
    "device_type": Name("type of this device", lambda model: _first(model).type),
    "is_multi_device_module": Name(
        "whether parameters are on several devices",
        lambda model: len({slot.parameter.device for slot in model._rounds.slots}) > 1,
    ),
    "device_ids": Name("None, as " + _INPUTS, lambda _: None),
    "output_device": Name("None, as nothing is moved", lambda _: None),
    "dim": Name("0, as batches are not cut", lambda _: 0),
    "find_unused_parameters": _given("find_unused_parameters"),
    "static_graph": _given("static_graph"),
    "gradient_as_bucket_view": _given("gradient_as_bucket_view"),
    "broadcast_buffers": _given("broadcast_buffers"),
    "forward_sync_buffers": _given("broadcast_buffers"),
    "parameters_to_ignore": Name(
        "names of parameters and buffers that stay local", lambda model: set(model._rounds._options.ignored)
    ),
    "bucket_bytes_cap": Name("`bucket_cap_mb` in bytes", lambda model: int(model._bucket_cap_mb * MIB)),
    "mixed_precision": Name("None: use `torch.autocast`", lambda _: None),
    "require_forward_param_sync": Name(
        "as `require_backward_grad_sync`: buffers are exchanged with gradients",
        lambda model: model.require_backward_grad_sync,
    ),
    "will_sync_module_buffers": Name(
        "tells whether the next exchange has buffers",
        lambda model: lambda: model.require_backward_grad_sync and bool(model._rounds.buffers),
    ),
    "_set_static_graph": Name("give `static_graph=True` at construction", _refuse_static_graph),
    "register_comm_hook": Name(_HOOKS),
    "_register_builtin_comm_hook": Name(_HOOKS),
    "_register_buffer_comm_hook": Name(_BUFFERS),
    "_register_fused_optim": Name("step the optimizer after `backward()`, when gradients are averaged"),
    "buffer_hook": Name(_BUFFERS),
    "modules_buffers": Name(_BUFFERS),
    "named_module_buffers": Name(_BUFFERS),
    "_sync_buffers": Name(_BUFFERS),
    "_sync_module_buffers": Name(_BUFFERS),
    "_sync_params": Name("construction makes parameters alike, and the optimizer's steps keep them so"),
    "_sync_params_and_buffers": Name("construction makes parameters alike, and the optimizer's steps keep them so"),
    "_module_parameters": Name("`model.parameters()`"),
    "_get_data_parallel_params": Name("`model.parameters()`"),
    "scatter": Name(_INPUTS),
    "gather": Name(_INPUTS),
    "to_kwargs": Name(_INPUTS),
    "use_side_stream_for_tensor_copies": Name(_INPUTS),
    "join_hook": Name(_JOIN),
    "join_device": Name(_JOIN),
    "join_process_group": Name(_JOIN),
    "process_group": Name(_GROUP),
    "device_mesh": Name(_GROUP),
    "_update_process_group": Name(_GROUP),
    "_distributed_rank": Name("`model.worker.rank`"),
    "logger": Name(_LOG),
    "_get_ddp_logging_data": Name(_LOG),
    "_set_ddp_runtime_logging_sample_rate": Name(_LOG),
    "reducer": Name(_BUCKETS),
    "_rebuild_buckets": Name(_BUCKETS),
    "bucket_bytes_cap_list": Name(_BUCKETS),
    "bucket_bytes_cap_default": Name(_BUCKETS),
    "broadcast_bucket_size": Name(_BUCKETS),
    "batched_grad_copy": Name("gradients are copied by bucket where they are copied at all"),
    "skip_all_reduce_unused_params": Name("`find_unused_parameters=True`: a bucket without gradients sends none"),
    "_check_reducer_finalized": Name("`backward()` returns when all is exchanged, or raises"),
    "_remove_autograd_hooks": Name("train `model.module`, or use `model.no_sync()`, to exchange nothing"),
    "_set_ddp_sink_clone": Name("outputs are not copied"),
}
"""Members by name. Each line of docs/coming-from-ddp.md's table of members is one of these."""

KEYWORDS: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "dim": ((0,), "batches are not cut here"),
    "check_reduction": ((False, True), ""),
    "delay_all_reduce_named_params": ((None,), "`delay_all_reduce=True` exchanges all gradients after backward"),
    "param_to_hook_all_reduce": ((None,), "`delay_all_reduce=True` exchanges all gradients after backward"),
    "mixed_precision": ((None,), "use `torch.autocast`, and `gradserver.connect(wire='bf16')` for gradients"),
    "device_mesh": ((None,), _GROUP),
    "skip_all_reduce_unused_params": ((False,), NAMES["skip_all_reduce_unused_params"].says),
    "bucket_cap_mb_list": ((None,), "`bucket_cap_mb=`, and `blocks=` for the modules that each become a bucket"),
    "batched_grad_copy": ((False, True), ""),
    "forward_sync_buffers": ((None, True), "start with equal buffers, and pass `broadcast_buffers=False`"),
}
"""Options of torch's constructor that are none here: values that change nothing, and what to do in place of others."""


class TorchOptions(TypedDict, total=False):
    """Options of torch's constructor, for values that change nothing here: see `KEYWORDS`."""

    dim: int
    check_reduction: bool
    delay_all_reduce_named_params: Any
    param_to_hook_all_reduce: Any
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: Any
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


def check_keywords(wrapper: type, options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that no wrapper has, or a value of one of torch's that would do something there."""
    for name, value in options.items():
        if name not in KEYWORDS:
            nearest = did_you_mean(name, [*inspect.signature(wrapper).parameters, *KEYWORDS], 0.0)
            raise TypeError(f"{wrapper.__name__} has no option {name!r}{nearest}")
        harmless, remedy = KEYWORDS[name]
        if not any(value is one or value == one for one in harmless):
            raise TypeError(f"{name}={value!r} is an option of torch's wrapper that is none here: {remedy}")


def check_join(divide_by_initial_world_size: bool, throw_on_early_termination: bool) -> None:
    """Raise InvalidArgumentError for the options of torch's ``join`` that would do something else there."""
    if divide_by_initial_world_size:
        raise InvalidArgumentError(
            "divide_by_initial_world_size=True: a mean here is over the workers that have a batch, as with False. "
            "model.set_weight(len(inputs)) makes each sample count the same"
        )
    if throw_on_early_termination:
        raise InvalidArgumentError(
            "throw_on_early_termination=True: give all workers equally many batches, with "
            "gradserver.ShardSampler(uneven='drop')"
        )


class LikeTorch(nn.Module):
    """A wrapper with the members that torch's has: those of `NAMES`, and those here."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next backward exchanges gradients. It may be set, as an alternative to `no_sync`.

        As there, only the place of ``backward()`` counts.
        """
        syncs: bool = self._backward.syncs
        return syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        self._backward.syncs = bool(syncs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of the backwards inside in ``.grad``. They become part of the next exchange outside.

        Only the place of ``backward()`` counts. The forward may be inside or outside.
        """
        before, self._backward.syncs = self._backward.syncs, False
        try:
            yield
        finally:
            self._backward.syncs = before

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, params_and_buffers_to_ignore: Collection[str]) -> None:
        """Name the parameters and buffers of ``module`` that stay local. Call it before wrapping."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def __getattr__(self, name: str) -> Any:
        known = NAMES.get(name)
        if known is None or "_backward" not in self.__dict__:  # a copy has no exchange
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                if name != "module" and hasattr(self.module, name):
                    raise AttributeError(f"{error}. The wrapped module has it: model.module.{name}") from None
                raise
        if known.read is None:
            raise AttributeError(f"{name} is a member of torch's wrapper that is none here: {known.says}")
        return known.read(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NAMES and "_backward" in self.__dict__:
            known = NAMES[name]
            if known.read is None or known.read(self) != value:
                raise AttributeError(f"{name} of a wrapped module cannot be set to {value!r}: {known.says}")
            return
        super().__setattr__(name, value)
