"""Staleness of a contribution, where rounds do not wait for all members: updates of its section since its version."""

from __future__ import annotations

from collections.abc import Mapping


def updates_between(version: int, number: int, section: int, sections: Mapping[int, int]) -> int:
    """Return how many updates of ``section`` there were between ``version`` and round ``number``.

    ``sections`` has the section of each of the latest rounds. A round counts if its section is not known, or -1.
    """
    others = (version <= one < number and of not in (section, -1) for one, of in sections.items())
    return number - version - sum(others)
