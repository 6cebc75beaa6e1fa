"""The oracle's evidence: the coordinator's ledger, and the lines of the workers and of the run itself.

Workers print a line of JSON for each round that they have finished. The run writes all lines, and its own, to one file,
in the order in which it reads them:

    {"kind": "gives", "name", "round", "rank"}   a worker begins to contribute to a round
    {"kind": "round", "name", "round", "rank", "results": […], "weights", "way", "at"}    it has finished it
                                                 (and its "staleness", where rounds do not wait for all)
    {"kind": "replayed", …}                      the same, but without contributing, as a learner, or for want of a
                                                 contribution where rounds do not wait for all
    {"kind": "dropped", "name", "round"}         its contribution was refused, as it was too old
    {"kind": "meets", "name", "round"}           it begins with the collectives behind a round
    {"kind": "met", "name", "round", "rank", "sums", "gathered", "broadcast", "half", "half_sum", "among"}
                                                 it has finished them
    {"kind": "entered" | "out" | "left", …}      it has joined, is out of the group, or has left it
    {"kind": "dies", "name", "round"}            it kills itself, in the middle of a push
    {"kind": "fault", "name", "text"}            a collective gave it a wrong result
    {"kind": "event" | "healed", …}              the run has injected an event
    {"kind": "full", "at"}                       the coordinator's disk is full from now on
    {"kind": "stalled", "at"}                    no round was finished for some time; logs have the stacks
    {"kind": "calm" | "stormy" | "end", "at"}    a part of the run has begun

Times are those of the machine's monotonic clock, like the ledger's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradserver.engine.journal_state import Dated
from gradserver.ledger.files import files_of
from gradserver.ledger.journal import HEADER_BYTES, Entry, header, scan

HEARD: Final = "heard.jsonl"
LEDGER: Final = "ledger"


class Report(NamedTuple):
    """One worker's report of a finished round: fingerprints of every bucket's result, and of its weights afterwards.

    Ranks are those after the round, in the order of member ids. ``gave`` is False for a learner.
    """

    name: str
    round: int
    rank: int
    results: tuple[int, ...]
    weights: int
    at: float
    gave: bool = True
    staleness: int = 0
    way: str = ""
    """Way of the round, if workers may reduce among themselves: "direct", "void" or "coordinator"."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Report:
        """Read the report in a line."""
        gave = line["kind"] == "round"
        results, way = tuple(line["results"]), line.get("way", "")
        stale = line.get("staleness", 0)
        return cls(line["name"], line["round"], line["rank"], results, line["weights"], line["at"], gave, stale, way)


class Met(NamedTuple):
    """Results of the collectives behind a round, at one worker.

    Attributes:
        sums: sums of tallies (`gradserver.tools.chaos.tally`), of each operation or slice of one.
        gathered: codes that an all_gather returned, by rank.
        broadcast: code that a broadcast returned; None if it failed everywhere.
        half: names of the members of the sub-group that this worker was in; empty if there was none.
        half_sum: the sum of tallies in that.
        among: true if the large sum was made among the workers.
    """

    name: str
    rank: int
    sums: dict[str, list[int]]
    gathered: tuple[int, ...]
    broadcast: int | None
    half: tuple[str, ...] = ()
    half_sum: tuple[int, ...] = ()
    among: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Met:
        """Read the results in a line."""
        half = tuple(line.get("half", ())), tuple(line.get("half_sum", ()))
        every = line["sums"], tuple(line["gathered"]), line["broadcast"]
        return cls(line["name"], line["rank"], *every, *half, line.get("among", False))


class HeardTail:
    """Reader of the lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Read the complete lines since the last time."""
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield json.loads(line)


class LedgerTail:
    """Reader of the records of a growing ledger. Restated records come again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[int, int] = {}
        """Position up to which each file was read, by its number."""

    def read(self) -> Iterator[Dated]:
        """Read the complete records since the last time."""
        if not self._path.exists():
            return
        for number, path in files_of(self._path):
            start = self._read.get(number, HEADER_BYTES)
            try:
                with path.open("rb") as stream:
                    stream.seek(start)
                    rest = stream.read()
            except FileNotFoundError:  # it was the oldest, and has just been deleted
                continue
            for item in scan(header(number) + rest):
                if isinstance(item, Entry):
                    # A torn end is read again: it may be a record that is being written, or be cut off.
                    self._read[number] = start + item.at - HEADER_BYTES + len(item.body) + FRAME_BYTES
                    yield item.read()


FRAME_BYTES: Final = 17
"""Bytes of a record in front of its body."""
