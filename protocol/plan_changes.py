"""Changes of plans: a section that is added, and the first place where two plans differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import zip_longest

from gradserver.protocol.exchange import Kind
from gradserver.protocol.plan import VACANT, Plan, Section


def extend(plan: Plan | None, since: int, new: Plan, dropped: Collection[int] = (), now: int = 0) -> Plan:
    """Add a section with the buckets of ``new`` to ``plan``. The others keep the numbers of their buckets.

    Args:
        plan: what is exchanged so far; None for nothing.
        since: the first round of ``plan``, if it does not say so itself.
        new: the buckets that are added. They take the place of dropped ones, if there is enough room in a row.
        dropped: the numbers of sections that are not exchanged any more.
        now: the first round in which ``new`` can be exchanged.

    Raises:
        InvalidArgumentError: together they have more buckets or parameters than a plan may have.
    """
    if plan is None:
        return new
    before = plan.sections or (plan.each[0]._replace(since=since),)
    kept = [section for section in before if section.number not in dropped]
    buckets = list(plan.buckets)
    for section in before:
        if section.number in dropped:
            buckets[section.first : section.first + section.size] = [VACANT] * section.size
    taken = {part for section in kept for part in section.parts}
    count, end = len(new.buckets), max(taken, default=-1) + 1
    first = next((f for f in range(end) if taken.isdisjoint(range(f, f + count))), end)
    buckets[end:] = [VACANT] * (max(first + count, end) - end)
    buckets[first : first + count] = new.buckets
    return Plan(tuple(buckets), (*kept, Section(before[-1].number + 1, now, first, count)))


def first_difference(one: Plan, other: Plan) -> tuple[str, str] | None:
    """Return the first place where two plans differ, as each side has it; None when they are equal."""
    for mine, theirs in zip_longest(_rows(one), _rows(other)):
        if mine != theirs:
            return mine or "nothing (its plan ends before)", theirs or "nothing (its plan ends before)"
    return None


def _rows(plan: Plan) -> Iterator[str]:
    for bucket in plan.buckets:
        for component in bucket.components:
            shape = "×".join(map(str, component.shape)) or "scalar"
            yield f"{component.name} ({shape}, {bucket.dtype.name}, {bucket.op.name.lower()}) in bucket {bucket.key!r}"
        codec = f" as {bucket.codec.name}" if bucket.codec else ""
        kind = ", commit" if bucket.kind is Kind.COMMIT else ""
        yield f"the end of bucket {bucket.key!r} ({bucket.dtype.name}, {bucket.op.name.lower()}{codec}{kind})"
