"""The course of a backward through a module: each bucket is pushed as soon as its last gradient is there.

    state      event                                   next       what happens
    ─────────  ──────────────────────────────────────  ─────────  ───────────────────────────────────────────
    IDLE       first hook, inside no_sync              LOCAL
    IDLE       … in eval mode that does not exchange   LOCAL
    IDLE       first hook                              EXCHANGE
    LOCAL      end of backward                         IDLE       gradients stay where they are
    EXCHANGE   last gradient of a bucket               EXCHANGE   the bucket is pushed
    EXCHANGE   end of backward                         IDLE       the others are pushed, all results awaited
    EXCHANGE   …, and rounds do not wait for all       IDLE       the gradients wait for a round (`deferred`)
    EXCHANGE   the exchange raises                     BROKEN     the error goes to the caller of backward()
    LOCAL      backward fails                          IDLE
    EXCHANGE   backward fails, nothing was pushed      IDLE
    EXCHANGE   backward fails, something was pushed    BROKEN
    BROKEN     … and the round is abandoned            IDLE       the others are pushed without data, results awaited
    IDLE       the round is abandoned                  IDLE       the same, of all buckets
    BROKEN     forward, first hook                     BROKEN     OutOfStepError, with the reason

Hooks run in the thread that computes a gradient: the caller's for a module on the CPU, and one for each CUDA device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradserver.protocol.errors import UsageError
from gradserver.worker.client import Worker
from gradserver.worker.eager import in_compiled_backward
from gradserver.worker.torch_ddp.aside import Aside
from gradserver.worker.torch_ddp.breakage import Breakage
from gradserver.worker.torch_ddp.buckets import Slot, bring
from gradserver.worker.torch_ddp.composition import Composition
from gradserver.worker.torch_ddp.deferred import Deferred
from gradserver.worker.torch_ddp.graph import MAX_NAMED, Graph
from gradserver.worker.torch_ddp.hooks import NEVER, Arrivals, Ending, hook_parameters
from gradserver.worker.torch_ddp.joining import GivenGradients
from gradserver.worker.torch_ddp.modes import Mode
from gradserver.worker.torch_ddp.rounds import Options, Rounds
from gradserver.worker.torch_ddp.sequence import Sequence as Modules
from gradserver.worker.torch_ddp.stepping import Stepper, checked_steps
from gradserver.worker.torch_ddp.untouched import Untouched


class State(Enum):
    """The state of a backward."""

    IDLE = "idle"
    LOCAL = "local"
    EXCHANGE = "exchange"


class Backward:
    """The backwards of one module.

    Attributes:
        rounds: the exchange.
        syncs: whether gradients are exchanged (not inside `no_sync`).
        training: whether the wrapper is in training mode.
        anybody: whether any worker took part in the last exchange with a batch.
        composition: the parameters that the module was wrapped with.
        deferred: contributions of the worker that wait for their round, where rounds do not wait for all.
        aside: gradients of the module that wait, while updates are applied.
        broken: the error that broke the exchange: its text is the BROKEN state.
        pending: number of backwards that accumulated gradients since the last exchange.
        version: value of ``worker.round`` at the first backward behind the gradients.
        has_result: whether the parameters' gradients are the result of an exchange.
        owner: the wrapper, from its construction on.
        block: what steps the module's updates at the end of a block of `join`; None outside of one.
        given: the averaged gradients, in a block of `join` with a loop that must leave them alone.
        optimizers: those that have stepped the module's parameters in a block of `join`.
        armed: whether a forward has run since the last exchange.
        leads: whether buckets are pushed while this backward is under way (`gradserver.worker.torch_ddp.sequence`).
        fresh: whether there was an exchange since the gradients were last cleared (`gradserver.Job` says so).
        latest: what all modules of the latest exchanging backward share.
        exchanged: whether the latest backward exchanged gradients.
        ended: exchanges without any batch since `DistributedDataParallel.join` began: each ends one such block.
    """

    def __init__(self, module: nn.Module, worker: Worker, options: Options, rounds: Rounds) -> None:
        self.rounds = rounds
        self.syncs = True
        self.training = True
        self.anybody = self.exchanged = True
        self.ended = 0
        self._worker = worker
        self._options = options
        self._state = State.IDLE
        self.broken = Breakage()
        self._number = 0
        """The number of the present backward: an error of an earlier one may be noticed late."""
        self._lock = threading.RLock()
        self._arrivals = hook_parameters(self, rounds.gradients)
        self.pending = 0
        self._due = False
        """True if there are gradients of a round, and `next_update` has yet to say so."""
        self.has_result = False
        self.version = 0
        self.block: Sequence[Stepper] | None = None
        self.given: GivenGradients | None = None
        self.owner: weakref.ref[nn.Module] | None = None
        self._graph = Graph(options, self._arrivals)
        self.aside = Aside(rounds, options.gradient_as_bucket_view)
        self._untouched = Untouched(rounds.slots)
        self.optimizers: list[Callable[[], object] | Optimizer] = []
        self.armed = False
        self._ends_by_count = False
        """True if the last gradient ends the present backward: compiled autograd drops the callback."""
        self.leads = True
        self.fresh = False
        self.latest: object = None
        self._sequence = Modules.of(worker)
        self._sequence.add(self)
        self.deferred = Deferred.of(worker, self)
        exchanged = [(slot.name, slot.parameter) for slot in rounds.slots]
        self.composition = Composition(module, exchanged, options.ignored)

    @property
    def begun(self) -> bool:
        """True if the present backward has reached the module."""
        return self._state is not State.IDLE

    @property
    def _defers(self) -> bool:
        """True if rounds do not wait for all members, so that gradients wait for their round."""
        return self._worker.mode != "sync"

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, outputs: Iterable[Any]) -> None:
        """Notice a backward when it reaches one of ``outputs``, tensors.

        That is before any parameter's hook. Unlike these, it is never inside the nested backward of a re-entrant
        checkpoint, which may end before the whole does.
        """
        turns = self.deferred.turns

        def on_output(_: Tensor) -> None:
            with self._lock:
                if self._defers:
                    self.deferred.check_graph(turns)
                self._begin()

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(on_output)

    def check(self, module: nn.Module) -> None:
        """Check before a forward of ``module``: OutOfStepError if an exchange broke, and as in `Composition.check`."""
        self.broken.check()
        self.deferred.check(self)
        self.composition.check(module)

    @property
    def exchanges(self) -> bool:
        """True if the present mode exchanges gradients; inside `no_sync` that happens later."""
        return self.training or self._options.exchange_in_eval

    # ── one backward ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self) -> None:
        """Begin a backward at its first hook, or return at a later one."""
        self.broken.check()
        if self.begun:
            return
        self.deferred.check(self)
        if self.exchanges and not (self.training and self.armed):  # no forward has checked it
            self.composition.check(getattr(self.owner and self.owner(), "module", None))
        pacing = self.rounds.pacing
        is_due = pacing is None or pacing.is_due(self.pending + 1, len(self._sequence.members))
        self._start(State.EXCHANGE if self.syncs and self.exchanges and is_due else State.LOCAL)
        self.leads = self._sequence.may_push(self)
        self.rounds.begin(self.pending + 1, foreseen=self._graph.learned)
        self._ends_by_count = is_compiled = in_compiled_backward()
        if is_compiled and (self._options.tracks_used or self._sequence.is_shared):
            self._rest()
            raise UsageError(
                "compiled autograd calls nothing at the end of a backward, as is needed with several wrapped modules, "
                "find_unused_parameters or static_graph: leave torch._dynamo.config.compiled_autograd False for them"
            )
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(Ending(self, self._number))

    def _start(self, state: State) -> None:
        self._state = state
        self.exchanged = state is State.EXCHANGE
        self._due = self.has_result = False
        self._number += 1
        accumulates = self.pending or any(arrivals.touched for arrivals in self._arrivals)
        thrown_away = not accumulates or all(slot.parameter.grad is None for slot in self.rounds.slots)
        if (pacing := self.rounds.pacing) is not None:
            pacing.check_accumulated(self.rounds.slots, thrown_away)
        if thrown_away:
            self.pending = 0
            for arrivals in self._arrivals:
                arrivals.touched.clear()
        if state is State.EXCHANGE:
            self._untouched.begin()

    def on_gradient(self, arrivals: Arrivals, slot: Slot) -> None:
        """Take a gradient that is ready: each large one, and of small ones the first and the last of a bucket."""
        has_graph = torch.is_grad_enabled()
        with self._lock, torch.no_grad():
            try:
                self._begin()
            finally:
                if not self.begun:
                    arrivals.ready.clear()
            if not arrivals.due:
                self._expect(arrivals, has_graph)
            if self._state is State.LOCAL:
                if self._options.gradient_as_bucket_view and not slot.is_small:
                    bring((slot,), as_view=True)
            else:
                with self.broken.by_errors(in_backward=True):
                    self._take(arrivals, slot)
            if self._ends_by_count and all(len(one.ready) >= one.expected for one in self._arrivals):
                self.end()

    def _take(self, arrivals: Arrivals, slot: Slot) -> None:
        """Take a gradient for the exchange, and push its bucket if it is the last one of that."""
        if not slot.is_small:
            self.rounds.take(arrivals.index, slot)
        if len(arrivals.ready) >= arrivals.due and not self._all_at_end:
            self._graph.check_often(arrivals)
            self.rounds.push(arrivals.index)

    def _expect(self, arrivals: Arrivals, has_graph: bool) -> None:
        """Expect the gradients of a bucket, at its first one in this backward."""
        if has_graph:
            self._graph.warn_of_graph()
        counts = self._ends_by_count or (self._state is State.EXCHANGE and not self._all_at_end)
        arrivals.due = max(arrivals.expected, 1) if counts else NEVER

    def _rest(self) -> None:
        """Note that no backward is under way."""
        self._state = State.IDLE
        for arrivals in self._arrivals:
            arrivals.rest()

    @property
    def _all_at_end(self) -> bool:
        """True if nothing is pushed before the end of backward."""
        waits = self._options.delay_all_reduce or not self.leads or self._defers or self._options.clips_own
        return waits or (self._options.static_graph and not self._graph.learned)

    def end_all(self) -> None:
        """End backward at all modules that it has reached, in the same order on all workers."""
        if self._sequence.is_shared:
            self._sequence.end()
        else:
            self.end()

    @torch.no_grad()
    def end(self) -> None:
        """End backward."""
        fired = any(arrivals.ready for arrivals in self._arrivals)
        if self._state is State.LOCAL:
            if self._options.gradient_as_bucket_view:
                for arrivals in self._arrivals:
                    bring(arrivals.ready, as_view=True)
            self._rest()
            if self.exchanges:
                if not self.pending:
                    self.version = self._worker.round
                self.pending += fired
                if fired and (pacing := self.rounds.pacing) is not None:
                    pacing.accumulated(self.rounds.weight, self.rounds.slots)
            elif fired and self.syncs:
                with self.broken.by_errors():
                    self.rounds.modes.check(Mode.EVAL)
        elif not fired:  # for example, torch.autograd.grad
            self._rest()
        else:
            with self.broken.by_errors():
                self._untouched.end()
                if not self._all_at_end:
                    for arrivals in self._arrivals:
                        self._graph.check_often(arrivals)
                self._graph.check()
                if self._defers:
                    self._defer()
                else:
                    self._finish()

    def _finish(self) -> bool:
        took_part = self._end_round()
        self.ended += not took_part
        self._end_backwards()
        return took_part

    def _end_round(self) -> bool:
        took_part = self.anybody = self._due = self.rounds.finish()
        self.fresh = self.has_result = True
        if self.given is not None:
            self.given.note(self.rounds.gradients)
        return took_part

    def _end_backwards(self) -> None:
        self.pending = 0
        self.armed = False
        for arrivals in self._arrivals:
            arrivals.forget()
        self._state = State.IDLE

    # ── rounds that do not wait for all ───────────────────────────────────────────────────────────────

    def _defer(self) -> None:
        """Let the gradients of this backward wait for their round."""
        if not self.pending:
            self.version = self._worker.round
        self.deferred.add(self, self.pending + 1, self.version, self._sequence.backward)
        self._rest()
        if not self._sequence.is_shared:
            self.deferred.ask()

    def next_update(self) -> Backward | None:
        """Wait for the next update that the last backward leads to, and return its module. None if there is none.

        Where rounds do not wait for all members, that may be any module of the worker.
        """
        if not self._defers:
            due, self._due = self._due, False
            return self if due else None
        with torch.no_grad():
            found = self.deferred.next_update(self._options.timeout)
        assert found is None or isinstance(found, Backward)
        return found

    def exchange(self, count: int) -> bool:
        """Exchange the gradients of ``count`` backwards; with 0, take part without. Return if any worker had some."""
        self.rounds.begin(count, leaves=not count)
        took_part = self._end_round()
        if count:
            self._end_backwards()
        return took_part

    def give_up(self) -> None:
        """Forget the gradients that were to be exchanged."""
        self._end_backwards()
        self.aside.drop()

    # ── rounds without a backward ─────────────────────────────────────────────────────────────────────

    def begin_block(self, block: Sequence[Stepper] = ()) -> None:
        """Begin a block of `DistributedDataParallel.join`: the end of the one before is over."""
        self.ended = 0 if self._defers else max(self.ended - 1, 0)
        self.block = block

    def steps(self) -> Sequence[Stepper]:
        """Return what steps the update that `shadow` has led to."""
        updated = self.deferred.due if self._defers else self
        assert isinstance(updated, Backward)
        if updated.block is None:
            self.broken.text = updated.broken.text = "an update of another module was not applied"
        return checked_steps(updated.block, self._worker.mode)

    def shadow(self) -> bool:
        """Take part in a round without a backward. Return whether any other worker had one.

        Gradients that were accumulated inside `no_sync` and not exchanged yet count in it.
        """
        self.broken.check()
        if self._defers:
            return self._follow()
        with torch.no_grad(), self.broken.by_errors():
            self._start(State.EXCHANGE)
            if self.pending:
                self._graph.check_all_touched()
            else:
                self.rounds.modes.pass_eval()
            self.rounds.begin(self.pending, leaves=not self.pending)
            anybody = self._finish()
        if not anybody:
            self.aside.clear()
        return anybody

    def _follow(self) -> bool:
        """Take part in the next round that has an update. Return false if no worker has data any more."""
        modules = [one for one in self._sequence.members if isinstance(one, Backward) and one.block is not None]
        with torch.no_grad():
            return self.deferred.follow(modules or [self], self._options.timeout) is not None

    def follow(self) -> int:
        """Prepare for rounds without a backward. Return the number of backwards that have accumulated gradients."""
        self._start(State.EXCHANGE)
        self._rest()
        if self.pending:
            self._graph.check_all_touched()
        return self.pending

    def abandon(self) -> None:
        """Complete the open round without a backward, or without the rest of one that failed."""
        self.broken.check(abandons=True)
        if not self.exchanges or self._defers:  # there is no open round
            self.broken.mend()
            self._rest()
            if self._defers:
                self.aside.clear()
            else:
                self.rounds.modes.check(Mode.EVAL)
            return
        with torch.no_grad(), self.broken.by_errors():
            begun = self.rounds.begun
            self.broken.mend()
            self._start(State.EXCHANGE)
            if not begun:
                self.rounds.begin(0)
            self.rounds.abandon()
            self._finish()

    def fail(self, number: int | None = None) -> None:
        """Handle the error that ended a backward: the present one, or that of this ``number``."""
        if number is not None and number != self._number:
            return
        if self._state is State.EXCHANGE and self._ends_by_count and not self.broken.text:
            self.broken.fail(f"a compiled backward of round {self._worker.round} ended without all gradients")
        if self._state is State.EXCHANGE and self.rounds.begun and not self.broken.text:
            left = ", ".join(self.rounds.unpushed[:MAX_NAMED]) or "nothing"
            self.broken.fail(
                f"a backward failed when it had begun to push round {self._worker.round} (left was: {left})"
            )
        self._rest()
