"""Tests of the digest: the same for the same bytes however they are cut, another for any other word."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gradserver.protocol.codecs import codec_of
from gradserver.protocol.digest import MODULUS, digest, places
from gradserver.protocol.dtypes import BY_NAME, FLOAT32
from gradserver.protocol.exchange import Op
from gradserver.protocol.plan import Bucket, Component, Plan

ROW = 1024
"""Words, as in the formula."""
NEAR_ROWS = st.sampled_from([0, 8 * (ROW - 3), 8 * (3 * ROW - 2), 8 << 40])


def splitmix(state: int) -> int:
    mixed = state * 0x9E3779B97F4A7C15 % MODULUS
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % MODULUS
    return mixed ^ (mixed >> 31)


def by_the_formula(data: bytes, at: int) -> int:
    """Compute the digest one word after the other."""
    place, total = bytes(at % 8) + data, 0
    for start in range(0, len(place), 8):
        word = int.from_bytes(place[start : start + 8], "little")
        index = at // 8 + start // 8
        total += word * (splitmix(index % ROW + 1) | 1) * (2 * (index // ROW) + 1)
    return total % MODULUS


def payload(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@given(st.binary(max_size=100), st.integers(0, 40), NEAR_ROWS)
def test_it_is_the_formula(data: bytes, at: int, base: int) -> None:
    assert digest(data, base + at) == by_the_formula(data, base + at)


def test_what_it_is_never_changes() -> None:
    """Test fixed values: ledgers outlive versions."""
    assert digest(b"") == 0
    assert digest(bytes(range(64))) == by_the_formula(bytes(range(64)), 0) == 0x7F66_F5EA_A275_AE70
    assert digest(b"gradserver", 8 * ROW - 5) == by_the_formula(b"gradserver", 8 * ROW - 5) == 0x8976_CCC7_8D0C_3C21


@given(st.integers(0, 4 * 8 * ROW), st.lists(st.integers(0, 4 * 8 * ROW), max_size=8), st.randoms())
def test_parts_add_up_to_the_whole_however_it_is_cut_and_in_any_order(
    size: int, cuts: list[int], chance: random.Random
) -> None:
    data = payload(size, size)
    bounds = sorted({0, size, *(cut for cut in cuts if cut < size)})
    parts = [(data[start:stop], start) for start, stop in pairwise(bounds)]
    chance.shuffle(parts)
    assert sum(digest(part, at) for part, at in parts) % MODULUS == digest(data)


@given(st.data(), st.integers(8, 4000), NEAR_ROWS, st.integers(1, MODULUS - 1))
def test_any_changed_word_changes_it(data: st.DataObject, size: int, at: int, change: int) -> None:
    before = payload(size // 8 * 8, size)
    words = np.frombuffer(before, np.uint64).copy()
    index = data.draw(st.integers(0, words.size - 1))
    words[index] ^= np.uint64(change)
    assert digest(words, at) != digest(before, at)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(0, MODULUS // 2 - 1))
def test_the_same_odd_word_elsewhere_is_another_digest(one: int, apart: int, half: int) -> None:
    word = (2 * half + 1).to_bytes(8, "little")
    assert digest(word, 8 * one) != digest(word, 8 * (one + apart))


@given(st.integers(1, 500), st.lists(st.integers(0, 63), min_size=2, max_size=2, unique=True))
def test_another_bit_of_any_word_is_another_digest(one: int, bits: list[int]) -> None:
    here, there = ((1 << bit).to_bytes(8, "little") for bit in bits)
    assert digest(here, 8) != digest(there, 8 * one)


def test_what_is_in_memory_may_be_anything() -> None:
    floats = np.arange(1000, dtype=np.float32)
    data = bytes(3) + floats.tobytes()
    assert digest(floats) == digest(floats.tobytes()) == digest(memoryview(data)[3:])


def test_zeros_are_what_is_not_there() -> None:
    """Test that an absent contribution, which counts as zeros, has the digest of zeros."""
    assert digest(bytes(1000), 24) == 0
    assert digest(b"x" + bytes(1000)) == digest(b"x")


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "topk:0.01"])
def test_buckets_stand_one_behind_the_other_each_at_a_row(wire: str) -> None:
    codec = codec_of(wire)
    plan = Plan(
        (
            Bucket("large", FLOAT32, (Component("w", (70_001,)),), codec=None if wire == "fp32" else codec),
            Bucket("bytes", BY_NAME["uint8"], (Component("mask", (13,)),), Op.FIRST),
            Bucket("empty", FLOAT32, ()),
            Bucket("last", FLOAT32, (Component("b", (3,)),)),
        )
    )
    row = 8 * ROW
    large = -(-codec.nbytes(70_001) // row) * row
    assert places(plan) == (0, large, large + row, large + row)
