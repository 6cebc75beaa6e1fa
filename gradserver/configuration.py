"""Settings of a coordinator: from flags, a configuration file, and defaults, each with its source.

    bind = "tcp://10.0.0.1:7411"        # options as on the command line, without the hyphens
    state-dir = "/var/lib/gradserver"
    round-timeout = 600                 # of all groups that say nothing else

    [group.default]                     # options of one group
    workers = "2:8"
    quorum = "75%"

    [group.critics]
    workers = 4
    mean = "trimmed:0.25"

A flag overrides the file, and a group's table overrides what is in front of the tables. ``[group."*"]`` stands for the
groups that are not named.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradserver.options import BY_KEY, GENERAL, SECTIONS, Option, each
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.files import read_regular
from gradserver.protocol.limits import KIB, MAX_GROUPS, MAX_NAME_BYTES
from gradserver.protocol.nearest import did_you_mean

DEFAULT: Final = "default"
"""Source of a setting that neither a flag nor a file has."""
_MAX_BYTES: Final = 64 * KIB
_MAX_DOTS: Final = 1024
"""Dots of a line: of a key, or of the names of all groups."""
_MAX_PARTS: Final = 4
"""Parts of a key with a line of their own. Options have three at most."""
_MAX_BITS: Final = 64
_MAX_WRITTEN: Final = 80


class Setting(NamedTuple):
    """A value with its text and its source: ``default``, ``--flag`` or ``FILE:LINE``."""

    text: str
    value: Any
    source: str


@dataclass(slots=True)
class Settings:
    """Settings that are given: of the coordinator by key, and of each group that is named, in their order.

    Attributes:
        common: settings that are given, by key.
        groups: settings that are given of each group, by name and key.
    """

    common: dict[str, Setting] = field(default_factory=dict)
    groups: dict[str, dict[str, Setting]] = field(default_factory=dict)

    def find(self, key: str, group: str = "") -> Setting:
        """Return a setting, of a group if it is named: a flag, the group's, the file's common one, or the default."""
        common, own = self.common.get(key), self.groups.get(group, {}).get(key)
        if own is not None and (common is None or not common.source.startswith("--")):
            return own
        if common is not None:
            return common
        option = BY_KEY[key]
        value = False if option.is_switch else option.value(option.default) if option.default else None
        return Setting(option.default, value, DEFAULT)

    def given(self, key: str, group: str = "") -> Any:
        """Return the value of a setting that is given; None for a default."""
        found = self.find(key, group)
        return None if found.source == DEFAULT else found.value

    def named(self) -> Iterator[tuple[Option, Setting]]:
        """Yield the options that are given, with one setting of each."""
        for option in each():
            found = [self.common.get(option.key), *(group.get(option.key) for group in self.groups.values())]
            if (first := next((one for one in found if one is not None), None)) is not None:
                yield option, first


# ── flags ─────────────────────────────────────────────────────────────────────────────────────────────


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all options to ``parser``, and that of the file. Namespaces have those that are given."""
    text = "file with these options (TOML), also for each group; flags override it. `gradserver config` shows both"
    parser.add_argument("--config", metavar="FILE", default=None, help=text)
    for option in GENERAL[:3]:
        _add(parser, option)
    for title, options in SECTIONS.items():
        part = parser.add_argument_group(title)
        for option in options:
            _add(part, option)


def _add(parser: argparse._ActionsContainer, option: Option) -> None:
    text = (option.help + (f" (default {option.default})" if option.default else "")).replace("%", "%%")
    if option.is_switch:
        parser.add_argument(option.flag, action="store_true", default=argparse.SUPPRESS, help=text)
    elif option.choices:
        parser.add_argument(option.flag, choices=option.choices, default=argparse.SUPPRESS, help=text)
    else:

        def given(text: str) -> Setting:
            return Setting(text, option.value(text), option.flag)

        action = "append" if option.repeated else "store"
        parser.add_argument(
            option.flag, type=given, action=action, metavar=option.metavar, default=argparse.SUPPRESS, help=text
        )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return what the flags and the file of a command line say together.

    Raises:
        InvalidArgumentError: the file cannot be read, or says what no option is; the error names file and line.
    """
    settings = Settings() if arguments.config is None else read(Path(arguments.config))
    for option in each():
        if option.name not in arguments or option.key == "workers":
            continue
        found = getattr(arguments, option.name)
        settings.common[option.key] = found if isinstance(found, Setting) else Setting(str(found), found, option.flag)
    name = settings.given("group")
    told = set[str]()
    for text, (group, policy), source in getattr(arguments, "workers", ()):
        group = group or name or "default"
        if group in told:
            raise InvalidArgumentError(f"--workers has group {group!r} twice: name another group, as NAME=MIN:MAX")
        told.add(group)
        settings.groups.setdefault(group, {})["workers"] = Setting(text, policy, source)
    if name is not None and name not in told and "join" not in settings.common:
        raise InvalidArgumentError("--group needs the number of workers in the group: give --workers without a name")
    if (common := settings.common.pop("workers", None)) is not None:  # of the file, in front of its tables
        settings.groups.setdefault("default", {}).setdefault("workers", common)
    return settings


# ── the file ──────────────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> Settings:
    """Return what a configuration file says; InvalidArgumentError names the line of what is wrong."""
    try:
        text = read_regular(path, _MAX_BYTES).decode()
        _check_lines(path, text)
        content = tomllib.loads(text)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidArgumentError(f"cannot read the configuration file {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"the configuration file {path} is not text in UTF-8: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{path} is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} has a value that is no option's: {str(error)[:120]}") from error
    tables = content.pop("group", {})
    if len(tables) > MAX_GROUPS:
        raise InvalidArgumentError(f"{path} has {len(tables)} groups, and {MAX_GROUPS} is the limit")
    lines, settings = _lines(text), Settings()
    where = f"{path}:{lines.get(('group',), 1)}"
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidArgumentError(f"{where}: `group` has a table for each group, as [group.NAME]")
    settings.common = _table(content, (), path, lines)
    for name, table in tables.items():
        if not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
            raise InvalidArgumentError(
                f"{path}:{lines.get(('group', name), 1)}: {name!r} is not a valid name of a group"
            )
        settings.groups[name] = _table(table, ("group", name), path, lines)
    return settings


def _table(
    content: Mapping[str, Any], place: tuple[str, ...], path: Path, lines: Mapping[tuple[str, ...], int]
) -> dict[str, Setting]:
    """Return the settings of one table."""
    found = {}
    for key, value in content.items():
        where = f"{path}:{lines.get((*place, key), 1)}"
        option = BY_KEY.get(key)
        if isinstance(value, dict):
            raise InvalidArgumentError(f"{where}: there is no table [{key}]: that of a group is [group.NAME]")
        if option is None or option.only_flag:
            known = [option.key for option in each() if not option.only_flag and (option.per_group or not place)]
            raise InvalidArgumentError(f"{where}: there is no option {key!r}{_nearest(key, known)}")
        if place and not option.per_group:
            raise InvalidArgumentError(
                f"{where}: {key!r} is an option of the coordinator, not of group {place[1]!r}: put it in front of the "
                f"first [group.NAME]"
            )
        made = _value(option, value, where)
        found[key] = Setting(_shown(value), made, where)
    return found


def _check_lines(path: Path, text: str) -> None:
    """Raise InvalidArgumentError of a key that has so many parts that reading it takes long."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > _MAX_DOTS:
            raise InvalidArgumentError(f"{path}:{number}: a line with more than {_MAX_DOTS} dots")


def _written(value: Any) -> str:
    """Return a value as a file has it, or the beginning of it."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an integer of {value.bit_length():,} bits"
    try:
        return str(value).lower() if isinstance(value, bool) else repr(value)[:_MAX_WRITTEN]
    except (ValueError, RecursionError):  # it has such an integer, or is too deep
        return "what it is"


def _nearest(key: str, known: Collection[str]) -> str:
    return did_you_mean(key.lower().replace("_", "-"), known, 0.0)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _value(option: Option, value: Any, where: str) -> Any:
    """Return the value of an option as the command line would have it."""
    if option.is_switch:
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{where}: {option.key} is true or false, not {value!r}")
        return value
    written = _written(value)
    is_huge = isinstance(value, int) and value.bit_length() > _MAX_BITS
    is_list = isinstance(value, list) and option.key == "groups" and all(isinstance(one, str) for one in value)
    if isinstance(value, bool) or is_huge or not (isinstance(value, str | int | float) or is_list):
        what = "a list of names, or a text with commas" if option.key == "groups" else "a number or a text"
        raise InvalidArgumentError(f"{where}: {option.key} is {what}, not {written}")
    text = _shown(value)
    if option.choices and text not in option.choices:
        raise InvalidArgumentError(f"{where}: {option.key} is one of {', '.join(option.choices)}, not {text!r}")
    try:
        made = option.value(text)
    except argparse.ArgumentTypeError as error:
        raise InvalidArgumentError(f"{where}: {option.key}: {error}") from error
    if option.key == "workers":
        name, policy = made
        if name:
            raise InvalidArgumentError(f"{where}: workers is N or MIN:MAX; name the group by its table, [group.{name}]")
        return policy
    return made


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the line of each key and table, which tomllib does not tell."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("["):
            table = _path(stripped.partition("#")[0])
            for length in range(1, min(len(table), _MAX_PARTS) + 1):
                found.setdefault(table[:length], number)
        elif "=" in stripped and not stripped.startswith("#"):
            key = _path(f"{stripped.partition('=')[0]} = 0")
            for length in range(1, min(len(key), _MAX_PARTS) + 1):
                found.setdefault((*table, *key[:length]), number)
    return found


def _path(text: str) -> tuple[str, ...]:
    """Return the keys that one line of TOML names; none if it is a part of something longer."""
    try:
        content: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(content, dict) and content:
        ((key, content),) = content.items()
        path.append(key)
    return tuple(path)
