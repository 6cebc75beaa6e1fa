"""Policies of groups: their size, gradients that are not finite, stragglers, and the mode of their rounds."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeVar

from gradserver.protocol.audits import NO_AUDIT, Audit
from gradserver.protocol.errors import InvalidArgumentError, InvalidWorldSizeError
from gradserver.protocol.limits import (
    BACKLOG_BYTES,
    MAX_STALENESS,
    MAX_TIMEOUT,
    MAX_WORLD_SIZE,
    STATE_BYTES_A_SECOND,
    STATE_SECONDS,
)
from gradserver.protocol.means import PLAIN, Mean

GATHER_SECONDS = 2.0
"""Time that an elastic group that could begin waits for more workers, by default."""
DEAD_AFTER_SECONDS = 1.0
RECONNECT_SECONDS = 60.0
MISSING_SECONDS = 2.0
GRACE_SECONDS = 0.5
"""Time that a round waits for members outside of the quorum, by default."""


E = TypeVar("E", bound=StrEnum)


def _named(kind: type[E], name: str, what: str) -> E:
    """Return the value of this name; InvalidArgumentError, which says ``what`` it is of, if there is none."""
    try:
        return kind(name)
    except ValueError:
        known = ", ".join(repr(str(one)) for one in kind)
        raise InvalidArgumentError(f"{what}: expected one of {known}, got {name!r}") from None


class OnNonFinite(StrEnum):
    """Policy about a round's gradients that are not finite."""

    HALT = "halt"
    """The group stops, and all members get an error that names worker, bucket and parameter."""
    LEAVE_OUT = "leave-out"
    """A slice of a contribution does not count if anything in it is not finite: the mean is that of the others."""
    SKIP = "skip"
    """No member applies the round."""
    PROPAGATE = "propagate"
    """They count like any number."""

    @property
    def sifts(self) -> bool:
        """True if it is decided for each slice of a mean, and told with its result."""
        return self in (OnNonFinite.LEAVE_OUT, OnNonFinite.SKIP)


class OnOutlier(StrEnum):
    """Policy about a member that contributes something else than the others, over several rounds."""

    REPORT = "report"
    """It is named in the log, the status and the ledger."""
    LEAVE_OUT = "leave-out"
    """It is evicted, if the group can go on without it: `gradserver.engine.control.watching`."""
    HALT = "halt"
    """The group stops, and all members get an error that names it."""


HALT: Final = OnNonFinite.HALT
PROPAGATE: Final = OnNonFinite.PROPAGATE
"""Aliases for code that asks with every slice: a look-up in a class of enumerators takes its time."""


def on_non_finite(name: str) -> OnNonFinite:
    """Return the policy of this name; InvalidArgumentError if there is none."""
    return _named(OnNonFinite, name, "nonfinite")


class Hashes(StrEnum):
    """Policy about digests of rounds, for the ledger."""

    OFF = "off"
    ON = "on"
    """Sums of the coordinator are hashed: what goes in, and the result."""
    ALL = "all"
    """So are the results of rounds that members reduce among themselves, by one of them."""


class Damping(StrEnum):
    """Factor of a contribution that is stale."""

    NONE = "none"
    INVERSE = "inverse"
    """1 / (1 + staleness): staleness-aware asynchronous SGD (Zhang et al., 2016)."""


KEPT_STALENESS: Final = 12
"""Rounds for which a late worker keeps a gradient, by default. With its next one that weighs as much as 13 at most."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Rule by which a round is closed without stragglers. One of the first three says how many are waited for.

    Attributes:
        quorum: so many.
        percent: that share of the members that are present.
        backup: all but so many, which may be any; then nothing else is waited for.
        grace: seconds that the others have when a quorum has given everything.
        keeps: whether a late member adds what did not count to what it gives next, or forgets it.
        staleness: most rounds for which it keeps that, and then forgets it; None for no limit.
        damping: factor of what was kept.
    """

    quorum: int = 0
    percent: float = 0.0
    backup: int = 0
    grace: float = GRACE_SECONDS
    keeps: bool = True
    staleness: int | None = None
    damping: Damping = Damping.NONE

    def __post_init__(self) -> None:
        if sum(map(bool, (self.quorum, self.percent, self.backup))) != 1:
            raise InvalidArgumentError(
                "a round is closed by a quorum of so many, or of so many percent, or with backups"
            )
        if not (0 <= self.quorum <= MAX_WORLD_SIZE and 0 <= self.backup < MAX_WORLD_SIZE and 0 <= self.percent <= 100):
            raise InvalidArgumentError(
                f"a quorum is 1 to {MAX_WORLD_SIZE} workers or 1 % to 100 %, backups are 1 to {MAX_WORLD_SIZE - 1}"
            )
        if not 0 <= self.grace <= MAX_TIMEOUT:
            raise InvalidArgumentError(f"a grace is 0 to {MAX_TIMEOUT:g} seconds, not {self.grace!r}")

    def needed(self, present: int) -> int:
        """Return the number of members that a round waits for."""
        if self.backup:
            return max(1, present - self.backup)
        if self.quorum:
            return min(self.quorum, present)
        return max(1, math.ceil(self.percent / 100 * present - 1e-9))


def lateness_of(
    quorum: int | str | None = None,
    backup: int = 0,
    grace: float | None = None,
    late: str | None = None,
    most: int = MAX_WORLD_SIZE,
) -> Lateness | None:
    """Make the rule about stragglers from what people say; None if they say nothing.

    Args:
        quorum: a number of workers, or a share as ``"75%"``.
        backup: number of members that are not waited for.
        grace: seconds; None for the default, which is none with backups.
        late: ``keep`` or ``drop``; None for ``keep``.
        most: workers of the largest group that the rule is for.
    """
    if late not in (None, "keep", "drop"):
        raise InvalidArgumentError(f"late is {late!r}, and must be 'keep' or 'drop'")
    if quorum is None and not backup:
        if grace is not None or late is not None:
            raise InvalidArgumentError(
                "grace and late need a quorum or backups: without them, a round waits for all workers"
            )
        return None
    if quorum is not None and backup:
        raise InvalidArgumentError("quorum and backup exclude each other: each sets how many workers a round waits for")
    for name, number, limit in (("quorum", quorum, most), ("backup", backup, max(most - 1, 1))):
        if isinstance(number, int) and number > limit:
            raise InvalidArgumentError(f"{name} is {number}, and must be at most {limit} in a group of {most} workers")
    keeps = late != "drop"
    if backup:
        if grace is not None:
            raise InvalidArgumentError("grace needs a quorum: with backups, a round does not wait for stragglers")
        return Lateness(backup=backup, grace=0.0, keeps=keeps)
    seconds = GRACE_SECONDS if grace is None else grace
    if isinstance(quorum, int):
        return Lateness(quorum=quorum, grace=seconds, keeps=keeps)
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,3})?) ?%", str(quorum))
    if match is None:
        raise InvalidArgumentError(f"a quorum is a number of workers, or a share such as 75%, not {quorum!r}")
    return Lateness(percent=float(match[1]), grace=seconds, keeps=keeps)


class ModeName(StrEnum):
    """Name of a mode: what a round waits for, and which contributions it may take."""

    SYNC = "sync"
    """A round takes a contribution of each member, computed at the version before it."""
    BOUNDED = "bounded"
    """It takes those that are there, and waits for a member before its contribution would be too old: stale
    synchronous parallel (Ho et al., 2013)."""
    ASYNC = "async"
    """It takes those that are there, and waits for no member."""


@dataclass(frozen=True, slots=True)
class Mode:
    """Mode of a group's rounds.

    Attributes:
        name: its name.
        staleness: most updates between the version at which a contribution was computed and the round that takes it.
            None for no limit.
        damping: factor of stale contributions.
    """

    name: ModeName = ModeName.SYNC
    staleness: int | None = None
    damping: Damping = Damping.NONE

    def __post_init__(self) -> None:
        if self.staleness is not None and not 0 <= self.staleness <= MAX_STALENESS:
            raise InvalidArgumentError(f"staleness is 0 to {MAX_STALENESS} updates, not {self.staleness!r}")
        if self.name is ModeName.BOUNDED and self.staleness is None:
            raise InvalidArgumentError(
                "mode 'bounded' needs staleness, the most updates by which a gradient is late: give a number, such as 4"
            )

    @property
    def grants(self) -> bool:
        """True if members request a round for each contribution, and are granted one."""
        return self.name is not ModeName.SYNC

    def takes(self, staleness: int) -> bool:
        """Tell whether a round may take a contribution with this staleness."""
        return self.staleness is None or staleness <= self.staleness

    def __str__(self) -> str:
        bound = "" if self.staleness is None else f", staleness {self.staleness} at most"
        return f"{self.name}{bound}" + ("" if self.damping is Damping.NONE else f", damping {self.damping}")


SYNC: Final = Mode()


def mode_of(name: str | None = None, staleness: int | None = None, damping: str | None = None) -> Mode:
    """Make the mode from what people say; None for the defaults. InvalidArgumentError says what is not possible."""
    return Mode(_named(ModeName, name or "sync", "mode"), staleness, _named(Damping, damping or "none", "damping"))


def on_outlier(name: str) -> OnOutlier:
    """Return the policy of this name; InvalidArgumentError if there is none."""
    return _named(OnOutlier, name, "outliers")


def in_mode(
    mode: Mode,
    quorum: int | str | None = None,
    backup: int = 0,
    grace: float | None = None,
    late: str | None = None,
    most: int = MAX_WORLD_SIZE,
) -> tuple[Mode, Lateness | None]:
    """Return a mode, and the rule by which its rounds begin, or are closed. `lateness_of` has the other arguments.

    By default a round of mode "bounded" begins with half of the members that are present, and one of mode "async" with
    any. The others have no grace, unless that is said. No contribution is late. In mode "sync" the staleness and the
    damping are those of what late members keep.
    """
    if not mode.grants:
        return SYNC, _keeping(mode, lateness_of(quorum, backup, grace, late, most))
    if late is not None:
        raise InvalidArgumentError(f"late needs mode 'sync': in mode {str(mode.name)!r} no gradient comes too late")
    if quorum is None and not backup:
        quorum = "50%" if mode.name is ModeName.BOUNDED else 1
    lateness = lateness_of(quorum, backup, None if backup else grace or 0.0, None, most)
    assert lateness is not None
    return mode, replace(lateness, keeps=False)


def _keeping(told: Mode, lateness: Lateness | None) -> Lateness | None:
    """Return ``lateness``, with the limits of what late members keep. InvalidArgumentError if they keep nothing."""
    if lateness is not None and lateness.keeps:
        staleness = KEPT_STALENESS if told.staleness is None else told.staleness
        return replace(lateness, staleness=staleness, damping=told.damping)
    given = {"staleness": told.staleness is not None, "damping": told.damping is not Damping.NONE}
    if any(given.values()):
        names = " and ".join(name for name, is_given in given.items() if is_given)
        are = "are" if all(given.values()) else "is"
        raise InvalidArgumentError(
            f"{names} {are} for mode 'bounded' or 'async', or for what late workers keep (quorum or backup, with late "
            f"'keep'), and the mode is 'sync', in which no gradient is stale here: choose one of these, or leave "
            f"{names} out"
        )
    return lateness


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules of a group: how many members it has, and what it waits for.

    With a minimum below the maximum the group is elastic: it continues when members leave or are lost.

    Attributes:
        minimum: it begins when so many are there, and makes no further round with fewer. 0 if the first worker is to
            say how many (`sized`).
        maximum: it never has more.
        gather: seconds that it waits for more than the minimum before it begins.
        backlog: bytes of unasked results that one member may have unread.
        dead_after: seconds after which a member without a connection has departed. In a durable group it has half of
            them to come back.
        reconnect: seconds that a durable group waits for a member to come back, when none is left.
        missing: seconds that members that have come back then wait for the others.
        lateness: rule by which a round is closed without stragglers; None for never. Where members request rounds, the
            rule by which one begins.
        mode: mode of its rounds.
        state_seconds: seconds that the others wait, at most, for a learner that gets its state.
        state_rate: bytes of it that must come in a second meanwhile.
        rejoin: seconds that a group with fewer than the minimum waits for a worker to join, before it ends. None for
            the default: 0 if minimum and maximum are equal, else the longest timeout of its founders.
        mean: rule by which gradients are averaged.
        outliers: policy about members that are far off.
        audit: policy about audits.
        nonfinite: policy about gradients that are not finite; None for the coordinator's.
        plane: the plane that the group is to go by; None for the coordinator's.
        round_timeout: seconds that an exchange waits for a member that is alive; None for the coordinator's.
    """

    minimum: int = 0
    maximum: int = MAX_WORLD_SIZE
    gather: float = GATHER_SECONDS
    backlog: int = BACKLOG_BYTES
    dead_after: float = DEAD_AFTER_SECONDS
    reconnect: float = RECONNECT_SECONDS
    missing: float = MISSING_SECONDS
    lateness: Lateness | None = None
    state_seconds: float = STATE_SECONDS
    state_rate: float = STATE_BYTES_A_SECOND
    rejoin: float | None = None
    mode: Mode = SYNC
    mean: Mean = PLAIN
    outliers: OnOutlier = OnOutlier.REPORT
    audit: Audit = NO_AUDIT
    nonfinite: OnNonFinite | None = None
    plane: str | None = None
    round_timeout: float | None = None

    def __post_init__(self) -> None:
        is_open = self.minimum == 0 and self.maximum == MAX_WORLD_SIZE
        if not is_open and not 1 <= self.minimum <= self.maximum <= MAX_WORLD_SIZE:
            raise InvalidWorldSizeError(
                f"a group has MIN to MAX workers, 1 ≤ MIN ≤ MAX ≤ {MAX_WORLD_SIZE}, "
                f"not {self.minimum} to {self.maximum}"
            )
        if self.rejoin is not None and not 0 <= self.rejoin <= MAX_TIMEOUT:
            raise InvalidArgumentError(f"a group waits 0 to {MAX_TIMEOUT:g} s for a worker, not {self.rejoin!r}")
        if self.lateness is not None and not self.backlog:
            raise InvalidArgumentError(
                "with a quorum or backups, backlog must be above 0: it holds the results that stragglers have not read"
            )
        if self.mode.grants and self.lateness is None:
            raise InvalidArgumentError(f"mode {str(self.mode.name)!r} needs a rule by which a round begins")
        if self.audit.share and self.lateness is not None:
            raise InvalidArgumentError(
                "an audit needs rounds to which all workers contribute, in mode 'sync' without a quorum or backups: "
                "gradients are compared that were computed at the same weights"
            )

    @classmethod
    def of(cls, size: int | Policy, group: str = "") -> Policy:
        """Give the policy of a group with exactly ``size`` members, or the policy itself. An error names ``group``."""
        if isinstance(size, Policy):
            return size
        if not 1 <= size <= MAX_WORLD_SIZE:
            named = f"group {group!r}: " if group else ""
            raise InvalidWorldSizeError(f"{named}a world size is 1 to {MAX_WORLD_SIZE}, not {size}")
        return cls(size, size)

    def check_mean(self, group: str = "") -> None:
        """Raise InvalidWorldSizeError if a round may have too few contributions for the mean."""
        self.mean.check_size(self.minimum if self.lateness is None else self.lateness.needed(self.minimum), group)

    def sized(self, world_size: int) -> Policy:
        """Return the policy with exactly ``world_size`` members, if it says no size itself."""
        if self.minimum:
            return self
        size = Policy.of(world_size)
        return replace(self, minimum=size.minimum, maximum=size.maximum)

    @property
    def case(self) -> tuple[str, Mean, str]:
        """The facts by which a plane is chosen: the mode, the mean, and why contributions must meet beside that."""
        compares = self.audit.share > 0 or self.outliers is not OnOutlier.REPORT
        return str(self.mode.name), self.mean, "contributions are compared" if compares else ""

    @property
    def is_elastic(self) -> bool:
        """True if the number of members can differ."""
        return self.minimum < self.maximum

    @property
    def ends_at_once(self) -> bool:
        """True if the group ends when fewer than the minimum are left, without waiting for another worker."""
        return self.rejoin == 0 or (self.rejoin is None and not self.is_elastic)

    @property
    def needs_all(self) -> bool:
        """True if the loss of any member ends the group."""
        return not self.is_elastic and self.ends_at_once

    def patience(self, timeout: float) -> float:
        """Seconds to wait for a worker below the minimum; ``timeout`` is the longest of the founders."""
        return 0.0 if self.ends_at_once else timeout if self.rejoin is None else self.rejoin

    def __str__(self) -> str:
        if not self.is_elastic:
            return str(self.minimum)
        return f"{self.minimum} or more" if self.maximum == MAX_WORLD_SIZE else f"{self.minimum} to {self.maximum}"
