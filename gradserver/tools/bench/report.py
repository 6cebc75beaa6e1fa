"""Rows of results, and their formats: tables, JSON, and one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradserver.tables import counted
from gradserver.tools.bench.stats import Stats, figures, microseconds, milliseconds


@dataclass(frozen=True)
class Row:
    """One line of a table: gradserver beside the peer and the limit that took turns with it.

    Attributes:
        op: operation: ``all_reduce``, ``step``, ``overlap``, ``codec``, ``mean``.
        variant: way in which the operation was done.
        wire: element type on the wire.
        workers: number of workers.
        nbytes: fp32 bytes of one worker's data.
        time: time of one operation.
        wrong: number of wrong values, and `peer_wrong` that of the peer.
        in_a_row: number of operations of which one sample is the mean.
        peer: name of the peer, and `peer_time` its time.
        limit: name of the limit, and `limit_time` the time that it allows; a Stats where it was measured.
        more: further figures of a suite, by name.
        place: where this was measured, and with which model, if a suite has several.
    """

    op: str
    variant: str
    wire: str
    workers: int
    nbytes: int
    time: Stats
    wrong: int
    in_a_row: int = 1
    peer: str = ""
    peer_time: Stats | None = None
    peer_wrong: int = 0
    limit: str = ""
    limit_time: Stats | float | None = None
    more: dict[str, float] = field(default_factory=dict)
    place: str = ""

    @property
    def algbw(self) -> float:
        """Bytes per second: one worker's data over the time."""
        return self.nbytes / self.time.median

    @property
    def busbw(self) -> float:
        """Bus bandwidth as in nccl-tests for all_reduce: the load of a ring's links for the same time."""
        return self.algbw * 2 * (self.workers - 1) / self.workers

    @property
    def ratio(self) -> float | None:
        """Ratio of the peer's median to gradserver's: above 1 gradserver is faster."""
        return self.peer_time.median / self.time.median if self.peer_time else None

    @property
    def peer_seconds(self) -> float | None:
        """Median of the peer."""
        return self.peer_time.median if self.peer_time else None

    @property
    def limit_seconds(self) -> float | None:
        """Time that the limit allows."""
        return self.limit_time.median if isinstance(self.limit_time, Stats) else self.limit_time

    @property
    def share(self) -> float | None:
        """Share of the limit that was reached: 1 is the maximum."""
        seconds = self.limit_seconds
        return None if seconds is None else seconds / self.time.median

    def to_json(self) -> dict[str, Any]:
        """Convert the row to plain values. Times are in seconds, bandwidths in bytes per second."""
        limit = self.limit_time.to_json() if isinstance(self.limit_time, Stats) else None
        return {
            "op": self.op,
            "variant": self.variant,
            "wire": self.wire,
            "workers": self.workers,
            "bytes": self.nbytes,
            "time_s": self.time.to_json(),
            "algbw": self.algbw,
            "busbw": self.busbw,
            "wrong": self.wrong,
            "operations_per_sample": self.in_a_row,
            "peer": self.peer or None,
            "peer_time_s": self.peer_time.to_json() if self.peer_time else None,
            "peer_wrong": self.peer_wrong,
            "ratio": self.ratio,
            "limit": self.limit or None,
            "limit_s": self.limit_seconds,
            "limit_time_s": limit,
            "share_of_limit": self.share,
            "place": self.place or None,
            **self.more,
        }


@dataclass(frozen=True, slots=True)
class Column:
    """One column: two lines of heading (name and unit), a width, and the text of a cell."""

    name: str
    unit: str
    width: int
    cell: Callable[[Row], str]
    left: bool = False

    def set(self, text: str) -> str:
        """Align `text` in the column's width."""
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def _columns(unit: str, shown: Callable[[float], str]) -> dict[str, Column]:
    def maybe(value: float | None, form: Callable[[float], str]) -> str:
        return "-" if value is None else form(value)

    def spread(row: Row) -> str:
        low, high = row.time.quartiles
        return f"{shown(low)}..{shown(high)}"

    return {
        "size": Column("size", "bytes", 11, lambda row: f"{row.nbytes:,}"),
        "variant": Column("type", "", 10, lambda row: row.variant, left=True),
        "wire": Column("wire", "", 4, lambda row: row.wire, left=True),
        "time": Column("time", unit, 7, lambda row: shown(row.time.median)),
        "spread": Column("quartiles", unit, 14, spread),
        "algbw": Column("algbw", "GB/s", 7, lambda row: _gigabytes(row.algbw)),
        "busbw": Column("busbw", "GB/s", 7, lambda row: _gigabytes(row.busbw)),
        "wrong": Column("#wrong", "", 6, lambda row: str(row.wrong)),
        "peer": Column("gloo", unit, 7, lambda row: maybe(row.peer_seconds, shown)),
        "ratio": Column("gloo/ours", "", 9, lambda row: maybe(row.ratio, lambda ratio: f"{ratio:.2f}x")),
        "beside": Column("tcp/this", "", 8, lambda row: maybe(row.ratio, lambda ratio: f"{ratio:.2f}x")),
        "plain": Column("of plain", "", 8, lambda row: maybe(row.ratio, lambda ratio: f"{1 / ratio:.1f}x")),
        "weights": Column("weights", "", 8, lambda row: row.variant, left=True),
        "mean": Column("mean", "", 14, lambda row: row.wire, left=True),
        "plane": Column("plane", "", 12, lambda row: row.variant, left=True),
        "limit": Column("limit", unit, 6, lambda row: maybe(row.limit_seconds, shown)),
        "share": Column("reached", "", 7, lambda row: maybe(row.share, lambda share: f"{share:.1%}")),
        "exposed": Column("exposed", unit, 7, lambda row: maybe(row.more.get("exposed_s"), shown)),
        "part": Column("of time", "", 7, lambda row: maybe(row.more.get("exposed_share"), lambda part: f"{part:.1%}")),
        "loss": Column("loss", "nats", 6, lambda row: maybe(row.more.get("loss"), lambda loss: f"{loss:.4f}")),
        "way": Column("way", "", 11, lambda row: row.variant, left=True),
        "format": Column("wire", "", 10, lambda row: row.wire, left=True),
        "sent": Column("sent", "MB", 6, lambda row: maybe(row.more.get("sent_bytes") or None, _megabytes)),
        "to ddp": Column("ddp/this", "", 8, lambda row: maybe(row.ratio, lambda ratio: f"{ratio:.2f}x")),
        "to best": Column("best/this", "", 9, lambda row: maybe(row.more.get("best_ratio"), lambda r: f"{r:.2f}x")),
        "alone": Column("exchange", unit, 8, lambda row: maybe(row.more.get("exchange_s"), shown)),
        "parameters": Column("parameters", "", 10, lambda row: f"{row.more['parameters']:,.0f}"),
        "by": Column("way", "", 12, lambda row: row.variant, left=True),
        "codec": Column("codec", "", 12, lambda row: row.wire, left=True),
        "kernels": Column("with", "", 8, lambda row: row.variant, left=True),
        "per element": Column("on wire", "B/elem", 7, lambda row: figures(row.more["bytes_per_element"])),
        "error": Column("error", "", 8, lambda row: _error(row.more["error"])),
        "errors": Column("of sum", "", 8, lambda row: _error(row.more["error_of_rounds"])),
        "encode": Column("encode", "GB/s", 7, lambda row: _gigabytes(row.algbw)),
        "decode": Column("decode", "GB/s", 7, lambda row: _gigabytes(row.nbytes / row.more["decode_s"])),
        "combine": Column("combine", "GB/s", 7, lambda row: _gigabytes(row.nbytes / row.more["combine_s"])),
        "copying": Column("memcpy", "GB/s", 7, lambda row: _gigabytes(row.nbytes / (row.limit_seconds or math.inf))),
        "coordinator": Column("coord", "s/GB", 6, lambda row: maybe(row.more.get("coordinator_s_per_gb"), _two)),
        "worker": Column("worker", "s/GB", 6, lambda row: maybe(row.more.get("worker_s_per_gb"), _two)),
        "serving": Column("coord", unit, 6, lambda row: maybe(row.more.get("coordinator_s"), shown)),
        "computing": Column("compute", unit, 8, lambda row: maybe(row.more.get("compute_s"), shown)),
    }


_TIMES = ("size", "variant", "wire", "time", "spread", "algbw", "wrong", "peer", "ratio")
_REDUCING = (*_TIMES, "share", "coordinator", "worker")
_LATENCY = tuple(name for name in (*_TIMES, "limit", "share") if name not in ("wire", "algbw"))
LAYOUTS = {
    "all_reduce": ("ms", milliseconds, _REDUCING),
    "same-host": ("ms", milliseconds, tuple(name for name in _REDUCING if name != "wire")),
    "latency": ("us", microseconds, _LATENCY),
    "step": (
        "ms",
        milliseconds,
        (
            "way",
            "format",
            "time",
            "spread",
            "exposed",
            "limit",
            "sent",
            "serving",
            "loss",
            "wrong",
            "to ddp",
            "to best",
        ),
    ),
    "parameters": ("ms", milliseconds, ("parameters", "by", "time", "spread", "wrong", "to ddp")),
    "levels": (
        "ms",
        milliseconds,
        ("plane", "wire", "time", "spread", "computing", "exposed", "part", "loss", "wrong", "beside"),
    ),
    "codecs": (
        "ms",
        milliseconds,
        (
            "size",
            "codec",
            "kernels",
            "per element",
            "error",
            "errors",
            "encode",
            "decode",
            "combine",
            "copying",
            "wrong",
        ),
    ),
    "means": ("ms", milliseconds, ("size", "weights", "mean", "time", "spread", "algbw", "plain", "wrong")),
    "overlap": (
        "ms",
        milliseconds,
        ("way", "wire", "computing", "alone", "limit", "time", "spread", "exposed", "part", "ratio"),
    ),
}


BANDWIDTHS = ("memory", "plain sockets", "links")
"""Limits that depend on bytes, not on latency."""
LARGE_BYTES = 1_000_000

NOTES = {
    "all_reduce": (
        "time: median of one operation, from a barrier to the end of the slowest rank; middle half of the samples",
        "algbw: size / time; #wrong: values checked against the exact mean",
        "gloo/ours: above 1.00x gradserver is faster; reached: the shortest time for the bytes / time",
        "coord, worker: processor seconds of the coordinator, and of a worker, per GB of payload in and out",
    ),
    "latency": (
        "time: median of one operation, from a barrier to the end of the slowest rank; middle half of the samples",
        "gloo/ours: above 1.00x gradserver is faster; limit: the same two hops over plain pyzmq; reached: limit / time",
    ),
    "parameters": (
        "time: median of one step, from a barrier to the end of the slowest rank; middle half of the samples",
        "#wrong: gradients that are not the mean; ddp/this: above 1.00x it is faster than torch's wrapper over gloo",
    ),
    "codecs": (
        "error: norm of a mean's error / norm of the mean; of sum: the same for the sum over all rounds",
        "encode: with feedback, at a worker; combine: decode all, add up, encode with feedback, at the coordinator",
        "with: numpy, or compiled kernels if gradserver[fast] is installed; both in turns",
        "GB/s: size / median time of one core; size: fp32 bytes of one contribution; memcpy: the same bytes copied",
        "#wrong: elements that are missing in the payloads and in the residuals",
    ),
    "means": (
        "time: processor time of one reduction, median and middle half; algbw: size / time, size: one contribution",
        "with norms: the plain mean with its sums of squares; compared: with these, and comparisons as in a round; "
        "of plain: time over that of the plain mean",
        "#wrong: values beyond the smallest and largest that were given",
    ),
    "levels": (
        "time: median of one training step of the slowest rank; compute: the same step without any exchange",
        "exposed: time - compute, and its share of the time; loss: on held-out text, after equally many steps",
        "#wrong: replicas that are not bit-identical to rank 0's; tcp/this: above 1.00x this plane is faster",
    ),
    "step": (
        "way: a plane of gradserver; ddp, ddp-…, own-…: DDP over gloo, over our backend, gradserver.torch's",
        "none: the same step without exchange, the lower bound",
        "time: median of one training step of the slowest rank; exposed: time - that without exchange",
        "limit: the longer of the step without exchange and sent bytes / rate",
        "sent: by a worker's link in a step, with headers; coord: processor time of the coordinator in a step",
        "loss: on held-out text, after equally many steps",
        "#wrong: replicas that are not bit-identical to rank 0's; ddp/this, best/this: DDP with fp32, and its quickest",
    ),
}


class Table:
    """Columns of one layout."""

    def __init__(self, layout: str) -> None:
        unit, shown, names = LAYOUTS[layout]
        known = _columns(unit, shown)
        self._columns = [known[name] for name in names]

    def heading(self) -> list[str]:
        """Format the names, and the units below them."""
        names = "  ".join(column.set(column.name) for column in self._columns)
        units = "  ".join(column.set(column.unit) for column in self._columns)
        return [f"  {names}".rstrip(), f"  {units}".rstrip()]

    def line(self, row: Row) -> str:
        """Format one row."""
        return "  " + "  ".join(column.set(column.cell(row)) for column in self._columns).rstrip()


def conclusion(rows: Sequence[Row]) -> str:
    """Summarize all rows in one sentence."""
    if not rows:
        return "Nothing was measured."
    wrong = sum(row.wrong + row.peer_wrong for row in rows)
    if wrong:
        bad = sum(row.wrong + row.peer_wrong > 0 for row in rows)
        return f"WRONG: {wrong:,} values in {bad} of {counted(len(rows), 'row')}."
    said = []
    # Trainings have sentences of their own (`gradserver.tools.bench.advice`).
    ours = [row for row in rows if row.peer_time is not None and row.op != "step"]
    ratios = [row.ratio for row in ours if row.ratio is not None]
    if ratios:
        ahead = sum(ratio > 1 for ratio in ratios)
        span = _span(f"{min(ratios):.2f}", f"{max(ratios):.2f}")
        rows_compared = counted(len(ratios), "row")
        peer = "tcp" if ours[0].peer == "tcp" else "gloo"
        if ours[0].op == "mean":
            times = _span(f"{1 / max(ratios):.2f}", f"{1 / min(ratios):.2f}")
            said.append(f"other means took {times} times as long as the plain one")
        else:
            said.append(
                f"gradserver was faster than {peer} in {ahead} of {rows_compared} ({peer} took {span} times as long)"
            )
    # For a few bytes, a limit of bandwidth is out of reach.
    bound = [row for row in ours if row.limit not in BANDWIDTHS or row.nbytes >= LARGE_BYTES]
    for limit in dict.fromkeys(row.limit for row in bound if row.limit):
        shares = [row.share for row in bound if row.limit == limit and row.share is not None]
        sizes = f", {LARGE_BYTES // 10**6} MB and more" if limit in BANDWIDTHS else ""
        said.append(f"it reached {_span(f'{min(shares):.0%}', f'{max(shares):.0%}')} of the limit ({limit}{sizes})")
    if fast := [row.more for row in rows if "combine_ratio" in row.more and row.wire != "fp32"]:
        combine, encode = (sorted(one[f"{what}_ratio"] for one in fast) for what in ("combine", "encode"))
        said.append(
            f"with kernels, lossy codecs combine {_span(f'{combine[0]:.1f}', f'{combine[-1]:.1f}')} times as fast as "
            f"with numpy, and encode {_span(f'{encode[0]:.1f}', f'{encode[-1]:.1f}')} times"
        )
    lossy = any(row.wire != "fp32" for row in rows)
    if apart := [row.more["distance"] for row in rows if row.wire == "fp32" and "distance" in row.more]:
        said.append(f"weights differ from those of torch DDP by at most {max(apart):.1g}")
    exact = "every value was right to its wire format's precision" if lossy else "every value was exact"
    if any(row.op in ("step", "levels") for row in rows):
        exact = "replicas stayed bit-identical"
    elif any(row.op == "mean" for row in rows):
        exact = "every value was within those that were given"
    elif any(row.op == "codec" for row in rows):
        exact = "every element is in the payloads or in the residuals"
    return f"{'; '.join([*said, exact])}."


def _gigabytes(bandwidth: float) -> str:
    """Format a bandwidth, without the unit. Small tensors measure latency: their bandwidth needs fewer digits."""
    value = bandwidth / 1e9
    return figures(value) if value >= 0.01 else f"{value:.4f}"


def _megabytes(nbytes: float) -> str:
    return figures(nbytes / 1e6)


def _two(seconds: float) -> str:
    return figures(seconds, 2)


def _error(error: float) -> str:
    """Format an error as a share."""
    return "0" if error == 0 else f"{error:.2%}" if error >= 1e-4 else f"{error:.1e}"


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
