"""What lossy codecs keep back at the coordinator, in files, so that the next coordinator owes what this one did.

For each slice of a lossy bucket there are two slots, each with the number of the round whose result left it. Making the
result of round n reads the slot of the last round before n and writes the other one, whose number is set when it is
whole, and before anybody is sent the result. So whenever this process dies, what the result of round n was made from is
still there: made once more, it has the same bits; and if somebody has it already, what it left is there too.

    file     number of the round plus one, or 0, of both slots of each slice (u64); then both slots of each (float32)

Files are mapped: a killed process loses nothing of them, a machine that loses power may. They are allocated when a plan
is agreed on; if that is not possible they are memory, which the log says.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from gradserver.engine.declared import Kind
from gradserver.engine.events import Reduce
from gradserver.engine.records import Closed, Durable, Plan
from gradserver.lossy import Owed
from gradserver.protocol.errors import reason_of
from gradserver.protocol.exchange import Stream, layout_of
from gradserver.protocol.plan import Plan as PlanTable

log = logging.getLogger("gradserver")

_PREFIX: Final = "residuals-"
_Places = dict[tuple[int, int], Owed]
"""What is owed, by bucket and slice."""
_PAGE: Final = 4096


class Residuals:
    """Those of the durable groups whose records are kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._durable: set[str] = set()
        self._groups: dict[str, dict[Path, _Places]] = {}
        """Of each group the files, one for each section that is lossy."""

    def restore(self, records: Iterable[Kind]) -> frozenset[str]:
        """Go on from what an earlier coordinator has left. The groups of which there is something."""
        before = set(self._directory.glob(f"{_PREFIX}*.bin"))
        for record in records:
            self.take(record)
        known = {path for files in self._groups.values() for path in files}
        for path in before - known:
            path.unlink(missing_ok=True)
        return frozenset(group for group, files in self._groups.items() if before.issuperset(files))

    def take(self, record: Kind) -> None:
        """Something was written down."""
        match record:
            case Durable(group, _, rates):
                if not rates:  # of several shards only some would be kept
                    self._durable.add(group)
            case Closed(group):
                self._durable.discard(group)
                self._forget(group)
            case Plan(group, _, number, plan) if group in self._durable:
                self._open(group, number, plan)

    def provide(self, command: Reduce) -> None:
        """Give a reduction what is owed to it, if that is kept here."""
        place = command.key.part, command.slice
        if command.key.stream == Stream.BUCKET and place not in command.state and command.group in self._groups:
            files = self._groups[command.group].values()
            command.state[place] = next(found[place] for found in files if place in found)

    def _open(self, group: str, number: int, plan: PlanTable) -> None:
        """Go by ``plan``: sections that were there before keep what they have."""
        before, here = self._groups.get(group, {}), dict[Path, _Places]()
        for section in plan.each:
            alone = plan.alone(section)
            if lengths := dict(_lengths(alone, section.first)):
                since = section.since if plan.sections else number
                which = f"\0{section.number}" if section.number else ""
                whole = f"{group}\0{since}\0{alone.hash}{which}"
                path = self._directory / f"{_PREFIX}{hashlib.sha256(whole.encode()).hexdigest()[:32]}.bin"
                here[path] = before[path] if path in before else self._map(path, lengths)
        for path in before.keys() - here.keys():
            path.unlink(missing_ok=True)
        self._groups[group] = here
        if not here:
            del self._groups[group]

    def _map(self, path: Path, lengths: dict[tuple[int, int], int]) -> _Places:
        rounds_bytes = -(-16 * len(lengths) // _PAGE) * _PAGE
        memory = np.frombuffer(_map(path, rounds_bytes + 8 * sum(lengths.values())), np.uint8)
        rounds = memory[: 16 * len(lengths)].view(np.uint64).reshape(-1, 2)
        values, at = memory[rounds_bytes:].view(np.float32), 0
        found: dict[tuple[int, int], Owed] = {}
        for row, (place, numel) in enumerate(lengths.items()):
            found[place] = Owed(values[at : at + 2 * numel].reshape(2, numel), rounds[row])
            at += 2 * numel
        return found

    def _forget(self, group: str) -> None:
        for path in self._groups.pop(group, {}):
            path.unlink(missing_ok=True)


def _lengths(plan: PlanTable, first: int) -> Iterable[tuple[tuple[int, int], int]]:
    """Elements of each slice of what is lossy, by bucket, from ``first`` on, and slice."""
    for part, bucket in enumerate(plan.buckets, first):
        if bucket.operation.is_lossy:
            layout = layout_of(bucket.operation, 1)
            for index in range(layout.count):
                start, stop = layout.span(index)
                yield (part, index), stop - start


def _map(path: Path, size: int) -> mmap.mmap:
    """So many bytes of a file, zeros if it is new; of memory, if the disk does not give them."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)  # a disk that is full says so now, and kills nobody later
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        log.warning(
            "cannot keep %s: %s. If this coordinator dies, what lossy codecs had kept back is lost",
            path,
            reason_of(error),
        )
        return mmap.mmap(-1, size)
