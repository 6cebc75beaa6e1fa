"""Concatenation of contributions that are not reduced, as of ALL_GATHER, and their parts, slice by slice."""

from __future__ import annotations

from typing import Final

from gradserver.engine.commands import Reduce
from gradserver.engine.events import Undecodable
from gradserver.mean import Outcome
from gradserver.protocol.buffer import Buffer
from gradserver.protocol.errors import MalformedMessageError
from gradserver.protocol.exchange import JOINED, PORTIONED, Op
from gradserver.protocol.frames import frames
from gradserver.protocol.keyed import keyed_hash

PASSED_ON: Final = JOINED | PORTIONED


def pass_on(command: Reduce) -> Outcome:
    """Make the result of an ALL_GATHER or GATHER, or those of a SCATTER or ALL_TO_ALL, one for each participant.

    Targets may be where contributions lie: all results are made before the first is written.
    """
    kind, given = command.operation.kind, []
    count = command.world if kind in PORTIONED else 1
    for contribution in command.contributions:
        if contribution.payload is not None:
            try:
                given.append(_parts(command, contribution.payload, count))
            except MalformedMessageError as error:
                return Undecodable(contribution.member_id, error)
    if kind in JOINED:
        joined = b"".join(parts[0] for parts in given)
        if command.hashes is not None:
            command.hashes.found.append(keyed_hash(joined, command.hashes.key))
        for target in command.targets:
            memoryview(target)[: len(joined)] = joined
        return joined if command.keep else None
    results: tuple[Buffer, ...] = tuple(b"".join(parts[place] for parts in given) for place in range(count))
    for target, place in zip(command.targets, command.places, strict=True):
        memoryview(target)[: len(results[place])] = results[place]
    return results if command.keep else None


def _parts(command: Reduce, payload: Buffer, count: int) -> list[memoryview]:
    """Split one contribution into portions for ``count`` receivers."""
    if command.operation.op is Op.FRAMED:
        return frames(memoryview(payload)[: command.nbytes], count)
    view, size = memoryview(payload), command.nbytes // count
    return [view[place * size : (place + 1) * size] for place in range(count)]
