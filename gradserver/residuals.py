"""Residuals of lossy codecs at the coordinator, kept in files so that the next coordinator has them.

For each slice of a lossy bucket there are two slots, each with the number of the round that left it. Computing the
result of round n reads the slot of the last round before n and writes the other one. The number of that slot is set
when it is complete, and before any member is sent the result. So whenever this process dies, the residual that the
result of round n was computed from still exists. A result that is computed once more has the same bits. If a member
already has the result, the residual that it left exists too.

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

from gradserver.engine.commands import Reduce
from gradserver.engine.declared import Kind
from gradserver.engine.records import Closed, Durable, Plan
from gradserver.lossy import Owed
from gradserver.protocol.errors import reason_of
from gradserver.protocol.exchange import layout_of
from gradserver.protocol.files import open_regular
from gradserver.protocol.plan import Plan as PlanTable

log = logging.getLogger("gradserver")

_PREFIX: Final = "residuals-"
_Places = dict[tuple[int, int], Owed]
"""Residuals by bucket and slice."""
_PAGE: Final = 4096


class Residuals:
    """Residuals of the durable groups that have their records in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._durable: dict[str, int] = {}
        """Grains of groups that survive this process."""
        self._groups: dict[str, dict[Path, _Places]] = {}
        """Files of each group, one for each lossy section."""

    def restore(self, records: Iterable[Kind]) -> frozenset[str]:
        """Restore the residuals of an earlier coordinator. Return the groups that have some."""
        before = set(self._directory.glob(f"{_PREFIX}*.bin"))
        for record in records:
            self.take(record)
        for path in before.difference(*self._groups.values()):
            path.unlink(missing_ok=True)
        return frozenset(group for group, files in self._groups.items() if before.issuperset(files))

    def take(self, record: Kind) -> None:
        """Note a record that was written."""
        match record:
            case Durable(group, _, rates, grain, _):
                if not rates:  # with several shards only some would be kept
                    self._durable[group] = grain
            case Closed(group):
                self._durable.pop(group, None)
                for path in self._groups.pop(group, {}):
                    path.unlink(missing_ok=True)
            case Plan(group, _, number, plan) if group in self._durable:
                self._open(group, number, plan)

    def provide(self, command: Reduce) -> None:
        """Give a reduction its residuals, if they are kept here."""
        memory, place = command.memory, (command.key.part, command.slice)
        if memory is not None and memory.content is None and command.group in self._groups:
            files = self._groups[command.group].values()
            memory.content = next(found[place] for found in files if place in found)

    def _open(self, group: str, number: int, plan: PlanTable) -> None:
        """Open the files of ``plan``. Sections that existed before keep their residuals."""
        before, here = self._groups.get(group, {}), dict[Path, _Places]()
        for section in plan.each:
            alone = plan.alone(section)
            if lengths := dict(_lengths(alone, section.first, self._durable[group])):
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


def _lengths(plan: PlanTable, first: int, grain: int) -> Iterable[tuple[tuple[int, int], int]]:
    """List the number of elements of each lossy slice, by bucket, from ``first`` on, and slice."""
    for part, bucket in enumerate(plan.buckets, first):
        if bucket.operation.is_lossy:
            layout = layout_of(bucket.operation, 1, grain)
            for index in range(layout.count):
                start, stop = layout.span(index)
                yield (part, index), stop - start


def _map(path: Path, size: int) -> mmap.mmap:
    """Map ``size`` bytes of a file, zeros if it is new; memory, if the disk is full."""
    try:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT, links=False)
        try:
            os.posix_fallocate(fd, 0, size)  # a full disk fails here, and does not kill the process later
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        path.unlink(missing_ok=True)
        log.warning(
            "cannot keep %s: %s. If this coordinator dies, the residuals of lossy codecs are lost",
            path,
            reason_of(error),
        )
        return mmap.mmap(-1, size)
