"""The comparison of workers' modes where eval mode exchanges no gradients, so that no worker waits in vain.

Each backward outside of `no_sync` then takes part in one small collective, in training mode beside the gradients.

    this worker   another           next
    ────────────  ────────────────  ──────────────────────────────────────────────────────────
    TRAINING      EVAL              both get a DisagreementError
    EVAL          EVAL              gradients stay where they are
    OUT_OF_DATA   EVAL              this worker, at the end of a block of `join`, compares again
    OUT_OF_DATA   TRAINING          the round takes place
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from gradserver.protocol.errors import DisagreementError
from gradserver.worker.client import Worker
from gradserver.worker.handle import Handle
from gradserver.worker.member.learner import Stage

_MAX_NAMED = 16


class Mode(IntEnum):
    """The mode of a worker in a backward."""

    ABSENT = 0
    OUT_OF_DATA = 1
    EVAL = 2
    TRAINING = 3


class Modes:
    """The modes of one wrapped module's backwards.

    Args:
        worker: the worker.
        compares: whether there is anything to compare; without that nothing is sent.
    """

    def __init__(self, worker: Worker, compares: bool) -> None:
        self._worker = worker
        self._compares = compares
        self._told: Handle | None = None

    def say(self, mode: Mode) -> None:
        """Begin to compare. A mode that was said for a backward that failed afterwards still holds."""
        # A learner takes part in collectives after its first round, and no worker waits for a straggler.
        membership = self._worker._session.membership
        if not self._compares or self._told is not None:
            return
        if self._worker._session.stage is not Stage.MEMBER or membership.late or membership.mode != "sync":
            return
        modes = np.zeros(self._worker.world_size, np.uint8)
        modes[self._worker.rank] = mode
        self._told = self._worker.all_reduce(modes, op="max", async_op=True)

    def heed(self) -> bool:
        """Wait for the others' modes. Return whether some are in eval mode.

        Raises:
            DisagreementError: the workers are in different modes.
        """
        if self._told is None:
            return False
        modes, names = self._told.wait().tolist(), self._worker.names
        self._told = None
        if Mode.TRAINING in modes and Mode.EVAL in modes:
            raise DisagreementError(
                f"backward ran in training mode at {_named(modes, Mode.TRAINING, names)}, and in eval mode at "
                f"{_named(modes, Mode.EVAL, names)}: with exchange_in_eval=False all workers must be in the same mode "
                f"(a backward of one worker alone belongs in no_sync)"
            )
        return Mode.EVAL in modes

    def check(self, mode: Mode) -> None:
        """Compare now. Raises DisagreementError."""
        self.say(mode)
        self.heed()

    def pass_eval(self) -> None:
        """Take part without batches until no other worker is in eval mode."""
        self.say(Mode.OUT_OF_DATA)
        while self.heed():
            self.say(Mode.OUT_OF_DATA)


def _named(modes: list[int], mode: Mode, names: tuple[str, ...]) -> str:
    found = [f"{names[rank]!r} (rank {rank})" for rank, other in enumerate(modes) if other == mode]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more
