"""What a demo run consists of, in numbers: shared by the parent process and the processes that it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run. Equal settings give equal samples and equal initial weights in every process.

    The defaults are tuned so that both runs together (workers, then one process) take about a minute on two
    ordinary cores: a small model, small steps and a high learning rate show the most learning for that time.
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
    learning_rate: float = 4e-3
    warmup: int = 10  # steps in which the learning rate rises from 0 to its peak
    validation_rows: int = 64  # sequences of held-out text
    sample_bytes: int = 320  # length of the continuation

    @property
    def global_batch(self) -> int:
        """Sequences in one step, over all workers."""
        return self.workers * self.batch

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in one step, over all workers."""
        return self.global_batch * self.context

    def rows_of(self, rank: int) -> range:
        """The rows of every global batch that worker `rank` trains on: rank, rank + N, rank + 2N, …"""
        return range(rank, self.global_batch, self.workers)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of 0-based `step`: a linear warm-up, then linearly down to zero after the last step."""
        rise = (step + 1) / self.warmup if self.warmup else 1.0
        fall = (self.steps - step) / max(1, self.steps - self.warmup)
        return self.learning_rate * min(1.0, rise, fall)

    def to_json(self) -> str:
        """One line of JSON that `from_json` turns back into equal settings."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that `to_json` wrote."""
        return cls(**json.loads(text))
