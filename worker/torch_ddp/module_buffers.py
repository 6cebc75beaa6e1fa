"""Buffers of a module: those that are exchanged, checks that they can be, and that no other ones come later."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from gradserver.protocol.errors import DTypeError, InvalidArgumentError, LayoutError, SizeMismatchError, UsageError
from gradserver.worker.tensors import obstacle, wire_dtype

_UNINITIALIZED: Final = (nn.UninitializedParameter, nn.UninitializedBuffer)


class Owned(NamedTuple):
    """A buffer of a module, by the part that has it.

    Attributes:
        name: as in ``module.named_buffers()``.
        owner: the part.
        key: its name there.
    """

    name: str
    owner: nn.Module
    key: str

    @property
    def tensor(self) -> Tensor | None:
        """The buffer as it is now, as modules assign to their buffers; None if it is gone."""
        buffers: Any = self.owner._buffers
        return buffers[self.key] if self.key in buffers else None  # noqa: SIM401  (a scripted module has no dict)


def exchanged_buffers(module: nn.Module, ignored: Collection[str]) -> list[tuple[Owned, Tensor]]:
    """List the buffers that are exchanged, each with its value: all that have elements, but for ``ignored`` names.

    Raises:
        LayoutError: one cannot travel. The error names it, and what to do.
    """
    found = [one for one in _named(list(module.named_modules())) if one[0].name not in ignored]
    for owned, buffer in found:
        check_travels("buffer", owned.name, buffer)
    return [(owned, buffer) for owned, buffer in found if buffer.numel()]


def startable_buffers(module: nn.Module, ignored: Collection[str]) -> list[Tensor]:
    """List the buffers that members can begin with alike, but for ``ignored`` names: all that can travel."""
    found = []
    for owned, buffer in _named(list(module.named_modules())):
        with suppress(InvalidArgumentError):
            check_travels("buffer", owned.name, buffer)
            found += [] if owned.name in ignored else [buffer]
    return found


def check_parameters(module: nn.Module, ignored: Collection[str]) -> None:
    """Raise LayoutError for a parameter that cannot travel, with its name and what to do."""
    for name, parameter in module.named_parameters():
        if name not in ignored:
            check_travels("parameter", name, parameter)


def check_travels(kind: str, name: str, tensor: Tensor) -> None:
    """Raise LayoutError, or DTypeError, for a tensor of a module that cannot travel, with what to do."""
    if isinstance(tensor, _UNINITIALIZED):
        raise InvalidArgumentError(f"{kind} {name!r} has no shape yet: run the lazy module once before wrapping it")
    error: type[InvalidArgumentError] = LayoutError
    why = obstacle(tensor, writes=True)
    if why is None and tensor.is_inference():
        why = "it was made in torch.inference_mode(), and cannot change outside of it: make the module outside"
    elif why is None and tensor.device.type not in ("cpu", "cuda"):
        why = f"it is on {tensor.device}, and tensors travel from cpu and cuda"
    elif why is None:
        try:
            wire_dtype(tensor)
        except DTypeError as found:
            error, why = LayoutError if tensor.is_quantized else DTypeError, found.message
    if why is not None:
        where = "buffers_to_ignore=" if kind == "buffer" else "module._ddp_params_and_buffers_to_ignore = "
        raise error(f"{kind} {name!r} cannot be exchanged: {why}. It stays with each worker by {where}[{name!r}]")


def names_of_buffers(module: nn.Module) -> list[str]:
    """List the names of all buffers, also of those that are None yet."""
    parts = module.named_modules(remove_duplicate=False)
    return [f"{path}.{key}" if path else key for path, part in parts for key in part._buffers.keys()]  # noqa: SIM118


def restore_buffers(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Make those buffers that are None yet, and have a value in ``state``, which is to be loaded."""
    device = next((parameter.device for parameter in module.parameters()), None)
    for path, part in module.named_modules():
        for key in [key for key, buffer in part._buffers.items() if buffer is None]:
            value = state.get(f"{path}.{key}" if path else key)
            if value is not None:
                part._buffers[key] = torch.empty_like(value, device=device)


class BufferWatch:
    """The buffers that are exchanged, as they were when the module was wrapped.

    A look costs some hundredths of a microsecond for each part of the module, as long as it has the same tensors.

    Args:
        module: the module.
        exchanged: the buffers that are exchanged, each with its value.
        ignored: names of those that are not.
        option: the option that exchanges none, for errors.
    """

    def __init__(
        self, module: nn.Module, exchanged: Sequence[tuple[Owned, Tensor]], ignored: Collection[str], option: str
    ) -> None:
        self._module, self._ignored, self._option = module, ignored, option
        self._forms = {owned.name: (tuple(buffer.shape), buffer.dtype) for owned, buffer in exchanged}
        self._list_parts()

    def _list_parts(self) -> None:
        self._parts = list(self._module.named_modules())
        modules, buffers = [part._modules for _, part in self._parts], [part._buffers for _, part in self._parts]
        self._full: list[Any] = [one for one in modules if len(one)]
        self._children = _all_in(self._full)
        self._having: list[Any] = [one for one in buffers if len(one)]
        self._empty: list[Any] = [one for one in (*modules, *buffers) if not len(one)]
        """Tables of parts without children, or without buffers, which take the least time to look at."""
        self._seen: list[Tensor | None] = []
        """Buffers that were looked at. They are kept, so that no other tensor can have their identity."""
        self._are_distinct = False
        """True if no tensor is there twice: assigning to one of two names makes another buffer of it."""

    def check(self) -> None:
        """Check that the module has the same buffers, each of the same shape and type.

        Raises:
            UsageError: there is a further one, which would not be exchanged. The error names it.
            SizeMismatchError: one has another shape, or is gone.
            DTypeError: one has another type.
        """
        if any(self._empty) or not _same(_all_in(self._full), self._children):
            self._list_parts()
        now = _all_in(self._having)
        if not _same(now, self._seen):
            if not self._are_assigned(now):
                self._compare()
            self._seen = now

    def _are_assigned(self, now: list[Tensor | None]) -> bool:
        """Return whether parts have only assigned tensors of the same form to their buffers, as some do each time."""
        if not self._are_distinct or len(now) != len(self._seen):
            return False
        changed = [pair for pair in zip(now, self._seen, strict=True) if pair[0] is not pair[1]]
        return all(
            one is not None and before is not None and one.shape == before.shape and one.dtype == before.dtype
            for one, before in changed
        )

    def _compare(self) -> None:
        """Compare all buffers with those that are exchanged."""
        present = [id(buffer) for buffer in _all_in(self._having) if buffer is not None]
        self._are_distinct = len(set(present)) == len(present)
        found = {owned.name: buffer for owned, buffer in _named(self._parts)}
        for name in sorted(self._forms.keys() - found.keys()):
            check_form(name, None, *self._forms[name], self._option)
        for name, buffer in found.items():
            if name in self._forms:
                check_form(name, buffer, *self._forms[name], self._option)
            elif name not in self._ignored and (isinstance(buffer, _UNINITIALIZED) or buffer.numel()):
                raise UsageError(
                    f"buffer {name!r} has come since the module was wrapped, and would differ between workers. Have it "
                    f"made before the module is wrapped, by a first forward for example. Or register it as None, and "
                    f"keep it with each worker by buffers_to_ignore=[{name!r}]"
                )


def check_form(name: str, buffer: Tensor | None, shape: tuple[int, ...], dtype: Any, option: str) -> None:
    """Raise SizeMismatchError or DTypeError unless a buffer has the form that it had when its module was wrapped."""
    if buffer is None or tuple(buffer.shape) != shape:
        now = "gone" if buffer is None else f"of shape {tuple(buffer.shape)}"
        raise SizeMismatchError(
            f"buffer {name!r} had shape {shape} when the module was wrapped and is {now}. It stays with each worker by "
            f"buffers_to_ignore=[{name!r}], as all do with {option}"
        )
    if buffer.dtype != dtype:
        raise DTypeError(
            f"buffer {name!r} was of {dtype} when the module was wrapped and is of {buffer.dtype}. Convert it before, "
            f"or keep it with each worker by buffers_to_ignore=[{name!r}]"
        )


def _all_in(tables: Sequence[Any]) -> list[Any]:
    return [one for table in tables for one in table.values()]


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _named(parts: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[Owned, Tensor]]:
    """Yield all buffers of parts of a module, each tensor once."""
    seen = set[int]()
    for path, part in parts:
        for key, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield Owned(f"{path}.{key}" if path else key, part, key), buffer
