"""Audited rounds in the ledger: the differences of contributions to the same samples."""

from __future__ import annotations

from collections.abc import Callable

from gradserver.engine.control.audits import size_of, verdict
from gradserver.engine.records import RoundRecord
from gradserver.protocol.plan import Plan
from gradserver.tables import table


def audit_remark(record: RoundRecord) -> str:
    """Say in two words what the audit of a round has found."""
    if not record.compared:
        return ""
    return "audit: differ" if verdict(record.compared).differs else "audit: agree"


def audited(record: RoundRecord, call: Callable[[int], str], plan: Plan | None) -> list[str]:
    """Show the pairs that were compared, each with the bucket in which it differs most."""
    if not record.compared:
        return []
    rows = []
    for pair in record.compared:
        bucket = str(pair.part) if plan is None or pair.part >= len(plan.buckets) else plan.buckets[pair.part].key[:40]
        said = "differ" if pair.relative > pair.limit else ""
        rows.append([call(pair.member_id), call(pair.other), size_of(pair), f"{pair.limit:.2g}", bucket, said])
    wrong = verdict(record.compared).wrong
    named = f": {call(wrong)} is wrong" if wrong >= 0 else ""
    heads = ["worker", "worker", "difference", "limit", "bucket", ""]
    return [f"  audit, these computed the same samples{named}", *table(heads, rows)]
