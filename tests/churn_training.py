"""Trainings of `tests.churn_ranges`, in which a gradient is a row of ones at the samples behind it.

Each replica adds up the means times their weights. So its weights are the numbers of times that samples counted. There
are three loops, by the kind of a case:

    kind    loop                               joins by        goes on from a checkpoint
    ──────  ─────────────────────────────────  ──────────────  ─────────────────────────
    plain   `Worker.push`, without torch       `Worker.enter`  no
    job     `DistributedDataParallel`, a Job   the job         yes
    local   `LocalSGD`, a Job                  the job         yes
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

import gradserver
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.plan import simple_plan
from gradserver.worker.member.learner import Stage

LOADED: Final = (
    gradserver.connect,
    gradserver.Job,
    gradserver.DataRanges,
    gradserver.LocalSGD,
    gradserver.DistributedDataParallel,
)
"""Parts that are imported here once, and not by each worker."""

SAMPLES: Final = 128
EPOCHS: Final = 2
CELLS: Final = EPOCHS * SAMPLES
"""Elements of a row: one for each sample of each epoch. Tensors are cut between rows."""
ROWS: Final = 32
"""Rows of each further tensor, which is one slice without torch. With torch all of them are a bucket of some slices."""
FURTHER: Final = 8
"""Number of further tensors: enough for all data shards."""
TIMEOUT: Final = 30.0
SAVES_EVERY: Final = 3
"""Rounds between two checkpoints."""
_LEAST_SHARE: Final = 0.06
"""Least part of one contribution in a mean: no more than a dozen count. A lossy wire's rounding is less."""
FADING: Final = np.float32(0.75)


class Case(NamedTuple):
    """One course of a training."""

    seed: int
    kind: str
    options: tuple[str, ...]
    kills_coordinator: bool
    loses: bool
    shards: int
    large: bool
    """True if there are further tensors beside the small one."""
    wire: str
    halts: tuple[str, ...]
    """Ends of all workers at once, after which others go on from a checkpoint."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each tensor."""
        return (1, *[ROWS] * FURTHER) if self.large else (1,)

    @property
    def weighs_alike(self) -> bool:
        """True if all contributions weigh one: what an update has of a sample says then how many contributed.

        Slices of a bucket may lack different contributions, and only one of their weights is known.
        """
        return self.wire != "fp32" or self.kind == "local" or (self.kind == "job" and self.large)

    @property
    def least(self) -> float:
        """Least part of a sample that counts as used: it is more than a lossy wire's rounding."""
        return 0.2 if self.wire != "fp32" else 1e-3


class Place(NamedTuple):
    """One worker's part in a case."""

    url: str
    name: str
    phase: int
    """Number of halts before."""
    seed: int
    folder: Path


Count = NDArray[np.float32]


class Tally:
    """Numbers of times that samples counted, as one tensor has them.

    Attributes:
        used: how much of each sample counted, in all updates together.
        hits: number of updates in which it counted.
        chain: sum of all updates, in which earlier ones fade: it shows their order.
    """

    def __init__(self, used: Count, hits: Count, chain: Count) -> None:
        self.used, self.hits, self.chain = used, hits, chain

    @classmethod
    def empty(cls, rows: int) -> Tally:
        """Return a tally of nothing."""
        return cls(*(np.zeros(rows * CELLS, np.float32) for _ in range(3)))

    def add(self, update: Count, least: float) -> None:
        """Add one update."""
        self.used += update
        self.hits += update > least
        self.chain *= FADING
        self.chain += update


def work(case: Case, place: Place) -> None:
    """Use both epochs, at a speed that changes, and write down how often each sample counted."""
    chance = random.Random(place.seed)
    with gradserver.connect(place.url, name=place.name, timeout=TIMEOUT, wire=case.wire) as worker:
        train = _plain if case.kind == "plain" else _job
        told = train(worker, case, place, chance)
        was_member = worker._session.stage is Stage.MEMBER  # else the others have ended before it had all
    if told is None or not was_member:
        return
    born, number, tallies = told
    new = place.folder / f"{place.name}.new"
    parts = [[one.used, one.hits, one.chain] for one in tallies]
    used, hits, chain = map(np.concatenate, zip(*parts, strict=True))
    with new.open("wb") as file:
        np.savez(file, born=born, round=number, used=used, hits=hits, chain=chain)
    new.rename(place.folder / f"{place.name}.npz")


def _birth(worker: gradserver.Worker, place: Place) -> str:
    """Name a training that begins. Membership epochs begin anew where a coordinator has no group any more."""
    return f"{place.phase}.{worker.epoch}.{min(worker.names)}"


Told = tuple[str, int, list[Tally]]
"""The beginning of this training, the last round, and the tally of each tensor."""


def _think(chance: random.Random, place: Place, count: int) -> None:
    """Compute for a while."""
    time.sleep(chance.choice((0.0, 0.0, 0.001, 0.004)) if count else 0.0)
    if chance.random() < 0.03:
        time.sleep(chance.uniform(0.05, 0.4))
    (place.folder / "begun").touch()


def _ranges(worker: gradserver.Worker, chance: random.Random) -> gradserver.DataRanges:
    return gradserver.DataRanges(
        SAMPLES, worker, batch_size=chance.randint(2, 5), seed=5, prefetch=chance.randint(0, 2)
    )


def _weight(case: Case, count: int) -> float:
    return float(min(count, 1) if case.weighs_alike else count)


# ── without torch ─────────────────────────────────────────────────────────────────────────────────────


class _Told:
    """True when this process was told to stop."""

    def __init__(self) -> None:
        self.stops = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _number: int, _frame: object) -> None:
        self.stops = True


class _Replica:
    """A replica of the plain loop.

    Args:
        worker: the worker.
        case: the case.
        place: its part in it.
    """

    def __init__(self, worker: gradserver.Worker, case: Case, place: Place) -> None:
        self.worker, self.case = worker, case
        worker.agree(simple_plan([(f"b{part}", rows * CELLS) for part, rows in enumerate(case.rows)], FLOAT32))
        self.tallies = [Tally.empty(rows) for rows in case.rows]
        self.born = _birth(worker, place)
        if worker.joins:
            worker.enter(self._install, waits=True)
        worker.serve_state(self._state)

    def _state(self) -> Any:
        return {"born": self.born, "tallies": [[one.used, one.hits, one.chain] for one in self.tallies]}

    def _install(self, state: Any) -> None:
        self.born = state["born"]
        for one, (used, hits, chain) in zip(self.tallies, state["tallies"], strict=True):
            one.used[:], one.hits[:], one.chain[:] = used, hits, chain

    def exchange(self, cells: list[int], weight: float, factor: float = 1.0) -> float:
        """Finish a round with these samples, and return the weight of all."""
        row = np.zeros(CELLS, np.float32)
        row[cells] = factor / max(weight, 1.0)
        gradients = [np.tile(row, rows) for rows in self.case.rows]
        handles = [self.worker.push(part, one, weight=weight) for part, one in enumerate(gradients)]
        self.worker.finish_round()
        for one, gradient, handle in zip(self.tallies, gradients, handles, strict=True):
            if handle.weight > 0:
                whole = _in_samples(gradient) if self.case.weighs_alike else gradient * np.float32(handle.weight)
                one.add(whole, self.case.least)
        self.worker.boundary()
        return max(handle.weight for handle in handles)

    def contribute(self, cells: list[int], weight: float) -> float:
        """Have these samples in an update, unless they are refused; return 0 if no worker has any."""
        if self.worker.mode == "sync":
            return self.exchange(cells, weight)
        self.worker.request_round(follows=not cells)
        while (turn := self.worker.next_turn()) is gradserver.Turn.APPLY:
            self.exchange([], 0.0)
        return 1.0 if turn is gradserver.Turn.DROP else self.exchange(cells, weight, self.worker.damping)


def _plain(worker: gradserver.Worker, case: Case, place: Place, chance: random.Random) -> Told | None:
    told, replica = _Told(), _Replica(worker, case, place)
    data = _ranges(worker, chance)
    while True:
        if data.finished():
            data.next_epoch()
        if (epoch := data.epoch) >= EPOCHS:
            break
        while True:
            if told.stops:
                return None
            indices = data.take()
            _think(chance, place, len(indices))
            if not replica.contribute((epoch * SAMPLES + indices).tolist(), _weight(case, len(indices))):
                break
    return replica.born, worker.round, replica.tallies


# ── with a job ────────────────────────────────────────────────────────────────────────────────────────


class _Adding(Optimizer):
    """Optimizer that adds an update to a parameter, and keeps the rest of its tally.

    Args:
        parameters: parameters, or the group's weights of local SGD.
        update: makes an update of a gradient.
        least: least part of a sample that counts as used.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], update: Callable[[Count], Count], least: float) -> None:
        super().__init__(parameters, {"least": least})
        self._update, self._least = update, least

    def tally(self, parameter: nn.Parameter) -> Tally:
        """Return the tally of ``parameter``, in the same memory."""
        kept = self.state[parameter]
        for key in ("hits", "chain"):
            kept.setdefault(key, torch.zeros_like(parameter, requires_grad=False))
        return Tally(*(one.detach().numpy() for one in (parameter, kept["hits"], kept["chain"])))

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """Add what the gradients say."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.tally(one).add(self._update(one.grad.numpy()), self._least)


class _Born:
    """The beginning of a training, which its checkpoints and learners know."""

    text = ""

    def state_dict(self) -> Any:
        return {"text": self.text}

    def load_state_dict(self, state: Any) -> None:
        self.text = state["text"]


def _in_samples(mean: Count) -> Count:
    """Return an update in whole samples, of a mean of contributions that weigh alike.

    In each row a sample that counted once has the least value. In a row that is cut, it is one over a whole number.
    """
    rows = mean.reshape(-1, CELLS)
    least = np.where(rows > _LEAST_SHARE, rows, np.inf).min(axis=1, keepdims=True)
    found: Count = np.rint(rows / least).astype(np.float32)
    return found.reshape(-1)


class _Network(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(rows * CELLS)) for rows in case.rows])

    def forward(self, row: torch.Tensor) -> Any:
        return sum((one.view(-1, CELLS) @ row).sum() for one in self.tensors)


def _wrap(worker: gradserver.Worker, case: Case, chance: random.Random) -> tuple[Any, Optimizer, _Adding]:
    """Return a model, its optimizer, and the optimizer that counts."""
    network = _Network(case)
    if case.kind == "job":
        model = gradserver.DistributedDataParallel(network, worker)
        update = _in_samples if case.weighs_alike else lambda mean: mean * np.float32(model.total_weight)
        adding = _Adding(network.parameters(), update, case.least)
        return model, adding, adding
    inner, counting = torch.optim.SGD(network.parameters(), lr=1.0), []

    def outer(weights: list[nn.Parameter]) -> Optimizer:
        counting.append(_Adding(weights, lambda mean: _in_samples(-mean), case.least))
        return counting[0]

    local = gradserver.LocalSGD(network, worker, inner, every=chance.randint(1, 3), outer=outer)
    return local, inner, counting[0]


def _job(worker: gradserver.Worker, case: Case, place: Place, chance: random.Random) -> Told:
    joins = worker.joins
    model, optimizer, adding = _wrap(worker, case, chance)
    data, born = _ranges(worker, chance), _Born()
    checkpoint = place.folder / "checkpoints"
    job = gradserver.Job(model, optimizer, data=data, state={"born": born}, checkpoint=checkpoint, every=SAVES_EVERY)
    if not joins:
        born.text = _birth(worker, place)
    before = -1
    for (indices,) in job.batches(TensorDataset(torch.arange(SAMPLES)), EPOCHS):
        _think(chance, place, len(indices))
        row = torch.zeros(CELLS)
        if (
            case.kind == "local"
        ):  # the first step after an exchange has all the weight: all contributions weigh the same
            model.set_weight(float(job.round != before))
            before = job.round
            row[data.epoch * SAMPLES + indices] = -1.0
        else:
            model.set_weight(_weight(case, len(indices)))
            row[data.epoch * SAMPLES + indices] = 1.0 / _weight(case, len(indices))
        model(row).backward()
        job.step()
        optimizer.zero_grad()
    return born.text, worker.round, [adding.tally(one) for one in adding.param_groups[0]["params"]]
