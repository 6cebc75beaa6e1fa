"""Batches: inputs cut into a part for each replica, and outputs joined again, however both are nested.

Tensors are found in tuples, lists, dicts and dataclasses. Other values go to every replica as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradserver.protocol.errors import InvalidArgumentError, SizeMismatchError

Scalars = Literal["stack", "mean"]
"""Result for outputs without a dimension: a vector with one for each replica, or the mean over the samples."""

_MAX_NAMED: Final = 8


class Part(NamedTuple):
    """The inputs of one replica: samples ``begin`` to ``end`` of the batch."""

    inputs: tuple[Any, ...]
    options: dict[str, Any]
    begin: int
    end: int

    def to(self, device: torch.device) -> Part:
        """Return the part with its tensors on ``device``."""
        inputs, options = _converted((self.inputs, self.options), lambda tensor: moved(tensor, device))
        return self._replace(inputs=inputs, options=options)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``. A copy to the host has ended then."""
    return tensor.to(device, non_blocking=device.type != "cpu")


# ── inputs ────────────────────────────────────────────────────────────────────────────────────────────


def split(
    inputs: tuple[Any, ...],
    options: Mapping[str, Any],
    ways: int,
    dim: int,
    whole: Collection[str],
    sizes: Callable[[int], Sequence[int]] | None = None,
) -> list[Part]:
    """Cut a batch into at most ``ways`` parts, which differ by one sample at most, unless ``sizes`` says otherwise.

    Without a tensor that has a dimension ``dim`` there is one part.

    Args:
        inputs: positional arguments.
        options: keyword arguments.
        ways: number of replicas.
        dim: dimension of the samples.
        whole: names of keyword arguments that every replica gets whole.
        sizes: returns the samples of each part of a batch that has at least one for each replica.

    Raises:
        SizeMismatchError: tensors differ in their number of samples.
    """
    cut = {name: value for name, value in options.items() if name not in whole}
    size = _batch_size([*((f"input {i}", v) for i, v in enumerate(inputs)), *cut.items()], dim)
    if size is None:
        return [Part(inputs, dict(options), 0, 0)]
    count = max(min(ways, size), 1)
    if sizes is not None and count == ways:
        ends = list(accumulate(sizes(size)))
    else:
        ends = [-(-size * (number + 1) // count) for number in range(count)]  # the first parts are the longer ones
    return [_part(inputs, options, cut, dim, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _part(
    inputs: tuple[Any, ...], options: Mapping[str, Any], cut: Mapping[str, Any], dim: int, begin: int, end: int
) -> Part:
    def narrowed(tensor: Tensor) -> Tensor:
        return tensor.narrow(dim, begin, end - begin) if tensor.ndim > dim else tensor

    return Part(_converted(inputs, narrowed), {**options, **_converted(dict(cut), narrowed)}, begin, end)


def _batch_size(named: Sequence[tuple[str, Any]], dim: int) -> int | None:
    sizes = {path: tensor.shape[dim] for name, value in named for path, tensor in _leaves(value, name, dim)}
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{path} has {size}" for path, size in list(sizes.items())[:_MAX_NAMED])
        raise SizeMismatchError(
            f"a batch has one number of samples, in dimension {dim} of each tensor, but {shown}. What every replica "
            f"needs whole is a keyword argument that whole=[…] names, or a buffer of the module"
        )
    return next(iter(sizes.values()), None)


def _leaves(value: Any, path: str, dim: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an input that have a dimension ``dim``, with their paths."""
    if isinstance(value, Tensor):
        if value.ndim > dim:
            yield path, value
    else:
        for key, item in _items(value):
            yield from _leaves(item, f"{path}{key}", dim)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container has, with the end of each item's path; nothing if it is none."""
    if isinstance(value, PackedSequence):
        raise InvalidArgumentError(
            "a PackedSequence cannot be cut into samples: pass the padded tensor and the lengths, and pack in forward"
        )
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        yield from ((f"[{number}]", item) for number, item in enumerate(value))
    elif _is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with all of its tensors converted."""
    if isinstance(value, Tensor):
        return convert(value)
    return _rebuilt(value, [_converted(item, convert) for _, item in _items(value)])


def _rebuilt(value: Any, items: Sequence[Any]) -> Any:
    """Return a container like ``value`` with these items, in the order of `_items`; ``value`` if it is none."""
    if isinstance(value, Mapping):
        if not isinstance(value, MutableMapping):
            return dict(zip(value, items, strict=True))
        made = copy.copy(value)  # also of a subclass, whatever its constructor takes
        made.update(zip(value, items, strict=True))
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, (tuple, list)):
        return type(value)(items)
    if _is_dataclass(value):
        made = copy.copy(value)
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(made, field.name, item)  # a frozen one, too
        return made
    return value


# ── outputs ───────────────────────────────────────────────────────────────────────────────────────────


class Joiner:
    """Joins the outputs of replicas.

    Args:
        dim: dimension of the samples.
        device: device of the result.
        scalars: what becomes of outputs without a dimension.
        samples: numbers of samples of the parts.
    """

    def __init__(self, dim: int, device: torch.device, scalars: Scalars, samples: Sequence[int]) -> None:
        self._dim, self._device, self._scalars, self._samples = dim, device, scalars, samples

    def join(self, outputs: Sequence[Any], path: str = "output") -> Any:
        """Return one output of the structure of each.

        Raises:
            SizeMismatchError: tensors differ in a dimension beside that of the samples.
            InvalidArgumentError: outputs differ otherwise.
        """
        first = outputs[0]
        if any(type(other) is not type(first) for other in outputs):
            raise _unlike(path, [type(other).__name__ for other in outputs])
        if isinstance(first, Tensor):
            return self._joined(outputs, path)
        rows = [list(_items(output)) for output in outputs]
        keys = [[key for key, _ in row] for row in rows]
        if any(other != keys[0] for other in keys):
            raise _unlike(path, keys)
        if not rows[0]:
            if not all(other is first or other == first for other in outputs):
                raise _unlike(path, outputs)
            return first
        columns = zip(*([item for _, item in row] for row in rows), strict=True)
        joined = [self.join(column, f"{path}{key}") for key, column in zip(keys[0], columns, strict=True)]
        return _rebuilt(first, joined)

    def _joined(self, tensors: Sequence[Tensor], path: str) -> Tensor:
        there = [moved(tensor, self._device) for tensor in tensors]
        shapes = [tuple(tensor.shape) for tensor in there]
        if any(not shape for shape in shapes):
            return self._one_each(there, path)
        others = {(*shape[: self._dim], *shape[self._dim + 1 :]) for shape in shapes}
        if len(others) > 1 or len(shapes[0]) <= self._dim:
            raise SizeMismatchError(
                f"the replicas' outputs are joined in dimension {self._dim}, and otherwise have one shape, but {path} "
                f"has {', '.join(map(str, shapes[:_MAX_NAMED]))}: pad to a common size in forward"
            )
        return torch.cat(there, self._dim) if len(there) > 1 else there[0]

    def _one_each(self, tensors: Sequence[Tensor], path: str) -> Tensor:
        if any(tensor.ndim for tensor in tensors):
            raise _unlike(path, [tuple(tensor.shape) for tensor in tensors])
        stacked = torch.stack(list(tensors))
        if self._scalars == "stack":
            return stacked
        if not stacked.is_floating_point() and not stacked.is_complex():
            raise InvalidArgumentError(f"{path} is {stacked.dtype}, of which scalars='mean' makes no mean")
        weights = torch.tensor(self._samples, dtype=stacked.dtype, device=stacked.device)
        return (stacked * weights).sum() / max(sum(self._samples), 1)


def _unlike(path: str, found: Sequence[Any]) -> InvalidArgumentError:
    shown = ", ".join(str(one)[:80] for one in found[:_MAX_NAMED])
    return InvalidArgumentError(
        f"the replicas' outputs cannot be joined: {path} differs, in their order: {shown}. Return tensors with a row "
        f"for each sample, and otherwise the same on every replica"
    )
