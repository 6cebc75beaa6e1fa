"""The suite `means`: the time of each rule by which gradients are averaged, beside the plain mean, in one thread.

The plain mean is also measured with the sums of squares that the norms of gradients come from, and as it is in a round:
with these, and with contributions compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from gradserver.daemon import keep_memory
from gradserver.engine.commands import Contribution, Reduce
from gradserver.engine.figures import BLOCK_BYTES, Sampling, Span
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Stream, operation_of
from gradserver.protocol.means import PLAIN, Mean
from gradserver.reducer import reduce
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import FLOAT_BYTES
from gradserver.tools.bench.stats import Stats, size_name

_KEY = ExchangeKey(Stream.BUCKET, 0, 0)
_PLAIN: Final = str(PLAIN)
_WITH_NORMS: Final = "with norms"
_COMPARED: Final = "compared"


def means(arguments: argparse.Namespace, session: Session) -> None:
    """Measure every rule alone: no processes, no network."""
    keep_memory()  # as the coordinator does
    workers, rules = (
        arguments.workers,
        {_PLAIN: PLAIN, _WITH_NORMS: PLAIN, _COMPARED: PLAIN, **{str(rule): rule for rule in arguments.mean}},
    )
    session.section(f"{workers} contributions in this process's memory; one thread", "means")
    for nbytes in arguments.sizes:
        for variant, weights in (("equal", [1.0] * workers), ("unequal", [1.0 + rank for rank in range(workers)])):
            session.live(f"{size_name(nbytes)}: {variant} weights")
            times, wrong = _measure(rules, nbytes // FLOAT_BYTES, weights, arguments.repetitions)
            plain = Stats.of(times[_PLAIN])
            for name in rules:
                row = Row("mean", variant, name, workers, nbytes, Stats.of(times[name]), wrong[name])
                session.add(row if name == _PLAIN else _beside(row, plain))


def _beside(row: Row, plain: Stats) -> Row:
    return Row(row.op, row.variant, row.wire, row.workers, row.nbytes, row.time, row.wrong, 1, "plain", plain)


def _measure(
    rules: dict[str, Mean], numel: int, weights: Sequence[float], repetitions: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Measure the rules in turns, behind one turn that does not count. Return times, and numbers of wrong values."""
    chance = np.random.default_rng(0)
    rows = [chance.standard_normal(numel, np.float32) for _ in weights]
    least, most = np.minimum.reduce(rows), np.maximum.reduce(rows)
    result = np.empty(numel, np.float32)
    given = [Contribution(rank, weight, row.data) for rank, (weight, row) in enumerate(zip(weights, rows, strict=True))]
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, numel)
    where = "bench", 1, _KEY, 0, operation, 0, result.nbytes, numel, None, given, (result.data,), False
    sampling = Sampling.of([Span(0, numel, BLOCK_BYTES // FLOAT_BYTES)], [[0]])
    times, wrong = {name: list[float]() for name in rules}, dict.fromkeys(rules, 0)
    for turn in range(repetitions + 1):
        for name, rule in rules.items():
            measures = sampling.measures(0, turn) if name == _COMPARED else None
            squares: list[float] | None = [] if name in (_WITH_NORMS, _COMPARED) else None
            began = time.thread_time()  # nothing here waits, and other programs' time must not count
            reduce(Reduce(*where, mean=rule, squares=squares, measures=measures))
            if turn:
                times[name].append(time.thread_time() - began)
            else:
                wrong[name] = int(np.count_nonzero(~((least <= result) & (result <= most))))
    return times, wrong
