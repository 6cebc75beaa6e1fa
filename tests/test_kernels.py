"""Compiled kernels: they give the same bits as numpy, whatever they are given, and are there or not without a trace."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from gradserver.cli import main
from gradserver.comparison import Products
from gradserver.engine.commands import Contribution, Digests, Measures, Memory, Reduce
from gradserver.engine.events import NonFinite, Sifted
from gradserver.engine.policy import OnNonFinite
from gradserver.mean import narrow, types_of
from gradserver.protocol import kernels
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.codecs import Codec, Scratch, codec_of, encode_with_feedback, seed_of
from gradserver.protocol.codecs.base import BLOCK
from gradserver.protocol.compiled import cache, loader
from gradserver.protocol.compiled.verification import differences
from gradserver.protocol.digest import digest
from gradserver.protocol.dtypes import FLOAT32, dtype_of
from gradserver.protocol.errors import BackendUnavailableError, InvalidArgumentError
from gradserver.protocol.exchange import ExchangeKey, Kind, Op, Stream, operation_of
from gradserver.protocol.kernels import NUMPY, Floats, Kernels
from gradserver.protocol.means import mean_of
from gradserver.protocol.slicing import ALIGNMENT
from gradserver.reducer import reduce
from gradserver.status import show
from tests.cluster import ROOT, Daemon, Program, wait_until

pytest.importorskip("numba", reason="kernels are an extra: gradserver[fast]")

LOSSY = ["bf16", "fp16", "int8", "topk:0.3", "randomk:0.3"]
ELEMENTS = ["float32", "float16", "bfloat16", "complex64", "complex32", "float64"]


@pytest.fixture(scope="module")
def table() -> Kernels:
    if os.environ.get(loader.VARIABLE) == loader.NUMPY:
        pytest.skip("these tests need kernels, and are asked for none")
    assert loader.settle(300).kernels == loader.COMPILED
    from gradserver.protocol.compiled.table import TABLE

    return TABLE


@contextmanager
def using(one: Kernels) -> Iterator[None]:
    before = kernels.active()
    kernels.use(one)
    try:
        yield
    finally:
        kernels.use(before)


# Numbers of every size, where conversions change what they do: subnormal ones and near them, usual ones, those that
# have no half, some with a sum beyond float32, and any bits, of which one in 256 is NaN or Inf.
sizes = st.sampled_from(
    ["zero", "subnormal", "small", "usual", "ties", "large", "largest", "any", "one NaN", "one Inf"]
)
lengths = st.integers(1, 700) | st.sampled_from([1023, 1024, 1025, 2047, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300])
weights = st.sampled_from([1.0, 1.0, 2.0, 0.5, 3.0, 7.0, 1e-30, 1e30, 0.1])


def numbers(size: str, numel: int, seed: int) -> Floats:
    chance = np.random.default_rng(seed)
    usual = chance.standard_normal(numel, np.float32)
    if size == "any":
        return chance.integers(0, 1 << 32, numel, np.uint32).view(np.float32)
    if size == "ties":
        return chance.integers(-254, 255, numel).astype(np.float32) / np.float32(2)
    if size.startswith("one "):
        usual[chance.integers(numel)] = np.float32(size[4:])
    if size == "largest":
        return np.sign(usual) * np.finfo(np.float32).max
    scale = {"zero": -0.0, "subnormal": 1e-41, "small": 1e-6, "large": 1e5}.get(size, 1.0)
    return usual * np.float32(scale)


def rows_of(data: st.DataObject, count: int, numel: int) -> list[Floats]:
    return [
        numbers(data.draw(sizes, label="size"), numel, data.draw(st.integers(0, 1 << 20), label="seed"))
        for _ in range(count)
    ]


def same(left: Any, right: Any) -> bool:
    return bytes(left) == bytes(right)


@given(st.sampled_from(LOSSY), lengths, st.data())
def test_a_worker_encodes_and_decodes_the_same_bits(table: Kernels, name: str, numel: int, data: st.DataObject) -> None:
    codec, scratch, seed = codec_of(name), Scratch(), seed_of(3, 1, 0)
    values, residual = rows_of(data, 2, numel)
    found = []
    for one in (NUMPY, table):
        left, arrived = residual.copy(), np.empty(numel, np.float32)
        with using(one):
            payload = encode_with_feedback(codec, values, left, seed=seed, scratch=scratch)
            plain = codec.encode(values, seed=seed, scratch=scratch)
            codec.decode(plain, numel, arrived, seed, scratch)
        found.append([bytes(payload), bytes(plain), left.tobytes(), arrived.tobytes()])
    assert found[0] == found[1]


@given(st.sampled_from(["bf16", "fp16", "int8"]), lengths, st.data())
def test_any_payload_is_decoded_and_added_up_to_the_same_bits(
    table: Kernels, name: str, numel: int, data: st.DataObject
) -> None:
    codec, seed = codec_of(name), data.draw(st.integers(0, 1 << 20), label="seed")
    numel = min(numel, BLOCK)
    payload = np.random.default_rng(seed).integers(0, 256, codec.nbytes(numel), np.uint8)
    weight = data.draw(st.none() | weights.map(np.float32), label="weight")
    found = []
    for one in (NUMPY, table):
        total, arrived = np.ones(numel, np.float32), np.empty(numel, np.float32)
        with using(one), np.errstate(all="ignore"):
            codec.decode_block(payload, arrived, 0, Scratch())
            codec.add_block(payload, total, weight, 0, Scratch())
        found.append([arrived.tobytes(), total.tobytes()])
    assert found[0] == found[1]


def command(
    payloads: Sequence[Buffer | None],
    weighed: Sequence[float],
    codec: Codec | None,
    dtype: str,
    numel: int,
    memory: Memory | None,
    policy: OnNonFinite,
    round_number: int,
) -> Reduce:
    element = FLOAT32 if codec else dtype_of(dtype)
    operation = operation_of(Kind.ALL_REDUCE, Op.MEAN, element, numel, **({"codec": codec} if codec else {}))
    nbytes = codec.nbytes(numel) if codec else numel * element.itemsize
    rows = [Contribution(place, weight, one) for place, (weight, one) in enumerate(zip(weighed, payloads, strict=True))]
    key = ExchangeKey(Stream.BUCKET, round_number, 0)
    spans = () if policy in (OnNonFinite.HALT, OnNonFinite.PROPAGATE) else ((0, numel),)
    return Reduce(
        *("test", 1, key, 0, operation, 0, nbytes, numel, memory, rows, ()),
        keep=True,
        nonfinite=policy,
        spans=spans,
        squares=[],
    )


def told(made: Reduce, outcome: Any) -> list[Any]:
    """Everything that a reduction leaves behind. Without a contribution that counts there is no result."""
    owed = made.memory.content if made.memory else None
    findings = outcome.findings if isinstance(outcome, Sifted) else ()
    if isinstance(outcome, Sifted):
        given = sum(one.payload is not None for one in made.contributions)
        is_void = made.nonfinite is OnNonFinite.SKIP or len(findings) == given
        outcome = None if findings and is_void else outcome.payload
    return [
        bytes(outcome) if isinstance(outcome, memoryview) else repr(outcome),
        findings,
        repr(made.squares),
        owed.latest.tobytes() if owed else None,
    ]


policies = st.sampled_from(list(OnNonFinite))


def elements(row: Floats, dtype: str) -> npt.NDArray[Any]:
    """Convert numbers to an element type, or to the parts of one."""
    if dtype == "bfloat16":
        return row.view(np.uint16)[1::2]
    with np.errstate(all="ignore"):
        return row.astype(
            {"float16": np.float16, "complex32": np.float16, "float64": np.float64}.get(dtype, np.float32)
        )


@given(st.sampled_from(LOSSY), st.integers(1, 5), lengths, policies, st.booleans(), st.data())
def test_lossy_means_have_the_same_bits_in_every_round(
    table: Kernels, name: str, count: int, numel: int, policy: OnNonFinite, feeds: bool, data: st.DataObject
) -> None:
    codec = codec_of(name)
    weighed = [data.draw(weights, label="weight") for _ in range(count)]
    found: list[list[Any]] = [[], []]
    memories = [Memory() if feeds else None for _ in found]
    for round_number in range(2):
        rows = rows_of(data, count, numel)
        payloads: list[bytes | None] = [bytes(codec.encode(row, seed=seed_of(round_number, 0, 0))) for row in rows]
        if count > 2 and data.draw(st.booleans(), label="gives nothing"):
            payloads[1] = None
        for place, one in enumerate((NUMPY, table)):
            made = command(payloads, weighed, codec, "", numel, memories[place], policy, round_number)
            with using(one):
                found[place].append(told(made, reduce(made)))
    assert found[0] == found[1]


@given(st.sampled_from(ELEMENTS), st.integers(1, 5), lengths, policies, st.data())
def test_means_of_elements_have_the_same_bits(
    table: Kernels, dtype: str, count: int, numel: int, policy: OnNonFinite, data: st.DataObject
) -> None:
    parts = 2 if dtype.startswith("complex") else 1
    weighed = [data.draw(weights, label="weight") for _ in range(count)]
    payloads = [elements(row, dtype).tobytes() for row in rows_of(data, count, numel * parts)]
    found = []
    for one in (NUMPY, table):
        made = command(payloads, weighed, None, dtype, numel, None, policy, 0)
        with using(one), np.errstate(all="ignore"):
            found.append(told(made, reduce(made)))
    assert found[0] == found[1]


def in_place(memory: Sequence[Buffer], numel: int, policy: OnNonFinite) -> Reduce:
    """Make the reduction of contributions of equal weight, with its result where they lie."""
    made = command(memory, [1.0] * len(memory), None, "float32", numel, None, policy, 0)
    return made._replace(targets=memory, keep=False, squares=None)


@given(
    st.sampled_from(ELEMENTS),
    st.sampled_from([Op.MEAN, Op.SUM]),
    st.integers(1, 5),
    lengths,
    policies,
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_results_that_are_written_to_all_members_have_the_same_bits(
    table: Kernels,
    dtype: str,
    op: Op,
    count: int,
    numel: int,
    policy: OnNonFinite,
    keep: bool,
    is_measured: bool,
    data: st.DataObject,
) -> None:
    parts, is_there = 2 if dtype.startswith("complex") else 1, data.draw(st.booleans(), label="in place")
    weighed = [data.draw(weights, label="weight") for _ in range(count)]
    given = [elements(row, dtype).tobytes() for row in rows_of(data, count, numel * parts)]
    absent = {1} if count > 2 and data.draw(st.booleans(), label="gives nothing") else set()
    policy = policy if op is Op.MEAN else OnNonFinite.PROPAGATE
    found, sizes = [], []

    def counting(*arguments: Any) -> int:
        sizes.append(table.hand_out[dtype](*arguments))
        return sizes[-1]

    counted = table._replace(hand_out={dtype: counting} if dtype in table.hand_out else {})
    for one in (NUMPY, counted):
        memory = [bytearray(payload) for payload in given]
        targets = memory if is_there else [bytearray(len(payload)) for payload in given]
        rows = [None if place in absent else payload for place, payload in enumerate(memory)]
        made = command(rows, weighed, None, dtype, numel, None, policy, 0)
        operation = operation_of(Kind.ALL_REDUCE, op, dtype_of(dtype), numel)
        squares: list[float] | None = [] if is_measured and op is Op.MEAN else None
        made = made._replace(operation=operation, keep=keep, squares=squares, targets=targets)
        with using(one), np.errstate(all="ignore"):
            outcome = reduce(made)
        written = None if isinstance(outcome, NonFinite) else [bytes(target) for target in targets]
        found.append([told(made, outcome), written])
    assert found[0] == found[1]
    has_zeros = op is Op.SUM and absent
    assert bool(sizes) == (count > 1 and dtype in table.hand_out and not has_zeros and not made.spans)


def test_contributions_that_are_wanted_again_are_not_written_over(table: Kernels) -> None:
    """A mean is not handed out if some may be left out of it, if they are hashed, or if it is of one alone."""
    numel = 4096
    rows = [numbers("usual", numel, seed) for seed in (1, 2)]

    def forbidden(*_: Any) -> int:
        pytest.fail("it was handed out")

    cases: list[tuple[OnNonFinite, int, dict[str, Any]]] = [
        (OnNonFinite.LEAVE_OUT, 2, {}),
        (OnNonFinite.SKIP, 2, {}),
        (OnNonFinite.HALT, 2, {"digests": Digests(0, [])}),
        (OnNonFinite.HALT, 2, {"mean": mean_of("median")}),
        (OnNonFinite.HALT, 2, {"targets": (), "keep": True}),
        (OnNonFinite.HALT, 1, {}),
    ]
    for policy, count, more in cases:
        memory = [bytearray(row.tobytes()) for row in rows[:count]]
        with using(table._replace(hand_out={"float32": forbidden})):
            reduce(in_place(memory, numel, policy)._replace(**more))


def test_a_value_that_is_not_finite_is_not_written_over(table: Kernels) -> None:
    """Its chunk and what is behind it are as members gave them, so that they can find the cause."""
    numel, place = 4096, 2048
    rows = [numbers("usual", numel, 1), numbers("usual", numel, 2)]
    rows[1][place] = np.nan
    memory = [bytearray(row.tobytes()) for row in rows]
    with using(table):
        outcome = reduce(in_place(memory, numel, OnNonFinite.HALT)._replace(squares=[]))
    assert outcome == NonFinite(1, place, "NaN")
    for row, one in zip(rows, memory, strict=True):
        assert one[4 * place :] == row[place:].tobytes()


@pytest.mark.parametrize("begins", [0, 3000, 130_000])
def test_a_block_that_stands_out_is_compared_from_where_that_shows(table: Kernels, begins: int) -> None:
    """A contribution that is much larger in a few elements is found, though its block is handed out in part."""
    numel, few, usual = 200_000, 10, Memory()
    for round_number in range(4):
        rows = [numbers("usual", numel, 10 * round_number + member) for member in range(3)]
        if round_number == 3:
            rows[1][begins : begins + few] *= np.float32(1e6)
        expected = ((rows[0] + rows[1]) + rows[2]) / np.float32(3)
        memory = [bytearray(row.tobytes()) for row in rows]
        # With two blocks and a stride of 2^20 units none is due after the first round, in which nothing is known.
        measures = Measures(1 << 20, 1, ALIGNMENT, usual, [])
        made = in_place(memory, numel, OnNonFinite.HALT)._replace(squares=[], measures=measures)
        with using(table):
            assert reduce(made) is None
        plain = command(
            [row.tobytes() for row in rows], [1.0] * 3, None, "float32", numel, None, OnNonFinite.HALT, round_number
        )
        with using(NUMPY):
            reduce(plain)
        assert made.squares == plain.squares
        assert all(bytes(one) == expected.tobytes() for one in memory)
        stood_out = [one for one in measures.found if one.stood_out]
        assert len(stood_out) == (round_number == 3)
    (compared,) = stood_out
    squares = {member_id: own for member_id, own, _, _ in compared.members}
    assert squares[1] > 1e9 > 1e6 > squares[0] + squares[2]


@given(
    st.sampled_from(["float32", "float16", "bfloat16", "complex64"]),
    st.sampled_from([1, 255, 256, 700, 5000]),
    st.integers(1, 9),
    st.integers(2, 5),
    st.sampled_from([1e-25, 1.0, 1e25]),
    st.integers(0, 1 << 20),
)
def test_comparisons_are_of_the_same_elements(
    table: Kernels, name: str, numel: int, step: int, count: int, scale: float, seed: int
) -> None:
    chance, dtype = np.random.default_rng(seed), dtype_of(name)
    elements, stored = types_of(dtype, Op.MEAN)
    scale = scale if stored.itemsize == 4 else 1.0
    given = [(chance.standard_normal(numel) * scale).astype(elements) for _ in range(count)]
    rows = [one if elements == stored else narrow(one, dtype, stored) for one in given]
    blocks = [None if place < count - 1 and chance.random() < 0.2 else row for place, row in enumerate(rows)]
    offset = int(chance.integers(step))
    with using(NUMPY), np.errstate(over="ignore"):
        plain = Products(blocks, step, offset, dtype)
    with using(table):
        fast = Products(blocks, step, offset, dtype)
    assert fast.seen == plain.seen
    assert fast.squares == pytest.approx(plain.squares, rel=1e-4)
    largest = [math.sqrt(one * plain.squares[-1]) for one in plain.squares[:-1]]
    for left, right, most in zip(fast.inner, plain.inner, largest, strict=True):
        assert abs(left - right) <= 1e-4 * most


@given(st.integers(0, 40_000), st.integers(0, 70_000), st.integers(0, 1 << 20))
def test_digests_are_the_same(table: Kernels, size: int, at: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    with using(NUMPY):
        expected = digest(data, at)
    with using(table):
        assert digest(data, at) == expected


def test_kernels_may_come_in_the_middle_of_a_slice(table: Kernels) -> None:
    codec, numel = codec_of("int8"), 4 * BLOCK
    values, residual = numbers("usual", numel, 1), numbers("small", numel, 2)
    expected, left = residual.copy(), residual.copy()
    with using(NUMPY):
        payload = bytes(encode_with_feedback(codec, values, expected))
    turns = iter([table, NUMPY, table])

    def compensate(*arrays: Any) -> bool:
        kernels.use(next(turns))
        return table.compensate[codec.code](*arrays)

    with using(Kernels(compensate={codec.code: compensate})):
        assert bytes(encode_with_feedback(codec, values, left)) == payload
        assert kernels.active() is table
    assert left.tobytes() == expected.tobytes()


def test_rows_that_lie_anywhere_in_memory_are_taken(table: Kernels) -> None:
    """A payload begins where its message's header ends. Nothing may rely on more."""
    codec, numel = codec_of("bf16"), 5000
    values = numbers("usual", numel, 1)
    room = np.empty(4 * numel + 1, np.uint8)[1:]
    room[:] = values.view(np.uint8)
    odd = room.view(np.float32)
    assert not odd.flags.aligned
    with using(table):
        assert bytes(codec.encode(odd)) == bytes(codec.encode(values))
        out = np.empty(2 * numel + 1, np.uint8)[1:]
        codec.encode(values, out)
        arrived, usual = np.empty(4 * numel + 1, np.uint8)[1:].view(np.float32), np.empty(numel, np.float32)
        codec.decode(out.data, numel, arrived)
        codec.decode(codec.encode(values), numel, usual)
    assert arrived.tobytes() == usual.tobytes()


# ── loading ───────────────────────────────────────────────────────────────────────────────────────────────


def in_process(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


SETTLE = "from gradserver.protocol.compiled import loader; print(loader.settle(90)); "


def test_one_variable_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    own = loader._Loader()
    monkeypatch.setenv(loader.VARIABLE, "numpy")
    own.start()
    assert str(own.standing) == "numpy (GRADSERVER_KERNELS=numpy)"
    monkeypatch.setenv(loader.VARIABLE, "fast")
    with pytest.raises(InvalidArgumentError, match="GRADSERVER_KERNELS must be auto, numpy or compiled, not 'fast'"):
        own.start()


@pytest.mark.parametrize("option", ["--workers", "--join"])
def test_nothing_listens_with_a_choice_that_cannot_be(option: str) -> None:
    value = "1" if option == "--workers" else "tcp://127.0.0.1:7411"
    program = f"import sys; from gradserver.cli import main; sys.exit(main({['serve', option, value]}))"
    done = in_process(program, GRADSERVER_KERNELS="fast")
    assert (done.stdout, done.returncode) == ("", 2)
    assert "GRADSERVER_KERNELS must be auto, numpy or compiled, not 'fast'" in done.stderr


def test_without_numba_numpy_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    own = loader._Loader()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setenv(loader.VARIABLE, "auto")
    found = own.settle(10)
    assert (found.kernels, found.failed) == ("numpy", False)
    assert found.reason == "numba is not installed: pip install 'gradserver[fast]'"
    monkeypatch.setenv(loader.VARIABLE, "compiled")
    with pytest.raises(BackendUnavailableError, match="GRADSERVER_KERNELS=compiled, but numba is not installed"):
        own.start()


def test_a_numba_that_does_not_work_is_told_once(tmp_path: Path) -> None:
    package = tmp_path / "numba"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it was made for another numpy')\n")
    program = f"import logging; logging.basicConfig(); {SETTLE} {SETTLE}"
    done = in_process(program, PYTHONPATH=str(tmp_path), GRADSERVER_KERNELS="auto")
    why = "kernels cannot be compiled: it was made for another numpy"
    assert done.stdout.splitlines() == [f"numpy ({why})"] * 2
    assert done.stderr.count(why) == 1
    assert "set GRADSERVER_KERNELS=numpy to do without" in done.stderr
    must = in_process(SETTLE, PYTHONPATH=str(tmp_path), GRADSERVER_KERNELS="compiled")
    assert f"BackendUnavailableError: GRADSERVER_KERNELS=compiled, but {why}" in must.stderr


def test_memory_that_may_not_be_executed_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    """Test the message of llvmlite in a service that may not make code."""
    package = tmp_path / "numba"
    package.mkdir()
    said = "cannot allocate executable memory. This may be due to security restrictions on your system."
    (package / "__init__.py").write_text(f"raise OSError({said!r})\n")
    done = in_process(
        f"import logging; logging.basicConfig(); {SETTLE}", PYTHONPATH=str(tmp_path), GRADSERVER_KERNELS="auto"
    )
    assert "MemoryDenyWriteExecute=yes. Leave that out of the unit" in done.stderr
    assert "pip install" not in done.stderr
    assert ".." not in done.stderr


def test_kernels_that_round_otherwise_are_not_used(table: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    with using(NUMPY):
        assert differences(table) == []

        def one_off(data: Any, out: Floats) -> None:
            table.decode[1](data, out)
            out[7] = np.nextafter(out[7], np.float32(9))

        wrong = table._replace(decode={**table.decode, 1: one_off})
        assert set(differences(wrong)) == {"bf16"}
        monkeypatch.setattr(sys.modules["gradserver.protocol.compiled.table"], "TABLE", wrong)
        monkeypatch.setenv(loader.VARIABLE, "auto")
        found = loader._Loader().settle(90)
        assert kernels.active() is NUMPY
    assert (found.kernels, found.failed) == ("numpy", True)
    assert "other bits than numpy on this machine (bf16" in found.reason


def test_machine_code_lies_where_this_user_alone_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with cache.directory() as directory:
        assert directory.parent == home / "gradserver"
        assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)  # others could put machine code there
    with cache.directory() as directory:
        assert directory.parent == temporary / f"gradserver-{os.geteuid()}"
    assert directory.is_dir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # neither is this user's
    with cache.directory() as directory:
        assert directory.parent == temporary
        assert directory.stat().st_mode & 0o077 == 0
    assert not directory.exists()


@pytest.mark.parametrize("place", ["home", "folder", "key", "parent"])
def test_no_machine_code_comes_from_where_others_can_put_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    (tmp_path / "own").mkdir()
    temporary.mkdir()
    home.mkdir(mode=0o700)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    link = {"folder": home / "gradserver", "key": home / "gradserver" / cache._name()}.get(place)
    if link is not None:  # a link that leads to a directory of this user now
        link.parent.mkdir(mode=0o700, exist_ok=True)
        link.symlink_to(tmp_path / "own")
    else:
        (home if place == "home" else tmp_path).chmod(0o777)
    temporary.chmod(0o700)
    with cache.directory() as directory:
        assert home not in directory.parents
        assert directory.resolve() == directory
        inside = temporary / f"gradserver-{os.geteuid()}"
        assert (directory.parent == inside) == (place != "parent")
    assert directory.exists() == (place != "parent")
    assert list((tmp_path / "own").iterdir()) == []


def test_a_sticky_directory_keeps_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "linked"))
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o1777)
    (tmp_path / "linked").symlink_to(tmp_path / "all")
    with cache.directory() as directory:
        assert directory.parent == tmp_path / "all" / "gradserver"


def test_a_home_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with cache.directory() as directory:
        assert directory.parent == tmp_path / f"gradserver-{os.geteuid()}"


def full(directory: Path) -> Path:
    """Make ``directory`` look as one with all kernels."""
    directory.mkdir(parents=True)
    (directory / "loops.nbc").write_bytes(b"machine code")
    (directory / "ready").touch()
    return directory


def package_with_kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a package with kernels beside it. Compiling anew is a failure, so that copies are told from it."""
    monkeypatch.setattr(cache, "_PACKAGE", path)
    found = full(cache.installed())

    def compiled(*_: Any) -> None:
        raise BackendUnavailableError("they are compiled anew")

    monkeypatch.setattr(cache, "_compile", compiled)
    return found


def test_kernels_beside_the_package_are_copied_for_each_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package_with_kernels(tmp_path / "package", monkeypatch)
    target = tmp_path / "own"
    target.mkdir()
    cache.fill(target)
    assert cache.is_full(target)
    assert (target / "loops.nbc").read_bytes() == b"machine code"


@pytest.mark.parametrize("fault", ["writable", "folder", "link", "owner", "unready", "unreadable"])
def test_kernels_that_are_not_as_safe_as_the_package_are_not_copied(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = package_with_kernels(tmp_path / "package", monkeypatch)
    if fault == "writable":
        source.chmod(0o777)
    elif fault == "folder":
        source.parent.chmod(0o775)
    elif fault == "link":
        source.rename(tmp_path / "elsewhere")
        source.symlink_to(tmp_path / "elsewhere")
    elif fault == "owner":
        os.chown(source, 12345, -1) if os.geteuid() == 0 else pytest.skip("only root can give a directory away")
    elif fault == "unready":
        (source / "ready").unlink()
    else:
        (source / "loops.nbc").unlink()
        (source / "loops.nbc").symlink_to(tmp_path / "nothing")
    target = tmp_path / "own"
    target.mkdir()
    with pytest.raises(BackendUnavailableError, match="compiled anew"):
        cache.fill(target)
    assert not cache.is_full(target)


def test_command_says_where_kernels_are_and_that_they_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = package_with_kernels(tmp_path / "package", monkeypatch)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert main(["kernels", "compile", "--system"]) == 0
    assert capsys.readouterr().out == f"kernels are compiled already, in {found}\n"
    assert main(["kernels", "compile"]) == 0
    assert "s, into " + str(tmp_path / "home" / "gradserver" / "kernels-") in capsys.readouterr().out
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path / "file")
    (tmp_path / "file").touch()
    assert main(["kernels", "compile", "--system"]) == 1
    assert f"kernels cannot be written to {tmp_path}/file/machine_code/kernels-" in capsys.readouterr().err
    monkeypatch.setattr(cache, "own", lambda: None)
    assert main(["kernels", "compile"]) == 1
    assert "set XDG_CACHE_HOME to one" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert main(["kernels", "compile"]) == 1
    assert "pip install 'gradserver[fast]'" in capsys.readouterr().err


@pytest.mark.long
def test_installed_kernels_are_those_that_run(tmp_path: Path) -> None:
    """Compile beside a copy of the package, and load them as another user would: by a copy."""
    root = Path(cache.__file__).resolve().parents[2]
    for name in ("gradserver", "protocol", "worker"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("machine_code"))
    home = tmp_path / "home"
    own = {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": str(tmp_path),
        "XDG_CACHE_HOME": str(home),
        "GRADSERVER_KERNELS": "auto",
    }
    command = "import sys; from gradserver.cli import main; sys.exit(main(['kernels', 'compile', '--system']))"
    done = in_process(f"import os; os.umask(0o077); {command}", **own)
    assert done.stdout.startswith("compiled kernels in "), done.stderr
    files = list((tmp_path / "protocol" / "compiled" / "machine_code").rglob("*.nbc"))
    assert len(files) > 8
    assert {file.stat().st_mode & 0o777 for file in files} == {0o644}
    forbid = "from gradserver.protocol.compiled import cache; cache._compile = None; "
    done = in_process(forbid + SETTLE, **own)
    assert done.stdout.startswith("compiled (by numba, ready after"), done.stdout
    assert len(list(home.rglob("*.nbc"))) == len(files)


def test_a_coordinator_ends_at_once_while_it_loads_kernels(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)\n"
    )
    more = {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))), "GRADSERVER_KERNELS": "auto"}
    with Program("-m", "gradserver", "serve", "--bind", "tcp://127.0.0.1:0", environment=more, loaded="") as program:
        wait_until((tmp_path / "begun").exists, "it loads kernels")
        program.send_signal(signal.SIGTERM)
        assert program.end(timeout=3) == 0  # the end of a process waits for such threads, for 5 s
        assert any(line.endswith("stopped") for line in program.complaints())


@pytest.mark.long
def test_processes_that_begin_at_once_compile_once(tmp_path: Path) -> None:
    variables = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "GRADSERVER_KERNELS": "auto"}
    variables.pop("NUMBA_CACHE_DIR", None)
    each = [
        subprocess.Popen([sys.executable, "-c", SETTLE], env=variables, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert all(one.communicate(timeout=100)[0].startswith("compiled (") for one in each)
    found = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")}
    assert len(found) > 8
    assert in_process(SETTLE, XDG_CACHE_HOME=str(tmp_path)).stdout.startswith("compiled (")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nbc")} == found


@pytest.mark.usefixtures("table")
def test_a_coordinator_says_which_does_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon("--workers", "1", "--quiet") as daemon:
        wait_until(lambda: daemon.snapshot()["kernels"]["kernels"] == "compiled", "kernels are loaded", 60)
        assert show(daemon.url, 0, False) == 0
        assert "kernels: compiled (by numba, ready after " in capsys.readouterr().out
