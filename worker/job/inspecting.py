"""The command ``gradserver checkpoint``: what is in a checkpoint, and its models for other programs."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradserver.protocol.buffer import Bytes
from gradserver.protocol.dtypes import DType
from gradserver.protocol.errors import BackendUnavailableError, InvalidArgumentError, StateError, reason_of
from gradserver.worker.job.checkpoint import Loaded, check_job, read
from gradserver.worker.tree import Tree

_SAFETENSORS: Final = ".safetensors"


class _Tensor(NamedTuple):
    """A tensor that was not made, for want of torch."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


def _described(_: Bytes, dtype: DType, shape: tuple[int, ...]) -> _Tensor:
    return _Tensor(dtype.name, shape)


def show(path: Path) -> list[str]:
    """Describe a checkpoint in lines. It needs no torch.

    Raises:
        StateError: it is no whole checkpoint of a job.
    """
    loaded = _job(read(path, _described))
    tree = loaded.tree
    written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    versions = ", ".join(f"{name} {version}" for name, version in tree["versions"].items())
    lines = [
        f"file        {path} ({path.stat().st_size:,} bytes)",
        f"written     {written:%Y-%m-%d %H:%M:%S} UTC",
        f"digest      {loaded.digest.hex()}",
        f"versions    {versions}",
        f"round       {tree['round']}",
        f"group       {tree.get('group', '-')}, workers {', '.join(map(str, tree.get('workers', ()))) or '-'}",
        f"data        {_position(tree['data'])}",
        f"generators  of {len(tree['chance'])} workers: torch, Python, numpy",
        f"state       {', '.join(map(str, tree['state'])) or '-'}",
    ]
    for name, model in _models(tree).items():
        tensors = {key: value for key, value in model.items() if isinstance(value, _Tensor)}
        numbers = sum(_numel(value) for value in tensors.values())
        lines += ["", f"model {name!r}: {numbers:,} numbers" if name else f"model: {numbers:,} numbers"]
        width = max(map(len, tensors), default=0)
        lines += [f"  {key:{width}}  {value}" for key, value in tensors.items()]
        optimizer = tree["optimizer"][name] if name else tree["optimizer"]
        lines.append(f"  optimizer: {_optimizer(optimizer)}")
    return lines


def export(path: Path, target: Path, model: str | None) -> None:
    """Write the models of a checkpoint as a state_dict: for ``torch.load``, or for safetensors by the suffix.

    Args:
        path: the checkpoint.
        target: the file to write.
        model: name of a single model of several; None for all, by name.

    Raises:
        StateError: the checkpoint cannot be read, or the file not be written.
        InvalidArgumentError: there is no such model, or several for a file of one.
        BackendUnavailableError: torch or safetensors is not installed.
    """
    _require("torch", "pip install torch")
    safe = target.suffix == _SAFETENSORS
    if safe:
        _require("safetensors", "pip install safetensors")
    models = _models(_job(read(path)).tree)
    if model is not None and model not in models:
        known = ", ".join(repr(name) for name in models if name) or "one, which has no name"
        raise InvalidArgumentError(f"{path} has no model {model!r}: it has {known}")
    chosen = models[model] if model is not None else models.get("", models)
    if safe and chosen is models:
        raise InvalidArgumentError(
            f"a {_SAFETENSORS} file has one model, and {path} has {', '.join(map(repr, models))}: choose with --model"
        )
    save = _save_safely if safe else _save_for_torch
    unfinished = target.with_name(target.name + ".tmp")
    try:
        save(chosen, unfinished)
        unfinished.replace(target)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        reason = reason_of(error) if isinstance(error, OSError) else str(error).partition("\n")[0]
        raise StateError(f"cannot write {target}: {reason}") from error


def _save_for_torch(chosen: Mapping[str, Any], path: Path) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(chosen, file)
        file.flush()
        os.fsync(file.fileno())


def _save_safely(chosen: Mapping[str, Any], path: Path) -> None:
    import torch

    other = [key for key, value in chosen.items() if not isinstance(value, torch.Tensor)]
    if other:
        raise InvalidArgumentError(f"{other[0]!r} of this model is no tensor, and {_SAFETENSORS} has tensors alone")
    save_file: Callable[..., None] = importlib.import_module("safetensors.torch").save_file
    save_file(dict(chosen), str(path))


def _require(module: str, command: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise BackendUnavailableError(f"this needs {module}, which is not installed: {command}")


def _job(loaded: Loaded) -> Loaded:
    check_job(loaded.tree, str(loaded.path))
    return loaded


def _models(tree: Tree) -> dict[str, Mapping[str, Any]]:
    """Return the state of each model, by name; with an empty name if there is one alone."""
    found: Mapping[str, Any] = tree["model"]
    if found and all(isinstance(one, Mapping) for one in found.values()):
        return dict(found)
    return {"": found}


def _position(data: Tree) -> str:
    if data is None:
        return "no position: the job was made without data="
    return ", ".join(f"{key} {value}" for key, value in _plain(data))[:400]


def _plain(data: Tree) -> Iterator[tuple[str, object]]:
    """Yield what is short in a position: its epoch, and counts."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _plain(value)
        elif isinstance(value, int | str | bool | float) or (isinstance(value, list | tuple) and len(value) <= 16):
            yield str(key), value


def _optimizer(state: Tree) -> str:
    groups = state.get("param_groups", []) if isinstance(state, Mapping) else []
    rates = ", ".join(str(group.get("lr", "?")) for group in groups)
    kinds = sorted({str(key) for one in state.get("state", {}).values() for key in one}) if groups else []
    return f"{len(groups)} groups (lr {rates}), state {', '.join(kinds) or 'none'}"


def _numel(tensor: _Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count
