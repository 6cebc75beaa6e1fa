"""Digests that reductions make for the ledger: of the very bytes that were summed and that came out, in any cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gradserver import reducer
from gradserver.engine import Engine
from gradserver.engine.commands import RESULT, Contribution, Digests, Record, Reduce
from gradserver.engine.data.rounds import Hashing
from gradserver.engine.policy import Hashes
from gradserver.engine.records import Round
from gradserver.protocol.codecs import codec_of, seed_of
from gradserver.protocol.digest import MODULUS, digest
from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.exchange import EXACT, ExchangeKey, Kind, Op, Operation, Stream
from gradserver.protocol.limits import MIB
from gradserver.reducer import Reducer
from tests.cluster import wait_until
from tests.engine_harness import Harness, bucket, floats, plan_of
from tests.examples import examples
from tests.reference import samples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Array = np.ndarray[Any, Any]
KEY = ExchangeKey(Stream.BUCKET, 5, 2)
AT = 8 * 1001
"""The beginning of the bucket in what is hashed of its round."""


def asked(
    operation: Operation, first: int, payloads: Sequence[bytes | memoryview | None], numel: int, **fields: Any
) -> Reduce:
    """Return a reduction of contributions of ranks 0, 2, 4, …, with digests."""
    size = next(len(payload) for payload in payloads if payload is not None)
    given = [Contribution(2 * place, 1.0 + place, payload) for place, payload in enumerate(payloads)]
    command = Reduce("g", 1, KEY, 0, operation, first, size, numel, None, given, (), True, Digests(AT, []))
    return command._replace(**fields)


def digests_of(command: Reduce) -> dict[int, int]:
    """Return the digests, added up, by rank."""
    assert command.digests is not None
    total: Counter[int] = Counter()
    for rank, found in command.digests.found:
        total[rank] += found
    return {rank: found % MODULUS for rank, found in total.items()}


def of(command: Reduce) -> tuple[bytes, dict[int, int]]:
    """Return the result, and the digests."""
    outcome = reducer.reduce(command)
    assert isinstance(outcome, memoryview | bytes)
    return bytes(outcome), digests_of(command)


def add(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {rank: (one.get(rank, 0) + other.get(rank, 0)) % MODULUS for rank in one | other}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64", "complex32", "complex64", "float8_e5m2"])
@pytest.mark.parametrize("numel", [1, 7, 1000, 300_001])
def test_contributions_and_result_are_hashed_as_they_travel(name: str, numel: int) -> None:
    dtype = BY_NAME[name]
    given = [sample.view(torch.uint8).numpy().tobytes() for sample in samples(name, 3, numel)]
    result, found = of(asked(Operation(Kind.ALL_REDUCE, Op.MEAN, dtype, numel), 0, given, numel))
    assert found == {**{2 * place: digest(data, AT) for place, data in enumerate(given)}, RESULT: digest(result, AT)}


@pytest.mark.parametrize("op", [Op.SUM, Op.MAX, Op.FIRST])
def test_whatever_is_done_with_them(op: Op) -> None:
    given = [np.full(5, value, np.float32).tobytes() for value in range(1, 2 if op is Op.FIRST else 3)]
    result, found = of(asked(Operation(Kind.ALL_REDUCE, op, FLOAT32, 5), 0, given, 5))
    assert found == {**{2 * place: digest(data, AT) for place, data in enumerate(given)}, RESULT: digest(result, AT)}


def test_an_absent_contribution_has_the_digest_of_zeros() -> None:
    given = [np.ones(5, np.float32).tobytes(), None]
    _, found = of(asked(Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 5), 0, given, 5))
    assert found.get(2, 0) == digest(bytes(20), AT)


def test_a_contribution_is_hashed_before_the_result_takes_its_place() -> None:
    """Test that the order is right in shared memory, too."""
    one, other = np.full(200_000, 1, np.float32), np.full(200_000, 4, np.float32)
    before = {0: digest(one, AT), 2: digest(other, AT)}
    given = [array.data.cast("B") for array in (one, other)]
    operation = Operation(Kind.ALL_REDUCE, Op.SUM, FLOAT32, one.size)
    command = asked(operation, 0, given, one.size, targets=given, keep=False)
    assert reducer.reduce(command) is None
    assert digests_of(command) == {**before, RESULT: digest(one, AT)}


def test_threads_hash_their_own_blocks() -> None:
    numel = 5 * MIB
    arrays = [np.random.default_rng(seed).standard_normal(numel).astype(np.float32) for seed in range(2)]
    command = asked(Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, numel), 0, [a.data.cast("B") for a in arrays], numel)
    outcomes: list[Any] = []
    several = Reducer(threads=3)
    try:
        several.start(command, outcomes.append)
        wait_until(lambda: outcomes, "the reduction is done")
    finally:
        several.close()
    assert digests_of(command) == {0: digest(arrays[0], AT), 2: digest(arrays[1], AT), RESULT: digest(outcomes[0], AT)}


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "topk:0.01", "randomk:0.01"])
@given(cuts=st.lists(st.integers(1, 1200), max_size=4), tail=st.integers(0, 300))
@settings(max_examples=examples(15))
def test_digests_do_not_depend_on_how_a_bucket_is_cut(wire: str, cuts: list[int], tail: int) -> None:
    """Test cuts like those of slices and of data shards: at blocks, or at groups of 256 elements."""
    codec = EXACT if wire == "fp32" else codec_of(wire)
    unit = 65_536 if codec.parameter else 256
    numel = 200_000 + tail
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, numel, codec=codec)
    arrays = [np.random.default_rng(seed).standard_normal(numel).astype(np.float32) for seed in range(2)]

    def part(start: int, stop: int) -> dict[int, int]:
        payloads = [codec.encode(array[start:stop], None, seed_of(5, 2, start)) for array in arrays]
        return of(asked(operation, start, payloads, stop - start))[1]

    bounds = sorted({0, numel, *(cut * unit for cut in cuts if cut * unit < numel)})
    total: dict[int, int] = {}
    for start, stop in itertools.pairwise(bounds):
        total = add(total, part(start, stop))
    assert total == part(0, numel)
    whole = [codec.encode(array, None, seed_of(5, 2, 0)) for array in arrays]
    if wire != "int8":  # integers are hashed before scales there
        assert [total[0], total[2]] == [digest(payload, AT) for payload in whole]
    assert len({*total.values()}) == 3


def test_int8_is_hashed_as_its_integers_and_behind_them_its_scales() -> None:
    numel = 70_000
    codec = codec_of("int8")
    values = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    operation = Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, numel, codec=codec)
    payload = bytes(codec.encode(values))
    _, found = of(asked(operation, 0, [payload], numel))
    first = 65_536 + 4 * 256
    integers = payload[4 * 256 : first] + payload[first + 4 * 18 :]
    scales = payload[: 4 * 256] + payload[first : first + 4 * 18]
    assert found[0] == digest(integers + scales, AT)


def test_nothing_is_hashed_unasked() -> None:
    command = asked(Operation(Kind.ALL_REDUCE, Op.MEAN, FLOAT32, 5), 0, [bytes(20)], 5, digests=None)
    assert isinstance(reducer.reduce(command), memoryview)


# ── which rounds ──────────────────────────────────────────────────────────────────────────────────────


def test_all_rounds_are_hashed_while_that_takes_little_of_the_time() -> None:
    hashing = Hashing.of(8_000_000, 0)  # a millisecond
    for number in range(20):
        assert hashing.is_due(number)
        hashing.completed(0.06 * number)


def test_of_quick_rounds_only_some_are_hashed_by_a_power_of_two() -> None:
    hashing = Hashing.of(80_000_000, 0)  # 10 ms
    for number in range(20):
        hashing.completed(0.1 * number)
    assert hashing.every == 8  # 1.25 ms of 100 ms; of every fourth it would be 2.5 %
    assert [number for number in range(20) if hashing.is_due(number)] == [0, 8, 16]
    for number in range(20, 60):
        hashing.completed(1.0 * number)
    assert hashing.every == 1


def test_many_small_buckets_take_their_time_too_and_some_round_is_always_hashed() -> None:
    hashing = Hashing.of(0, 1000)
    hashing.completed(1.0)
    hashing.completed(1.0001)
    assert hashing.every == 1024


def recorded(harness: Harness, rounds: range, seconds: float) -> list[bool]:
    """Return whether each of some rounds was hashed, by what the engine has written."""
    written = []
    for number in rounds:
        harness.now += seconds
        harness.push(0, bucket(number), floats(1, 2))
        commands = harness.push(1, bucket(number), floats(3, 4))
        written += [command.record for command in commands if isinstance(command, Record)]
    return [bool(record.record.inputs) for record in written if isinstance(record, Round)]


def test_the_engine_hashes_as_often_as_that_and_only_if_it_is_to() -> None:
    for digests in (True, False):
        harness = Harness()
        harness.engine = Engine(hashes=Hashes.ON if digests else Hashes.OFF)
        harness.assemble(2, plan_of(2))
        assert recorded(harness, range(10), 1.0) == [digests] * 10
        assert recorded(harness, range(10, 80), 1e-4)[-32:].count(True) == 2 * digests
