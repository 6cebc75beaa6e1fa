"""``gradserver ledger``: shows a coordinator's ledger to people and to programs, and checks it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradserver.engine.declared import Kind
from gradserver.engine.records import Gap, Group, Plan, Round, RoundRecord, Snapshot, Start
from gradserver.json_text import json_text
from gradserver.ledger.files import MAX_FILE_BYTES, files_of
from gradserver.ledger.journal import Entry, Fault, number_of, scan
from gradserver.ledger.repair import repair
from gradserver.ledger.tables import Story, hexadecimal, moment, one_round, round_rows, span, summary
from gradserver.printing import complain, say
from gradserver.protocol.errors import StateError, reason_of
from gradserver.protocol.exchange import EXACT
from gradserver.protocol.files import read_regular
from gradserver.protocol.limits import KIB, MIB
from gradserver.protocol.means import Mean
from gradserver.tables import counted


class Selection(NamedTuple):
    """Selection of what to show: rounds ``first`` to ``last``, or one; of one group, or of all."""

    group: str | None = None
    one: int | None = None
    first: int | None = None
    last: int | None = None

    def has(self, number: int) -> bool:
        """Return whether a round is in it."""
        if self.one is not None:
            return number == self.one
        return (self.first is None or self.first <= number) and (self.last is None or number <= self.last)

    @property
    def is_all(self) -> bool:
        """True if the user did not ask for certain rounds."""
        return self.one is None and self.first is None and self.last is None


class Written(NamedTuple):
    """A record, the time at which it was written, and whether it only restates an earlier file."""

    record: Kind
    clock: float
    restated: bool


def export(path: str, target: str) -> int:
    """Write all readable records of the ledger at ``path`` to ``target``, one JSON object a line. Return exit status 0.

    Places that cannot be read have lines of their own. Secrets, by which members of durable groups are known, are
    left out.
    """
    files, faults = list[Path](), list[str]()
    for file in _files(Path(path)):
        try:
            _content(file)
            files.append(file)
        except StateError as error:
            faults.append(error.message)
    count = 0
    try:
        with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            for line in _lines(_read(files, faults), Selection()):
                out.write(json_text(line) + "\n")
                count += 1
            for fault in faults:
                out.write(json_text({"kind": "damage", "what": fault}) + "\n")
    except OSError as error:
        raise StateError(f"cannot write {target}: {reason_of(error)}") from error
    damage = f", {len(faults)} places could not be read" if faults else ""
    say(f"{target}: {count} records written{damage}")
    return 0


def mend(path: str) -> int:
    """Repair the ledger at ``path``: remove damaged records, and keep the original files beside the new ones."""
    return repair(Path(path), _files(Path(path)))


def show(path: str, selection: Selection, as_json: bool, verify: bool) -> int:
    """Print the ledger at ``path``. The exit status is 1 if something in it is damaged or missing."""
    files = _files(Path(path))
    if verify:
        return _verify(files, selection.group)
    faults: list[str] = []
    written = _read(files, faults)
    if as_json:
        found = 0
        for line in _lines(written, selection):
            print(json_text(line))
            found += line["kind"] == "round"
        if not selection.is_all and not found:
            raise _nothing(path, selection, list(_read(files, [])))
    else:
        say(*_text(path, files, written, selection))
    for fault in faults:
        complain("gradserver", fault)
    return 1 if faults else 0


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise StateError(f"no ledger at {path}: no such file or directory")
    if not path.is_dir():
        return [path]
    files = [file for _, file in files_of(path)]
    if not files:
        raise StateError(f"{path} contains no ledger: `gradserver serve --state-dir {path}` writes one")
    return files


def _content(file: Path) -> bytes:
    try:
        data = read_regular(file, MAX_FILE_BYTES)
    except OSError as error:
        raise StateError(f"cannot read {file}: {reason_of(error)}") from error
    if data.strip(b"\0"):
        number_of(file, data)
    return data


def _read(files: Sequence[Path], faults: list[str]) -> Iterator[Written]:
    """Read all records, in order. Damaged places are skipped, and described in ``faults``."""
    for file in files:
        restated = 0
        for item in scan(_content(file)):
            if isinstance(item, Fault):
                if not item.torn:
                    faults.append(
                        f"{file} is damaged: bytes {item.at} to {item.stop} are not a record and were skipped"
                    )
                continue
            try:
                clock, record = item.read()
            except StateError as error:
                faults.append(f"{file}: {error.message}")
                continue
            yield Written(record, clock, restated > 0 and file != files[0])
            restated = record.restated if isinstance(record, Snapshot) else max(restated - 1, 0)


# ── for people ────────────────────────────────────────────────────────────────────────────────────────


def _text(path: str, files: Sequence[Path], written: Iterator[Written], selection: Selection) -> list[str]:
    stories, gaps = _stories(written, selection)
    names = {story.name for story in stories}
    if selection.group is not None and selection.group not in names:
        raise _no_group(path, selection.group, names)
    told = [story for story in stories if selection.group in (None, story.name)]
    if not selection.is_all and not any(story.chosen for story in told):
        raise _no_rounds(path, selection, told)
    if selection.one is not None:
        return [line for story in told for found in story.chosen for line in (*one_round(story, found), "")][:-1]
    if not selection.is_all:
        return [line for story in told if story.chosen for line in (*round_rows(story, story.chosen), "")][:-1]
    size = sum(file.stat().st_size for file in files)
    lines = [f"{path}: {counted(len(files), 'file')}, {_size(size)}"]
    lines += [
        f"gap: from {at} the disk could not be written ({gap.reason}), {gap.lost} records were lost" for at, gap in gaps
    ]
    if not told:
        lines.append("no groups: none was ever complete")
    for story in told:
        lines += ["", *summary(story)]
    return lines


def _stories(written: Iterator[Written], selection: Selection) -> tuple[list[Story], list[tuple[str, Gap]]]:
    """Collect the history of each group, in the order in which they began; and the gaps of the disk."""
    stories: list[Story] = []
    living: dict[str, Story] = {}
    gaps: list[tuple[str, Gap]] = []
    start: Start | None = None
    for record, clock, restated in written:
        if isinstance(record, Start):
            if not restated:
                for story in living.values():
                    if not story.ended:
                        story.lost_coordinator(record, clock)
                living = {name: story for name, story in living.items() if story.durable}
            start = record
        elif isinstance(record, Gap):
            gaps.append((moment(start, record.since), record))
        elif isinstance(record, Group) and not (restated and record.group in living):
            living[record.group] = Story(record, clock, start)
            stories.append(living[record.group])
        elif (group := record.of_group) in living and not restated:
            story = living[group]
            story.take(record, clock)
            if isinstance(record, Round) and not selection.is_all and selection.has(record.record.round):
                story.choose(record)
    return stories, gaps


def _no_group(path: str, group: str, names: set[str]) -> StateError:
    there = ", ".join(repr(name) for name in sorted(names)) or "none"
    return StateError(f"{path} has no group {group!r}; its groups: {there}")


def _no_rounds(path: str, selection: Selection, stories: Sequence[Story]) -> StateError:
    if selection.one is not None:
        what = f"round {selection.one}"
    else:
        what = f"rounds from {selection.first or 0}" + ("" if selection.last is None else f" to {selection.last}")
    there = [f"{story.first} to {story.last} of group {story.name!r}" for story in stories if story.first is not None]
    return StateError(
        f"{path} has no {what}; " + (f"it has rounds {', '.join(there[-8:])}" if there else "it has no rounds at all")
    )


def _nothing(path: str, selection: Selection, written: list[Written]) -> StateError:
    stories, _ = _stories(iter(written), Selection())
    names = {story.name for story in stories}
    if selection.group is not None and selection.group not in names:
        return _no_group(path, selection.group, names)
    return _no_rounds(path, selection, [story for story in stories if selection.group in (None, story.name)])


# ── for programs ──────────────────────────────────────────────────────────────────────────────────────

_SECRET: Final = "secret", "keys"
"""Fields by which a process could pass for a member."""


def _lines(written: Iterator[Written], selection: Selection) -> Iterator[dict[str, Any]]:
    """Make one object for each record. Times are seconds since 1970, digests are hexadecimal."""
    start: Start | None = None
    for record, clock, restated in written:
        if isinstance(record, Start):
            start = record
        if restated or isinstance(record, Snapshot):
            continue
        if record.of_group and selection.group not in (None, record.of_group):
            continue
        if isinstance(record, Round):
            if selection.has(record.record.round):
                yield _round_line(record, start)
        elif selection.is_all:
            line = {one.name: _plain(getattr(record, one.name)) for one in fields(record) if one.name not in _SECRET}
            if isinstance(record, Plan):
                line["plan"] = {
                    "hash": record.plan.hash,
                    "buckets": [
                        {"key": b.key, "dtype": b.dtype.name, "numel": b.numel, "codec": (b.codec or EXACT).name}
                        for b in record.plan.buckets
                    ],
                }
            elif isinstance(record, Gap):
                line["since"] = _wall(start, record.since)
            yield {"kind": type(record).__name__.lower(), "at": _wall(start, clock), **line}


def _plain(value: Any) -> Any:
    """Return a field as JSON has it; a mean is called by its name."""
    return str(value) if isinstance(value, Mean) else value


def _round_line(found: Round, start: Start | None) -> dict[str, Any]:
    record = found.record
    return {
        "kind": "round",
        "group": found.group,
        "epoch": found.epoch,
        "round": record.round,
        "section": record.section,
        "opened": _wall(start, record.opened),
        "completed": _wall(start, record.completed),
        "last": record.last,
        "weights": record.weights,
        "arrivals": [
            [_wall(start, first), None if last is None else _wall(start, last)] for first, last in record.arrivals
        ],
        "inputs": [hexadecimal(value) for value in record.inputs],
        "results": [hexadecimal(value) for value in record.results],
        "used": [one._asdict() for one in found.used_up],
        "nonfinite": [
            {"seat": member_id, "bucket": part, "slices": slices, "element": first}
            for member_id, part, slices, first in record.nonfinite
        ],
        "audit": [
            {"seats": [one.member_id, one.other], "bucket": one.part, "difference": one.relative, "limit": one.limit}
            for one in record.compared
        ],
    }


def _wall(start: Start | None, clock: float) -> float:
    return round(clock if start is None else start.wall + clock - start.clock, 6)


# ── checked ───────────────────────────────────────────────────────────────────────────────────────────


def _verify(files: Sequence[Path], group: str | None) -> int:
    """Print for each file whether it is intact, and for each epoch whether a round is missing."""
    wrong = False
    for file in files:
        line, bad = _check(file)
        say(*line.split("\n"))
        wrong |= bad
    runs: dict[tuple[int, str, int], list[RoundRecord]] = {}
    holes: list[str] = []
    incarnation = 0
    for record, _, restated in _read(files, []):
        if isinstance(record, Start):
            incarnation = record.incarnation
        elif isinstance(record, Gap):
            holes.append(f"gap: {record.lost} records were lost, as the disk could not be written ({record.reason})")
        elif isinstance(record, Round) and not restated and group in (None, record.group):
            known = runs.setdefault((incarnation, record.group, record.epoch), [record.record])
            if known[-1].round + 1 < record.record.round:
                missing = span(known[-1].round + 1, record.record.round - 1)
                holes.append(f"group {record.group!r}, membership epoch {record.epoch}: {missing} missing")
            known[1:] = [record.record]
    for (_, name, epoch), records in runs.items():
        say(f"group {name!r}, membership epoch {epoch}: {span(records[0].round, records[-1].round)}")
    say(*(holes or ["no rounds are missing"]))
    return 1 if wrong or holes else 0


def _check(file: Path) -> tuple[str, bool]:
    count, torn, wrong = 0, "", []
    data = _content(file)
    for item in scan(data):
        if isinstance(item, Entry):
            count += 1
            try:
                item.read()
            except StateError as error:
                wrong.append(error.message)
        elif item.torn:
            torn = f" except for its last {item.stop - item.at} bytes, an incomplete record"
        else:
            wrong.append(f"bytes {item.at} to {item.stop} are not a record")
    state = "\n  ".join(["damaged", *wrong[:8]]) if wrong else f"intact{torn}"
    return f"{file.name}: {count} records, {_size(len(data))}, {state}", bool(wrong)


def _size(count: int) -> str:
    return f"{count / MIB:.1f} MiB" if count >= MIB / 10 else f"{count / KIB:.1f} KiB"
