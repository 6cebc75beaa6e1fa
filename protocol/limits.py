"""The protocol's limits: what a peer may send, and so what we must be able to hold.

A message beyond a limit is refused before memory is taken for what it describes.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

PROTOCOL_VERSION: Final = 17
"""The protocol's version. It goes up when an old peer could misread a new one."""

MAX_HEADER_BYTES: Final = 64 * KIB
"""Bytes of one encoded header."""

MAX_DECODING_BYTES: Final = 16 * MIB
"""Memory that decoding one header takes at most. A byte of msgpack can become objects of 128 bytes (a map in a map).
And msgpack trusts an array's length at each of 1024 levels."""

MAX_FRAME_BYTES: Final = 4 * MIB
"""Bytes of any frame; an encoded plan comes nearest. ZeroMQ drops a peer that announces more."""

SLICE_BYTES: Final = 1 * MIB
"""Bytes of the largest slice of a bucket or tensor. It is reduced while it is in cache and keeps the pipe full."""

RUN_BYTES: Final = MAX_FRAME_BYTES
"""Bytes of one payload. It has one slice, or several that follow one another and have no codec."""

MAX_TEXT: Final = 4 * KIB
"""Characters in a name or a reason."""

MAX_NAME_BYTES: Final = 128
"""UTF-8 of a worker's or a group's name. In large groups names must be shorter: a Welcome carries all of them."""

MAX_LIST: Final = 1024
"""Items of any list in a header."""

MAX_SLICES: Final = MAX_LIST // 2
"""Slices that one message names. In shared memory their credit is below a slice. A Result has two numbers for each."""

STAMP_BYTES: Final = 8
"""Bytes of a proof that say in which generation its slices were made."""
CODE_BYTES: Final = 4
"""Bytes of a proof for each slice. A wrong guess costs a member its place."""
MAX_PROOF_BYTES: Final = STAMP_BYTES + MAX_SLICES * CODE_BYTES

MAX_WORLD_SIZE: Final = 1024
MAX_GROUPS: Final = 256
MAX_SUBGROUPS: Final = 1024
"""Sub-groups of all groups together, and logical connections that one connection carries."""
MAX_ENDED_GROUPS: Final = 1024
"""Ended groups that have not paid for what they had written, as far as a coordinator remembers them."""
JOURNAL_QUOTA_BYTES: Final = 256 * MIB
"""Bytes of a coordinator's journal that one group may fill in an hour, beside what its rounds need, by default."""
MAX_SHARDS: Final = 32
"""Data shards of one coordinator, itself included."""
MAX_URL: Final = 128
"""Characters of a data shard's URL."""
MAX_TOKEN: Final = 64
"""Characters of the token that a worker shows a data shard."""
MAX_LABEL: Final = 64
"""Characters of a word in an offer: a name, a version, an address. All offers of the largest group fit into a frame."""
MAX_TROUBLE: Final = 192
"""Characters of the reason for which a worker lacks something."""
MAX_DEVICES: Final = 16
"""CUDA devices in an offer."""
MAX_PLANE_REASON: Final = 256
"""UTF-8 of the reason for which a group has its plane."""
MAX_RATE: Final = 1e6
MAX_PACE: Final = 1e15
"""Gbit/s of a link."""
MAX_ORDER_BYTES: Final = MAX_FRAME_BYTES + MAX_HEADER_BYTES
"""Bytes that a coordinator tells a data shard at once: a plan, at most."""
MAX_REPORT_BYTES: Final = 2 * MIB
"""Bytes that a data shard reports at once: a round with a digest of every bucket, at most."""
MAX_BUCKETS: Final = 163_840
MAX_COMPONENTS: Final = 655_360
"""Parameters in a whole plan."""
MAX_PLAN_BYTES: Final = 40 * MIB
"""Bytes of a plan before it is packed. Packed, it fits into a frame."""
MAX_DIMENSIONS: Final = 64
MAX_NUMEL: Final = 1 << 48
MAX_COUNTER: Final = 1 << 62
"""Rounds, sequence numbers and tags."""
MAX_CLAIMED: Final = 1 << 48
"""The largest round or epoch that a worker can claim. Counting on from it stays far below `MAX_COUNTER`."""
MAX_ROUNDS_AHEAD: Final = 1 << 16
"""Rounds that members can be ahead of what data shards have reported to their coordinator."""
MAX_UNWRITTEN_ROUNDS: Final = 1 << 32
"""Rounds that a group can be ahead of its ledger. The disk may have taken nothing before the coordinator was lost."""
MAX_UNWRITTEN_EPOCHS: Final = 1 << 16
"""The same for epochs."""
MAX_WEIGHT: Final = 1e30
"""The largest weight: above any count of tokens, and still a float32 when a thousand are added up."""
MAX_TRANSFERS: Final = 65_536
"""Combinations of source, target and tag that a worker can use. Each is counted for the group's life."""
STATE_SECONDS: Final = 120.0
"""Seconds that a group waits for a learner that gets its state, by default."""
STATE_BYTES_A_SECOND: Final = 4 * MIB
"""Bytes of the state that must come in a second, by default, in each span of `STATE_STALL_SECONDS` and more."""
STATE_ASK_SECONDS: Final = 3.0
"""Seconds in which a learner asks for the state that a member is told to send."""
STATE_STALL_SECONDS: Final = 5.0
"""Seconds without any byte of the state, once it has begun."""
STATE_INSTALLED_A_SECOND: Final = 256 * MIB
"""Bytes of the state that a learner installs in a second, at least."""
MAX_STATE_ATTEMPTS: Final = 3
"""Learners of one name for which a group waits in vain. Then that name may not join for `STATE_REST_SECONDS`."""
STATE_REST_SECONDS: Final = 600.0
EVICTED_SECONDS: Final = 600.0
"""Time after which a worker may join under the name of one that was evicted, as its gradients were far off."""
MAX_OBJECT_BYTES: Final = 256 * MIB
"""Bytes of one object in a collective of objects."""
MAX_DATA: Final = 16
"""Names of data with leases in one group."""
MAX_RANGES: Final = 65_536
"""Ranges of positions in one message. What is left of a pass never falls into more pieces."""
MAX_SEED: Final = (1 << 64) - 1
MAX_TIMEOUT: Final = 7 * 24 * 3600.0
"""The longest timeout, in seconds. Every wait ends; a week is for groups that a cluster's queue fills slowly."""

ROUND_TIMEOUT: Final = 1800.0
"""Seconds that others wait by default for a worker that is alive, as in torch.distributed. A worker that validates or
writes a checkpoint needs minutes. A dead or frozen one is noticed within seconds in other ways."""

HEARTBEAT_SECONDS: Final = 1.0
COORDINATOR_SILENCE: Final = 8.0
"""Seconds without a word, asked for each second, after which a coordinator counts as lost. It may stand still for a
while, and the end of its process is noticed at once. So this is for machines and networks that fail."""
FORGOTTEN_SECONDS: Final = 2.0
"""Seconds after which a coordinator knows that a connection has ended. A peer that returns earlier may be in its own
way."""

CREDIT_BYTES: Final = 16 * MIB
"""Bytes that one worker may have in flight in one pool by default: pushed, and not yet answered."""
BACKLOG_BYTES: Final = 64 * MIB
"""Bytes of unasked results that one receiver may have unread by default."""
TOLD_BYTES: Final = 1 * MIB
"""Bytes that a receiver reads before it tells a data shard of them."""
KEPT_BYTES: Final = 256 * MIB
"""Bytes of results that a worker keeps at least for rounds that it has not reached."""
KEPT_ROUNDS: Final = 4
"""Rounds for which a worker has room at least, however large the plan is."""
MAX_STALENESS: Final = 1 << 16
"""Largest bound of the staleness of a contribution."""
MIN_SLICE_COST: Final = 2 * KIB
"""Credit that a slice takes however short it is: the coordinator's memory about it."""
SHARED_SLICE_COST: Final = 64
"""Credit for a slice in shared memory, behind its exchange's first. The coordinator keeps its number only."""
MIN_CREDIT_BYTES: Final = 2 * SLICE_BYTES
"""The least credit. Below two slices a worker could not push one while the reply to another travels."""

PROBE_BYTES: Final = 512 * KIB
"""Bytes of the largest message with which a worker measures its link."""
PROBE_GROUP: Final = "gradserver-doctor"
"""The group in which `gradserver doctor` measures links. Any peer may open it, and it ends by itself."""
PROBE_WORLD: Final = 4
PROBE_SECONDS: Final = 20.0
"""Seconds from the first worker of that group to its end, at most."""

OTHERS: Final = "*"
"""All groups that are not named, in place of a group's name."""
