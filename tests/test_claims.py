"""Tests of claims: what a member says that it holds reaches the others only if a coordinator has made it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver import GradServerError, Worker, connect
from gradserver.engine.proofs import Proofs, Said
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.dtypes import FLOAT32
from gradserver.protocol.exchange import ExchangeKey
from gradserver.protocol.kernels import NUMPY
from gradserver.protocol.keyed import ROW_BYTES, hashed, key_of, keyed_hash, rows
from gradserver.protocol.messages import Failure, Membership, Result
from gradserver.protocol.messages.recovery import (
    Fetch,
    Held,
    Holding,
    Resume,
    Resumed,
    Span,
    Standing,
    State,
    pack_spans,
)
from gradserver.protocol.plan import simple_plan
from gradserver.worker.member.sendqueue import ShardTraffic
from tests.cluster import Daemon, Task
from tests.engine_harness import bucket, collective, floats
from tests.strangers import Stranger
from tests.test_engine_resuming import BACK, Group
from tests.test_kernels import table, using

assert table  # a fixture
KEY = key_of("a" * 32)
HONEST, NUMEL = 4, 3 << 18
PLAN = simple_plan([("w", NUMEL)], FLOAT32)
LIE = np.full(NUMEL, 666, np.float32)


# ── keyed hashes and proofs ───────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 40_000), st.integers(0, 7), st.integers(0, 1 << 20))
def test_keyed_hashes_are_the_same_with_and_without_kernels(table: object, size: int, at: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, at + size, np.uint8)[at:]
    with using(NUMPY):
        expected = keyed_hash(data, KEY)
    with using(table):  # type: ignore[arg-type]
        assert keyed_hash(data, KEY) == expected


def test_the_keyed_hash_is_the_sum_of_products_that_its_module_says() -> None:
    data = bytes(range(251)) * 40
    words = np.frombuffer(data[:10_040], "<u8").tolist()
    low, found = (1 << 32) - 1, []
    for start in range(0, len(words), 1024):
        pairs = zip(words[start : start + 1024], KEY.tolist(), strict=False)
        found.append(sum(((w + k) & low) * (((w >> 32) + (k >> 32)) & low) for w, k in pairs).__and__((1 << 64) - 1))
    assert keyed_hash(data, KEY) == hashed(len(data), b"".join(one.to_bytes(8, "little") for one in found))


@given(st.binary(min_size=1, max_size=3 * ROW_BYTES), st.data())
def test_parts_of_whole_rows_have_the_hash_of_the_whole(data: bytes, draw: st.DataObject) -> None:
    cut = ROW_BYTES * draw.draw(st.integers(0, len(data) // ROW_BYTES))
    assert rows(data[:cut], KEY) + rows(data[cut:], KEY) == rows(data, KEY)


def test_another_bit_and_another_key_have_another_hash() -> None:
    data = os.urandom(20_000)
    for bit in (0, 63, 64, 8 * ROW_BYTES - 1, 8 * 20_000 - 1):
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        assert keyed_hash(other, KEY) != keyed_hash(data, KEY)
    assert keyed_hash(data, key_of("b" * 32)) != keyed_hash(data, KEY)


SAID = Said(bucket(3), 2.0, (7,), (1.0, 1.0))
OTHERS = [
    {"said": SAID._replace(key=bucket(4))},
    {"said": SAID._replace(key=bucket(3, 1))},
    {"said": SAID._replace(weight=3.0)},
    {"said": SAID._replace(without=())},
    {"said": SAID._replace(weights=(1.0, 0.5))},
    {"index": 1},
    {"payload": b"four and three"},
    {"payload": None},
    {"squares": (1.0, 0.0)},
]


@pytest.mark.parametrize("other", OTHERS)
def test_a_proof_is_of_all_that_is_said_of_a_result(other: dict[str, object]) -> None:
    proofs, payload, squares = Proofs("s" * 32), b"four and four", (2.0, 0.0)
    proof = proofs.prove(5, SAID, 0, proofs.hashes(payload, (13,)), squares)
    right: dict[str, object] = {"said": SAID, "index": 0, "payload": payload, "squares": squares}

    assert proofs.is_right(proof, **right)  # type: ignore[arg-type]
    assert not proofs.is_right(proof, **{**right, **other})  # type: ignore[arg-type]
    assert not Proofs("t" * 32).is_right(proof, **right)  # type: ignore[arg-type]
    assert not proofs.is_right(b"\6" + proof[1:], **right)  # type: ignore[arg-type]
    assert not proofs.is_right(b"", **right)  # type: ignore[arg-type]


# ── in the engine ─────────────────────────────────────────────────────────────────────────────────────────


def recovering(key: ExchangeKey, restarted: bool) -> tuple[Group, int]:
    """Make a group of three. Two say that they hold a result, and the first is asked. Return the generation, too."""
    group = Group(3)
    if restarted:
        group.harness.restart()
        for rank in range(3):
            group.resume(rank)
    else:
        for rank in range(3):
            group.harness.lose(rank)
            group.resume(rank)
    generation = group.harness.engine.control.groups["default"].recovery.generation
    number, sizes = (3, 0) if key.stream == bucket(0).stream else (0, 16)
    number = number if restarted else 0
    for rank in range(2):
        group.hold(rank, number, Span(State.HELD, key, 0, 1, (), sizes))
    group.hold(2, number, *([Span(State.LACKING, key, 0, 1, (), sizes)] if sizes else []))
    assert group.told(0)[-1] == Fetch(generation, key, 0)
    group.told(1), group.told(2)
    return group, generation


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("forged", ["nothing", "anything", "an earlier one", "no bytes"])
def test_a_member_that_makes_a_result_up_is_out_and_the_next_one_is_asked(
    restarted: bool, collectives: bool, forged: str
) -> None:
    key = collective(0) if collectives else bucket(3 if restarted else 0)
    group, generation = recovering(key, restarted)
    lie, truth = floats(6, 6, 6, 6).tobytes(), floats(1, 2, 3, 4).tobytes()
    earlier = group.prove(Held(generation, bucket(2) if not collectives else collective(7), 0, 3.0, True), lie).proof
    proof = {"nothing": b"", "anything": bytes(12)}.get(forged, earlier)

    if forged == "no bytes":
        group.harness.receive(BACK, Held(generation, key, 0, 3.0, False, proof=proof))
    else:
        group.harness.receive(BACK, Held(generation, key, 0, 3.0, True, proof=proof), lie)

    failure = group.told(0)[-1]
    assert isinstance(failure, Failure)
    assert "'w0' (rank 0) holds it: slice 0 is not what a coordinator of this group has made of it" in failure.text
    assert BACK in group.harness.closed
    shown = group.prove(Held(generation, key, 0, 2.0, True), truth)
    group.harness.receive(BACK + 1, shown, truth)
    told = group.harness.inbox.pop(BACK + 2)
    assert [type(message) for message, _ in told] == [Membership, Result, Standing]
    assert told[1][1] == [truth]


@pytest.mark.parametrize("says", [1, 2])
def test_a_result_that_was_made_again_is_not_handed_on_as_it_was_before(says: int) -> None:
    """Test that a member which kept silent of a result cannot show it when the others have another one."""
    group = Group(3)
    group.harness.restart()
    before, now = floats(6, 6, 6, 6).tobytes(), floats(1, 2, 3, 4).tobytes()
    for rank in range(3):
        group.resume(rank)
    group.hold(0, 3, Span(State.HELD, bucket(3), 0, 1, made=says))
    group.hold(1, 3, Span(State.HELD, bucket(3), 0, 1, made=2))
    group.hold(2, 3)
    asked = group.told(0)[-1]
    assert (asked == Fetch(2, bucket(3), 0)) is (says == 2)

    if says == 2:  # it is asked, and has no proof of that
        group.harness.receive(BACK, group.prove(Held(2, bucket(3), 0, 2.0, True), before, 1), before)
        assert BACK in group.harness.closed
    group.harness.receive(BACK + 1, group.prove(Held(2, bucket(3), 0, 2.0, True), now, 2), now)

    payloads = [payloads for message, payloads in group.harness.inbox.pop(BACK + 2) if isinstance(message, Result)]
    assert payloads == [[now]]


# ── between processes ─────────────────────────────────────────────────────────────────────────────────────


def lies(worker: Worker, number: int) -> None:
    """Let a worker say that it holds the whole of a round's bucket, and show what it has made up."""
    resumption = worker._session.resumption
    assert resumption is not None
    key, spans, fetch = bucket(number), resumption.inventory.spans, resumption.recovery.fetch

    def spans_and_more(shard: ShardTraffic) -> list[Span]:
        _, bounds = worker._session.member.exchanges.table.share(key, PLAN.buckets[0].operation)
        first, stop = bounds[shard.number : shard.number + 2]
        more = [Span(State.HELD, key, first, stop, (1.0,) * (HONEST + 1))] if first < stop else []
        return [*spans(shard), *more]

    def fetch_a_lie(message: Fetch) -> tuple[Held, Buffer | None]:
        if message.key != key:
            return fetch(message)
        said = message.generation, key, message.slice, 5.0, True, (), (1.0,) * (HONEST + 1), (1.0, 0.0), bytes(12)
        return Held(*said), LIE[: NUMEL // 3].tobytes()

    resumption.inventory.spans = spans_and_more  # type: ignore[method-assign]
    resumption.recovery.fetch = fetch_a_lie  # type: ignore[method-assign]


def resumes_and_lies(worker: Worker, url: str, number: int) -> None:
    """Come back on another connection in the midst of a round, and say what `lies` says."""
    welcome = worker._session.membership
    shown = Resume("default", welcome.member_ids[welcome.rank], welcome.token, worker.epoch, PLAN.hash)
    with Stranger(url) as stranger:
        stranger.send(shown)
        resumed = stranger.hear()
        assert isinstance(resumed, Resumed)
        weights = (1.0,) * (HONEST + 1)
        stranger.send(
            Holding(resumed.generation, number, 1.0), pack_spans([Span(State.HELD, bucket(number), 0, 3, weights)])
        )
        for _ in range(3):
            message = stranger.hear()
            if not isinstance(message, Fetch):
                break
            said = resumed.generation, bucket(number), message.slice, 5.0, True, (), weights, (1.0, 0.0), bytes(12)
            stranger.send(Held(*said), LIE[: NUMEL // 3].tobytes())
        while not isinstance(message, Failure):
            message = stranger.hear()
        assert "is not what a coordinator of this group has made of it" in message.exception().message


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


MEDIAN = ("--mean", "median")
LONGER = [
    (True, MEDIAN),
    (False, ("--mean", "trimmed:0.25")),
    (False, ("--outliers", "leave-out")),
    (False, ("--audit", "0.5", "--mean", "median")),
]


@pytest.mark.parametrize(
    ("restarts", "options"),
    [
        (False, MEDIAN),
        (True, (*MEDIAN, "--shards", "2")),
        *[pytest.param(*one, marks=pytest.mark.long) for one in LONGER],
    ],
)
def test_no_member_gets_a_result_that_another_has_made_up(
    stack: ExitStack, tmp_path: Path, restarts: bool, options: Sequence[str]
) -> None:
    options = ("--workers", "4:8", "--gather", "60", "--state-dir", str(tmp_path), *options)
    daemon = stack.enter_context(Daemon(*options))
    world = HONEST + 1
    joining = [
        Task(connect, daemon.url, rank=rank, world_size=world, name=f"w{rank}", channel="tcp") for rank in range(world)
    ]
    workers = [task.result() for task in joining]
    for agreeing in [Task(worker.agree, PLAN) for worker in workers]:
        agreeing.result()
    gradients = [np.full(NUMEL, 1 if rank < HONEST else 134, np.float32) for rank in range(world)]
    for worker, gradient in zip(workers, [one.copy() for one in gradients], strict=True):
        worker.push(0, gradient)
    for task in [Task(worker.finish_round) for worker in workers]:
        task.result()

    for worker, gradient in zip(workers[:HONEST], gradients, strict=False):
        worker.push(0, gradient)
    rounds = [Task(worker.finish_round) for worker in workers[:HONEST]]
    if restarts:
        lies(workers[HONEST], 1)
        url = daemon.url
        daemon.send_signal(signal.SIGKILL)
        daemon.end()
        daemon = stack.enter_context(Daemon(*options))
        assert daemon.url == url
    else:
        resumes_and_lies(workers[HONEST], daemon.url, 1)

    for task in rounds:
        task.result(60.0)
    assert {float(value) for gradient in gradients[:HONEST] for value in np.unique(gradient)} == {1.0}
    assert {worker.world_size for worker in workers[:HONEST]} == {HONEST}
    with pytest.raises(GradServerError):
        workers[HONEST].finish_round()
    for worker in workers:
        worker.close()
