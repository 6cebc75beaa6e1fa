"""The protocol's limits, in one place: what a peer may send, and so what we must be able to hold.

A message beyond a limit is refused before memory is taken for what it describes.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

PROTOCOL_VERSION: Final = 5
"""Goes up when an old peer could misread a new one."""

MAX_HEADER_BYTES: Final = 64 * KIB
"""One encoded header."""

MAX_DECODING_BYTES: Final = 16 * MIB
"""Memory that decoding one header takes at most, whatever it says: msgpack can blow a byte up into objects of
128 bytes (a map in a map), and takes an array's word for its length at each of 1024 levels of nesting."""

MAX_FRAME_BYTES: Final = 4 * MIB
"""Any frame; an encoded plan comes nearest. ZeroMQ drops whoever announces more."""

SLICE_BYTES: Final = 1 * MIB
"""Largest slice of a bucket or tensor. It is reduced while it is in cache and keeps the pipe full."""

MAX_TEXT: Final = 4 * KIB
"""Characters in a name or a reason."""

MAX_NAME_BYTES: Final = 128
"""UTF-8 of a worker's or a group's name. In large groups names must be shorter: a Welcome carries all of them."""

MAX_LIST: Final = 1024
"""Items of any list in a header."""

MAX_SLICES: Final = 8192
"""Slices that one message speaks of; more than one only if they lie in shared memory. Their credit is below a slice."""

MAX_WORLD_SIZE: Final = 1024
MAX_GROUPS: Final = 256
MAX_ENDED_GROUPS: Final = 1024
"""Groups that have ended, and of which a coordinator knows that they have not paid for what they had written."""
JOURNAL_QUOTA_BYTES: Final = 256 * MIB
"""Bytes of a coordinator's journal that one group may fill in an hour, beside what its rounds need, by default."""
MAX_SHARDS: Final = 32
"""Data shards of one coordinator, itself included."""
MAX_URL: Final = 128
"""Characters of a data shard's URL."""
MAX_TOKEN: Final = 64
"""Characters of what a worker shows a data shard."""
MAX_RATE: Final = 1e6
"""Gbit/s."""
MAX_ORDER_BYTES: Final = MAX_FRAME_BYTES + MAX_HEADER_BYTES
"""What a coordinator tells a data shard at once: a plan, at most."""
MAX_REPORT_BYTES: Final = 256 * KIB
"""What a data shard reports at once: a round with a digest of every bucket, at most."""
MAX_BUCKETS: Final = 16_384
MAX_COMPONENTS: Final = 65_536
"""Parameters in a whole plan."""
MAX_DIMENSIONS: Final = 64
MAX_NUMEL: Final = 1 << 48
MAX_COUNTER: Final = 1 << 62
"""Rounds, sequence numbers and tags."""
MAX_CLAIMED: Final = 1 << 48
"""A round or an epoch that a worker says it is in. Far below `MAX_COUNTER`: what is counted on from it stays valid."""
MAX_ROUNDS_AHEAD: Final = 1 << 16
"""Rounds that members of a fixed group can be ahead of what data shards have reported to their coordinator."""
MAX_UNWRITTEN_ROUNDS: Final = 1 << 32
"""Rounds that a group can be ahead of its ledger, if the disk took nothing before the coordinator was lost."""
MAX_UNWRITTEN_EPOCHS: Final = 1 << 16
"""The same for epochs."""
MAX_WEIGHT: Final = 1e30
"""Larger than any count of tokens, and still a float32 when a thousand are added up."""
MAX_TRANSFERS: Final = 65_536
"""Different combinations of source, target and tag that a worker can use: each is counted for the group's life."""
STATE_SECONDS: Final = 120.0
"""How long a group waits for a learner that gets its state, by default."""
STATE_BYTES_A_SECOND: Final = 4 * MIB
"""How fast that must come, by default: so much of it in each span of `STATE_STALL_SECONDS` and more."""
STATE_ASK_SECONDS: Final = 3.0
"""How soon a learner asks for the state that a member is told to send."""
STATE_STALL_SECONDS: Final = 5.0
"""How long nothing may come of it, once it has begun."""
STATE_INSTALLED_A_SECOND: Final = 256 * MIB
"""Bytes of it that a learner makes its own in a second, at least."""
MAX_STATE_ATTEMPTS: Final = 3
"""Learners of one name for which a group waits in vain. Then that name may not join for `STATE_REST_SECONDS`."""
STATE_REST_SECONDS: Final = 600.0
MAX_OBJECT_BYTES: Final = 256 * MIB
"""One object of a collective of objects, as bytes."""
MAX_DATA: Final = 16
"""Names of data whose positions are handed out in one group."""
MAX_RANGES: Final = 65_536
"""Ranges of positions in one message; what is not used up of an epoch never falls into more pieces."""
MAX_SEED: Final = (1 << 64) - 1
MAX_TIMEOUT: Final = 7 * 24 * 3600.0
"""Seconds. Every wait ends; a week is for groups that a cluster's queue fills slowly."""

ROUND_TIMEOUT: Final = 1800.0
"""Seconds that others wait by default for a worker that is alive, as in torch.distributed. One that validates or writes
a checkpoint needs minutes; one that is dead or frozen is noticed within seconds in other ways."""

HEARTBEAT_SECONDS: Final = 1.0
COORDINATOR_SILENCE: Final = 8.0
"""After so long without a word, asked for each second, a coordinator counts as gone. It may stand still for a while,
and the end of its process is noticed at once, so this is for machines and networks that fail."""
FORGOTTEN_SECONDS: Final = 2.0
"""After which a coordinator knows that a connection has ended. Whoever comes again before may be in his own way."""

CREDIT_BYTES: Final = 16 * MIB
"""What one worker may have in flight in one pool by default: pushed, and not yet answered."""
BACKLOG_BYTES: Final = 64 * MIB
"""Unasked results that one receiver may have unread by default."""
MIN_SLICE_COST: Final = 2 * KIB
"""Credit that a slice takes however short it is: what the coordinator has to keep about it."""
SHARED_SLICE_COST: Final = 64
"""Credit for a slice in shared memory, behind its exchange's first: nothing of it is kept but its number."""
MIN_CREDIT_BYTES: Final = 2 * SLICE_BYTES
"""Below two slices a worker could not push one while the reply to another travels."""

OTHERS: Final = "*"
"""In place of a group's name, where sizes are told: all groups that are not named."""
