"""The commands ``gradserver serve`` and ``gradserver config``: what holds, and the process that runs by it."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gradserver.arguments import ANY, folder
from gradserver.configuration import DEFAULT, Setting, Settings, add_flags, settings_of
from gradserver.json_text import json_text
from gradserver.options import DEFAULT_BIND, Of, each
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MAX_WORLD_SIZE, MIB, OTHERS
from gradserver.protocol.planes import AMONG_MEMBERS
from gradserver.tables import table

if TYPE_CHECKING:
    from gradserver.engine.policy import Policy
    from gradserver.transport.liveness import Patience

__all__ = ["DEFAULT_BIND", "add_arguments", "add_config_arguments", "run", "show"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``serve`` to its ``parser``."""
    add_flags(parser)
    parser.set_defaults(run=run)


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``config`` to its ``parser``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_flags(parser)
    parser.set_defaults(run=show)


def run(arguments: argparse.Namespace) -> int:
    """Run a coordinator until SIGTERM or SIGINT. It prints `listening on tcp://HOST:PORT` when it is ready."""
    settings = settings_of(arguments)
    logging.basicConfig(
        level=logging.WARNING if settings.given("quiet") else logging.INFO,
        format="%(asctime)s %(levelname).1s %(message)s",
    )
    gc.disable()  # until it serves: a start makes objects that stay, and garbage collection takes a tenth of its time
    try:
        return _process(settings)()
    finally:
        gc.enable()


def show(arguments: argparse.Namespace) -> int:
    """Print the settings that `gradserver serve` would run with, and where each comes from."""
    settings = settings_of(arguments)
    _process(settings)  # its errors are those of `serve`
    found = {"": [option for option in each() if option.key not in ("group", "workers")]}
    found |= {name: [option for option in each() if option.key in own] for name, own in settings.groups.items()}
    rows = [
        {"group": name, "option": option.key, "value": setting.text, "from": setting.source}
        for name, options in found.items()
        for option in options
        for setting in (settings.find(option.key, name),)
    ]
    if arguments.json:
        print(json_text(rows, indent=2))
        return 0
    for name in found:
        mine = [[row["option"], row["value"] or "-", row["from"]] for row in rows if row["group"] == name]
        print("\n".join([f"group {name!r}" if name else "coordinator", *table(["option", "value", "from"], mine)]))
    return 0


def settings_in(words: Sequence[str]) -> Settings:
    """Return what options of ``serve`` say that stand in another command; InvalidArgumentError if they are wrong."""
    from gradserver.command_line import Quoted

    return settings_of(Quoted(prog="gradserver serve", fill=add_arguments).parse_args(words))


def sized(words: Sequence[str], count: int) -> list[str]:
    """Return further options, with which ``count`` is the number of workers where ``words`` need one and have none.

    Raises:
        InvalidArgumentError: the options cannot be right, with so many workers.
    """
    settings = settings_in(words)
    found = [name for name in settings.groups if _needs_size(settings, name)]
    if not settings.groups and _needs_size(settings, ""):
        found = [OTHERS]
    more = [word for name in found for word in ("--workers", f"{name}={count}")]
    _process(settings_in([*words, *more]))  # its errors are those of `serve`
    return more


def _needs_size(settings: Settings, name: str) -> bool:
    """Tell whether a group has options that make sense with a number of workers only, and has none."""
    if settings.given("workers", name) is not None:
        return False
    return any(settings.given(key, name) not in (None, "sync") for key in _FOR_SIZED)


def _process(settings: Settings) -> Callable[[], int]:
    """Return the function that runs the process; InvalidArgumentError if the settings do not go together."""
    from gradserver.transport.liveness import Patience

    patience = Patience(settings.find("dead-after").value, settings.find("frozen-after").value)
    return (_coordinator if settings.given("join") is None else _shard)(settings, patience)


def _shard(settings: Settings, patience: Patience) -> Callable[[], int]:
    from gradserver.daemon import serve_shard

    for option, found in settings.named():
        if option.of in (Of.COORDINATOR, Of.LEDGER) and (option.key, found.value) != ("shards", 1):
            raise InvalidArgumentError(
                f"{_said(option.key, found.source)} is an option of coordinators, not of data shards (--join)"
                + (": run `gradserver serve --join` once for each data shard" if option.key == "shards" else "")
            )
    rate, reconnect = settings.given("rate"), settings.find("reconnect").value
    if rate == 0:
        raise InvalidArgumentError("a data shard of rate 0 would hold no slices: with --join, --rate must be above 0")
    urls = settings.given("join"), settings.given("bind")
    return partial(serve_shard, *urls, rate, patience=patience, reconnect=reconnect)


def _coordinator(settings: Settings, patience: Patience) -> Callable[[], int]:
    from gradserver.daemon import Ledger, serve
    from gradserver.engine.policy import Hashes, on_non_finite

    given = {option.key: found for option, found in settings.named()}
    if "reconnect" in given:
        raise InvalidArgumentError(f"{_said('reconnect', given['reconnect'].source)} needs --join")
    ledger = None
    if (directory := settings.given("state-dir")) is not None:
        keep, hashes, quota = (settings.find(key).value for key in ("ledger-keep", "ledger-hashes", "journal-quota"))
        ledger = Ledger(folder(directory), settings.find("sync").value, keep, Hashes(hashes), quota)
    else:
        for option, found in settings.named():
            if option.of is Of.LEDGER:
                raise InvalidArgumentError(
                    f"{_said(option.key, found.source)} needs a directory for the ledger: give --state-dir"
                )
    common = Settings(settings.common)
    return partial(
        serve,
        settings.find("bind").value,
        _worlds(settings),
        settings.given("credit"),
        shards=settings.find("shards").value,
        rate=settings.given("rate"),
        quiet=bool(settings.given("quiet")),
        ledger=ledger,
        patience=patience,
        groups=_names_of_groups(settings),
        allow_shards=bool(settings.given("allow-shards")),
        round_timeout=common.find("round-timeout").value,
        nonfinite=on_non_finite(common.find("nonfinite").value),
        plane=common.find("plane").value,
    )


def _names_of_groups(settings: Settings) -> frozenset[str] | None:
    """Collect the names that groups may have; None for any."""
    allowed = settings.given("groups")
    sized = {name for name, own in settings.groups.items() if "workers" in own}
    if allowed is None:
        return frozenset(settings.groups) if sized and OTHERS not in settings.groups else None
    if allowed == ANY:
        return None
    for name, own in settings.groups.items():
        if name != OTHERS and name not in allowed:
            source = next(iter(own.values())).source if own else "the file"
            raise InvalidArgumentError(f"{source} has group {name!r}, which --groups does not allow")
    return frozenset(allowed)


def _worlds(settings: Settings) -> dict[str, Policy]:
    """Collect the policies of the groups that are named, and of the others where something is said of them."""
    from gradserver.engine.policy import OnOutlier

    policies = {name: _checked_policy(settings, name) for name in settings.groups}
    if not policies or OTHERS not in policies:
        others = _checked_policy(Settings(settings.common), "", is_only=not policies)
        own = others is not None and (others.mean.is_robust or others.audit.share > 0)
        if others is not None and (own or others.outliers is not OnOutlier.REPORT):
            policies = {OTHERS: others, **policies}
    return {name: policy for name, policy in policies.items() if policy is not None}


_FOR_SIZED = ("quorum", "backup", "mode", "gather", "rejoin-for", "backlog", "state-timeout", "state-rate")
"""Options that make sense for a group of a known size only."""


def _checked_policy(settings: Settings, name: str, is_only: bool = True) -> Policy | None:
    """Make the policy of a group as `_policy` does. Errors name the group, and the line at which its table begins."""
    try:
        return _policy(settings, name, is_only)
    except InvalidArgumentError as error:
        if not name:
            raise
        sources = (setting.source for setting in settings.groups[name].values())
        line = next((f"{source}: " for source in sources if not source.startswith("--")), "")
        raise type(error)(f"{line}group {name!r}: {error.message}") from None


def _policy(settings: Settings, name: str, is_only: bool = True) -> Policy | None:
    """Make the policy of a group. With an empty name, of those of which nothing is said but what all groups have.

    Where others are named, too, such options may be theirs alone: then it ``is_only`` one of several, and they do not
    count.
    """
    from gradserver.engine.control.watching import check_policy
    from gradserver.engine.policy import OnNonFinite, Policy, in_mode, mode_of, on_outlier

    def given(key: str) -> Any:
        return settings.given(key, name)

    size: Policy | None = given("workers")
    if size is None:
        needing = [key for key in _FOR_SIZED if given(key) is not None and given(key) != "sync"]
        if needing and not is_only:
            return None
        if needing:
            found = settings.find(needing[0], name)
            give = "--workers" if found.source.startswith("--") else "workers, as workers = 4"
            raise InvalidArgumentError(f"{_named(found, needing[0])} needs the number of workers: give {give}")
        size = Policy()
    most = size.maximum if name else MAX_WORLD_SIZE
    chosen = mode_of(given("mode"), given("staleness"), given("damping"))
    mode, lateness = in_mode(chosen, given("quorum"), given("backup") or 0, given("grace"), given("late"), most)
    own = settings.groups.get(name, {})
    made = {
        "mean": given("mean"),
        "audit": given("audit"),
        "gather": given("gather"),
        "backlog": None if given("backlog") is None else given("backlog") * MIB,
        "rejoin": given("rejoin-for"),
        "state_seconds": given("state-timeout"),
        "state_rate": None if given("state-rate") is None else given("state-rate") * MIB,
        "outliers": None if given("outliers") is None else on_outlier(given("outliers")),
        "nonfinite": OnNonFinite(given("nonfinite")) if "nonfinite" in own else None,
        "plane": given("plane") if "plane" in own else None,
        "round_timeout": given("round-timeout") if "round-timeout" in own else None,
    }
    told = {key: value for key, value in made.items() if value is not None}
    policy = dataclasses.replace(size, lateness=lateness, mode=mode, **told)
    if given("plane") in AMONG_MEMBERS:
        _check_plane(settings, name, policy)
    if policy.minimum:
        policy.check_mean()
    if policy.minimum or is_only:
        check_policy(policy, "")
    return policy


def _check_plane(settings: Settings, name: str, policy: Policy) -> None:
    """Raise the error of options that do not go together with a plane among members."""
    from gradserver.engine.policy import OnOutlier

    reasons = {
        "mode": "workers that reduce among themselves wait for all" if policy.mode.grants else "",
        "quorum": "workers that reduce among themselves wait for all" if policy.lateness is not None else "",
        "backup": "workers that reduce among themselves wait for all" if policy.lateness is not None else "",
        "mean": "libraries that reduce among workers only add up" if policy.mean.is_robust else "",
        "audit": "the coordinator compares the contributions" if policy.audit.share else "",
        "outliers": "the coordinator compares the contributions" if policy.outliers is not OnOutlier.REPORT else "",
    }
    plane = settings.find("plane", name)
    for key, reason in reasons.items():
        if reason and settings.given(key, name) is not None:
            other, instead = settings.find(key, name), "use --mode sync" if key == "mode" else f"--{key}"
            raise InvalidArgumentError(
                f"{_named(plane, f'plane {plane.text}')} is not possible with {_named(other, f'{key} {other.text}')}: "
                f"{reason}. Leave out --plane, or {instead}"
            )


def _named(found: Setting, what: str) -> str:
    """Return ``what``, which begins with an option's key, as the option's source has it: a flag, or with its line."""
    return f"--{what}" if found.source.startswith("--") else f"{what} ({found.source})"


def _said(key: str, source: str) -> str:
    """Return an option as its source has it: a flag, or a key with the line of a file."""
    return f"--{key}" if source == DEFAULT or source.startswith("--") else f"{source}: {key}"
