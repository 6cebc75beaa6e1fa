"""The cost of each TCP connection, as the kernel counts it, and the end of those that cost too much.

libzmq reads whatever comes, puts frames together until a message is whole, and keeps what a peer does not read. None of
that is bounded by its options: with a bound on what it reads ahead, libzmq 4.3 ends the whole process when a connection
breaks (`.binding`). So the bounds are kept from outside. The socket's monitor names the descriptor of each connection.
The kernel knows how many bytes have come there, and how many the other side has taken (TCP_INFO). The server knows how
many it was handed and has sent. The differences are what libzmq holds. A peer above a limit is disconnected by
shutdown(2), and libzmq then acts as on any connection that breaks.

    of          what is limited                                      limit
    ──────────  ───────────────────────────────────────────────────  ─────────────────────────────────────────────────
    a stranger  bytes that it says on a connection, in all           STRANGERS_BYTES; STRANGERS_TALK if in many messages
                messages with bytes that do not count                STRANGERS_PROBES
                messages that it says on a connection                STRANGERS_MESSAGES, and STRANGERS_RATE each second
                bytes that it leaves unread                          STRANGERS_UNREAD
    strangers   bytes that they have said, together                  ALL_STRANGERS_BYTES
    a member    bytes that it leaves unread                          the allowance: its credit in each of four pools;
                                                                     once for each membership that it carries
                bytes of it that were not taken yet                  the same, and one message
                bytes of a message that does not end                 MESSAGE_BYTES
                messages that take no credit                         MEMBERS_MESSAGES, and MEMBERS_RATE each second
                messages of one that is a member no more             PARTED_MESSAGES; STRANGERS_MESSAGES, and
                                                                     STRANGERS_RATE, if it has sent too many before
    all         bytes unread or not taken                            a quarter of the machine's memory
                descriptors                                          what the process may have, less a reserve

The kernel uses a descriptor's number again as soon as it was closed. So before a connection is shut, its cookie is
compared with that of the connection which is meant. The kernel gives a cookie to one socket only.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import sys
import time
from typing import Final

from gradserver.protocol.limits import KIB, MAX_FRAME_BYTES, MAX_HEADER_BYTES, MIB
from gradserver.transport.system import Spare, descriptor_limit, machine_memory, open_descriptors, queued, reserve_of

log = logging.getLogger("gradserver")

STRANGERS_BYTES: Final = 5 * MIB // 4
STRANGERS_TALK: Final = 256 * KIB
STRANGERS_MESSAGES: Final = 1024
STRANGERS_PROBES: Final = 8
STRANGERS_RATE: Final = 50.0
STRANGERS_UNREAD: Final = 8 * MIB
ALL_STRANGERS_BYTES: Final = 16 * MIB
MESSAGE_BYTES: Final = MAX_FRAME_BYTES + MAX_HEADER_BYTES
MEMBERS_MESSAGES: Final = 4096
MEMBERS_RATE: Final = 1000.0
PARTED_MESSAGES: Final = 16_384
LOOK_SECONDS: Final = 0.05
"""Pause between two looks at all connections. It is longer if a look computes for more than a hundredth of it."""

_LOOKS_SHARE: Final = 0.01
_JOINING_BYTES: Final = 8 * KIB
"""Bytes on a connection that are not counted, as they come before it is a member's."""
_HEARTBEAT_BYTES: Final = 16
"""Bytes of libzmq's own that come from a member each second."""
_PARTING_SECONDS: Final = 30.0
"""Time that a former member has to read what it was sent."""
STRANGERS_KNOWN: Final = 4096
_TALK_LOOKS: Final = 16
"""Messages of a stranger between two looks at its bytes."""
_COUNT_SECONDS: Final = 5.0
"""Pause between two counts of the process's descriptors."""
_QUEUE_LOOK: Final = 64 * KIB
"""Bytes above which the kernel is asked how many of them libzmq has not read."""
_COOKIE: Final = 57  # SO_COOKIE, of Linux 4.6
_TCP_INFO_BYTES: Final = 136
_COUNTS: Final = struct.Struct("QQ")
_COUNTS_AT: Final = 120  # tcpi_bytes_acked and tcpi_bytes_received, of Linux 4.1
_DISCARDED_BYTES: Final = MIB
_DISCARD: Final = socket.MSG_TRUNC | getattr(socket, "MSG_DONTWAIT", 0)
_CAN_MEASURE: Final = sys.platform == "linux"


class Traffic:
    """The traffic of one connection.

    Attributes:
        descriptor: libzmq's own; -1 if it is closed or unknown.
        since: time at which it was accepted.
        member: True if it is a member's, or a data shard's.
        present: True if it is a member's or data shard's beacon.
        parted: time since which it is a member's no more.
        shut: True once it was disconnected here.
        taken: bytes on the wire of a member's messages that were received.
        sent: bytes that were given to libzmq for it.
        untaken: bytes that libzmq had read and that were not received yet, at the last look.
        unread: bytes that were sent and are not acknowledged by the other side yet, at the last look.
        memberships: the most memberships of groups that it has carried at once. Each has its own allowance.
    """

    __slots__ = (
        *("_cookie", "_floor", "_last_taken", "_socket", "_stuck"),
        *(
            "descriptor",
            "member",
            "memberships",
            "parted",
            "present",
            "sent",
            "shut",
            "since",
            "taken",
            "unread",
            "untaken",
        ),
    )

    def __init__(self, descriptor: int = -1) -> None:
        self.descriptor, self.since = descriptor, time.monotonic()
        self.member = self.present = self.shut = False
        self.memberships = 1
        self.parted: float | None = None
        self.taken = self.sent = self.untaken = self.unread = 0
        self._floor = self._last_taken = 0
        self._stuck = False
        self._cookie = b""
        self._socket: socket.socket | None = None
        if descriptor >= 0 and _CAN_MEASURE:
            try:
                self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
                self._cookie = self._socket.getsockopt(socket.SOL_SOCKET, _COOKIE, 8)
            except OSError:  # it was closed already
                self.forget()

    def forget(self) -> None:
        """Forget the connection: it was closed, or does not matter any more."""
        self.descriptor = -1
        if self._socket is not None:
            self._socket.detach()  # the descriptor is libzmq's
            self._socket = None

    def carry(self, memberships: int) -> None:
        """Note that it carries so many memberships."""
        self.memberships = max(self.memberships, memberships)

    def measure(self, now: float) -> bool:
        """Ask the kernel for its counts. Return False if it has none."""
        if self._socket is None:
            return False
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            acknowledged, received = _COUNTS.unpack_from(info, _COUNTS_AT)
        except (OSError, struct.error):
            return False
        heartbeats = int(_HEARTBEAT_BYTES * (now - self.since)) if self.member else 0
        self.untaken = max(received - self.taken - heartbeats - _JOINING_BYTES, 0)
        if self.untaken > _QUEUE_LOOK:  # what libzmq has not read costs no memory of ours
            self.untaken = max(self.untaken - queued(self.descriptor), 0)
        ahead = self.sent - acknowledged
        self._floor = min(self._floor, ahead)  # what libzmq says for itself is acknowledged, too
        self.unread = ahead - self._floor
        return True

    def trouble(self, now: float, allowance: int, caught_up: bool) -> str:
        """Return the reason for shutting the connection, by what was measured; empty if there is none.

        ``caught_up``: all whole messages that have come were taken.
        """
        if not self.member and self.parted is None:
            if self.untaken > STRANGERS_BYTES:
                return f"it has sent {_mib(self.untaken)} and has not joined"
            return f"it has not read {_mib(self.unread)} of answers" if self.unread > STRANGERS_UNREAD else ""
        if self.unread > allowance:
            return unread_text(self.unread, allowance)
        if self.untaken > allowance + MESSAGE_BYTES:
            return f"it has {_mib(self.untaken)} under way; {_mib(allowance)} is the limit"
        if self.parted is not None and self.unread > STRANGERS_BYTES and now > self.parted + _PARTING_SECONDS:
            return f"it was given up, and has not read {_mib(self.unread)} since"
        was_stuck, moved, self._last_taken = self._stuck, self.taken != self._last_taken, self.taken
        self._stuck = caught_up and not moved and self.untaken > MESSAGE_BYTES
        return f"{_mib(self.untaken)} of one message came, and no end of it" if was_stuck and self._stuck else ""

    def shutdown(self, spare: Spare) -> None:
        """Disconnect the connection, if it is still there."""
        self.shut = True
        if self._socket is None:
            return
        with contextlib.suppress(OSError), spare.holding(self.descriptor) as own:
            if own.getsockopt(socket.SOL_SOCKET, _COOKIE, 8) == self._cookie:
                own.shutdown(socket.SHUT_RDWR)
                while own.recv(_DISCARDED_BYTES, _DISCARD):
                    pass  # what lies there already would be read by libzmq, and then by us


class Saying:
    """The messages of an identity that is no member's.

    Attributes:
        since: time at which its first message was taken.
        traffic: its connection, if it is that which has its descriptor now; certain if it can be answered.
    """

    __slots__ = ("_most", "_probes", "_said", "over", "since", "traffic")

    def __init__(self, traffic: Traffic, messages: int, since: float) -> None:
        self.traffic, self.since = traffic, since
        self._most, self._said, self._probes = messages, 0, 0
        self.over = False
        """True once the stranger has said too much: all that still comes from it is dropped."""

    def one_more(self, now: float) -> bool:
        """Count a message. Return False if it is one too many."""
        self._said += 1
        if self._said > self._most + STRANGERS_RATE * (now - self.since):
            return False
        looks = self._said % _TALK_LOOKS == 0 and self.traffic.parted is None and self.traffic.measure(now)
        return not (looks and self.traffic.untaken > STRANGERS_TALK)

    def probe(self, size: int) -> None:
        """Count a message that measures the link. The bytes of the first ones count as a member's: they are gone."""
        self._probes += 1
        if self._probes <= STRANGERS_PROBES:
            self.traffic.taken += size


class Connections:
    """All connections of a server.

    Args:
        descriptors: limit for the descriptors of the process; None for its own.
        memory: bytes that all connections together may cost; None for a quarter of the machine's.
    """

    def __init__(self, descriptors: int | None = None, memory: int | None = None) -> None:
        self._spare = Spare()
        self._connections: dict[int, Traffic] = {}
        """Connections by descriptor, the oldest first."""
        self._sayings: dict[bytes, Saying] = {}
        """Messages of strangers by identity, the oldest first."""
        limit = descriptor_limit() if descriptors is None else descriptors
        self._descriptors = limit - reserve_of(limit)
        """Number of descriptors up to which peers are let in."""
        self._most = limit - reserve_of(limit) // 2
        """Number of descriptors up to which a connection is kept, so that it can be told that it is one too many."""
        self._others, self._counted = open_descriptors(), time.monotonic()
        """Number of descriptors that are no connections', and the time of its count."""
        self._ending = 0
        """Number of connections that were shut, and have not ended yet."""
        self._memory = memory or machine_memory() // 4
        self.due = 0.0
        """Time of the next look."""
        self._warned = -60.0

    def __len__(self) -> int:
        return len(self._connections)

    # ── what the monitor says ─────────────────────────────────────────────────────────────────────────

    def accepted(self, descriptor: int) -> None:
        """Note a new connection. If too few descriptors are left, shut the oldest stranger, or else this one."""
        before = self._connections.pop(descriptor, None)
        if before is not None:
            before.forget()
            self._ending -= before.shut
        traffic = self._connections[descriptor] = Traffic(descriptor)
        if self._in_use() > self._most:
            oldest = next((one for one in self._connections.values() if _is_strangers(one)), traffic)
            self._shut(oldest, "the coordinator has too few descriptors left for one more connection")

    def _in_use(self) -> int:
        return self._others + len(self._connections) - self._ending

    def _count(self, now: float) -> None:
        self._others, self._counted = max(open_descriptors() - len(self._connections), 0), now

    def have_room(self) -> bool:
        """Return True if there is a descriptor for the beacon of one more peer.

        The oldest strangers that have said nothing make room.
        """
        self._count(time.monotonic())
        heard = {id(saying.traffic) for saying in self._sayings.values()}
        mute = (one for one in [*self._connections.values()] if _is_strangers(one) and id(one) not in heard)
        while self._in_use() >= self._descriptors:
            if (oldest := next(mute, None)) is None:
                return False
            self._shut(oldest, "the coordinator has too few descriptors left for one more worker beside it")
        return True

    def disconnected(self, descriptor: int) -> bool:
        """Note the end of a connection. Return True if it may have been a member's, or its beacon."""
        traffic = self._connections.pop(descriptor, None)
        if traffic is None:
            return True
        self._ending -= traffic.shut
        traffic.forget()
        return traffic.member or traffic.present

    # ── members and strangers ─────────────────────────────────────────────────────────────────────────

    def stranger(self, identity: bytes) -> Saying | None:
        """Return what has come from a stranger so far; None if it is unknown."""
        return self._sayings.get(identity)

    def introduce(self, identity: bytes, descriptor: int, now: float) -> Saying:
        """Return the record of a new stranger. Take in all that the monitor says before."""
        traffic = self._connections.get(descriptor) or Traffic()
        return self._remember(identity, Saying(traffic, STRANGERS_MESSAGES, now))

    def _remember(self, identity: bytes, saying: Saying) -> Saying:
        while len(self._sayings) >= STRANGERS_KNOWN:
            del self._sayings[next(iter(self._sayings))]
        self._sayings[identity] = saying
        return saying

    def admit(self, identity: bytes) -> Traffic:
        """Return the traffic of ``identity``, which is a member or a data shard from now on, and can be answered."""
        saying = self._sayings.pop(identity, None)
        traffic = Traffic() if saying is None or saying.traffic.member else saying.traffic
        traffic.member = True
        return traffic

    def part(self, identity: bytes, traffic: Traffic, now: float, flooded: bool = False) -> None:
        """Note that ``identity`` is a member no more. Messages of it may be under way: few count if it has ``flooded``.

        A flood goes on while the last words to it are sent, and libzmq keeps ten bytes for each byte of it.
        """
        traffic.member, traffic.parted = False, now
        self._sayings.pop(identity, None)
        messages = STRANGERS_MESSAGES if flooded else PARTED_MESSAGES
        self._remember(identity, Saying(traffic, messages, now)).over = traffic.shut

    def silence(self, saying: Saying, answers: bool) -> None:
        """Drop all that still comes from a stranger. ``answers``: it can be answered, so its connection is known."""
        saying.over = True
        if answers and saying.traffic.since <= saying.since:
            self._shut(saying.traffic, "it has sent too many messages and has not joined")

    # ── what they cost ────────────────────────────────────────────────────────────────────────────────

    def look(self, now: float, allowance: int, caught_up: bool) -> list[tuple[Traffic, str]]:
        """Shut connections that cost too much. Return those of members, with the reasons.

        Args:
            now: on `time.monotonic`'s scale.
            allowance: bytes that a member may leave unread, or have under way, at most, for each membership.
            caught_up: True if all whole messages that have come were taken.
        """
        began = time.thread_time()  # what other processes take of the processor's time is no cost of a look
        members: list[tuple[Traffic, str]] = []
        here = [one for one in self._connections.values() if not one.shut and one.measure(now)]
        for traffic in here:
            if why := traffic.trouble(now, allowance * traffic.memberships, caught_up):
                self._end(traffic, why, members)
        strangers = [one for one in here if not one.shut and _is_strangers(one)]
        said = sum(one.untaken for one in strangers)
        if said > ALL_STRANGERS_BYTES:
            why = f"peers that have not joined have sent {_mib(said)}, and this one most"
            self._end(max(strangers, key=lambda one: one.untaken), why, members)
        cost = sum(one.untaken + one.unread for one in here if not one.shut)
        if cost > self._memory:
            why = f"all connections hold {_mib(cost)} of memory, and this one most: {_mib(self._memory)} is the limit"
            self._end(max(here, key=lambda one: 0 if one.shut else one.untaken + one.unread), why, members)
        if now > self._counted + _COUNT_SECONDS:
            self._count(now)
        self.due = time.monotonic() + max(LOOK_SECONDS, (time.thread_time() - began) / _LOOKS_SHARE)
        return members

    def _end(self, traffic: Traffic, why: str, members: list[tuple[Traffic, str]]) -> None:
        if traffic.member:
            members.append((traffic, why))
        self._shut(traffic, why)

    def _shut(self, traffic: Traffic, why: str) -> None:
        if not traffic.shut:
            self._ending += traffic.descriptor >= 0
            traffic.shutdown(self._spare)
            now = time.monotonic()
            level = logging.WARNING if now > self._warned + 60.0 else logging.DEBUG
            if level == logging.WARNING:
                self._warned = now
            log.log(level, "a connection was closed: %s", why)

    def close(self) -> None:
        """Forget all connections."""
        for traffic in self._connections.values():
            traffic.forget()
        self._connections.clear()
        self._sayings.clear()
        self._spare.close()


def _is_strangers(traffic: Traffic) -> bool:
    return not (traffic.member or traffic.present or traffic.shut)


def unread_text(unread: int, allowance: int) -> str:
    """Return the reason for losing a member that does not read."""
    return f"it has not read {_mib(unread)} that it was sent; {_mib(allowance)} is the limit"


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"
