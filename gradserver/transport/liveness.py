"""Who of a server's peers is still there: what connections, processes and silence say of each, and what follows.

Beside the connection that its messages pass through, each peer opens a second one, its *presence*, through which
libzmq's own thread says from time to time that its process runs, and which nothing else ever passes through. So

- a peer whose Python is busy for minutes is there, and one that froze is not;
- it does not matter how much of what peers said is still unread: where heartbeats come behind messages, a server that
  stood still for a while would take everybody for dead;
- a server that stood still finds presences closed, and a moment later open again: peers' libzmq sees to that. That
  moment is counted in the server's own time, in which it does not stand still.

    connection  process  presence                            the peer
    ──────────  ───────  ──────────────────────────────────  ────────────────────────────────────────────────
    there       unknown  there                               is there
    there       lives    there                               is there
    there       any      not there yet, for some time        froze or was cut off: it is told, if it still hears
    there       any      gone for some time                  the same
    there       ended    any                                 is dead; its children hold the connection open
    gone        ended    any                                 is dead
    gone        lives    any                                 is cut off, if it has not ended a moment later
    gone        unknown  any                                 is gone
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from typing import Final, NamedTuple

import zmq

from gradserver.protocol.beacon import beacon_id
from gradserver.protocol.messages import BePresent, Enlist, Message, Present, Welcome
from gradserver.protocol.resuming import Resume
from gradserver.transport.local import UnixServer
from gradserver.transport.monitor import Disconnects
from gradserver.transport.peers import Peer
from gradserver.transport.traffic import Connections

_GONE: Final = "it died, froze or lost its network"
_ENDED: Final = "its process ended"
_CUT_OFF: Final = "it lost its connection, and its process is there"

_SILENT: Final = 0.55
_BACK: Final = 0.3
"""Of the time after which a peer counts as frozen: how long its presence may be silent, and then be closed."""
_FIRST: Final = 0.7
_LEAST_SECONDS: Final = 2.0
"""The same, for it to show for the first time; and how long that may take a busy machine."""
_ENLISTING_SECONDS: Final = 30.0
"""The same for a data shard, which does nothing before, and says no more of it."""
_LOOK_SECONDS: Final = 0.05


class Patience(NamedTuple):
    """How long somebody may be away.

    Attributes:
        dead_after: seconds after which the owner of a connection that broke is dead.
        frozen_after: seconds of silence after which somebody is taken for frozen, or cut off.
    """

    dead_after: float = 1.0
    frozen_after: float = 3.0


class Verdict(NamedTuple):
    """A peer is gone. ``ended`` is certain of its process; a ``silent`` one may hear of it when it is back."""

    peer: Peer
    reason: str
    ended: bool = False
    silent: bool = False


class Attendance:
    """Knows who is there.

    Args:
        router: the socket whose peers they are.
        unix: the local socket of those of this host.
        patience: how long they may be away.
        connections: what is known of the router's.
    """

    def __init__(
        self,
        router: zmq.Socket[bytes],
        unix: UnixServer | None,
        patience: Patience,
        connections: Connections | None = None,
    ) -> None:
        self.disconnects = Disconnects(router, Connections() if connections is None else connections)
        self._router = router
        self._unix = unix
        self._patience = patience
        self._invited: dict[bytes, Peer] = {}
        """By their presences' identities."""
        self._looked = self._lived = 0.0

    def invite(self, peer: Peer, why: Message) -> BePresent:
        """What to tell somebody: as what to be present, instead of what he may have been told before.

        Whoever has a seat to which he may come back is known by its token (of a Welcome, or a Resume), and his presence
        connects by itself to a server that takes our place.
        """
        token = why.token if isinstance(why, Welcome | Resume) else ""
        presence = beacon_id(token) if token else secrets.token_hex(16)
        peer.presence = presence.encode()
        peer.beats, peer.silent = isinstance(why, Resume | Enlist), None  # these say no more of it
        least = _ENLISTING_SECONDS if isinstance(why, Enlist) else _LEAST_SECONDS
        peer.due = time.monotonic() + max(_FIRST * self._patience.frozen_after, least)
        self.disconnects.look_at(peer.due)
        self._invited[peer.presence] = peer
        peer.presences.append(peer.presence)
        return BePresent(presence, _SILENT * self._patience.frozen_after)

    def has_come(self, identity: bytes) -> bool:
        """Whether what came from ``identity`` is a presence that was asked for."""
        peer = self._invited.get(identity)
        if peer is not None and peer.beats:
            peer.due = 0.0
        return peer is not None

    def beats(self, peer: Peer, present: Present) -> None:
        """Its presence is not to be missing from now on."""
        if present.identity.encode() == peer.presence:
            peer.beats, peer.due = True, 0.0

    def forget(self, peer: Peer) -> None:
        """It is gone."""
        for identity in peer.presences:
            if self._invited.get(identity) is peer:
                del self._invited[identity]

    def lives(self, peer: Peer) -> bool | None:
        """Whether its process is there; None if nobody knows."""
        return None if self._unix is None else self._unix.lives(peer.identity)

    def ended(self, peer: Peer) -> Verdict:
        """What is to be said of a peer whose process has ended."""
        return Verdict(peer, _ENDED, ended=True)

    def look(self, peers: Collection[Peer]) -> list[Verdict]:
        """Who is gone now. If that is not certain of somebody yet, it will soon be time to look again."""
        now = self._own_time()
        verdicts = [verdict for peer in peers if (verdict := self._judge(peer, now)) is not None]
        if any(peer.doubtful is not None or peer.silent is not None for peer in peers):
            self.disconnects.look_at(self._looked + _LOOK_SECONDS)
        if (due := min((peer.due for peer in peers if self._looked < peer.due), default=None)) is not None:
            self.disconnects.look_at(due)
        return verdicts

    def _own_time(self) -> float:
        """Seconds, of which those between two looks count only so far as it was time for the next one.

        What is longer this server stood still itself, perhaps in the midst of a look, or there was nothing to look for.
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
        if self._looked < peer.due or (peer.beats and self.is_present(peer.presence)):
            peer.silent = None
            return None
        peer.silent = now if peer.silent is None else peer.silent
        if peer.silent + _BACK * self._patience.frozen_after > now:
            return None
        return Verdict(peer, f"nothing was heard of it for {self._patience.frozen_after:g} s", silent=True)

    def is_present(self, presence: bytes) -> bool:
        """Whether the process runs that a presence is of; also if nobody was asked to have it."""
        try:
            self._router.send(presence, zmq.NOBLOCK | zmq.SNDMORE)
            self._router.send(b"", zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Look no more."""
        self.disconnects.close()
