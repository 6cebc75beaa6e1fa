"""The exchanges of local SGD at one worker: fragments are sent and taken, and the group's weights move.

    event                            what the mean is for
    ───────────────────────────────  ────────────────────────────────────────────────────────────────────
    any member's schedule sends it   a gradient of the outer optimizer
    all send it before it is due     the group's weights change by it: `sync`, the end of a block of `join`
    no member counts                 nothing: the end of a block of `join`
    the round is skipped             nothing, and parameters become the group's weights

The mean says itself which of these it is: its first bucket is the largest of what members say. So all agree, whatever
each one is doing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradserver.protocol.convergence import ConvergenceGuard, next_interval
from gradserver.protocol.errors import OutOfStepError
from gradserver.protocol.plan_codecs import with_named_codecs
from gradserver.worker.client import Worker
from gradserver.worker.local_sgd.fragments import Fragment
from gradserver.worker.local_sgd.outer import description
from gradserver.worker.local_sgd.pace import LocalPace
from gradserver.worker.local_sgd.schedule import Schedule
from gradserver.worker.planes.plane import Outcome
from gradserver.worker.planes.staging import Staging
from gradserver.worker.tree import Tree

_LEAST_SECONDS: Final = 1e-6
"""Time between a sending and a taking below which there was no step."""
_NO_STEPS: Final = 1e-300
"""Weight of a worker without a step since the last exchange. With 0 it would say that it has no more batches."""


class Averaging:
    """The exchanges of one module. Constructing it agrees on the fragments with all other workers.

    Args:
        worker: the worker.
        fragments: the parts of the module.
        schedule: when each is sent and taken.
        outer: the outer optimizer, of the group's weights.
        mixing: part of the worker's own parameters when a mean is taken.
        longest: the longest interval; None if it stays.
        timeout: seconds that one exchange may wait for others; None for the worker's.
        wire: formats of buckets, by key.
        pace: the steps of unequal workers; None for as many as the schedule says.

    Attributes:
        ended: exchanges without any batch since a block of `join` began: each ends one.
        left: exchanges that are left of the present `sync`.
        guard: guard of the interval.
    """

    def __init__(
        self,
        worker: Worker,
        fragments: list[Fragment],
        schedule: Schedule,
        outer: Optimizer,
        mixing: float,
        longest: int | None,
        timeout: float | None,
        wire: Mapping[str, str],
        pace: LocalPace | None = None,
    ) -> None:
        self._worker = worker
        self._pace = pace
        self._every = schedule.every
        """Steps in an interval; with a pace, of the slowest worker."""
        self._fragments = fragments
        self._schedule = schedule
        self._outer = outer
        self._mixing = mixing
        self._first, self._longest = schedule.every, longest
        self.guard = ConvergenceGuard()
        self.ended = self.left = 0
        self._spent = 0.0
        """The sum of this worker's weights so far."""
        self._broken = ""
        """The error that broke the exchange."""
        self._waited, self._since = 0.0, time.monotonic()
        self._waited_before = 0.0
        """Time spent in exchanges of earlier intervals."""
        self._sent_at = 0.0
        """Time of the last sending."""
        self._change = [0.0, 0.0]
        """Sums of squares of changes and of weights, over the fragments of this interval."""
        self._listeners: list[Callable[[], object]] = []
        self._inner: Optimizer | None = None
        self._ways = [self._agree(one, wire, timeout) for one in fragments]
        if pace is not None:
            device = fragments[0].parts[0].local.device
            pace.measure(device, lambda: self._waited_before + self._waited)

    def _agree(self, fragment: Fragment, wire: Mapping[str, str], timeout: float | None) -> Staging:
        own = {bucket.key for bucket in fragment.plan.buckets}
        paced = self._pace if self._is_last(fragment) else None
        proposal = fragment.proposal(description(self._outer), None if paced is None else paced.spec)
        plan = with_named_codecs(proposal, {key: name for key, name in wire.items() if key in own})
        agreement = self._worker.agree_beside(plan, timeout)
        way = Staging(self._worker, agreement, timeout)
        if paced is not None:
            paced.memory = way.new_memory(paced.spec.numel, torch.float64, torch.device("cpu"))
        fragment.agreed(agreement.plan, way.new_memory)
        return way

    def _is_last(self, fragment: Fragment) -> bool:
        """Tell whether an interval ends with a fragment."""
        return fragment is self._fragments[-1]

    @property
    def every(self) -> int:
        """Steps in an interval; with a pace, of the slowest worker."""
        return self._every

    def set_every(self, every: int) -> None:
        """Set the steps in an interval."""
        self._schedule.set_every(every if self._pace is None else self._pace.steps_of(every))
        self._every = every

    def on_boundary(self, listener: Callable[[], object]) -> None:
        """Call ``listener`` after each exchange, before the next one begins."""
        self._listeners.append(listener)

    def steps_with(self, inner: Optimizer | None) -> None:
        """Note the inner optimizer, which keeps nothing of parameters that became NaN."""
        self._inner = inner

    # ── events ────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def step(self, weight: float) -> None:
        """Count a step of the inner optimizer with this ``weight``, and exchange what is due."""
        self._check()
        self._schedule.step()
        if self._schedule.looks and self._ways[self._schedule.fragment].is_there:
            self._schedule.arrived()
        self._spent += weight
        if self._pace is not None:
            self._pace.step(weight)
        if self._schedule.takes:
            self._take(self._mixing)
        if self._schedule.sends:
            self._send(due=True)
            if self._schedule.takes:
                self._take(self._mixing)

    @torch.no_grad()
    def sync(self, rounds: int | None = None) -> None:
        """Average all fragments now, or do the last ``rounds`` exchanges in which the others do that."""
        self._check()
        self.left = len(self._fragments) if rounds is None else rounds
        self._arrive()
        while self.left:
            self.left -= 1
            self._send(due=False)
            self._take(0.0)

    def begin_block(self) -> None:
        """Begin a block of `join`."""
        self.ended = max(self.ended - 1, 0)

    @torch.no_grad()
    def replay(self) -> bool:
        """Take part in an exchange with what was not exchanged yet. Return false if no member has a batch any more."""
        self._check()
        self._arrive()
        self._send(due=False, leaves=True)
        if self._take(0.0):
            return True
        self.ended += 1
        for fragment in self._fragments:
            fragment.merge(0.0)
        return False

    # ── one exchange ──────────────────────────────────────────────────────────────────────────────────

    def _check(self) -> None:
        if self._broken:
            raise OutOfStepError(f"{self._broken}. This replica is out of step: close the worker and start again")

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Count the time in here as waiting, and break the exchange by any error."""
        began = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._broken = f"an exchange failed ({type(error).__name__}: {error})"
            raise
        finally:
            self._waited += time.monotonic() - began

    def _arrive(self) -> None:
        """Take the fragment that is on its way, if there is one."""
        if self._schedule.under_way:
            self._take(self._mixing)

    def _send(self, due: bool, leaves: bool = False) -> None:
        """Send the next fragment: as it is ``due``, or before. A worker that ``leaves`` has no more batches."""
        number = self._schedule.fragment
        fragment, way = self._fragments[number], self._ways[number]
        weight = fragment.spend(self._spent)
        present = weight > 0
        if self._pace is not None and not self._schedule.delay:
            self._pace.computed()
        with self._exchanging():
            way.before_forward()
            fragment.pack(due, self._rest())
            word, *flats = fragment.memories
            told = [word, self._pace.fill()] if self._pace is not None and self._is_last(fragment) else [word]
            gives = [True] * len(told) + [present and one for one in fragment.gives]
            for index, memory in enumerate((*told, *flats)):
                way.note_writer(index, memory.device)
                counts = weight if leaves else max(weight, _NO_STEPS)
                way.push(index, memory, counts, gives[index])
        self._schedule.sent()
        self._sent_at = time.monotonic()

    def _take(self, mixing: float) -> bool:
        """Take the mean of the fragment that is on its way. Return whether any member had a batch."""
        number = self._schedule.fragment
        fragment = self._fragments[number]
        if self._pace is not None and self._schedule.delay:
            self._pace.computed()
        with self._exchanging():
            began = time.monotonic()
            outcomes = self._ways[number].finish()
            anybody = outcomes[0].weight > 0
            waited = (time.monotonic() - began) / max(began - self._sent_at, _LEAST_SECONDS)
            if anybody and not self._worker.skipped:
                self._update(fragment, outcomes)
            spoilt = self._worker.skipped or self._worker.left_out
            fragment.merge(0.0 if spoilt else mixing)
            if spoilt:
                self._renew(fragment)
        self._schedule.taken(waited)
        if self._pace is not None:
            if self._is_last(fragment):
                self._pace.arrived(anybody)
            else:
                self._pace.began()
        if self._is_last(fragment) and anybody:
            self._end_interval(fragment.rest)
        for listener in self._listeners:
            listener()
        return anybody

    def _update(self, fragment: Fragment, outcomes: Mapping[int, Outcome]) -> None:
        """Move the group's weights by the mean."""
        if self._longest is not None:
            change, weights = fragment.squares()
            self._change[0] += change
            self._change[1] += weights
        buckets = enumerate(fragment.plan.buckets)
        fragment.buffers.take({bucket.key: outcomes[index] for index, bucket in buckets if bucket.has_buffers})
        if fragment.due:
            fragment.take_gradients()
            self._outer.step()
            fragment.drop_gradients()
        else:
            fragment.average()

    def _renew(self, fragment: Fragment) -> None:
        """Forget what the inner optimizer keeps of parameters if it is not finite: no later step would be."""
        state = {} if self._inner is None else self._inner.state
        for part in fragment.parts:
            kept = [one for one in state.get(part.local, {}).values() if isinstance(one, Tensor)]
            if not all(bool(one.isfinite().all()) for one in kept):
                del state[part.local]

    def _rest(self) -> float:
        """Return the part of the time of this interval in which this worker has not waited."""
        elapsed = time.monotonic() - self._since
        return max(1.0 - self._waited / elapsed, 0.0) if elapsed > 0 else 1.0

    def _end_interval(self, rest: float) -> None:
        """Choose the next interval. The largest ``rest`` of all is that of the slowest worker, which waits least."""
        self._waited_before += self._waited
        self._waited, self._since = 0.0, time.monotonic()
        change, self._change = self._change, [0.0, 0.0]
        if self._longest is not None:
            if change[1] > 0:
                self.guard.record(math.sqrt(change[0] / change[1]))
            self.set_every(next_interval(self._every, 1.0 - rest, self._first, self._longest, self.guard))
        elif self._pace is not None:
            self.set_every(self._every)

    # ── state ─────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def begin_from_module(self) -> None:
        """Take the module's parameters for the group's weights."""
        for fragment in self._fragments:
            fragment.begin(self._spent)

    def state(self, saved: Collection[str]) -> Tree:
        """Return the group's weights that are wider than their parameters, the outer optimizer, and the schedule.

        With them come the group's buffers that are not the module's, or none of those that are ``saved``.
        """
        return {
            "buffers": self._fragments[-1].buffers.state(saved),
            "round": self._schedule.round,
            "every": self._every,
            "changes": list(self.guard.changes),
            "wide": {name: weight for fragment in self._fragments for name, weight in fragment.wide().items()},
            "optimizer": self._outer.state_dict(),
        }

    @torch.no_grad()
    def load_state(self, state: Tree) -> None:
        """Take what `state` has returned, here or at another member. The module has its parameters already."""
        self.begin_from_module()
        for fragment in self._fragments:
            for name, weight in fragment.wide().items():
                weight.copy_(state["wide"][name])
        self._fragments[-1].buffers.load(state.get("buffers", {}))
        self._outer.load_state_dict(state["optimizer"])
        if self._longest is not None:
            self.set_every(state["every"])
        self._schedule.go_on_from(state["round"])
        self.guard = ConvergenceGuard(state["changes"])
        self._waited, self._since = 0.0, time.monotonic()
