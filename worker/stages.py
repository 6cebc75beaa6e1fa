"""How far a worker has come into its group; the table is in `gradserver.worker.entry`."""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    """One's own part in a group."""

    JOINING = "joins a group that trains already"
    OBSERVING = "catches up with a group that trains already"
    ENTERED = "has just joined, and is in its first round"
    MEMBER = "is a member"
