"""``gradserver ledger --repair``: removes damaged records from ledger files that a coordinator refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from gradserver.engine.declared import Kind
from gradserver.engine.journal_state import Dated
from gradserver.engine.records import Epoch, Plan, Round, Snapshot, Start
from gradserver.ledger.files import MAX_FILE_BYTES, OWN, file_number, lock, sync_directory
from gradserver.ledger.journal import HEADER_BYTES, Entry, Fault, check_format, frame, header, scan
from gradserver.ledger.tables import span
from gradserver.printing import say
from gradserver.protocol.errors import StateError, reason_of
from gradserver.protocol.files import open_regular, read_regular

_MOST_TOLD: Final = 100
"""Places of one file that are printed one by one."""


class Loss(NamedTuple):
    """Bytes ``at`` to ``stop``, their fault, and the number of records before them in the file."""

    at: int
    stop: int
    why: str
    before: int


def repair(path: Path, files: Sequence[Path]) -> int:
    """Repair ``files``, which are those of a directory, or the one at ``path``; print losses. Return the exit status.

    Raises:
        StateError: a coordinator uses the directory, it cannot be written, or a file is of another format.
    """
    held = lock(path if path.is_dir() else path.parent)
    try:
        for file in files:
            say(*_mend(file).split("\n"))
    except OSError as error:
        raise StateError(f"cannot repair {path}: {reason_of(error)}") from error
    finally:
        os.close(held)
    return 0


def _mend(file: Path) -> str:
    """Keep the intact records of one file, and the damaged file beside it. Return a report for people."""
    data = read_regular(file, MAX_FILE_BYTES)
    if not data.strip(b"\0"):
        return f"{file.name}: empty, a coordinator will delete it"
    check_format(file, data)
    kept, lost = _sort(file, data)
    if not lost:
        return f"{file.name}: {len(kept)} records, intact"
    beside = _replace(file, _whole(data, file_number(file), kept, lost))
    lines = [f"{file.name}: {len(kept)} records kept, {_places(lost)} lost; the original file is now {beside.name}"]
    lines += [f"  {_tell(loss, kept)}" for loss in lost[:_MOST_TOLD]]
    if len(lost) > _MOST_TOLD:
        lines.append(f"  and {len(lost) - _MOST_TOLD} more")
    return "\n".join(lines)


def _sort(file: Path, data: bytes) -> tuple[list[tuple[Entry, Kind]], list[Loss]]:
    """Sort the file into readable records and losses."""
    kept, lost = list[tuple[Entry, Kind]](), list[Loss]()
    if data[:HEADER_BYTES] != header(file_number(file)):
        lost.append(Loss(0, min(HEADER_BYTES, len(data)), "are not a valid header, which was written again", 0))
    for item in scan(data):
        if isinstance(item, Fault):
            why = "are the beginning of an incomplete record" if item.torn else "are not a record"
            lost.append(Loss(item.at, item.stop, why, len(kept)))
            continue
        try:
            kept.append((item, item.read().record))
        except StateError as error:
            lost.append(Loss(item.at, item.stop, f"cannot be read by this version: {error.message}", len(kept)))
    return kept, lost


def _whole(data: bytes, number: int, kept: Sequence[tuple[Entry, Kind]], lost: Sequence[Loss]) -> bytes:
    """Make a file of the kept records. A snapshot says how many records it restates, of which some may be lost."""
    parts = [header(number)]
    for place, (entry, record) in enumerate(kept):
        if isinstance(record, Snapshot):
            missing = sum(place < loss.before <= place + record.restated for loss in lost)
            parts.append(frame(Dated(entry.clock, Snapshot(max(record.restated - missing, 0)))))
        else:
            parts.append(data[entry.at : entry.stop])
    return b"".join(parts)


def _replace(file: Path, data: bytes) -> Path:
    """Put ``data`` in the place of ``file``, which is kept beside it under the name that is returned."""
    beside, count = file.with_name(f"{file.name}.damaged"), 1
    while beside.exists():
        count += 1
        beside = file.with_name(f"{file.name}.damaged-{count}")
    half = file.with_suffix(".tmp")
    fd = open_regular(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWN, links=False)
    with os.fdopen(fd, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.link(file, beside)
    half.rename(file)
    sync_directory(file.parent)
    return beside


# ── for people ────────────────────────────────────────────────────────────────────────────────────────


def _places(lost: Sequence[Loss]) -> str:
    nbytes = sum(loss.stop - loss.at for loss in lost)
    return f"{nbytes:,} bytes in {len(lost)} place{'s' * (len(lost) > 1)}"


def _tell(loss: Loss, kept: Sequence[tuple[Entry, Kind]]) -> str:
    before = [record for _, record in kept[: loss.before]]
    behind = [record for _, record in kept[loss.before :]]
    where = f"after {_name(before[-1])}" if before else "at the beginning"
    if behind:
        where += f", before {_name(behind[0])}"
    rounds = _rounds(before, behind)
    return f"bytes {loss.at} to {loss.stop - 1}, {where}, {loss.why}" + (f"; {rounds}" if rounds else "")


def _rounds(before: Sequence[Kind], behind: Sequence[Kind]) -> str:
    """Describe the rounds that are missing between the records before a loss and those behind it."""
    last: dict[str, int] = {}
    for record in before:
        if isinstance(record, Round):
            last[record.group] = record.record.round
    missing = []
    for record in behind:
        if isinstance(record, Round) and (number := last.pop(record.group, None)) is not None:
            first, end = number + 1, record.record.round - 1
            if first <= end:
                missing.append(f"{span(first, end)} missing in group {record.group!r}")
    return ", ".join(missing)


def _name(record: Kind) -> str:
    """Describe a record in a few words."""
    match record:
        case Round(group, _, done):
            return f"round {done.round} of group {group!r}"
        case Epoch(group, epoch):
            return f"membership epoch {epoch} of group {group!r}"
        case Plan(group, _, number):
            return f"the plan of group {group!r} from round {number} on"
        case Start(incarnation):
            return f"start {incarnation} of a coordinator"
    group = getattr(record, "group", "")
    return f"a {type(record).__name__}" + (f" of group {group!r}" if group else "")
