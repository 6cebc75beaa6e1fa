"""The messages, each declared once: a frozen dataclass with its number, its payloads, and the checks of its fields.

`gradserver.protocol.wire` encodes and decodes what is declared with `message`. `Push` and `Result` are named tuples:
there are two for every slice, and a named tuple is made in a sixth of the time. A new message takes the next number,
and a place at its receiver: a row in the table of control (`gradserver.engine.control.machine`), or a `case`.

worker                                  coordinator
  Probe + bytes ─────────────────────────► some times, to measure the link
  ◄────────────────────────────────────── Probed
  Join ──────────────────────────────────► waits until the group is complete
  ◄────────────────────────────────────── Welcome (or Failure)
  Attend ────────────────────────────────► to every further data shard, with the token that the Welcome brought
  ◄────────────────────────────────────── Attended
  ShareMemory ───────────────────────────► "is there memory that both of us see?"
  ◄────────────────────────────────────── MemoryAt, where to hand it over
  Split ─────────────────────────────────► on a branch: waits until all have asked that the sub-group is of
  ◄────────────────────────────────────── Welcome (or Failure), on the branch, as all else of the sub-group
  Propose + plan ────────────────────────► compares, when all have proposed
  ◄────────────────────────────────────── Agreed (or Failure)
  Opens, Steps ──────────────────────────► "this round is that module's", and "I step", with several modules
  Follow ────────────────────────────────► "what do the others exchange?", of a worker without data
  ◄────────────────────────────────────── Opened
  RequestRound ──────────────────────────► "I have a contribution", where rounds do not wait for all: `.grants` has them
  ◄────────────────────────────────────── Granted
  Push + slice ──────────────────────────►
  ◄────────────────────────────────────── Result + slice, until every slice of the Push has one
  ◄────────────────────────────────────── Result + slice, unasked, to a listener
  Taken ─────────────────────────────────► bytes of that which were read
  Register, Claim, Used ─────────────────► data: `.leases` has them, and the answers
  Paced ─────────────────────────────────► shows in the status how fast this member is
  Inquire ───────────────────────────────► "which members are missing?", when a wait ran out
  ◄────────────────────────────────────── Missing
  Blocked ───────────────────────────────► "all my threads wait, for this": `.waiting` has it
  ◄────────────────────────────────────── Recheck, when all members have said so
  Leave ─────────────────────────────────► forgets the worker
  ◄────────────────────────────────────── Leave, the same: all that was said before it was heard
  ◄────────────────────────────────────── BePresent, when it has come: also to a data shard that comes to a coordinator
  Present ───────────────────────────────► a moment later (from a worker)
  ◄────────────────────────────────────── Failure at any time; Ping at any time, not answered
  Ping ──────────────────────────────────► answered with a Ping, which shows whether anything was lost
  ◄────────────────────────────────────── Membership, when a member departed or came in
  ◄────────────────────────────────────── Notice, when its gradients are far off those of the others
  ◄────────────────────────────────────── RoundDone, after the last Result of a round
  (Resume, Resumed, Holding, Fetch, Held, Standing, after a connection broke: drawn in `.recovery`)
  Serve ─────────────────────────────────► may ask this member for its state, for a learner
  StateFailed ───────────────────────────► asks another one

learner                                 coordinator of a group that has begun
  Join ──────────────────────────────────► waits until there is a place, and all shards know of it
  ◄────────────────────────────────────── Welcome, which says that it joins; then as above, up to Agreed
  Enter ─────────────────────────────────► waits for the end of a round
  ◄────────────────────────────────────── RoundDone, which names the member that sends it the state: in transfers
  Ready ─────────────────────────────────►
  ◄────────────────────────────────────── Entered: it contributes, and is a member when that round is over

data shard                              coordinator
  Enlist ────────────────────────────────► uses it for the groups that become complete from now on
  ◄────────────────────────────────────── Enlisted (or Failure)
  ◄────────────────────────────────────── Ordered + order     (`gradserver.engine.orders` has them)
  Reported + report ─────────────────────►

anyone
  StatusRequest ─────────────────────────►
  ◄────────────────────────────────────── Status + JSON
"""

from __future__ import annotations

from gradserver.protocol.message_family import MessageKind
from gradserver.protocol.messages import leases, recovery, waiting
from gradserver.protocol.messages.core import (
    BePresent,
    Failure,
    Join,
    Leave,
    Notice,
    Ping,
    Present,
    Probe,
    Probed,
    Scope,
    Status,
    StatusRequest,
    Welcome,
)
from gradserver.protocol.messages.data import (
    HERE,
    Inquire,
    MemoryAt,
    Missing,
    Place,
    Push,
    Result,
    ShareMemory,
    Taken,
    pack_operation,
    unpack_operation,
)
from gradserver.protocol.messages.grants import Granted, RequestRound
from gradserver.protocol.messages.membership import (
    Enter,
    Entered,
    Membership,
    Paced,
    Ready,
    RoundDone,
    Serve,
    Split,
    StateFailed,
    Transfer,
)
from gradserver.protocol.messages.plans import Agreed, Follow, Opened, Opens, Propose, Steps
from gradserver.protocol.messages.shards import Attend, Attended, Enlist, Enlisted, Ordered, Reported

Message = MessageKind | Push | Result
"""All messages; those of `.recovery`, `.leases` and `.waiting` are among them."""
