"""Texts about a run: a line at its start, and the failure that ended it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradserver.tools.launch.failures import Failure, shown
from gradserver.tools.launch.hosts import Host
from gradserver.tools.launch.output import Console
from gradserver.tools.launch.places import Hello, Place

_MOST_NAMED = 3


def counted(count: int, what: str) -> str:
    """Return ``1 worker`` or ``2 workers``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def ranks(numbers: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0 to 3, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = (f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"


def beginning(hosts: Sequence[Host], hellos: Sequence[Hello], places: Sequence[Place], threads: str | None) -> str:
    """Describe the workers that are about to start."""
    counts = [sum(place.host == number for place in places) for number in range(len(hosts))]
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts"
    if len(hosts) > 1:
        where += f" ({', '.join(f'{host}: {count}' for host, count in zip(hosts, counts, strict=True))})"
    return f"{counted(len(places), 'worker')} {where}, {_devices(hellos, counts, places)}{_threads(threads)}"


def _devices(hellos: Sequence[Hello], counts: Sequence[int], places: Sequence[Place]) -> str:
    if not any(hello.devices for hello in hellos):
        return "no GPU"
    if all(place.device is None for place in places):
        return "each sees all GPUs"
    if all(len(hello.devices) >= count for hello, count in zip(hellos, counts, strict=True)):
        return "a GPU each"
    short = [f"{count} on {counted(len(one.devices), 'GPU')}" for one, count in zip(hellos, counts, strict=True)]
    return f"which share GPUs ({'; '.join(short)}): NCCL needs one for each"


def _threads(threads: str | None) -> str:
    return "" if threads is None else f", {counted(int(threads), 'thread')} each" if threads.isdecimal() else ""


def show_failures(console: Console, failure: Failure, all_failures: Sequence[Failure], ended: Sequence[int]) -> None:
    """Show the first failure by itself, and then in a few lines what became of the other workers."""
    lived = f", after {failure.lived:.1f} s" if failure.lived else ""
    console.say(f"{failure.what} failed first: {failure.fate()} ({failure.where}{lived})")
    console.block(shown(failure.report) if failure.report.strip() else "  it has printed nothing")
    for hint in failure.hints:
        console.say(f"hint: {hint}")
    others = [other for other in all_failures if other is not failure]
    alike = [other for other in others if (other.status, other.last_line()) == (failure.status, failure.last_line())]
    follow = [other for other in others if other.follows and other not in alike]
    rest = [other for other in others if other not in (*alike, *follow)]
    for which, text in ((alike, "in the same way"), (follow, "as a consequence"), (rest[_MOST_NAMED:], "too")):
        if which:
            console.say(f"{listed([other.what for other in which])} failed {text}")
    for other in rest[:_MOST_NAMED]:
        console.say(f"then {other.what}: {other.fate()}, {other.last_line()}".removesuffix(", "))
    if ended:
        console.say(f"{ranks(ended)} {'was' if len(ended) == 1 else 'were'} ended")


def listed(names: Sequence[str]) -> str:
    """Return ``rank 1``, ``ranks 1 to 7``, or names that are no ranks."""
    numbers = [int(name.removeprefix("rank ")) for name in names if name.startswith("rank ")]
    others = [name for name in names if not name.startswith("rank ")]
    return ", ".join([ranks(numbers)] * bool(numbers) + others)


def show_logs(console: Console, folder: Path | None, trouble: OSError | None) -> None:
    """Say where the output is kept, or why not."""
    if trouble is not None:
        console.say(f"the output is not complete in {folder}: {trouble.strerror}")
    elif folder is not None:
        console.say(f"the whole output is in {folder}")
