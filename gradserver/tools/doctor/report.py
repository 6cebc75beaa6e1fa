"""Report of a doctor: facts in sections, and findings, which say what to change. As text, and as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, Final, NamedTuple

FINE: Final = 0
TO_CHANGE: Final = 1
BROKEN: Final = 2
_COLUMNS: Final = 118


class Fact(NamedTuple):
    """One fact. ``value`` is for programs, and ``text`` for people."""

    key: str
    value: object
    text: str


class Finding(NamedTuple):
    """Something to change. ``breaks``: training does not work before that."""

    what: str
    change: str
    breaks: bool = False


@dataclass(slots=True)
class Section:
    """Facts about one subject."""

    title: str
    facts: list[Fact] = field(default_factory=list)

    def add(self, key: str, value: object, text: str | None = None) -> None:
        """Add a fact; its text is the value's, if none is given."""
        self.facts.append(Fact(key, value, str(value) if text is None else text))


@dataclass(slots=True)
class Report:
    """All sections, by key, and the findings."""

    sections: dict[str, Section] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def section(self, key: str, title: str) -> Section:
        """Begin a section."""
        self.sections[key] = Section(title)
        return self.sections[key]

    def find(self, what: str, change: str, breaks: bool = False) -> None:
        """Add a finding."""
        self.findings.append(Finding(what, change, breaks))

    @property
    def status(self) -> int:
        """Exit status: 2 if training does not work, 1 if there is something to change, and else 0."""
        if any(one.breaks for one in self.findings):
            return BROKEN
        return TO_CHANGE if self.findings else FINE

    def as_json(self) -> dict[str, Any]:
        """Return plain values: a map for each section, the findings, and the exit status."""
        shown: dict[str, Any] = {
            key: {fact.key: fact.value for fact in section.facts} for key, section in self.sections.items()
        }
        shown["findings"] = [one._asdict() for one in self.findings]
        shown["status"] = self.status
        return shown

    def lines(self) -> Iterator[str]:
        """Yield the report as text, in aligned columns."""
        widest = max((len(fact.key) for section in self.sections.values() for fact in section.facts), default=0)
        for section in self.sections.values():
            yield section.title
            for fact in section.facts:
                yield from _indented(f"  {fact.key.replace('_', ' '):{widest}}  ", fact.text)
            yield ""
        yield from _verdict(self.findings)


def _indented(begin: str, text: str) -> Iterator[str]:
    lines = wrap(text, _COLUMNS - len(begin), break_long_words=False, break_on_hyphens=False) or [""]
    yield (begin + lines[0]).rstrip()
    yield from (" " * len(begin) + line for line in lines[1:])


def _verdict(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "nothing to change"
        return
    yield "to change"
    for one in sorted(findings, key=lambda one: not one.breaks):
        yield from _indented("  FAILS  " if one.breaks else "  -      ", f"{one.what}: {one.change}")
