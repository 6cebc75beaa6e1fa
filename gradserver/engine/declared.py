"""Records of the journal are declared as `Kind`, each with its number (`gradserver.protocol.declared` says how)."""

from __future__ import annotations

from typing import Final

from gradserver.protocol.declared import Declared, Family, Field

__all__ = ["CODES", "KINDS", "Field", "Kind", "kind"]


class Kind(Declared):
    """A kind of record: the base of dataclasses that `kind` has given a number."""

    __slots__ = ()

    @property
    def of_group(self) -> str:
        """The group that it is of; empty for the coordinator's own records."""
        return str(getattr(self, "group", ""))


kind: Final = Family[int, Kind]("record")
"""Declares a kind of record."""
KINDS: Final = kind.kinds
"""All kinds, by number."""
CODES: Final = kind.codes
"""The number of each kind."""
