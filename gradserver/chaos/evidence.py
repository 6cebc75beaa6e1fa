"""What the oracle goes by: the coordinator's ledger, and what workers and the run itself have said, line by line.

Workers print a line of JSON for each round that they have finished, and the run writes all of them, and what it does,
into one file, in the order in which it heard them:

    {"kind": "gives", "name", "round", "rank"}   a worker begins to contribute to a round
    {"kind": "round", "name", "round", "rank", "results": […], "weights", "at"}    it has finished the round
    {"kind": "replayed", …}                      the same, but it only took part in its result, as it was coming in
    {"kind": "meets", "name", "round"}           it begins with the collectives behind a round
    {"kind": "met", "name", "round", "rank", "sums", "gathered", "broadcast"}      it is through with them
    {"kind": "entered" | "out" | "left", …}      it has come in, is out of the group, or has left it
    {"kind": "dies", "name", "round"}            it kills itself, in the midst of a push
    {"kind": "fault", "name", "text"}            what it got from a collective is not what it should be
    {"kind": "event" | "healed", …}              the run has done something to somebody
    {"kind": "full", "at"}                       from now on the coordinator's disk is full
    {"kind": "calm" | "stormy" | "end", "at"}    a part of the run has begun

Times are those of the machine's monotonic clock, which the ledger's are, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradserver.engine.journal_state import Dated
from gradserver.ledger.journal import HEADER_BYTES, Entry, header, scan
from gradserver.ledger.state import files_of

HEARD: Final = "heard.jsonl"
LEDGER: Final = "ledger"


class Report(NamedTuple):
    """One worker's report of a finished round: fingerprints of every bucket's result, and of its weights afterwards.

    Ranks are in the order of seats, and those after the round. ``gave`` is False for a worker that was coming in.
    """

    name: str
    round: int
    rank: int
    results: tuple[int, ...]
    weights: int
    at: float
    gave: bool = True

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Report:
        """The report in a line."""
        gave = line["kind"] == "round"
        return cls(line["name"], line["round"], line["rank"], tuple(line["results"]), line["weights"], line["at"], gave)


class Met(NamedTuple):
    """What one worker got from the collectives behind a round.

    Attributes:
        sums: of tallies (`gradserver.chaos.tally`): each that some operation or some slice of one has brought.
        gathered: the codes that an all_gather has brought, by rank.
        broadcast: the code that a broadcast has brought; None if it failed everywhere.
    """

    name: str
    rank: int
    sums: dict[str, list[int]]
    gathered: tuple[int, ...]
    broadcast: int | None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Met:
        """What is in a line."""
        return cls(line["name"], line["rank"], line["sums"], tuple(line["gathered"]), line["broadcast"])


class HeardTail:
    """Reads the lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> Iterator[dict[str, Any]]:
        """What is there since the last time, as far as lines are whole."""
        with self._path.open("rb") as stream:
            stream.seek(self._at)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                yield json.loads(line)


class LedgerTail:
    """Reads the records of a directory in which somebody writes. What is restated comes again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read: dict[int, int] = {}
        """Up to where each file was read, by its number."""

    def read(self) -> Iterator[Dated]:
        """What is there since the last time, as far as records are whole."""
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
                    # A torn end is read again: it may be half of what is being written, or be cut off.
                    self._read[number] = start + item.at - HEADER_BYTES + len(item.body) + FRAME_BYTES
                    yield item.read()


FRAME_BYTES: Final = 17
"""Of a record in front of its body."""
