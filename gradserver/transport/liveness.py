"""Liveness: which of a server's peers are alive, by their connections, processes and beacons.

Beside the connection that its messages pass through, each peer opens a second one, its *beacon*. Through that libzmq's
own thread shows from time to time that the process runs, and nothing else ever passes there. So

- a peer with Python code that is busy for minutes is alive, and one that froze is not;
- it does not matter how many messages of peers are still unread. If heartbeats came behind messages, a server that
  stood still for a while would take every peer for dead;
- a server that stood still finds beacons closed, and a moment later open again: the peers' libzmq sees to that. That
  moment is counted in the server's own time, in which it does not stand still.

    connection  process  beacon                              the peer
    ──────────  ───────  ──────────────────────────────────  ────────────────────────────────────────────────
    there       unknown  there                               is alive
    there       lives    there                               is alive
    there       any      not there yet, for some time        froze or was cut off: it is told, if it still hears
    there       any      gone for some time                  the same
    there       ended    any                                 is dead; its children hold the connection open
    gone        ended    any                                 is dead
    gone        lives    any                                 is cut off, if it has not ended a moment later
    gone        unknown  any                                 is lost
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from typing import Final, NamedTuple

import zmq

from gradserver.protocol.beacon import beacon_id
from gradserver.protocol.messages import BePresent, Message, Present, Welcome
from gradserver.protocol.messages.recovery import Resume
from gradserver.protocol.transport.zeromq import NOBLOCK, NOBLOCK_MORE
from gradserver.transport.local import UnixServer
from gradserver.transport.monitor import Monitor
from gradserver.transport.peers import Peer
from gradserver.transport.traffic import Connections

_GONE: Final = "it died, froze or lost its network"
_ENDED: Final = "its process ended"
_CUT_OFF: Final = "it lost its connection, and its process is there"

_SILENT: Final = 0.55
_BACK: Final = 0.3
"""Silence after which a beacon is closed, and time that it may stay closed: parts of the time to count as frozen."""
_FIRST: Final = 0.7
"""Time in which it must show for the first time: the same, if the peer's role does not allow more."""
_LOOK_SECONDS: Final = 0.05


class Patience(NamedTuple):
    """Times for which a peer may be away.

    Attributes:
        dead_after: seconds after which the owner of a connection that broke is dead. Half of it passes here, half in
            control.
        frozen_after: seconds of silence after which a peer counts as frozen, or cut off.
    """

    dead_after: float = 1.0
    frozen_after: float = 3.0


class Verdict(NamedTuple):
    """A peer that is lost. ``ended``: its process surely has; ``silent``: it may hear of it when it is back."""

    peer: Peer
    reason: str
    ended: bool = False
    silent: bool = False


class Liveness:
    """Verdicts on a server's peers: which of them are alive.

    Args:
        router: the socket of the peers.
        unix: the local socket of those of this host.
        patience: how long they may be away.
        connections: the traffic of the router's connections.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        unix: UnixServer | None,
        patience: Patience,
        connections: Connections | None = None,
    ) -> None:
        self.monitor = Monitor(router, Connections() if connections is None else connections)
        self._router, self._unix, self._patience = router, unix, patience
        self._beacons: dict[bytes, Peer] = {}
        """Peers by the identities of their beacons."""
        self._looked = self._lived = 0.0

    def invite(self, peer: Peer, why: Message, first_beat: float, announces: bool) -> BePresent:
        """Return the request for a beacon, which replaces an earlier one; `.handshake.Role` has what a beacon does.

        A member that may come back is known by its token (of a Welcome, or a Resume). Its beacon then connects by
        itself to a server that takes this one's place.
        """
        token = why.token if isinstance(why, Welcome | Resume) else ""
        identity = beacon_id(token) if token else secrets.token_hex(16)
        peer.beacon = identity.encode()
        peer.beats, peer.silent = not announces, None
        peer.due = time.monotonic() + max(_FIRST * self._patience.frozen_after, first_beat)
        self.monitor.probe_at(peer.due)
        self._beacons[peer.beacon] = peer
        peer.beacons.append(peer.beacon)
        return BePresent(identity, _SILENT * self._patience.frozen_after)

    def note_beacon(self, identity: bytes) -> bool:
        """Return True if ``identity`` is a beacon that was asked for, and note that it has connected."""
        peer = self._beacons.get(identity)
        if peer is not None and peer.beats:
            peer.due = 0.0
        return peer is not None

    def beats(self, peer: Peer, present: Present) -> None:
        """Miss the beacon of ``peer`` from now on, if it is the one that ``peer`` says is present."""
        if present.identity.encode() == peer.beacon:
            peer.beats, peer.due = True, 0.0

    def forget(self, peer: Peer) -> None:
        """Forget the beacons of ``peer``, which is lost or has left."""
        for identity in peer.beacons:
            if self._beacons.get(identity) is peer:
                del self._beacons[identity]

    def lives(self, peer: Peer) -> bool | None:
        """Return True if the process of ``peer`` lives, False if it has ended, None if that is unknown."""
        return None if self._unix is None else self._unix.lives(peer.identity)

    def ended(self, peer: Peer) -> Verdict:
        """Return the verdict on a peer after its process has ended."""
        return Verdict(peer, _ENDED, ended=True)

    def look(self, peers: Collection[Peer]) -> list[Verdict]:
        """Return a verdict on each peer that is lost. While a verdict is open, the next look is soon."""
        now = self._own_time()
        verdicts = [verdict for peer in peers if (verdict := self._judge(peer, now)) is not None]
        if any(peer.doubtful is not None or peer.silent is not None for peer in peers):
            self.monitor.probe_at(self._looked + _LOOK_SECONDS)
        if (due := min((peer.due for peer in peers if self._looked < peer.due), default=None)) is not None:
            self.monitor.probe_at(due)
        return verdicts

    def _own_time(self) -> float:
        """Return the seconds for which this server ran. Those between two looks count only until the next one was due.

        In the rest this server stood still itself, perhaps in the midst of a look, or there was nothing to look for.
        """
        before, self._looked = self._looked, time.monotonic()
        self._lived += min(self._looked - before, _LOOK_SECONDS)
        return self._lived

    def _judge(self, peer: Peer, now: float) -> Verdict | None:
        lives, connected = self.lives(peer), peer.is_connected()
        if lives is False and (peer.talked or not connected):
            return self.ended(peer)
        if not connected and lives is None:
            return Verdict(peer, _GONE)
        if not connected or lives is False:
            peer.doubtful = now if peer.doubtful is None else peer.doubtful
            if peer.doubtful + self._patience.dead_after / 2 <= now:
                return self.ended(peer) if lives is False else Verdict(peer, _CUT_OFF)
            return None
        if self._looked < peer.due or (peer.beats and self.is_lit(peer.beacon)):
            peer.silent = None
            return None
        peer.silent = now if peer.silent is None else peer.silent
        if peer.silent + _BACK * self._patience.frozen_after > now:
            return None
        return Verdict(peer, f"nothing was heard of it for {self._patience.frozen_after:g} s", silent=True)

    def is_lit(self, beacon: bytes) -> bool:
        """Return True if the process with this beacon runs, even if no peer was asked to light it."""
        try:
            self._router.send(beacon, NOBLOCK_MORE)
            self._router.send(b"", NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Look no more."""
        self.monitor.close()
