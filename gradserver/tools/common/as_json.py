"""Settings that travel to another process as an argument of its command line."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import Self


class AsJson:
    """Base of a dataclass that JSON can say: its fields are numbers, texts, mappings and tuples of these."""

    __slots__ = ()

    def to_json(self) -> str:
        """Convert to one line of JSON, which `from_json` reads."""
        assert is_dataclass(self)
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
