"""Contributions of a worker that wait for their rounds, in a group where rounds do not wait for all members.

    state    event                                      next     what happens
    ───────  ─────────────────────────────────────────  ───────  ────────────────────────────────────────────────────
    NONE     end of backward                            QUEUED   each module that it has reached has a contribution
    NONE     no batches are left                        FOLLOWS  a round is requested, for a worker without gradients
    QUEUED   end of another backward                    QUEUED   the same, of other modules
    QUEUED   the worker wants updates; it has one       ASKED    a round is requested for the first contribution
             module alone: at once, at end of backward
    FOLLOWS  end of backward                            QUEUED   the same
    ASKED    turn: a round is done without              ASKED    the update of its module is applied
    FOLLOWS  turn: a round is done without              FOLLOWS  the same
    ASKED    turn: its round                            QUEUED   the contribution is exchanged; NONE behind the last
    FOLLOWS  turn: no worker has batches                NONE     a round without gradients is exchanged
    ASKED    turn: the contribution is too old          QUEUED   it is dropped, and all others of the same backward
    QUEUED,  forward, or another backward, of a module  the same UsageError
    ASKED    that has a contribution
    any      backward of a graph from before a turn     the same UsageError, as an update may have changed its weights

The worker has one queue for all of its modules, as the group has one log. Contributions stand in it in the order of
their modules, which is the same at all workers. Whatever their turn is, updates come in the order of the log. During an
update only its module has gradients: `gradserver.worker.torch_ddp.aside` keeps the others.

Turns are taken in `updates` alone, behind a backward and before the next forward. So no update changes weights that a
graph has still to go through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from gradserver.protocol.errors import UsageError
from gradserver.worker.client import Worker
from gradserver.worker.torch_ddp.aside import Aside
from gradserver.worker.torch_ddp.breakage import Breakage
from gradserver.worker.torch_ddp.rounds import Rounds
from gradserver.worker.turns import Turn


class Module(Protocol):
    """A module with gradients that wait: `gradserver.worker.torch_ddp.backward.Backward`."""

    rounds: Rounds
    aside: Aside
    broken: Breakage
    ended: int
    pending: int
    version: int
    has_result: bool

    def exchange(self, count: int) -> bool:
        """Exchange the gradients of ``count`` backwards; with 0, take part without. Return if any worker had some."""

    def give_up(self) -> None:
        """Forget the gradients that were to be exchanged."""

    def follow(self) -> int:
        """Prepare for rounds without a backward. Return the number of backwards that have accumulated gradients."""


@dataclass(eq=False)
class Contribution:
    """Gradients that wait.

    Attributes:
        module: the module.
        count: number of backwards behind them.
        version: number of updates that the weights had.
        backward: number of the backward, which may have reached several modules.
    """

    module: Module
    count: int
    version: int
    backward: int


class Deferred:
    """The contributions of one worker that wait. There are none at first.

    Args:
        worker: the worker.

    Attributes:
        due: the module with an update that was exchanged, which `next_update` has yet to give.
        turns: number of turns that were taken so far.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._modules: list[weakref.ref[Module]] = []
        self._queue: list[Contribution] = []
        self._asked: Contribution | None = None
        """The contribution that a round is requested for."""
        self._follows = False
        """True if a round is requested without one."""
        self.due: Module | None = None
        self.turns = 0
        self._has_ended = False
        """True if no worker had data in the last round."""

    @classmethod
    def of(cls, worker: Worker, module: Module) -> Deferred:
        """Return that of ``worker``, which has ``module`` now. It lasts as long as a module refers to it."""
        known = _of_worker.get(worker)
        found = None if known is None else known()
        if found is None:
            found = cls(worker)
            _of_worker[worker] = weakref.ref(found)
        found._modules = [*(one for one in found._modules if one() is not None), weakref.ref(module)]
        return found

    @property
    def modules(self) -> list[Module]:
        """The modules that still exist."""
        return [module for one in self._modules if (module := one()) is not None]

    # ── contributions ─────────────────────────────────────────────────────────────────────────────────

    def has(self, module: Module) -> bool:
        """Return whether ``module`` has a contribution that waits."""
        return any(one.module is module for one in self._queue)

    def check(self, module: Module) -> None:
        """Check that a forward or backward may begin: UsageError if updates before it were not applied."""
        if module.aside.is_hidden and not self.has(module):  # the loop over updates was left before its end
            module.aside.bring_back()
        if self.has(module):
            raise UsageError(
                f"the last backward has led to updates that were not applied. In a group of mode "
                f"{self._worker.mode!r} rounds do not wait for all workers, so one backward can lead to several "
                f"updates: write `for _ in model.updates(): optimizer.step()`, or let gradserver.Job do it"
            )

    def check_graph(self, turns: int) -> None:
        """Check that no turn was taken since a forward, when there were so many: UsageError otherwise."""
        if self.turns != turns:
            raise UsageError(
                f"this backward goes through a forward from before the last updates. In a group of mode "
                f"{self._worker.mode!r} these may be updates of any module, by other workers' gradients, and may have "
                f"changed the weights of that forward: call the module again behind `for one in model.updates()`"
            )

    def add(self, module: Module, count: int, version: int, backward: int) -> None:
        """Let gradients of ``module`` wait."""
        self._queue.append(Contribution(module, count, version, backward))

    def withdraw(self, modules: Sequence[Module]) -> None:
        """Forget contributions of ``modules``, which came in the same backward as one of another module."""
        kept = {one.backward for one in self._queue if one.module not in modules}
        for one in [one for one in self._queue if one.module in modules and one.backward in kept]:
            if one is not self._asked:
                self._forget(one)

    def _forget(self, one: Contribution) -> None:
        self._queue.remove(one)
        one.module.give_up()

    # ── turns ─────────────────────────────────────────────────────────────────────────────────────────

    def next_update(self, timeout: float | None) -> Module | None:
        """Wait for the next update that the contributions lead to, and return its module. None if there is none."""
        self._bring_back()
        while self.due is None and self._queue:
            self._take_turn(timeout)
        due, self.due = self.due, None
        return due

    def follow(self, modules: Sequence[Module], timeout: float | None) -> Module | None:
        """Take part in the next round that has an update, and return its module, which is due then.

        Gradients that ``modules`` have accumulated count in rounds of their own. None if no worker has data any more.
        """
        self._bring_back()
        self.due, self._has_ended = None, False
        while self.due is None and not self._has_ended:
            if not (self._queue or self._follows):
                with self._breaking_all():
                    counts = [(one, one.follow()) for one in modules]
                for one, count in counts:
                    if count:
                        self.add(one, count, one.version, -1)
            self._take_turn(timeout)
        return self.due

    def ask(self) -> None:
        """Request a round for the first contribution, or for none. Nothing happens if that is done."""
        if self._asked is not None or (self._follows and not self._queue):
            return
        self._queue.sort(key=lambda one: one.module.rounds.agreement.number)
        if not self._queue:
            self._worker.request_round(follows=True)
            self._follows = True
            return
        first, *others = self._queue
        later = [one.module.rounds.agreement for one in others if one.version == first.version]
        self._worker.request_round(of=first.module.rounds.agreement, version=first.version, later=later)
        self._asked, self._follows = first, False

    def _take_turn(self, timeout: float | None) -> None:
        """Take part in the next round, with the first contribution if it is the round of that."""
        with self._breaking_all():
            self.ask()
            turn, own = self._worker.next_turn(timeout), self._asked
            self.turns += 1
            if turn is not Turn.APPLY:
                self._asked, self._follows = None, False
            if turn is Turn.DROP:
                assert own is not None
                for one in [one for one in self._queue if one is own or one.backward == own.backward >= 0]:
                    self._forget(one)
                return
            module = self._module(self._worker.turn_of)
            given = own if turn is Turn.PUSH else None
            self._make_room(module, given is not None)
            if given is not None:
                self._queue.remove(given)
                module.aside.bring_back(self._worker.damping)
            else:
                module.aside.move()
            took_part = module.exchange(0 if given is None else given.count)
            self.due = module if took_part else None
            if turn is Turn.PUSH and given is None and not took_part:
                self._has_ended = True
                for each in self.modules:
                    each.ended += 1
                    each.aside.clear()

    def _make_room(self, updated: Module, gives: bool) -> None:
        """Let only the module that is ``updated`` have gradients, and only if it ``gives`` them to the round."""
        for one in self.modules:
            if gives and one is updated:
                continue
            if self.has(one) or one.pending:
                one.aside.hide()
            elif one is not updated and one.has_result:
                one.aside.clear()

    def _bring_back(self) -> None:
        """Give modules the gradients again that they have accumulated, behind an update."""
        for one in self.modules:
            if one.aside.is_hidden and not self.has(one):
                one.aside.bring_back()

    def _module(self, section: int) -> Module:
        found = next((one for one in self.modules if one.rounds.agreement.number == section), None)
        if found is None:
            raise UsageError(
                f"round {self._worker.round} is of a module that this worker has wrapped and does not have any more: "
                f"keep a reference to each, as the other workers do"
            )
        return found

    @contextmanager
    def _breaking_all(self) -> Iterator[None]:
        """Break the exchange of all modules by any error raised in here: the log goes no further at this worker."""
        with ExitStack() as stack:
            for one in self.modules:
                stack.enter_context(one.broken.by_errors())
            yield


_of_worker: WeakKeyDictionary[Worker, weakref.ref[Deferred]] = WeakKeyDictionary()
