"""Tables about one group of a ledger, of at most 100 columns."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import median
from textwrap import wrap

from gradserver.engine.data_records import Data
from gradserver.engine.declared import Kind
from gradserver.engine.lateness import BEGAN_LATE, SENT_SLOWLY, UNKNOWN, Lag, lags, slowest, was_there
from gradserver.engine.policy import OnNonFinite
from gradserver.engine.records import (
    Begun,
    Chosen,
    Closed,
    Cut,
    Durable,
    Epoch,
    Group,
    Halt,
    Handling,
    Moded,
    Outlier,
    Plan,
    Reset,
    Round,
    RoundRecord,
    Start,
)
from gradserver.ledger.audits import audit_remark, audited
from gradserver.ledger.staleness import Staleness
from gradserver.protocol.digest import MODULUS
from gradserver.protocol.exchange import EXACT
from gradserver.protocol.ranges import Ranges, count
from gradserver.tables import counted, table

_SHOWN_ROUNDS = 10
_SHOWN_EVENTS = 10
_SHOWN_RANGES = 4
_SHOWN_NAME = 24
"""Characters; longer names are cut, so that a table fits its columns."""
_UNKNOWN = "????-??-?? ??:??:??"


class Story:
    """History of a group from the time when it was complete to its end, as far as the ledger goes.

    Attributes:
        chosen: rounds that the user has asked for.
        first: first round in the ledger; None if there is none.
        last: last round.
        ended: whether the group has ended by itself.
        durable: whether the group survives its coordinator.
    """

    def __init__(self, founded: Group, clock: float, start: Start | None) -> None:
        self.name, self.world = founded.group, founded.world
        self.start = start
        self.since = moment(start, clock)
        self.epoch = 0
        self.names: dict[int, str] = {}
        self.plan: Plan | None = None
        self.data: dict[str, str] = {}
        self.chosen: list[Round] = []
        self.first: int | None = None
        self.last = -1
        self.hashed = self.count = 0
        self.ended = self.durable = False
        self.events: deque[str] = deque(maxlen=_SHOWN_EVENTS)
        self.recent: deque[RoundRecord] = deque(maxlen=_SHOWN_ROUNDS)
        self.took = array("f")
        self.behind: defaultdict[int, defaultdict[int, array[float]]] = defaultdict(
            lambda: defaultdict(lambda: array("f"))
        )
        """Seconds that each member was behind the others, by section: each round of a step has another one."""
        self.given: Counter[int] = Counter()
        self.late: Counter[tuple[int, str]] = Counter()
        self.came_last: Counter[int] = Counter()
        self.unmeasured = 0
        """Rounds that do not tell which member was late."""
        self.closed: dict[int, list[Cut]] = {}
        """Rounds that were closed without some members."""
        self.missed: Counter[int] = Counter()
        self.handling = OnNonFinite.HALT
        self.mode = ""
        self.staleness: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        self.stale: dict[int, dict[int, int]] = {}
        """Staleness of each contribution to the rounds that the user has asked for, by round and member id."""
        self._staleness = Staleness()
        self.bad: Counter[int] = Counter()
        """Number of rounds to which each member contributed NaN or Inf."""

    def take(self, record: Kind, clock: float) -> None:
        """Add the next record."""
        match record:
            case Epoch(_, epoch, number, members, reason):
                self.epoch = epoch
                self.names.update(members)
                self._note(clock, f"before round {number}: {plain(reason)}")
            case Chosen(_, _, plane, reason):
                self._note(clock, f"plane {plane}, because {plain(reason)}")
            case Plan():
                self.plan = record
            case Durable():
                self.durable = True
            case Handling(_, nonfinite, mean):
                self.handling = nonfinite
                if mean.is_robust:
                    self._note(clock, f"gradients are averaged by the mean {mean}")
            case Reset(_, number):
                self._note(clock, f"before round {number}: residuals of lossy codecs were lost, and reset")
            case Outlier():
                self._note(clock, record.told(plain(self.names.get(record.member_id, str(record.member_id)))))
            case Halt(_, _, number, error, reason):
                self._note(clock, f"in round {number}: {error}: {plain(reason)}")
            case Closed(_, _, rounds, reason):
                self.ended = True
                self._note(clock, f"after {rounds} rounds: {plain(reason)}")
            case Cut(_, _, number, member_ids, reason):
                if number not in self.closed:
                    self._note(clock, plain(reason))
                self.closed.setdefault(number, []).append(record)
                self.missed.update(member_ids)
            case Moded(_, mode, bound, damping):
                self.mode = f"{mode}, staleness {bound} at most" if bound >= 0 else mode
                self.mode += f", damping {damping}" if damping != "none" else ""
            case Begun():
                self._staleness.begin(record)
            case Round(_, _, found):
                self._count(found)
            case Data(_, name, order):
                self.data[name] = str(order)

    def lost_coordinator(self, start: Start, clock: float) -> None:
        """Note that the coordinator was lost; ``start`` is the next one's."""
        if not self.durable:
            self.events.append("its coordinator was lost")
            return
        self.start = start
        self._note(
            clock, f"after round {self.last}: its coordinator was started again, incarnation {start.incarnation}"
        )

    def _note(self, clock: float, what: str) -> None:
        self.events.append(f"{moment(self.start, clock)}  {what}")

    def _count(self, record: RoundRecord) -> None:
        self.first = record.round if self.first is None else self.first
        self.last = record.round
        self.count += 1
        self.hashed += bool(record.inputs)
        self.recent.append(record)
        self.took.append(record.completed - record.opened)
        self._staleness.complete(record)
        for member_id, staleness in self._staleness.latest.items():
            self.staleness[member_id].append(staleness)
        self.bad.update({member_id for member_id, _, _, _ in record.nonfinite})
        for member_id, weight in enumerate(record.weights):
            self.given[member_id] += weight > 0
        found = lags(record)
        last = slowest(found)
        self.came_last[last] += 1
        self.unmeasured += last < 0 and len(record.weights) > 1
        for member_id, lag in found.items():
            self.late[member_id, lag.cause] += 1
            if lag.cause != UNKNOWN:
                self.behind[member_id][record.section].append(lag.seconds)

    def usually_behind(self, member_id: int) -> float | None:
        """Return the median of the seconds that a member was behind; of several modules, that of the largest."""
        return max((median(found) for found in self.behind[member_id].values()), default=None)

    def choose(self, record: Round) -> None:
        """Note that the user has asked for this round, the last one."""
        self.chosen.append(record)
        self.stale[record.record.round] = self._staleness.latest

    def call(self, member_id: int) -> str:
        """Return the name of a member, cut to the width of a column."""
        name = plain(self.names.get(member_id, "?"))
        return name if len(name) <= _SHOWN_NAME else name[: _SHOWN_NAME - 1] + "…"


def summary(story: Story) -> list[str]:
    """Show how often each member contributed and was waited for, the events, and the last rounds."""
    world = counted(story.world, "worker")
    lines = [f"group {story.name!r}: {world}, membership epoch {story.epoch}, since {story.since}"]
    if story.mode:
        lines.append(f"  mode: {plain(story.mode)}")
    if story.plan is not None:
        lines.append(f"  plan: {story.plan.plan.size}, {_wires(story.plan)}")
    lines += [f"  data {plain(name)!r}: {order}" for name, order in story.data.items()]
    if story.first is None:
        lines.append("  no round was completed")
    else:
        lines.append(
            f"  {span(story.first, story.last)}: {_seconds(median(story.took))} median, "
            f"{_seconds(max(story.took))} maximum; {story.hashed} of {story.count} have digests"
        )
        rows = [
            [
                member_id,
                story.call(member_id),
                story.given[member_id],
                story.came_last[member_id],
                _known(story.usually_behind(member_id)),
                story.late[member_id, BEGAN_LATE],
                story.late[member_id, SENT_SLOWLY],
            ]
            for member_id in sorted(story.names)
        ]
        heads = ["member", "worker", "rounds", "came last", "behind", BEGAN_LATE, SENT_SLOWLY]
        if story.missed:
            heads.append("too late")
            rows = [[*row, story.missed[member_id]] for row, member_id in zip(rows, sorted(story.names), strict=True)]
        if story.staleness:
            heads.append("stale, most")
            shown = [_staleness(story.staleness[member_id]) for member_id in sorted(story.names)]
            rows = [[*row, stale] for row, stale in zip(rows, shown, strict=True)]
        if story.bad:
            heads.append("not finite")
            rows = [[*row, story.bad[member_id]] for row, member_id in zip(rows, sorted(story.names), strict=True)]
        lines += table(heads, rows)
        if story.unmeasured:
            lines.append(f"  {counted(story.unmeasured, 'round')} of {story.count} do not tell which worker was late")
    lines += [
        line for event in story.events for line in wrap(event, 98, initial_indent="  ", subsequent_indent=" " * 23)
    ]
    if story.recent:
        lines += _rows(story, list(story.recent))
    return lines


def _staleness(found: Sequence[int]) -> str:
    """Show the mean and the largest of some stalenesses."""
    return f"{sum(found) / len(found):.2g}, {max(found)}" if found else "-"


def round_rows(story: Story, found: Sequence[Round]) -> list[str]:
    """Show one line for each round: the member that it waited for, how long, and why."""
    first, last = found[0].epoch, found[-1].epoch
    epochs = f"membership epoch {first}" if first == last else f"membership epochs {first} to {last}"
    return [f"group {story.name!r}, {epochs}:", *_rows(story, [each.record for each in found])]


def _rows(story: Story, records: Sequence[RoundRecord]) -> list[str]:
    rows = []
    for record in records:
        found = lags(record)
        last = slowest(found)
        rows.append(
            [
                record.round,
                moment(story.start, record.completed)[11:],
                _seconds(record.completed - record.opened),
                f"{sum(weight > 0 for weight in record.weights)} of {_present(record)}",
                "-" if last < 0 else story.call(last),
                "-" if last < 0 else _seconds(found[last].seconds),
                _remark(story, record) or _cause(found),
                hexadecimal(sum(record.results) % MODULUS) if record.results else "-",
            ]
        )
    return table(["round", "done at", "took", "counted", "came last", "behind", "why", "digest"], rows)


def _cause(found: Mapping[int, Lag]) -> str:
    """Return why the others waited for the last member of a round, if they did."""
    last = slowest(found)
    return (UNKNOWN if found else "") if last < 0 else found[last].cause


def _known(seconds: float | None) -> str:
    return "-" if seconds is None else _seconds(seconds)


def _remark(story: Story, record: RoundRecord) -> str:
    if record.nonfinite:
        return "skipped" if story.handling is OnNonFinite.SKIP else "left out"
    return "too late" if record.round in story.closed else audit_remark(record)


def one_round(story: Story, found: Round) -> list[str]:
    """Show all details of one round."""
    record = found.record
    lines = [
        f"round {record.round} of group {story.name!r}, membership epoch {found.epoch}: "
        f"{moment(story.start, record.opened)}, took {_seconds(record.completed - record.opened)}"
    ]
    total = sum(record.weights)
    found_lags = lags(record)
    rows = []
    for member_id, weight in enumerate(record.weights):
        first, last = record.arrivals[member_id] if record.arrivals else (record.opened, None)
        rows.append(
            [
                member_id,
                story.call(member_id),
                f"{weight:g}",
                f"{weight / total:.1%}" if weight else "left out",
                _seconds(first - record.opened),
                _known(None if last is None else last - record.opened),
                found_lags[member_id].cause if member_id in found_lags else "",
                story.stale.get(record.round, {}).get(member_id, "-"),
                hexadecimal(record.inputs[member_id]) if record.inputs else "-",
            ]
        )
    heads = ["member", "worker", "weight", "share", "began", "ended", "", "stale", "digest of what counted"]
    if not story.mode:
        heads.remove("stale")
        rows = [[*row[:-2], row[-1]] for row in rows]
    lines += table(heads, rows)
    for closing in story.closed.get(record.round, []):
        lines += wrap(plain(closing.reason), 98, initial_indent="  ", subsequent_indent="    ")
    lines += _not_finite(story, record) + audited(record, story.call, None if story.plan is None else story.plan.plan)
    section = story.plan.plan.section(record.section) if story.plan is not None else None
    if story.plan is not None and section is not None and record.results:
        buckets = [
            [_cut(bucket.key), bucket.numel, bucket.dtype.name, (bucket.codec or EXACT).name, hexadecimal(found)]
            for bucket, found in zip(story.plan.plan.alone(section).buckets, record.results, strict=False)
        ]
        lines += table(["bucket", "elements", "type", "wire", "digest of the result"], buckets)
    rows = [
        [
            plain(used.name),
            used.epoch,
            story.call(used.member_id),
            count(used.ranges),
            _positions(used.ranges),
            "counted in some slices only" if used.partly else "",
        ]
        for used in found.used_up
    ]
    return lines + (table(["data", "epoch", "worker", "samples", "positions", ""], rows) if rows else [])


def _not_finite(story: Story, record: RoundRecord) -> list[str]:
    """Show which members contributed NaN or Inf, to which buckets, and to how many slices of them."""
    if not record.nonfinite:
        return []
    buckets = story.plan.plan.buckets if story.plan is not None else ()
    rows = []
    for member_id, part, slices, first in record.nonfinite:
        bucket = buckets[part] if part < len(buckets) else None
        known = bucket is not None and 0 <= first < bucket.numel
        parameter = _cut(bucket.component_at(first).name) if bucket is not None and known else "?"
        parameter += " (buffer)" if bucket is not None and bucket.has_buffers else ""
        rows.append([story.call(member_id), _cut(bucket.key) if bucket is not None else part, slices, parameter])
    becomes = "skipped by all workers" if story.handling is OnNonFinite.SKIP else "left out"
    return [f"  NaN or Inf, {becomes}:", *table(["worker", "bucket", "slices", "first parameter"], rows)]


def _positions(ranges: Ranges) -> str:
    shown = [f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in ranges[:_SHOWN_RANGES]]
    return ", ".join(shown) + (f" and {len(ranges) - _SHOWN_RANGES} more" if len(ranges) > _SHOWN_RANGES else "")


def _present(record: RoundRecord) -> int:
    return sum(not record.arrivals or was_there(record, member_id) for member_id in range(len(record.weights)))


def _wires(plan: Plan) -> str:
    names = dict.fromkeys((bucket.codec or EXACT).name for bucket in plan.plan.buckets)
    return f"as {', '.join(names)}"


def _cut(name: str) -> str:
    return plain(name if len(name) <= 40 else name[:39] + "…")


def plain(text: str) -> str:
    """Replace characters that could disturb a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def span(first: int, last: int) -> str:
    """Name the rounds from ``first`` to ``last``."""
    return f"round {first}" if first == last else f"rounds {first} to {last}"


def hexadecimal(value: int) -> str:
    """Format a digest."""
    return f"{value:016x}"


def moment(start: Start | None, clock: float) -> str:
    """Format the local time at which the coordinator's clock showed ``clock``."""
    try:
        wall = clock if start is None else start.wall + clock - start.clock
        return datetime.fromtimestamp(wall).isoformat(" ", "seconds")
    except (OverflowError, OSError, ValueError):  # no clock has ever shown this
        return _UNKNOWN


def _seconds(seconds: float) -> str:
    return f"{round(seconds, 3) + 0.0:.3f} s"  # not -0.000
