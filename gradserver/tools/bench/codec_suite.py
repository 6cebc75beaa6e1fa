"""The suite `codecs`: the size of each codec on the wire, its error, and its time in one thread: numpy, and kernels."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gradserver.daemon import keep_memory
from gradserver.engine.commands import Contribution, Memory, Reduce
from gradserver.engine.events import Broken, NonFinite, Sifted, Undecodable
from gradserver.lossy import Owed
from gradserver.protocol import kernels
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import Codec, Feedback, Scratch, codec_of, seed_of
from gradserver.protocol.compiled import loader
from gradserver.protocol.compiled.loader import COMPILED, NUMPY
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Stream, layout_of, operation_of
from gradserver.reducer import reduce
from gradserver.tools.bench.machine import await_kernels
from gradserver.tools.bench.report import Row
from gradserver.tools.bench.session import Session
from gradserver.tools.bench.spec import FLOAT_BYTES
from gradserver.tools.bench.stats import Stats, size_name
from gradserver.tools.common.processes import RunError

Floats = npt.NDArray[np.float32]

_NUMEL = 300_000
"""Number of elements for the errors: two slices, of which the second is no whole number of blocks."""
_TOLERANCE = 2e-5
"""Largest rounding of fp32 in one round of gradients with elements of about 1."""


def codecs(arguments: argparse.Namespace, session: Session) -> None:
    """Measure every codec alone: no processes, no network."""
    keep_memory()  # as the coordinator does
    if (found := await_kernels()).failed:
        raise RunError(f"{found.reason}: {loader.remedy(found.reason)}")
    workers, rounds = arguments.workers, arguments.rounds
    names = [codec_of(name).name for name in arguments.wire]
    title = f"means of {workers} contributions; one thread; error after one round, and after {rounds} with feedback"
    session.section(title, "codecs")
    session.live(f"errors in {rounds} rounds")
    losses = account(names, workers, rounds)
    for nbytes in arguments.sizes:
        session.live(f"{size_name(nbytes)}: encoding, decoding, adding up")
        copying, times = measure(names, nbytes // FLOAT_BYTES, workers, arguments.repetitions)
        for (name, how), taken in times.items():
            beside = None if how == NUMPY else times[name, NUMPY]
            session.add(_row(name, how, workers, nbytes, taken, beside, copying, losses[name]))


class Exchange:
    """Exchange of one bucket in one codec, between workers and a coordinator that are all in this thread."""

    def __init__(self, name: str, numel: int, workers: int) -> None:
        self.codec: Codec = codec_of(name)
        self._operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, numel, codec=self.codec)
        layout = layout_of(self._operation, workers)
        self._spans = [layout.span(index) for index in range(layout.count)]
        self._memories = [Memory() for _ in self._spans]
        self._scratch = Scratch()

    def rooms(self) -> list[npt.NDArray[np.uint8]]:
        """Allocate memory for a payload of each slice."""
        return [np.empty(self.codec.nbytes(stop - start), np.uint8) for start, stop in self._spans]

    def encode(
        self, values: Floats, round_number: int, feedback: Feedback | None, rooms: Sequence[npt.NDArray[np.uint8]]
    ) -> list[Buffer]:
        """Encode a worker's payload of each slice. Without ``feedback`` the residual is lost."""
        payloads: list[Buffer] = []
        for (start, stop), room in zip(self._spans, rooms, strict=True):
            piece, seed = values[start:stop], seed_of(round_number, 0, start)
            if feedback is None:
                payloads.append(self.codec.encode(piece, room, seed, self._scratch))
            else:
                payloads.append(feedback.encode(self.codec, start, stop, piece, room, seed, self._scratch))
        return payloads

    def combine(self, contributions: Sequence[Sequence[Buffer]], round_number: int) -> list[Buffer]:
        """Make the coordinator's answers from the payloads of every rank."""
        key, answers = ExchangeKey(Stream.BUCKET, round_number, 0), list[Buffer]()
        for index, (start, stop) in enumerate(self._spans):
            given = [Contribution(rank, 1.0, payloads[index]) for rank, payloads in enumerate(contributions)]
            nbytes, numel = self.codec.nbytes(stop - start), stop - start
            command = Reduce(
                "bench",
                1,
                key,
                index,
                self._operation,
                start,
                nbytes,
                numel,
                self._memories[index],
                given,
                (),
                keep=True,
            )
            outcome = reduce(command)
            if outcome is None or isinstance(outcome, NonFinite | Sifted | Undecodable | Broken | tuple):
                raise RunError(f"{self.codec.name}: the reduction failed: {outcome}")
            answers.append(outcome)
        return answers

    def decode(self, payloads: Sequence[Buffer], out: Floats, round_number: int) -> None:
        """Decode the answers at a worker."""
        for (start, stop), payload in zip(self._spans, payloads, strict=True):
            seed = seed_of(round_number, 0, start)
            self.codec.decode(payload, stop - start, out[start:stop], seed, self._scratch)

    def owed(self) -> Floats:
        """Return the coordinator's residual, one value for each element."""
        owed: list[Owed | None] = [memory.content for memory in self._memories]
        return np.concatenate(
            [
                np.zeros(stop - start, np.float32) if left is None else left.latest
                for left, (start, stop) in zip(owed, self._spans, strict=True)
            ]
        )


# ── what is lost ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Loss:
    """Errors of the means of some rounds.

    Attributes:
        rounds: number of rounds.
        first: norm of the first round's error, over that of its exact mean.
        total: the same for the sums over all rounds.
        wrong: number of elements that are missing in the results and in the residuals.
    """

    rounds: int
    first: float
    total: float
    wrong: int


class _Account:
    """Results of a codec's workers, beside the exact ones."""

    def __init__(self, name: str, workers: int) -> None:
        self.exchange = Exchange(name, _NUMEL, workers)
        lossy = self.exchange.codec.nbytes(_NUMEL) < _NUMEL * FLOAT_BYTES
        self.feedbacks = [Feedback(_NUMEL) if lossy else None for _ in range(workers)]
        self.total = np.zeros(_NUMEL)
        self.first = 0.0
        self._result = np.empty(_NUMEL, np.float32)

    def round(self, number: int, gradients: Sequence[Floats], exact: npt.NDArray[np.float64]) -> None:
        exchange = self.exchange
        sent = [
            exchange.encode(gradient, number, feedback, exchange.rooms())
            for gradient, feedback in zip(gradients, self.feedbacks, strict=True)
        ]
        exchange.decode(exchange.combine(sent, number), self._result, number)
        self.total += self._result
        if number == 0:
            self.first = _relative(self._result, exact)

    def close(self, rounds: int, exact: npt.NDArray[np.float64]) -> Loss:
        owed = self.exchange.owed().astype(np.float64)
        for feedback in self.feedbacks:
            if feedback is not None:
                owed += feedback.residual.astype(np.float64) / len(self.feedbacks)
        missing = np.abs(self.total + owed - exact) > _TOLERANCE * rounds
        return Loss(rounds, self.first, _relative(self.total, exact), int(np.count_nonzero(missing)))


def account(names: Sequence[str], workers: int, rounds: int) -> dict[str, Loss]:
    """Measure the errors of each codec, on gradients of one signal and as much noise at every worker and round."""
    chance = np.random.default_rng(0)
    signal = chance.standard_normal(_NUMEL, np.float32)
    accounts = {name: _Account(name, workers) for name in names}
    total = np.zeros(_NUMEL)
    for number in range(rounds):
        gradients = [signal + chance.standard_normal(_NUMEL, np.float32) for _ in range(workers)]
        exact: npt.NDArray[np.float64] = np.mean(gradients, axis=0, dtype=np.float64)
        total += exact
        for one in accounts.values():
            one.round(number, gradients, exact)
    return {name: one.close(rounds, total) for name, one in accounts.items()}


def _relative(values: npt.NDArray[np.floating], exact: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(values - exact) / np.linalg.norm(exact))


# ── what it costs ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Times:
    """Seconds that one codec took, a sample for each repetition."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    combine: list[float] = field(default_factory=list)

    def forget(self) -> None:
        """Discard the samples of the warm-up."""
        for samples in (self.encode, self.decode, self.combine):
            samples.clear()


def measure(
    names: Sequence[str], numel: int, workers: int, repetitions: int
) -> tuple[Stats, dict[tuple[str, str], Times]]:
    """Measure a copy and each codec, with numpy and with the kernels there are, in turns after one that does not count.

    Returns:
        The times of the copy, and those of each codec by its name and what has done the work.
    """
    tables = {NUMPY: kernels.NUMPY}
    if (own := kernels.active()) is not kernels.NUMPY:
        tables[COMPILED] = own
    chance = np.random.default_rng(0)
    gradients = [chance.standard_normal(numel, np.float32) for _ in range(workers)]
    out, copying = np.empty(numel, np.float32), list[float]()
    times = {(name, how): Times() for name in names for how in tables}
    turns = [(tables[how], _turn(name, gradients, out, taken)) for (name, how), taken in times.items()]

    def take_turns() -> None:
        for table, turn in turns:
            kernels.use(table)
            turn()

    try:
        take_turns()
        for one in times.values():
            one.forget()
        for _ in range(repetitions):
            copying.append(_timed(lambda: np.copyto(out, gradients[0])))
            take_turns()
    finally:
        kernels.use(own)
    return Stats.of(copying), times


def _turn(name: str, gradients: Sequence[Floats], out: Floats, times: Times) -> Callable[[], None]:
    """Make a function that measures one codec once."""
    exchange = Exchange(name, out.size, len(gradients))
    feedback = None if name == "fp32" else Feedback(out.size)
    sent = [exchange.encode(gradient, 0, None, exchange.rooms()) for gradient in gradients]
    rooms = exchange.rooms()  # a worker reuses the memory of earlier payloads

    def turn() -> None:
        times.encode.append(_timed(lambda: exchange.encode(gradients[0], 0, feedback, rooms)))
        times.combine.append(_timed(lambda: exchange.combine(sent, 0)))
        times.decode.append(_timed(lambda: exchange.decode(sent[0], out, 0)))

    return turn


def _timed(work: Callable[[], object]) -> float:
    """Measure the processor's time: nothing here waits, and other programs' time must not count."""
    began = time.thread_time()
    work()
    return time.thread_time() - began


def _row(
    name: str,
    how: str,
    workers: int,
    nbytes: int,
    times: Times,
    beside: Times | None,
    copying: Stats,
    loss: Loss,
) -> Row:
    """Make a row of what was measured; ``beside`` are the times of numpy, if kernels have done the work."""
    encode, decode, combine = (Stats.of(one) for one in (times.encode, times.decode, times.combine))
    numel = nbytes // FLOAT_BYTES
    more = {
        "bytes_per_element": codec_of(name).nbytes(numel) / numel,
        "error": loss.first,
        "rounds": loss.rounds,
        "error_of_rounds": loss.total,
        "decode_s": decode.median,
        "combine_s": combine.median,
    }
    if beside is not None:
        more["encode_ratio"] = Stats.of(beside.encode).median / encode.median
        more["combine_ratio"] = Stats.of(beside.combine).median / combine.median
    return Row("codec", how, name, workers, nbytes, encode, loss.wrong, limit="memcpy", limit_time=copying, more=more)
