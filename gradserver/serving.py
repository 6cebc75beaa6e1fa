"""The commands ``gradserver serve`` and ``gradserver config``: what holds, and the process that runs by it."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradserver.arguments import ANY
from gradserver.configuration import DEFAULT, Settings, add_flags, settings_of
from gradserver.json_text import json_text
from gradserver.options import DEFAULT_BIND, Of, each
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MAX_WORLD_SIZE, MIB, OTHERS
from gradserver.protocol.planes import AMONG_MEMBERS
from gradserver.tables import table

if TYPE_CHECKING:
    from gradserver.engine.policy import Lateness, Mode, Policy
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
        from gradserver.transport.liveness import Patience

        patience = Patience(settings.find("dead-after").value, settings.find("frozen-after").value)
        return (_serve if settings.given("join") is None else _serve_shard)(settings, patience)
    finally:
        gc.enable()


def show(arguments: argparse.Namespace) -> int:
    """Print the settings that `gradserver serve` would run with, and where each comes from."""
    settings = settings_of(arguments)
    if settings.given("join") is None:
        _worlds(settings)
        _names_of_groups(settings)
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


def _serve_shard(settings: Settings, patience: Patience) -> int:
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
    return serve_shard(settings.given("join"), settings.given("bind"), rate, patience=patience, reconnect=reconnect)


def _serve(settings: Settings, patience: Patience) -> int:
    from gradserver.daemon import Ledger, serve
    from gradserver.engine.policy import Hashes, on_non_finite

    given = {option.key: found for option, found in settings.named()}
    if "reconnect" in given:
        raise InvalidArgumentError(f"{_said('reconnect', given['reconnect'].source)} needs --join")
    ledger = None
    if (directory := settings.given("state-dir")) is not None:
        keep, hashes, quota = (settings.find(key).value for key in ("ledger-keep", "ledger-hashes", "journal-quota"))
        ledger = Ledger(Path(directory), settings.find("sync").value, keep, Hashes(hashes), quota)
    else:
        for option, found in settings.named():
            if option.of is Of.LEDGER:
                raise InvalidArgumentError(
                    f"{_said(option.key, found.source)} needs a directory for the ledger: give --state-dir"
                )
    common = Settings(settings.common)
    return serve(
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

    policies = {name: _policy(settings, name) for name in settings.groups}
    if not policies or OTHERS not in policies:
        others = _policy(Settings(settings.common), "", is_only=not policies)
        own = others is not None and (others.mean.is_robust or others.audit.share > 0)
        if others is not None and (own or others.outliers is not OnOutlier.REPORT):
            policies = {OTHERS: others, **policies}
    return {name: policy for name, policy in policies.items() if policy is not None}


_FOR_SIZED = ("quorum", "backup", "mode", "gather", "rejoin-for", "backlog", "state-timeout", "state-rate")
"""Options that make sense for a group of a known size only."""


def _policy(settings: Settings, name: str, is_only: bool = True) -> Policy | None:
    """Make the policy of a group. With an empty name, of those of which nothing is said but what all groups have.

    Where others are named, too, such options may be theirs alone: then it ``is_only`` one of several, and they do not
    count.
    """
    from gradserver.engine.policy import OnNonFinite, Policy, in_mode, mode_of, on_outlier

    def given(key: str) -> Any:
        return settings.given(key, name)

    size: Policy | None = given("workers")
    if size is None:
        needing = [key for key in _FOR_SIZED if given(key) is not None and given(key) != "sync"]
        if needing and not is_only:
            return None
        if needing:
            flags = [_said(key, settings.find(key, name).source) for key in needing]
            named = f"group {name!r}: " if name else ""
            raise InvalidArgumentError(f"{named}{flags[0]} needs the number of workers: give --workers")
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
    _check(policy, given("plane"), mode, lateness, name, is_only)
    return policy


def _check(policy: Policy, plane: str | None, mode: Mode, lateness: Lateness | None, name: str, is_only: bool) -> None:
    """Raise the error of options that do not go together."""
    from gradserver.engine.control.watching import check_policy
    from gradserver.engine.policy import OnOutlier

    if plane in AMONG_MEMBERS and lateness is not None:
        what = f"--mode {mode.name}" if mode.grants else "--quorum or --backup"
        other = "use --mode sync" if mode.grants else "--quorum and --backup"
        raise InvalidArgumentError(
            f"--plane {plane} is not possible with {what}: workers that reduce among themselves wait for all. "
            f"Leave out --plane, or {other}"
        )
    if plane in AMONG_MEMBERS and policy.mean.is_robust:
        raise InvalidArgumentError(
            f"--plane {plane} is not possible with --mean {policy.mean}: libraries that reduce among workers only add "
            f"up. Leave out --plane, or --mean"
        )
    if plane in AMONG_MEMBERS and policy.audit.share:
        raise InvalidArgumentError(
            f"--plane {plane} is not possible with --audit {policy.audit}: the coordinator compares the contributions. "
            f"Leave out --plane, or --audit"
        )
    if plane in AMONG_MEMBERS and policy.outliers is not OnOutlier.REPORT:
        raise InvalidArgumentError(
            f"--plane {plane} is not possible with --outliers {policy.outliers}: the coordinator compares the "
            f"contributions"
        )
    if policy.minimum:
        policy.check_mean(name)
    if policy.minimum or is_only:
        check_policy(policy, name)


def _said(key: str, source: str) -> str:
    """Return an option as its source has it: a flag, or a key with the line of a file."""
    return f"--{key}" if source == DEFAULT or source.startswith("--") else f"{source}: {key}"
