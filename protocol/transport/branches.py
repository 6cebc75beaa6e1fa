"""Branches: further connections that one connection carries.

Each sub-group has a connection of its own at both ends. They share the sockets, the numbers of messages, the memory
and the liveness of the worker's first connection, the *trunk*. A message of a branch says which one, before its header:

    1 byte     0x42: no header begins so, and no number of `.numbers`
    4 bytes    the number of the branch, big-endian, from 1 on
    header     as `gradserver.protocol.wire` encodes it

The worker gives the numbers, and gives none again. A message of a branch that one end has closed is dropped.

    branch   event, at the coordinator or a data shard        next     what happens
    ───────  ───────────────────────────────────────────────  ───────  ────────────────────────────────────────────────
    (none)   Split, Resume or Attend                          OPEN     the engine gets it as of a new connection
    (none)   any other message                                (none)   it is dropped: the branch was closed meanwhile
    OPEN     a message                                        OPEN     the engine gets it
    OPEN     the engine closes the connection                 (none)
    OPEN     the trunk is lost, or the worker leaves          (none)   the engine hears the same of the branch
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from gradserver.protocol.buffer import Buffer

_HEAD: Final = struct.Struct(">BI")
MARK: Final = 0x42
"""First byte of the header of each message of a branch."""


def on_branch(header: bytes, branch: int) -> bytes:
    """Return ``header`` with the number of its branch in front."""
    return _HEAD.pack(MARK, branch) + header


def branch_of(frames: Sequence[Buffer]) -> tuple[int, Sequence[Buffer]]:
    """Return the branch of a message that begins with `MARK`, and the message without the number."""
    header = bytes(frames[0])
    if len(header) < _HEAD.size:
        return 0, frames  # it is no message, as its reader is about to find
    return _HEAD.unpack_from(header)[1], [header[_HEAD.size :], *frames[1:]]
