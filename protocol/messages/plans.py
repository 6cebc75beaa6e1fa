"""Messages about plans, and about the section of each round."""

from __future__ import annotations

from dataclasses import dataclass

from gradserver.protocol.fields import Count, Counts, Flag, Stated, Text
from gradserver.protocol.limits import MAX_FRAME_BYTES
from gradserver.protocol.message_family import MessageKind, Payloads, message


@message(3, Payloads.one(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Propose(MessageKind):
    """The plan (in the payload) by which this worker wants to exchange from ``round`` on, the next one.

    It replaces the plan in force. Or it stands ``beside`` that, named by its hash, as one more section. Then the worker
    names the sections that it has ``dropped``. A learner names none: its plan is the group's next section.

    A member gives its proposals a ``number``, from 1 on. One that it repeats on a connection is dropped: in a recovery
    a proposal may be said twice, by the thread that makes it and by the one that resumes.
    """

    hash: Text
    round: Stated = 0
    beside: Text = ""
    dropped: Counts = ()
    number: Count = 0


@message(4, Payloads.optional(MAX_FRAME_BYTES))
@dataclass(frozen=True, slots=True)
class Agreed(MessageKind):
    """The answer that every member proposed this plan; ``round`` is the first one to be exchanged by it.

    If it is a ``section`` of a plan that has more, the whole plan is the payload.
    """

    hash: Text
    round: Count
    section: Count = 0


@message(42)
@dataclass(frozen=True, slots=True)
class Opens(MessageKind):
    """The message that this member is about to exchange ``section`` in ``round``, if a plan has several sections.

    The ``attempt`` is 0 if members reduce the round among themselves, with a commit, and 1 over the coordinator. The
    latter takes the place of the former: that was void, or is void as a learner contributes and has no part in it.
    """

    round: Stated
    section: Count
    attempt: Count = 0


@message(43)
@dataclass(frozen=True, slots=True)
class Steps(MessageKind):
    """The message that before ``round`` this member's job has updated models, or is at the top of its loop.

    It is the ``index``-th such message since the round before. The bits of two numbers are the models that were
    updated, and those that dropped their gradients.
    """

    round: Stated
    index: Count
    updated: Count
    dropped: Count


@message(44)
@dataclass(frozen=True, slots=True)
class Follow(MessageKind):
    """The question of a member without data: what do the others do before and in ``round``?

    It has done as many updates as ``index`` says since the round before.
    """

    round: Stated
    index: Count = 0


@message(45)
@dataclass(frozen=True, slots=True)
class Opened(MessageKind):
    """The answer to a Follow. ``updated`` models come first, as in `Steps`, or the others are at the ``top``.

    Otherwise they exchange ``section``. If all of them follow, this has ``ended``: the section is the first one, and no
    member has any data. ``index`` is that of the Follow.
    """

    round: Count
    section: Count
    top: Flag = False
    updated: Count = 0
    dropped: Count = 0
    ended: Flag = False
    index: Count = 0
