"""Replicas of a module: made once, and before each forward made what the module is now.

| of a replica | is |
|---|---|
| parameters | on the module's device the module's own; elsewhere copies (`gradserver.worker.data_parallel.copies`) |
| buffers | copies of its own, which get the module's values before a forward |
| attributes, modes, hooks | the module's; what a forward changes in them lasts until the next one |

The first replica is the module itself. Replicas of one device run one after the other, in their order. The caller's
thread runs those of the first device, and a thread for each further device runs the others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradserver.protocol.errors import ClosedError, UsageError
from gradserver.worker.data_parallel.batches import Part, moved
from gradserver.worker.data_parallel.copies import Copies, mark
from gradserver.worker.data_parallel.devices import check_replicable, plain
from gradserver.worker.data_parallel.given import GivenReplica, follow_buffers
from gradserver.worker.data_parallel.lanes import Lane, Surroundings
from gradserver.worker.data_parallel.shares import Shares

_CLOSE_SECONDS: Final = 10.0
_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module()))


class Outcome(NamedTuple):
    """The end of one replica's forward: its output, or its error."""

    rank: int
    output: Any = None
    error: Exception | None = None


@dataclass
class _Site:
    """One device, its replicas, and its thread. The first one has none."""

    device: torch.device
    ranks: list[int] = field(default_factory=list)
    replicas: list[_Follower] = field(default_factory=list)
    lane: Lane | None = None


class Replicas:
    """Replicas of a module on some devices.

    Args:
        module: the module, on the first of the devices.
        devices: device of each replica, in their order. A device may be there several times.
        cap_mb: size in MiB of the buckets in which parameters and gradients travel.
        timeout: seconds that a forward may last in a thread beside the caller's.
        given: the further replicas, if the caller has made them.
        shares: measures forwards; None if nothing does.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        cap_mb: float,
        timeout: float,
        given: Sequence[nn.Module] = (),
        shares: Shares | None = None,
    ) -> None:
        self._shares = shares
        self._module, self._devices, self._cap_mb, self._timeout = module, devices, cap_mb, timeout
        self._given = given
        self._sites = {device: _Site(device) for device in devices}
        for rank, device in enumerate(devices):
            self._sites[device].ranks.append(rank)
        self._closed = self._accumulates = False
        self._in_use = threading.Lock()
        self._modes: tuple[bool, bool] | None = None
        self._build()

    def are_of(self, module: nn.Module) -> bool:
        """Return whether these are replicas of ``module``."""
        return self._module is module

    # ── one forward ───────────────────────────────────────────────────────────────────────────────────

    def call(self, parts: Sequence[Part]) -> list[Any]:
        """Run the forward of each part on its replica, and return the outputs in their order.

        Raises:
            DeadlineError: a forward has not ended in time. The error names its device.
            Exception: the error of the first replica that failed, with a note that names its device.
        """
        if self._closed:
            raise ClosedError("this DataParallel is closed")
        if not self._in_use.acquire(blocking=False):
            raise UsageError("a forward of this DataParallel is under way in another thread: call one after the other")
        try:
            return self._call(parts)
        finally:
            self._in_use.release()

    def _call(self, parts: Sequence[Part]) -> list[Any]:
        for site in self._sites.values():
            if site.lane is not None:
                site.lane.settle(self._timeout)  # what an interrupted forward has left behind
        self._follow()
        parts = [part.to(plain(device)) for part, device in zip(parts, self._devices, strict=False)]
        first, *others = self._sites.values()
        surroundings = Surroundings()
        running = [self._start(site, parts, surroundings) for site in others if site.ranks[0] < len(parts)]
        if not running and torch.is_grad_enabled() and self._copies is not None:
            self._copies.backward_passes()  # one may, and reaches no copy
        outcomes = self._run(first, parts)
        for lane, future in running:
            lane.settle(self._timeout)
            outcomes += future.result()
        outcomes.sort(key=lambda outcome: outcome.rank)
        self._raise_first([outcome for outcome in outcomes if outcome.error is not None], parts)
        return [outcome.output for outcome in outcomes]

    def _start(
        self, site: _Site, parts: Sequence[Part], surroundings: Surroundings
    ) -> tuple[Lane, Future[list[Outcome]]]:
        if site.lane is None:
            site.lane = Lane(site.device)
        return site.lane, site.lane.submit(surroundings.around(site.device, lambda: self._run(site, parts)))

    def _run(self, site: _Site, parts: Sequence[Part]) -> list[Outcome]:
        """Run the forwards of one device, and measure them if each replica has a part of the batch."""
        there = zip(site.ranks, site.replicas, strict=True)
        calls = [(rank, replica.module, parts[rank]) for rank, replica in there if rank < len(parts)]
        if self._shares is None or len(parts) < len(self._devices):
            return _run(calls)
        self._shares.begin(site.device)
        outcomes = _run(calls)
        if all(outcome.error is None for outcome in outcomes):
            self._shares.end(site.device, sum(part.end - part.begin for _, _, part in calls))
        return outcomes

    def _raise_first(self, failed: Sequence[Outcome], parts: Sequence[Part]) -> None:
        for number, (rank, _, error) in enumerate(failed):
            assert error is not None
            at = f"replica {rank} on {self._devices[rank]}"
            if not number:
                part = parts[rank]
                last = f"samples {part.begin} to {part.end - 1} of {parts[-1].end}" if part.end else "no sample"
                error.add_note(f"{at} raised this, which had {last}")
            else:
                assert failed[0].error is not None
                failed[0].error.add_note(f"{at} failed, too: {type(error).__name__}: {error}")
        if failed and failed[0].error is not None:
            raise failed[0].error

    # ── following the module ──────────────────────────────────────────────────────────────────────────

    def _build(self) -> None:
        """Make the replicas anew."""
        first, *others = self._sites.values()
        home = plain(first.device)
        check_replicable(self._module, home)
        with torch.inference_mode(False), torch.no_grad():
            further = [plain(site.device) for site in others]
            self._copies = Copies(self._module, further, self._cap_mb) if others else None
        self.accumulate(self._accumulates)
        self._structure = [_Structure.of(part) for part in self._module.modules()]
        for site in self._sites.values():
            site.replicas = [self._replica(rank, plain(site.device), site is first) for rank in site.ranks]
        self._buffers_are_stale, self._marks = True, list[object]()

    def _replica(self, rank: int, device: torch.device, shares: bool) -> _Follower:
        if not rank:
            return _First(self._module)
        if self._given:
            return GivenReplica(self._module, self._given[rank - 1], rank, device, shares)
        return _Replica(self._module, device, shares)

    def _follow(self) -> None:
        """Make all replicas what the module is now."""
        if not all(one.holds() for one in self._structure) or not (self._copies is None or self._copies.fit()):
            self._build()
            assert self._copies is None or self._copies.fit()
        # A training loop may change values in ways that autograd does not notice: between a backward and the next
        # forward, and between training and evaluation.
        modes = (self._module.training, torch.is_grad_enabled())
        if modes != self._modes:
            self.parameters_may_have_changed()
        if modes != self._modes or (any(modes) and not self._accumulates):
            self.buffers_may_have_changed()
        self._modes = modes
        tensors: list[dict[int, Tensor]] = [{}]
        if self._copies is not None:
            with torch.inference_mode(False):
                self._copies.refresh()
            tensors += self._copies.tensors()
        buffers = chain.from_iterable(one.part._buffers.values() for one in self._structure)
        marks = [mark(buffer) for buffer in buffers if buffer is not None]
        copies_buffers = self._buffers_are_stale or marks != self._marks
        for site, parameters in zip(self._sites.values(), tensors, strict=True):
            for replica in site.replicas:
                replica.follow(parameters, copies_buffers)
        self._buffers_are_stale, self._marks = False, marks

    def accumulate(self, accumulates: bool) -> None:
        """Say whether values stay as they are after a backward, unless something shows a change."""
        self._accumulates = accumulates
        if self._copies is not None:
            self._copies.accumulate(accumulates)

    def parameters_may_have_changed(self) -> None:
        """Give all replicas the module's parameters before the next forward."""
        if self._copies is not None:
            self._copies.may_have_changed()

    def buffers_may_have_changed(self) -> None:
        """Give all replicas the module's buffers before the next forward."""
        self._buffers_are_stale = True

    def close(self) -> None:
        """End the threads."""
        self._closed = True
        for site in self._sites.values():
            if site.lane is not None:
                site.lane.close(_CLOSE_SECONDS)


class _Follower(Protocol):
    """A replica, which becomes what the module is."""

    module: nn.Module

    def follow(self, parameters: Mapping[int, Tensor], copies_buffers: bool) -> None:
        """Follow the module.

        Args:
            parameters: what is used for a parameter on this device, by the parameter's id.
            copies_buffers: whether buffers get the module's values.
        """


class _First:
    """The first replica, which is the module itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def follow(self, parameters: Mapping[int, Tensor], copies_buffers: bool) -> None:
        """Do nothing."""


class _Replica:
    """A further replica.

    Args:
        module: the module that it follows.
        device: its device.
        shares: whether that is the module's device, so that its parameters are the module's own.
    """

    def __init__(self, module: nn.Module, device: torch.device, shares: bool) -> None:
        # By `object`, as a class may take arguments, or make classes of its own, as torch.fx does.
        made: dict[nn.Module, nn.Module] = {part: object.__new__(type(part)) for part in module.modules()}
        self.module = made[module]
        self._device, self._shares = device, shares
        self._pairs = [_Pair(part, replica, _children(part, made), {}) for part, replica in made.items()]

    def follow(self, parameters: Mapping[int, Tensor], copies_buffers: bool) -> None:
        """Become what the module is now."""
        with torch.inference_mode(False), torch.no_grad():
            for source, _, _, buffers in self._pairs:
                if source._buffers or buffers:
                    follow_buffers(source, buffers, self._device, copies_buffers)
        for source, replica, children, buffers in self._pairs:
            attributes = vars(replica)
            attributes.clear()
            attributes.update(vars(source))
            attributes["_modules"] = children
            attributes["_buffers"] = dict(buffers)
            if not self._shares:
                of = source._parameters.items()
                attributes["_parameters"] = {name: None if p is None else parameters[id(p)] for name, p in of}
                self._move_attributes(attributes)

    def _move_attributes(self, attributes: dict[str, Any]) -> None:
        """Bring tensors that are neither parameters nor buffers, such as caches, to this replica's device."""
        for name in attributes.keys() - _OF_EVERY_MODULE:
            value = attributes[name]
            if isinstance(value, Tensor) and value.device != self._device:
                attributes[name] = moved(value, self._device)


class _Pair(NamedTuple):
    """A module inside of the module, its replica, and the replica's children and buffers."""

    source: nn.Module
    replica: nn.Module
    children: dict[str, nn.Module | None]
    buffers: dict[str, Tensor | None]


class _Structure(NamedTuple):
    """Facts that replicas of a part of the module depend on: its class, its children and its parameters."""

    part: nn.Module
    kind: type
    children: dict[str, nn.Module | None]
    parameters: list[tuple[str, nn.Parameter | None]]

    @classmethod
    def of(cls, part: nn.Module) -> _Structure:
        """Note how a part is now."""
        return cls(part, type(part), dict(part._modules), list(part._parameters.items()))

    def holds(self) -> bool:
        """Return whether the part is still so."""
        now = self.part._parameters
        return (
            type(self.part) is self.kind
            and self.part._modules == self.children
            and len(now) == len(self.parameters)
            and all(now.get(name) is parameter for name, parameter in self.parameters)
        )


def _children(part: nn.Module, made: Mapping[nn.Module, nn.Module]) -> dict[str, nn.Module | None]:
    return {name: None if child is None else made[child] for name, child in part._modules.items()}


def _run(calls: Sequence[tuple[int, nn.Module, Part]]) -> list[Outcome]:
    """Run the forwards of one device, up to the first that fails."""
    outcomes = list[Outcome]()
    for rank, replica, part in calls:
        try:
            outcomes.append(Outcome(rank, replica(*part.inputs, **part.options)))
        except Exception as error:  # raised for the caller when all others have ended
            return [*outcomes, Outcome(rank, error=error)]
    return outcomes
