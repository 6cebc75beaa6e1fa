"""``gradserver status``: the state of a running coordinator, for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any, Final, cast

import zmq

from gradserver.json_text import json_text
from gradserver.printing import say
from gradserver.protocol.buffer import size_text
from gradserver.protocol.errors import (
    CoordinatorError,
    CoordinatorUnreachableError,
    InvalidArgumentError,
    ProtocolError,
    UnexpectedMessageError,
    reason_of,
)
from gradserver.protocol.limits import MAX_FRAME_BYTES
from gradserver.protocol.messages import Failure, Status, StatusRequest
from gradserver.protocol.planes import DIRECT, HIERARCHICAL
from gradserver.protocol.transport.dealer import Dealer
from gradserver.protocol.transport.numbers import Frames
from gradserver.protocol.transport.reach import reach, remedy
from gradserver.protocol.transport.under_way import LOOK_SECONDS
from gradserver.protocol.url import beside, not_answered
from gradserver.protocol.wire import decode, encode
from gradserver.snapshot import Snapshot, snapshot_in
from gradserver.tables import counted, table

_UNMEASURED: Final = {
    DIRECT: "noise scale, norms and cosines: not measured on plane direct, as gradients do not come to the coordinator",
    HIERARCHICAL: "norms and cosines of workers: not measured on plane hierarchical, where those of hosts are",
}
"""Figures of gradients that the coordinator cannot measure, by plane."""
_STAGES: Final = {
    "admitted": "the group gets to know it",
    "welcome": "it prepares",
    "waiting": "it waits for the state of another worker",
    "receiving": "it gets the state of another worker",
    "ready": "it has the state",
    "entered": "it is in its first round",
}
"""Stages of a worker that joins a running group."""
_CLEAR: Final = "\033[H\033[J"
"""Control sequence that clears a terminal, and goes to its first line."""
_PATIENCE: Final = 3.0
"""Seconds for a coordinator to accept a connection, and then to answer."""


def show(url: str, interval: float, as_json: bool) -> int:
    """Print the status of the coordinator at ``url``; rates are taken over ``interval`` seconds."""
    first = survey(url)
    if as_json:
        print(json_text(first, indent=2))
        return 0
    if "shard" in first:
        shard = first["shard"]
        say(f"{url} is data shard {shard['number']} of the coordinator at {shard['primary']}: ask the coordinator")
        return 0
    if first["groups"]:
        time.sleep(interval)
    second = survey(url)
    if "shard" in second:
        raise ProtocolError(f"{url} was a coordinator, and now is data shard {second['shard']['number']} of another")
    say(*render(first, second))
    return 0


def watch(url: str, seconds: float) -> int:
    """Show the status every so many ``seconds`` until Ctrl-C, on a terminal in place."""
    in_place = sys.stdout.isatty()
    try:
        before = survey(url)
        while True:
            time.sleep(seconds)
            after = survey(url)
            if in_place:
                print(_CLEAR, end="")
            say(*render(before, after), *([] if in_place else [""]))
            before = after
    except KeyboardInterrupt:
        return 0


def survey(url: str) -> Snapshot:
    """Take a snapshot of a coordinator, and add the traffic of its other data shards. These are asked at once."""
    snapshot = fetch(url)
    shards = snapshot.get("shards", [])
    with ThreadPoolExecutor(max(len(shards), 1)) as threads:
        asked = [(shard, threads.submit(_groups_of, shard["url"], url)) for shard in shards if shard["number"]]
    for shard in shards:
        if not shard["number"]:
            shard["bytes"] = sum(_traffic(group) for group in snapshot["groups"].values())
    for shard, answer in asked:
        try:
            groups = answer.result()
        except (CoordinatorError, ProtocolError, InvalidArgumentError) as error:
            shard["error"] = str(error)
            continue
        shard["bytes"] = sum(_traffic(group) for group in groups.values())
        for name, there in groups.items():
            if name in snapshot["groups"]:
                _add(snapshot["groups"][name], there)
    return snapshot


def _groups_of(shard: str, url: str) -> dict[str, Any]:
    """Return the groups of the data shard at a URL that the coordinator at ``url`` has named."""
    answer = fetch(beside(shard, url))
    if "shard" not in answer:
        raise ProtocolError(f"{shard} is no data shard")
    groups: dict[str, Any] = answer["groups"]
    return groups


def _traffic(group: dict[str, Any]) -> int:
    return int(group.get("bytes_in", 0)) + int(group.get("bytes_out", 0))


def _add(group: dict[str, Any], there: dict[str, Any]) -> None:
    """Add what another data shard sees of a group."""
    for counter in ("bytes_in", "bytes_out", "slices"):
        group[counter] += there[counter]
    both = zip_longest(group["outstanding"], there["outstanding"], fillvalue=0)
    group["outstanding"] = [one + other for one, other in both]
    known = {exchange["what"] for exchange in group["open"]}
    group["open"] += [exchange for exchange in there["open"] if exchange["what"] not in known]


def fetch(url: str) -> Snapshot:
    """Take one snapshot. CoordinatorUnreachableError if none comes in time."""
    try:
        address, _, _ = reach(url, _PATIENCE)
    except OSError as error:
        text = f"no coordinator answers at {url} ({reason_of(error)}). {remedy(error)}"
        raise CoordinatorUnreachableError(text) from error
    context = zmq.Context()
    dealer = Dealer(context, address, MAX_FRAME_BYTES)
    try:
        dealer.socket.send(encode(StatusRequest()))
        return _status_in(_answer(dealer, url))
    except ProtocolError as error:
        raise ProtocolError(f"{url} answers, but not as a gradserver coordinator: {error}") from error
    finally:
        dealer.disconnect(0)
        context.term()


def _answer(dealer: Dealer, url: str) -> Frames:
    """Wait for a message, and return it."""
    poller = zmq.Poller()
    poller.register(dealer.socket, zmq.POLLIN)
    poller.register(dealer.monitor, zmq.POLLIN)
    until = time.monotonic() + _PATIENCE
    while (left := until - time.monotonic()) > 0:
        ready = dict(poller.poll(int(min(left, LOOK_SECONDS) * 1000) + 1))
        if dealer.socket in ready:
            return dealer.receive()
        if dealer.has_ended():
            raise CoordinatorUnreachableError(dealer.end(url, "coordinator").message)
        dealer.look("coordinator")
    raise CoordinatorUnreachableError(not_answered(url, _PATIENCE))


def _status_in(frames: Frames) -> Snapshot:
    message, payloads = decode(frames)
    if isinstance(message, Failure):
        raise message.exception()
    if not isinstance(message, Status):
        raise UnexpectedMessageError(f"a {type(message).__name__} instead of a Status")
    return snapshot_in(payloads[0])


def render(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Render ``after`` as lines, with rates since ``before``."""
    lines = [f"coordinator at {after['url']}, up {_duration(after['uptime'])}"]
    seconds = max(after["uptime"] - before["uptime"], 1e-9)
    if kernels := after.get("kernels"):
        lines.append(f"kernels: {kernels['kernels']} ({kernels['reason']})")
    ledger = after.get("ledger", {})
    if ledger.get("trouble"):
        lines.append(f"ledger cannot be written: {ledger['file']}: {ledger['trouble']}")
    if len(after.get("shards", [])) > 1:
        lines += _shards(before, after, seconds)
    if not after["groups"]:
        return [*lines, "no groups: no worker is connected"]
    for name, group in after["groups"].items():
        lines += ["", *_group(name, group, before["groups"].get(name, {}), seconds)]
    return lines


def _shards(before: dict[str, Any], after: dict[str, Any], seconds: float) -> list[str]:
    earlier = {shard["number"]: shard.get("bytes", 0) for shard in before["shards"]}
    moved = {s["number"]: max(s.get("bytes", 0) - earlier.get(s["number"], 0), 0) for s in after["shards"]}
    total = sum(moved.values())
    rows = []
    for shard in after["shards"]:
        number, rate = shard["number"], shard["rate"]
        share = f"{moved[number] / total:.0%}" if total else "-"
        speed = "unreachable" if "error" in shard else f"{moved[number] / seconds / 1e6:.1f} MB/s"
        rows.append([number, shard["url"] or after["url"], "-" if rate is None else f"{rate:g} Gbit/s", speed, share])
    return table(["shard", "URL", "link", "in and out", "share"], rows)


def _group(name: str, group: dict[str, Any], before: dict[str, Any], seconds: float) -> list[str]:
    state = group["state"]
    here = len(group["members"]) or len(group["waiting"])
    elastic = group.get("elastic")
    of = (
        f"{counted(here, 'worker')}, elastic ({elastic[0]} to {elastic[1]})"
        if elastic
        else f"{here} of {group['world_size']} workers"
    )
    parent = f", sub-group of {group['parent']!r}" if "parent" in group else ""
    lines = [f"group {name!r}: {state}, {of}, membership epoch {group['epoch']}{parent}"]
    if state == "forming":
        waits = [[w["rank"] if w["rank"] >= 0 else "any", w["name"], f"{w['waits']:.1f} s"] for w in group["waiting"]]
        return [*lines, *table(["rank", "worker", "waits"], waits)]

    rates = _rates(group, before, seconds)
    lines.append(
        f"  round {group['round']}, {_figure(rates['rounds'])} rounds/s, "
        f"{_figure(rates['in'] / 1e6)} MB/s in, {_figure(rates['out'] / 1e6)} MB/s out"
    )
    if group["plan"]:
        buckets, size = counted(group["plan"]["buckets"], "bucket"), size_text(group["plan"]["bytes"])
        lines.append(f"  plan: {buckets}, {size} a round")
    if group["mean"] != "plain":
        lines.append(f"  mean: {group['mean']}")
    scale = group["noise_scale"]["scale"]
    if scale is not None and any(weight not in (0.0, 1.0) for weight in (group["last_round"] or {}).get("weights", ())):
        lines.append(f"  noise scale: {scale:.4g}, about the critical batch size (in units of weight)")
    lines += [*_plane(group["plane"]), *_members(group), *_unmeasured(group), *_waits(group), *_comings(group)]
    bad = group.get("nonfinite", {})
    if bad.get("rounds"):
        whose = ", ".join(f"{name!r} in {rounds}" for name, rounds in bad["workers"].items())
        lines.append(f"  NaN or Inf in {bad['rounds']} rounds ({bad['policy']}): {whose}")
    for member in group["members"]:
        found = member.get("gradients", {})
        if found.get("off"):
            lines.append(f"  {member['name']!r} is far off ({group['outliers']['policy']}): {found['off']}")
    lines += _outliers(group["outliers"])
    lines += _audit(group.get("audit", {}))
    if group["broken"]:
        lines.append(f"  broken: {group['broken']}")
    return lines


def _rates(group: dict[str, Any], before: dict[str, Any], seconds: float) -> dict[str, float]:
    """Return the rounds and the bytes a second: over whole rounds if the coordinator has seen some."""
    if found := group.get("rates"):
        return cast(dict[str, float], found)
    counters = {"rounds": "round", "in": "bytes_in", "out": "bytes_out"}
    moved = {name: group.get(one, 0) - before.get(one, group.get(one, 0)) for name, one in counters.items()}
    return {name: count / seconds for name, count in moved.items()}


def _figure(rate: float) -> str:
    """Write a rate with two digits at least, so that a slow one does not look like none."""
    return f"{rate:.1f}" if rate >= 10 or not rate else f"{rate:.2f}" if rate >= 0.1 else f"{rate:.2g}"


def _unmeasured(group: dict[str, Any]) -> list[str]:
    """Say that it is not known which worker is slow, if none of the last rounds tells."""
    pace = group.get("pace", {})
    if not pace.get("rounds") or pace["known"] or len(group["members"]) < 2:
        return []
    return ["  the last rounds do not tell which worker is slow"]


def _waits(group: dict[str, Any]) -> list[str]:
    """Render the workers that others wait for now. Most of those that miss an exchange wait themselves for another."""
    found = group.get("open", [])
    fewest = min((len(one["missing"]) for one in found), default=0)
    if not fewest:
        return []
    oldest: dict[str, dict[str, Any]] = {}
    for one in sorted(found, key=lambda one: one["age"], reverse=True):
        if len(one["missing"]) == fewest:
            oldest.setdefault(", ".join(one["missing"]), one)
    return [
        f"  waits for {names}: {one['age']:.1f} s so far, in "
        + (f"round {one['round']}" if one.get("round") is not None else str(one["what"]))
        for names, one in oldest.items()
    ]


def _comings(group: dict[str, Any]) -> list[str]:
    """Render workers that join, that wait to join, and that are gone since a short time."""
    joins = [f"  {one['name']!r} joins: {_STAGES.get(one['stage'], one['stage'])}" for one in group.get("joining", [])]
    waits = [f"  {one['name']!r} has waited {_duration(one['waits'])} to join" for one in group["waiting"]]
    gone = [_gone(one) for one in group.get("gone", [])]
    return [*joins, *waits, *gone]


def _gone(one: dict[str, Any]) -> str:
    what = "could not join" if one["joining"] else "is gone"
    return f"  {one['name']!r} {what}, since {_duration(one['ago'])}: {one['why']}"


def _outliers(outliers: dict[str, Any]) -> list[str]:
    """Render why members that are far off are kept, and which were evicted; nothing if there is nothing to say."""
    kept = [f"  outliers are reported only: {outliers['keeps_all']}"] if outliers["keeps_all"] else []
    return kept + [f"  {name!r} was evicted: {what}" for name, what in outliers["evicted"].items()]


def _audit(audit: dict[str, Any]) -> list[str]:
    """Render what audits have found; nothing if there are none."""
    if not audit or audit["policy"] == "off":
        return []
    largest = audit["largest"]  # null: a contribution was not finite, or its square is not
    most = "a difference that is not finite" if largest is None else f"relative difference {largest:.2g} at most"
    found = f"  audit: {counted(audit['rounds'], 'round')}, {most}"
    if not audit["differing"]:
        return [found]
    wrong = [f"{name!r} was wrong in {counted(rounds, 'round')}" for name, rounds in audit["wrong"].items()]
    doubtful = [f"{name!r} or another in {counted(rounds, 'round')}" for name, rounds in audit["doubtful"].items()]
    return [f"{found}; {', '.join([*wrong, *doubtful])}", f"  last: {audit['last']}"]


def _plane(plane: dict[str, Any]) -> list[str]:
    """Render how the gradients travel, and why; nothing if no worker has told what it can do."""
    if not plane["reason"]:
        return []
    unmeasured = [f"  {_UNMEASURED[plane['name']]}"] if plane["name"] in _UNMEASURED else []
    return [f"  plane: {plane['name']}, because {plane['reason']}", f"  devices: {plane['devices']}", *unmeasured]


def _members(group: dict[str, Any]) -> list[str]:
    """Render the members. Columns that would say the same of all of them are left out."""
    flights, members = group.get("outstanding", []), group["members"]
    found: dict[str, list[object]] = {
        "rank": [member["rank"] for member in members],
        "worker": [member["name"] for member in members],
        "no result yet": [f"{_flight(flights, member) / 1e6:.1f} MB" for member in members],
    }
    if any("held_up" in member for member in members):
        heading = f"held the group up, in {counted(group['pace']['known'], 'round')}"
        found[heading] = [_held_up(member.get("held_up")) for member in members]
    paces = [member.get("pace") for member in group["members"]]
    if any(paces):
        found["speed"] = [f"{pace['rate']:.3g} {pace['unit']}/s" if pace else "" for pace in paces]
        found["share"] = [f"{pace['share']:.0%}" if pace else "" for pace in paces]
        found["batches"] = [f"{pace['batches']} a round" if pace else "" for pace in paces]
    gradients = [member.get("gradients") for member in group["members"]]
    if any(gradients):
        found["norm"] = [f"{_shown(one['norm_ratio'], '.3g')} x" if one else "" for one in gradients]
        found["cosine"] = [_shown(one["cosine"], ".2f") if one else "" for one in gradients]
    offers = [member.get("offer", {}) for member in group["members"]]
    if any(offer.get("devices") for offer in offers):
        found["device"] = [offer["devices"][0]["name"] if offer.get("devices") else "CPU" for offer in offers]
    channels = [offer.get("channel", "") for offer in offers]
    if len({*channels}) > 1:
        found["channel"] = channels
    if group.get("elastic"):
        found["member"] = [member.get("seat", member["rank"]) for member in group["members"]]
    return table(list(found), list(zip(*found.values(), strict=True)))


def _held_up(one: dict[str, Any] | None) -> str:
    return "" if one is None else f"{one['seconds']:.3g} s in {one['rounds']}, {one['cause']}"


def _flight(flights: Sequence[int], member: dict[str, Any]) -> int:
    member_id = member.get("seat", member["rank"])
    return flights[member_id] if 0 <= member_id < len(flights) else 0


def _shown(number: float | None, form: str) -> str:
    """Format a number. Those that are not finite are null in JSON."""
    return "?" if number is None else format(number, form)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
