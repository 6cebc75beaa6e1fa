"""Traces of the engine: each event that went in, and the commands that came out.

A trace tells whether a change of the engine's structure changes what it does. Texts for people are no part of it, nor
are names of classes and fields: messages and records count by their numbers on the wire and on disk.

`python -m tests.traces` writes `tests/traces.txt` anew, which `tests/test_traces.py` compares with.
`python -m tests.traces NAME` prints one trace whole, to be compared with that of another commit.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from gradserver.engine import Engine
from gradserver.engine.commands import Close, Command, Hire, Log, Record, Reduce, Send
from gradserver.engine.events import Event, Received
from gradserver.engine.records import encode as encode_record
from gradserver.engine.shard import ShardEngine
from gradserver.protocol import wire
from gradserver.protocol.errors import GradServerError
from gradserver.protocol.messages import Message
from gradserver.protocol.plan import Plan

PATH = Path(__file__).with_suffix(".txt")
_TEXTS = {"text", "reason", "why"}
"""Fields that are for people to read."""
_AS_THEY_ARE = {type(None), str, int, float, bool}


@dataclass
class Asked:
    """A function that an engine was given, and its answers."""

    function: Callable[..., object]
    answers: list[object] = field(default_factory=list)

    def __call__(self, *arguments: object) -> object:
        """Call it, and remember the answer."""
        self.answers.append(self.function(*arguments))
        return self.answers[-1]

    def again(self) -> Callable[..., object]:
        """Return a function that gives the same answers in the same order, whatever it is asked."""
        answers = iter(self.answers)
        return lambda *_: next(answers)


@dataclass
class Engines:
    """The engines that were made, with what happened to each."""

    made: list[Trace] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Return what all engines were told and did, in the order in which they were made."""
        for trace in self.made:
            yield "# an engine"
            yield from trace.lines


@dataclass
class Trace:
    """The events of one engine, which ``kind`` makes."""

    kind: Callable[..., Engine | ShardEngine]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    events: list[tuple[Event, float]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def take(self, event: Event, now: float, commands: Sequence[Command]) -> None:
        """Record the handling of one event."""
        self.events.append((event, now))
        self.lines.append(f"{now:g} {_event(event)} -> {' | '.join(filter(None, map(_command, commands)))}")

    def replayed(self) -> list[str]:
        """Return the lines of a new engine that is told the same."""
        arguments = [one.again() if isinstance(one, Asked) else one for one in self.arguments]
        options = {name: one.again() if isinstance(one, Asked) else one for name, one in self.options.items()}
        engine = self.kind(*arguments, **options)
        again = Trace(self.kind, (), {})
        for event, now in self.events:
            again.take(event, now, engine.handle(event, now))
        return again.lines


@contextmanager
def recording() -> Iterator[Engines]:
    """Trace every engine that is made meanwhile."""
    found = Engines()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Engine, ShardEngine):
            _record(kind, found, patch)
        yield found


def _record(kind: type[Engine | ShardEngine], found: Engines, patch: pytest.MonkeyPatch) -> None:
    make: Callable[..., None] = kind.__init__
    handle: Callable[..., list[Command]] = kind.handle
    traces: dict[int, Trace] = {}

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        asked = tuple(Asked(one) if callable(one) else one for one in arguments)
        named = {name: Asked(one) if callable(one) else one for name, one in options.items()}
        trace = traces[id(self)] = Trace(kind, asked, named)
        found.made.append(trace)
        kept.append(self)
        make(self, *asked, **named)

    def handled(self: Any, event: Event, now: float) -> list[Command]:
        commands = handle(self, event, now)
        traces[id(self)].take(event, now, commands)
        return commands

    kept: list[Any] = []  # as long as one is there no other has its identity
    patch.setattr(kind, "__init__", made)
    patch.setattr(kind, "handle", handled)


# ── as text ───────────────────────────────────────────────────────────────────────────────────────────────


def _event(event: Event) -> str:
    match event:
        case Received(connection, message, payloads):
            return f"< {connection} {_message(message, payloads)}"
        case _:
            return f"< {get_args(Event).index(type(event))} {_digest(event)}"


def _command(command: Command) -> str:
    match command:
        case Send(connection, message, payloads):
            return f"> {connection} {_message(message, payloads)}"
        case Record(record):
            return f"write {encode_record(record)[0]} {_digest(record)}"
        case Reduce():
            what = command.group, command.key, command.slice, command.contributions, command.targets, command.keep
            return f"reduce {_digest(what)}"
        case Close(connection):
            return f"close {connection}"
        case Hire():
            return "hire"
        case Log():
            return ""  # for people


def _message(message: Message, payloads: Sequence[Any]) -> str:
    code = wire._CODE_OF[type(message)]
    return f"{code} {_digest((message, list(payloads)))}"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(_plain(value)).encode()).hexdigest()[:8]


def _plain(value: object) -> object:
    """Return ``value`` without names of classes and fields, and without texts for people."""
    if type(value) in _AS_THEY_ARE:  # nearly all that there is
        return value
    match value:
        case bytes() | bytearray() | memoryview() | np.ndarray():
            return hashlib.sha256(bytes(value)).hexdigest()
        case Enum():
            return value.value
        case None | str() | int() | float():
            return value
        case GradServerError():
            return type(value).__name__, _plain(value.fields)
        case Plan():
            return value.hash
        case Mapping():
            return sorted((repr(_plain(key)), _plain(one)) for key, one in value.items())
        case set() | frozenset():
            return sorted(repr(_plain(one)) for one in value)
        case tuple() if hasattr(value, "_fields"):
            return [_plain(getattr(value, name)) for name in value._fields if name not in _TEXTS]
        case tuple() | list():
            return [_plain(one) for one in value]
    kind: Any = type(value)
    return [_plain(getattr(value, name)) for name in _names_of(kind)]


@cache
def _names_of(kind: type) -> list[str]:
    """Return the fields of a dataclass that are not for people."""
    return [one.name for one in fields(kind) if one.name not in _TEXTS]


# ── what is traced ────────────────────────────────────────────────────────────────────────────────────────


def scenarios() -> dict[str, Callable[[], object]]:
    """Yield runs of the laws, by name: each is the same every time."""
    from tests import (
        lossy_harness,
        test_engine_crash_laws,
        test_promotion_laws,
        test_section_laws,
        test_sharded_crash_laws,
        test_stragglers,
    )

    found: dict[str, Callable[[], object]] = {}
    for seed in range(12):
        found[f"coordinators lost {seed}"] = partial(test_engine_crash_laws.holds_in_run, seed)
        found[f"shards lost {seed}"] = partial(test_sharded_crash_laws.nothing_is_lost_in_run, seed)
        found[f"joining {seed}"] = partial(_joining, seed)
    for seed in range(4):
        found[f"sections {seed}"] = partial(test_section_laws.no_sections_are_mixed_in_run, seed)
        found[f"sections joined {seed}"] = partial(test_promotion_laws.who_joins_mixes_no_sections_in_run, seed)
        found[f"promotions {seed}"] = partial(test_promotion_laws.promotions_cost_nothing_in_run, seed)
        found[f"lossy {seed}"] = partial(lossy_harness.run, seed)
    for seed in range(12):
        found[f"quorum {seed}"] = partial(test_stragglers.comes_to_its_end_in_run, seed)
    return found


def _joining(seed: int) -> None:
    from tests import test_engine_join_laws as laws

    chance = random.Random(seed)
    program = [chance.choice((laws.N, laws.N, laws.A)) for _ in range(8)]
    what = ["join", "join", "return", "leave", "die", "give up"]
    happens = [(chance.randint(0, 150), chance.choice(what), chance.randint(0, 6)) for _ in range(6)]
    laws.run(chance.randint(1, 4), [chance.randint(1, 14)], program, happens, seed)


def traced(scenario: Callable[[], object]) -> Engines:
    """Return what engines do in ``scenario``."""
    from tests.test_shard_laws import small_shares

    with small_shares(), recording() as found:
        scenario()
    return found


def summary(engines: Engines) -> list[str]:
    """Return a trace in short: how many events, and a digest of each twenty."""
    lines = list(engines.lines())
    parts = [lines[start : start + 20] for start in range(0, len(lines), 20)]
    return [str(len(lines)), *(hashlib.sha256("\n".join(part).encode()).hexdigest()[:8] for part in parts)]


def all_summaries() -> Iterator[str]:
    """Return a line for each scenario."""
    for name, scenario in scenarios().items():
        yield f"{name}: {' '.join(summary(traced(scenario)))}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*traced(scenarios()[sys.argv[1]]).lines(), sep="\n")
    else:
        PATH.write_text("".join(line + "\n" for line in all_summaries()))
