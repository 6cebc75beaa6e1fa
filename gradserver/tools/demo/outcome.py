"""Results of a run, and the verdict on them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gradserver.tools.demo.reports import Done, Step
from gradserver.tools.demo.settings import TOLERANCE


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """Step of all replicas together."""

    step: int  # from 0
    loss: float  # mean over the replicas, and so over all samples of the step; nats per byte
    gradient_norm: float  # norm of the averaged gradient, which all replicas have
    seconds: float  # time of the slowest replica
    exchange_share: float  # share of the step's time, 0 to 1, averaged over the replicas

    @classmethod
    def of(cls, parts: Sequence[Step]) -> GlobalStep:
        """Join the parts of all replicas. All have equally many samples, so a plain mean is right."""
        total = sum(part.seconds for part in parts)
        waited = sum(part.exchange_seconds for part in parts)
        loss = math.fsum(part.loss for part in parts) / len(parts)
        seconds = max(part.seconds for part in parts)
        return cls(parts[0].step, loss, parts[0].gradient_norm, seconds, waited / total if total else 0.0)


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one training run."""

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
        """Time of the training, without the start of processes."""
        return sum(step.seconds for step in self.steps)

    @property
    def exchange_share(self) -> float:
        """Share of the training time that the exchange took, 0 to 1."""
        spent = sum(step.exchange_share * step.seconds for step in self.steps)
        return spent / self.seconds if self.seconds else 0.0

    @property
    def validation_loss(self) -> float:
        """Loss on held-out text, by rank 0."""
        loss = self.done[0].validation_loss
        return math.nan if loss is None else loss


@dataclass(frozen=True, slots=True)
class Gap:
    """Largest distance of two curves."""

    distance: float  # relative to the reference
    step: int  # step of this distance, from 0

    @classmethod
    def of(cls, curve: Sequence[float], reference: Sequence[float]) -> Gap:
        """Compare the curves step by step."""
        apart = distances(curve, reference)
        worst = max(range(len(apart)), key=apart.__getitem__)
        return cls(apart[worst], worst)

    def allowed(self, *, lossy: bool) -> bool:
        """Return whether the curves agree within the tolerance. With lossy gradients they only have to be finite."""
        return self.distance <= (sys.float_info.max if lossy else TOLERANCE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison of the workers' run with the reference.

    The losses alone would not show a gradient that is too long or too short by the same factor in every step:
    clipping hides that. The gradients' norms therefore have to agree as well. Lossy gradients take another course:
    the distance of the curves is then no fault but the result.
    """

    hashes: tuple[str, ...]  # hash of each replica's weights, by rank
    losses: Gap
    gradient_norms: Gap
    lossy: bool = False  # whether the codec of gradients was lossy

    @property
    def losses_allowed(self) -> bool:
        """True if the loss curve is within its tolerance."""
        return self.losses.allowed(lossy=self.lossy)

    @property
    def norms_allowed(self) -> bool:
        """True if the gradients' norms are within their tolerance."""
        return self.gradient_norms.allowed(lossy=self.lossy)

    @property
    def identical(self) -> bool:
        """True if all replicas have the same weights, bit for bit."""
        return len(set(self.hashes)) == 1

    @property
    def passed(self) -> bool:
        """True if the run passed all checks."""
        return self.identical and self.losses_allowed and self.norms_allowed


def judge(group: Result, reference: Result, *, lossy: bool = False) -> Verdict:
    """Compare the runs."""
    return Verdict(
        tuple(done.sha256 for done in group.done),
        Gap.of(group.losses, reference.losses),
        Gap.of(group.gradient_norms, reference.gradient_norms),
        lossy,
    )


def distances(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Compute |a - b| / |b| for each step; infinite where a loss is not a finite number."""
    pairs = zip(losses, reference, strict=True)
    return [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) and b else math.inf for a, b in pairs]
