"""Settings of a demo run, shared by the parent process and the processes that it starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradserver.tools.common.as_json import AsJson

VOCABULARY = 256
"""Every byte value is a token."""

TOLERANCE = 1e-4
"""Largest relative difference of two runs' losses, and gradient norms, that still counts as the same training.

A sum in another order changes a gradient by a few parts in ten million. This training does not enlarge that:
its curves differ by less than 1e-6, also after hundreds of steps. A wrong average shows: one bucket that is 10 % too
long moves the loss by 1 %.
"""

PROMPT = "def __init__(self, "
"""Text that the trained model continues."""

FINAL = 0.1
"""Share of the samples, at the end, of which the final loss is the mean: a few would not be enough to compare."""

CHURN_TOLERANCE = 0.02
"""Largest relative difference of the final losses of a run with deaths, and one without, that counts as the same.

They cannot be the same bits: the samples of a killed worker are used later, and by others.
"""

_FLOPS_PER_CORE = 40e9  # speed of training on an ordinary core, for an estimate of the duration
_STARTUP_SECONDS = 8.0  # to import torch and read the text; twice in a run


@dataclass(frozen=True, slots=True)
class Settings(AsJson):
    """One training run. Equal settings give equal samples and equal initial weights in every process.

    The defaults are tuned so that both runs together (workers, then one process) take one to four minutes on two
    ordinary cores: a small model and small steps show the most learning for that time.
    """

    workers: int = 2
    batch: int = 4  # sequences per worker and step
    steps: int = 200
    seed: int = 0
    context: int = 128  # bytes that one sequence predicts
    width: int = 192
    heads: int = 6
    blocks: int = 4
    hidden: int = 512  # width of the gated MLP
    history: int = 2  # earlier bytes that a position's embedding includes
    vocabulary: int = VOCABULARY  # different tokens; those of a text are its bytes
    learning_rate: float = 4e-3
    warmup: int = 10  # steps in which the learning rate rises to its peak
    clip_norm: float = 0.5  # largest norm of a step's gradient
    validation_rows: int = 64  # sequences of held-out text
    sample_bytes: int = 280  # length of the continuation
    wire: str = "fp32"  # the codec that gradients travel in
    churn: float = 0.0  # seconds between two workers that are killed; 0: none is

    @classmethod
    def quick(
        cls, *, workers: int, batch: int, steps: int, seed: int, wire: str = "fp32", churn: float = 0.0
    ) -> Settings:
        """Make the settings of a tiny model, which shows that everything works, and learns little."""
        small = cls(workers, batch, steps, seed, context=64, width=64, heads=2, blocks=2, hidden=128, sample_bytes=80)
        return replace(small, wire=wire, churn=churn)

    @property
    def is_lossy(self) -> bool:
        """True if the codec of gradients is lossy, so that the curves cannot be the same."""
        return self.wire != "fp32"

    @property
    def crew(self) -> str:
        """Description of the workers."""
        return f"{self.workers} workers" if self.workers > 1 else "1 worker"

    @property
    def global_batch(self) -> int:
        """Number of sequences in one step, over all workers."""
        return self.workers * self.batch

    @property
    def samples(self) -> int:
        """Number of sequences in the whole run."""
        return self.steps * self.global_batch

    @property
    def tokens_per_step(self) -> int:
        """Number of bytes predicted in one step, over all workers."""
        return self.global_batch * self.context

    @property
    def parameters(self) -> int:
        """Number of the model's trainable scalars."""
        block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        tables = self.vocabulary * (2 + self.history) + self.context  # tokens in, tokens out, positions
        return self.blocks * block + self.width * (tables + 1)

    def rows_of(self, rank: int) -> range:
        """Return the rows of every global batch that worker `rank` trains on: rank, rank + N, rank + 2N and so on."""
        return range(rank, self.global_batch, self.workers)

    def learning_rate_at(self, step: float) -> float:
        """Compute the learning rate of 0-based `step`: linearly up to the peak, then linearly down to zero at the end.

        If steps are not equally large, `step` is the number of usual steps that the samples used so far would make.
        """
        rise = (step + 1) / self.warmup
        fall = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.learning_rate * min(1.0, rise, fall)

    def expected_seconds(self, cores: int) -> float:
        """Estimate the duration of both runs together."""
        useful = min(cores, 8)  # matrices this small do not use more
        work = 2 * self.steps * self.tokens_per_step * 6 * self.parameters
        return 2 * _STARTUP_SECONDS + work / (_FLOPS_PER_CORE * useful)
