"""Messages about rounds that members request: in groups with bounded staleness, and in asynchronous ones.

worker                                  coordinator
  RequestRound ──────────────────────────► "I have a contribution"
  ◄────────────────────────────────────── Granted, with the round in which it counts
  Push + slice ──────────────────────────► as in every round
"""

from __future__ import annotations

from dataclasses import dataclass

from gradserver.protocol.fields import Count, Counts, Flag, Stated
from gradserver.protocol.message_family import MessageKind, message


@message(47)
@dataclass(frozen=True, slots=True)
class RequestRound(MessageKind):
    """The request for a round, by a member with a contribution. Until that is over, a member has one request.

    Attributes:
        version: number of updates that its weights had when it computed the contribution.
        first: the first round that it can contribute to.
        follows: true if it has no data: no round waits for it, and it takes part with weight 0.
        pushes: true if it was granted ``first``, and has begun to push; said again on a new connection.
        section: the section of the plan that the contribution is to.
        later: sections of further contributions of the same version, which it requests rounds for afterwards.
    """

    version: Stated
    first: Stated
    follows: Flag = False
    pushes: Flag = False
    section: Count = 0
    later: Counts = ()


@message(48)
@dataclass(frozen=True, slots=True)
class Granted(MessageKind):
    """The answer that the contribution counts in ``round``. If it is ``refused``, it is too old for that.

    Then its member drops it, and computes again when it has the updates before ``round``.

    Attributes:
        round: the round.
        refused: true if the contribution is too old.
        applied: number of rounds that all members have applied, so that none can lack a result of these.
        section: the section that the round is of.
        staleness: number of updates of the section since the version of the contribution.
    """

    round: Count
    refused: Flag = False
    applied: Count = 0
    section: Count = 0
    staleness: Count = 0
