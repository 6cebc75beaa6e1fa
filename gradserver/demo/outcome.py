"""What came out of a run, and whether it is what was promised."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gradserver.demo.reports import Done, Step
from gradserver.demo.settings import TOLERANCE


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One step of all replicas together."""

    step: int  # from 0
    loss: float  # mean over the replicas, and so over all samples of the step; nats per byte
    gradient_norm: float  # of the averaged gradient, which all replicas have
    seconds: float  # of the slowest replica
    exchange_share: float  # of the step's time, 0 to 1, averaged over the replicas

    @classmethod
    def of(cls, parts: Sequence[Step]) -> GlobalStep:
        """Joins what each replica did in the same step. All have equally many samples, so a plain mean is right."""
        total = sum(part.seconds for part in parts)
        waited = sum(part.exchange_seconds for part in parts)
        loss = math.fsum(part.loss for part in parts) / len(parts)
        seconds = max(part.seconds for part in parts)
        return cls(parts[0].step, loss, parts[0].gradient_norm, seconds, waited / total if total else 0.0)


@dataclass(frozen=True, slots=True)
class Result:
    """One training run, seen from outside."""

    steps: list[GlobalStep]
    done: list[Done]  # by rank

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [step.loss for step in self.steps]

    @property
    def gradient_norms(self) -> list[float]:
        """Norm of each step's gradient."""
        return [step.gradient_norm for step in self.steps]

    @property
    def seconds(self) -> float:
        """Time in training, without the processes' start."""
        return sum(step.seconds for step in self.steps)

    @property
    def exchange_share(self) -> float:
        """Share of the training time that went into the exchange, 0 to 1."""
        spent = sum(step.exchange_share * step.seconds for step in self.steps)
        return spent / self.seconds if self.seconds else 0.0

    @property
    def validation_loss(self) -> float:
        """Loss on held-out text, by rank 0."""
        loss = self.done[0].validation_loss
        return math.nan if loss is None else loss


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two curves are apart at most."""

    distance: float  # relative to the reference
    step: int  # where that is, from 0

    @classmethod
    def of(cls, curve: Sequence[float], reference: Sequence[float]) -> Gap:
        """Compares the curves step by step."""
        apart = distances(curve, reference)
        worst = max(range(len(apart)), key=apart.__getitem__)
        return cls(apart[worst], worst)

    def allowed(self, *, lossy: bool) -> bool:
        """Whether the curves agree within the tolerance; if gradients were lossy, whether both are numbers at all."""
        return self.distance <= (sys.float_info.max if lossy else TOLERANCE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The workers' run against the reference.

    The losses alone would not show a gradient that is too long or too short by the same factor in every step:
    clipping takes that away again. So the gradients' norms have to agree as well. Lossy gradients train another way
    down: then how far the curves are apart is no fault but the answer.
    """

    hashes: tuple[str, ...]  # of each replica's weights, by rank
    losses: Gap
    gradient_norms: Gap
    lossy: bool = False  # whether gradients lost something on the way

    @property
    def losses_allowed(self) -> bool:
        """Whether the loss curve is as it has to be."""
        return self.losses.allowed(lossy=self.lossy)

    @property
    def norms_allowed(self) -> bool:
        """Whether the gradients' norms are."""
        return self.gradient_norms.allowed(lossy=self.lossy)

    @property
    def identical(self) -> bool:
        """Whether all replicas hold the same weights, bit for bit."""
        return len(set(self.hashes)) == 1

    @property
    def passed(self) -> bool:
        """Whether the run did what was promised."""
        return self.identical and self.losses_allowed and self.norms_allowed


def judge(group: Result, reference: Result, *, lossy: bool = False) -> Verdict:
    """Compares the runs."""
    return Verdict(
        tuple(done.sha256 for done in group.done),
        Gap.of(group.losses, reference.losses),
        Gap.of(group.gradient_norms, reference.gradient_norms),
        lossy,
    )


def distances(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|a - b| / |b| for each step; infinite where a loss is not a finite number."""
    pairs = zip(losses, reference, strict=True)
    return [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) and b else math.inf for a, b in pairs]
