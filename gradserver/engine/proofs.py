"""Proofs of results: with each result of a durable group goes a code that only its coordinator can make.

Members keep results for one another (`gradserver.protocol.messages.recovery`). A result that one of them shows is
handed on only if its proof is right: then this coordinator, its predecessor or one of its data shards has made it, and
said the same beside it. So a member can neither invent a result nor change one, on purpose or by a fault of its memory.

    proof of some slices      the generation in which they were made, and 4 bytes for each slice
    the 4 bytes               BLAKE2b with the group's key, of generation, exchange, slice, weights, members without a
                              part, squares, and the keyed hash of the bytes (`gradserver.protocol.keyed`)

A member that guesses is right once in 2^32 times, and its first wrong guess costs it its place.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from gradserver.protocol.buffer import Buffer
from gradserver.protocol.exchange import ExchangeKey
from gradserver.protocol.keyed import key_of, keyed_hash
from gradserver.protocol.limits import CODE_BYTES, STAMP_BYTES
from gradserver.protocol.messages.data import made_in

_MOST_KEY: Final = hashlib.blake2b.MAX_KEY_SIZE
_NONE: Final = b""
"""In the place of a hash: there are no bytes."""


class Said(NamedTuple):
    """The facts that a result states beside its bytes, the same for all slices of one message."""

    key: ExchangeKey
    weight: float
    without: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


class Proofs:
    """The maker of proofs of one group.

    Attributes:
        key: that of the keyed hash.
    """

    def __init__(self, secret: str) -> None:
        self.key = key_of(secret)
        code = hashlib.shake_256(b"code" + secret.encode()).digest(_MOST_KEY)
        self._begun = hashlib.blake2b(key=code, digest_size=CODE_BYTES)

    def prove(
        self, generation: int, said: Said, first: int, hashes: Sequence[bytes], squares: Sequence[float] = ()
    ) -> bytes:
        """Return the proof of slices from ``first`` on, of which these are the hashes; an empty one: no bytes."""
        begun, made = self._begun.copy(), generation.to_bytes(STAMP_BYTES, "little")
        begun.update(made + _packed(said))
        codes = [made]
        for place, own in enumerate(hashes):
            one = begun.copy()
            two = squares[2 * place : 2 * place + 2] if own else ()
            one.update(struct.pack(f"<QB{len(two)}d", first + place, len(two), *two) + own)
            codes.append(one.digest())
        return b"".join(codes)

    def hashes(self, payload: Buffer | None, sizes: Sequence[int]) -> list[bytes]:
        """Return the hashes of slices that lie one behind the other, each with so many bytes, or with none."""
        if payload is None:
            return [_NONE] * len(sizes)
        return [keyed_hash(part, self.key) for part in _cut(payload, sizes)]

    def is_right(
        self, proof: bytes, said: Said, index: int, payload: Buffer | None, squares: tuple[float, ...]
    ) -> bool:
        """Tell whether ``proof`` is that of this one slice."""
        if len(proof) != STAMP_BYTES + CODE_BYTES:
            return False
        own = _NONE if payload is None else keyed_hash(payload, self.key)
        return hmac.compare_digest(proof, self.prove(made_in(proof), said, index, (own,), squares))


def _packed(said: Said) -> bytes:
    without, weights = said.without, said.weights
    form = f"<BQQhhdHH{len(without)}H{len(weights)}d"
    return struct.pack(form, *said.key, said.weight, len(without), len(weights), *without, *weights)


def _cut(payload: Buffer, sizes: Sequence[int]) -> Iterator[Buffer]:
    if len(sizes) == 1:
        yield payload
        return
    view, at = memoryview(payload), 0
    for size in sizes:
        yield view[at : at + size]
        at += size
