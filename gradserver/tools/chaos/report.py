"""Results of a chaos run: numbers for programs, and the reasons of a failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any, Final

from gradserver.protocol.limits import MIB
from gradserver.tools.chaos.schedule import KILLS, Event
from gradserver.tools.chaos.uses import Use

_MORE_DESCRIPTORS: Final = 8
_MORE_SEGMENTS: Final = 8
_MORE_MEMORY: Final = 112 * MIB
"""Memory that a process may use in addition after the storm. The limits allow for connections and memory that it
keeps for later: a worker that sums tensors of 8 MiB with others keeps several of these, and stays 70 MiB higher."""
_FEW: Final = 4
"""Number of events below which no median is reported, as it would mean nothing."""
Uses = Mapping[str, tuple[int, Use]]


def times(seconds: Sequence[float]) -> dict[str, float]:
    """Summarize times."""
    return {"count": len(seconds), "median": round(median(seconds), 3), "max": round(max(seconds), 3)}


def leaks(before: Uses, after: Uses) -> list[str]:
    """Find processes that ran before the storm and after it, and use more."""
    found = []
    for name, (pid, use) in after.items():
        if name not in before or before[name][0] != pid:
            continue
        earlier = before[name][1]
        for what, more, limit in (
            ("descriptors", use.descriptors - earlier.descriptors, _MORE_DESCRIPTORS),
            ("shared segments", use.segments - earlier.segments, _MORE_SEGMENTS),
            ("MiB", (use.memory - earlier.memory) // MIB, _MORE_MEMORY // MIB),
        ):
            if more > limit:
                found.append(f"{name} has {more} {what} more than before the storm")
    return found


def summary(
    events: Sequence[Event],
    missed: Sequence[Event],
    verdict: Mapping[str, Any],
    outs: Mapping[str, int],
    back: Sequence[tuple[str, float]],
    faults: Sequence[str],
    uses: tuple[Uses, Uses],
) -> dict[str, Any]:
    """Summarize the run in numbers. ``faults`` are those that were noticed beside the oracle's findings."""
    found = verdict["found"]
    rates = verdict["rates"]
    returned: dict[str, list[float]] = {}
    for kind, seconds in back:
        returned.setdefault(kind, []).append(seconds)
    calm = rates["calm"]
    share = verdict["committed"] / verdict["contributions"] if verdict["contributions"] else 1.0
    return {
        "events": len(events),
        "events_by_kind": dict(Counter(event.kind for event in events)),
        "events_missed": len(missed),
        "kills": sum(event.kind in KILLS for event in events),
        "rounds": verdict["rounds"],
        "rounds_unwritten": verdict["unwritten"],
        "contributions": verdict["contributions"],
        "committed_share": round(share, 5),
        "in_part": verdict["in_part"],
        "not_counted": verdict["contributions"] - verdict["committed"] - verdict["in_part"],
        "ways": verdict["ways"],
        "staleness": verdict["staleness"],
        "meetings": verdict["meetings"],
        "subgroups": verdict["halves"],
        "sums_among_workers": verdict["among"],
        **{kind: found.get(kind, 0) for kind in ("wrong", "double", "lost", "diverged", "fault")},
        "findings": [*faults, *verdict["findings"]],
        "outs": dict(outs),
        "leaks": leaks(*uses),
        "longest_stall": round(verdict["longest_stall"], 3),
        "longest_stall_at": round(verdict["longest_stall_at"], 3),
        "next_round_after": {kind: times(seconds) for kind, seconds in sorted(verdict["resumed"].items())},
        "back_after": {kind: times(seconds) for kind, seconds in sorted(returned.items())},
        "rounds_per_second": {name: None if rate is None else round(rate, 2) for name, rate in rates.items()},
        "throughput_kept": {
            "storm": round(rates["storm"] / calm, 3) if calm and rates["storm"] is not None else None,
            "behind_each_event": _spread(verdict["before_and_after"]),
        },
        "use": {
            name: {
                what: [uses[0][name][1][place], uses[1][name][1][place]]
                for place, what in enumerate(("descriptors", "segments", "memory"))
            }
            for name in uses[1]
            if name in uses[0] and uses[0][name][0] == uses[1][name][0]
        },
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    """Compute number, median and quartiles; nothing if there are too few."""
    if len(ratios) < _FEW:
        return {}
    low, middle, high = (round(ratio, 3) for ratio in quantiles(ratios, n=4))
    return {"count": len(ratios), "low": low, "median": middle, "high": high}


def too_few(result: Mapping[str, Any], least: Mapping[str, int]) -> list[str]:
    """Describe the kinds of which fewer events took effect than ``least`` requires; "" stands for all."""
    counts = {"": result["events"], **result["events_by_kind"]}
    return [
        f"only {counts.get(kind, 0)} {f'{kind} ' if kind else ''}events took effect, fewer than {number}"
        for kind, number in least.items()
        if counts.get(kind, 0) < number
    ]


def wrongs(result: Mapping[str, Any], stall: float) -> list[str]:
    """Collect the reasons for which a run has failed, one for each kind; empty if it has passed."""
    found = [
        f"{result[kind]} {text}"
        for kind, text in (
            ("wrong", "wrong results"),
            ("double", "contributions counted twice"),
            ("lost", "rounds or contributions lost"),
            ("diverged", "replicas diverged"),
            ("fault", "wrong collectives"),
        )
        if result[kind]
    ]
    if result["longest_stall"] > stall:
        found.append(f"no round was finished for {result['longest_stall']:.1f} s, which is above {stall:g} s")
    found += result["leaks"]
    return found
