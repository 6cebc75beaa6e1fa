"""Origin of a sub-group: its parent, and the members of the parent that it is of."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradserver.engine.policy import Policy


@dataclass(slots=True)
class Origin:
    """Origin of a sub-group. A member's id there is the place of its id in ``member_ids``.

    Attributes:
        parent: name of the parent.
        member_ids: ids in the parent of those that were named, in order.
        names: their names.
        timeout: seconds that the parent's members wait for others.
        round_timeout: seconds that an exchange of the parent waits for a member that is alive.
        leaders: true if they are leaders of hosts, as a Split says.
        absent: places of those that departed from the parent before they asked.
        began: the sub-group's first epoch. It is 0 if it has none yet, and if all members are known to have had it.
    """

    parent: str
    member_ids: tuple[int, ...]
    names: tuple[str, ...]
    timeout: float
    round_timeout: float
    leaders: bool = False
    absent: set[int] = field(default_factory=set)
    began: int = 0

    @property
    def asked(self) -> tuple[tuple[int, ...], bool]:
        """The content of a Split that asks for this sub-group: the members, and whether they are leaders."""
        return self.member_ids, self.leaders

    def do_without(self, place: int) -> None:
        """Wait no more for the member at ``place``."""
        self.absent.add(place)

    def begin(self, epoch: int) -> None:
        """Note the first epoch."""
        self.began = epoch

    @property
    def expected(self) -> int:
        """Number of members that the sub-group waits for before it begins."""
        return len(self.member_ids) - len(self.absent)

    @property
    def rule(self) -> Policy:
        """The policy of its applicants: it begins with all of them, whatever it does without later."""
        return Policy.of(len(self.member_ids))

    def called(self, places: list[int] | None = None) -> str:
        """Name the members at ``places``, or all, for people."""
        names = self.names if places is None else [self.names[place] for place in places]
        shown = ", ".join(map(repr, names[:_SHOWN]))
        return shown + f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)


_SHOWN = 8
"""Members that a text names at most."""
