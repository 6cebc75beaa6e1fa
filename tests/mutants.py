"""Faults of the product, each of which `gradserver chaos` must find by itself: ``python -m tests.mutants [NAME…]``.

One after the other is planted in a copy of the product, by replacing text of its sources. Chaos then runs there, until
it has found something: without kills of the coordinator, and without a full disk. Exit status 0 if chaos finds every
fault, and nothing in the copy without one; 1 if not, also if a fault cannot be planted as the text is another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("gradserver", "protocol", "worker")
CHAOS: Final = (
    *("chaos", "--workers", "6", "--seconds", "40", "--every", "0.25", "--pace", "0.02", "--seed", "78", "--json"),
    "--stop-at-fault",
)
"""The command that runs in each copy."""
_EVENTS: Final = "kill,midpush,join,leave,reset,midcall,drop,stop"
_CONTROL: Final = "none"
"""The name of the copy without a fault."""
_LIMIT: Final = 240.0
"""Seconds after which a run is given up."""
_KINDS: Final = ("wrong", "double", "lost", "diverged", "fault")

DIRECT: Final = "worker/planes/direct.py"
OUTER: Final = "worker/local_sgd/outer.py"
AVERAGING: Final = "worker/local_sgd/averaging.py"
RESULTS: Final = "gradserver/engine/data/completion.py"
COMPLETE: Final = "    if not any(contribution.payload is not None for contribution in contributions):\n"
"""The place where the contributions to some slices are known, and not yet summed."""
NOW: Final = "exchange.key.stream == BUCKET and exchange.key.number % 8 == 3 and len(contributions) > 1"
"""A condition that holds in one of eight rounds."""


class PlantError(Exception):
    """The error of a fault that cannot be planted. The text says why."""


@dataclass(frozen=True)
class Change:
    """In the file ``path`` the text ``before``, which is there once, becomes ``after``."""

    path: str
    before: str
    after: str

    def make(self, folder: Path) -> None:
        """Make the change in the copy in ``folder``."""
        source = folder / self.path
        text = source.read_text("utf-8") if source.exists() else ""
        if (count := text.count(self.before)) != 1:
            raise PlantError(f"{self.path} has {count} times, and not once:\n{self.before}")
        source.write_text(text.replace(self.before, self.after), "utf-8")


@dataclass(frozen=True)
class Mutant:
    """A fault: its name, what it does, the kinds of findings by which it may be found, and the text that makes it.

    It shows when one of ``events`` happens, on the ``plane``, with further ``options`` of chaos.
    """

    name: str
    what: str
    kinds: tuple[str, ...]
    changes: tuple[Change, ...]
    events: str = _EVENTS
    plane: str = "auto"
    options: tuple[str, ...] = ()


def _before_the_sum(text: str) -> Change:
    return Change(RESULTS, COMPLETE, text + COMPLETE)


MUTANTS: Final = (
    Mutant(
        "wrong-bit",
        "one bit of a mean is another, at everybody and in the ledger",
        ("wrong",),
        (
            Change(
                "gradserver/reducer.py",
                "            result = self._mean(rows, self._scale, block)\n            if result is None:\n",
                "            result = self._mean(rows, self._scale, block)\n"
                "            if result is not None and block == 0 and self._first == 0:\n"
                "                result = result.copy()\n"
                "                result.view(np.uint8)[0] ^= 1\n"
                "            if result is None:\n",
            ),
        ),
    ),
    Mutant(
        "other-bit",
        "one member that shares memory gets another bit than the others",
        ("diverged",),
        (
            Change(
                "gradserver/reducer.py",
                "                target[cut] = result\n        return None\n",
                "                target[cut] = result\n"
                "        if self._op is Op.MEAN and len(self._targets) > 1:\n"
                "            self._targets[0][cut].view(np.uint8)[0] ^= 1\n        return None\n",
            ),
        ),
    ),
    Mutant(
        "twice",
        "a contribution is in the sum twice",
        ("double",),
        (_before_the_sum(f"    if {NOW}:\n        contributions.insert(0, contributions[0])\n"),),
    ),
    Mutant(
        "earlier",
        "what is summed of a member is what it gave to the round before",
        ("double",),
        (
            _before_the_sum(
                "    kept = _EARLIER.get((exchange.key.part, piece.start, piece.stop))\n"
                f"    if {NOW} and kept is not None and contributions[0].member_id == kept.member_id:\n"
                "        contributions[0] = contributions[0]._replace(payload=kept.payload)\n"
                "    if exchange.key.stream == BUCKET and contributions:\n"
                "        nbytes = exchange.layout.run_bytes(piece.start, piece.stop)\n"
                "        own = contributions[0]._replace(payload=bytes((contributions[0].payload or b'')[:nbytes]))\n"
                "        _EARLIER[exchange.key.part, piece.start, piece.stop] = own\n"
            ),
            Change(RESULTS, "\n\ndef complete(", "\n\n_EARLIER: dict[object, Contribution] = {}\n\n\ndef complete("),
        ),
    ),
    Mutant(
        "said-to-count",
        "a contribution is not in the sum, and the ledger says that it is",
        ("lost",),
        (_before_the_sum(f"    if {NOW}:\n        del contributions[0]\n"),),
    ),
    Mutant(
        "not-counted",
        "a member takes part in a round to its end, and does not count; the ledger says so",
        ("lost",),
        (
            _before_the_sum(
                f"    if {NOW}:\n        exchange.spoil(contributions.pop(0).member_id, piece.stop - piece.start)\n"
            ),
        ),
    ),
    Mutant(
        "weight",
        "a contribution counts with another weight than it was given with",
        ("wrong",),
        (
            Change(
                "gradserver/engine/data/matching.py",
                "        exchange.join(member_id, push.weight)\n    elif exchange is None:\n",
                "        heavy = member_id == 1 and key.stream == BUCKET and key.number % 8 == 3\n"
                "        exchange.join(member_id, push.weight * (2 if heavy else 1))\n    elif exchange is None:\n",
            ),
        ),
    ),
    Mutant(
        "hole",
        "the ledger lacks a round",
        ("lost",),
        (
            Change(
                "gradserver/engine/control/journal.py",
                "    effects.journal_behind(Round(group.name, group.members.epoch, record, used_up))\n",
                "    if record.round % 8 != 3:\n"
                "        effects.journal_behind(Round(group.name, group.members.epoch, record, used_up))\n",
            ),
        ),
    ),
    Mutant(
        "collective-twice",
        "a contribution to an open collective counts twice when a member has resumed",
        ("fault",),
        (
            Change(
                "gradserver/engine/data/recovery.py",
                "    group.start_over(",
                "    results.OPEN |= {key for key, one in group.exchanges.items() if one.pushed}\n"
                "    group.start_over(",
            ),
            Change(
                "gradserver/engine/data/recovery.py",
                "from gradserver.engine.data.membership import ",
                "from gradserver.engine.data import completion as results\n"
                "from gradserver.engine.data.membership import ",
            ),
            Change(RESULTS, "\n\ndef complete(", "\n\nOPEN: set[object] = set()\n\n\ndef complete("),
            Change(
                RESULTS,
                "from gradserver.protocol.exchange import BUCKET, ",
                "from gradserver.protocol.exchange import BUCKET, COLLECTIVE, ",
            ),
            _before_the_sum(
                "    if exchange.key in OPEN and exchange.key.stream == COLLECTIVE and operation.op is Op.SUM:\n"
                "        contributions.insert(0, contributions[0])\n"
            ),
        ),
    ),
    Mutant(
        "survivor-in-part",
        "when a member is lost, another one counts in part; the ledger says so",
        ("lost",),
        (
            _before_the_sum(
                "    if exchange.absent and exchange.key.stream == BUCKET and exchange.key.part == 0:\n"
                "        for one in [one for one in contributions if one.member_id in exchange.participants][:1]:\n"
                "            contributions.remove(one)\n"
                "            exchange.spoil(one.member_id, piece.stop - piece.start)\n"
            ),
            Change(
                RESULTS,
                "\n\ndef complete(",
                "\n\nPARTLY: set[object] = set()\nCOUNTS: dict[Any, int] = {}\n\n\ndef complete(",
            ),
            Change(
                RESULTS,
                "    current.end_bucket(exchange)\n",
                "    PARTLY.update((number, member_id) for member_id in exchange.spoiled)\n"
                "    for member_id in exchange.weights:\n"
                "        COUNTS[number, member_id, exchange.key.part] = exchange.counted(member_id)\n"
                "    current.end_bucket(exchange)\n",
            ),
            Change(
                RESULTS,
                "    group.rounds.end(number)\n",
                "    for planted, member_id, part in COUNTS:\n"
                "        if planted == number and (number, member_id) in PARTLY:\n"
                "            current.cut[member_id, part] = COUNTS[number, member_id, part]\n"
                "    group.rounds.end(number)\n",
            ),
            Change(
                RESULTS,
                "from collections.abc import Collection, Iterable, Sequence\n",
                "from collections.abc import Collection, Iterable, Sequence\nfrom typing import Any\n",
            ),
        ),
    ),
    Mutant(
        "first-contribution",
        "the first contribution of a worker that joins does not count; the ledger says so",
        ("lost",),
        (
            _before_the_sum(
                "    firsts = group.learners.first_rounds\n"
                "    new = {member_id for member_id in firsts if firsts[member_id] == exchange.key.number}\n"
                "    if exchange.key.stream == BUCKET:\n"
                "        for one in [one for one in contributions if one.member_id in new]:\n"
                "            contributions.remove(one)\n"
                "            exchange.spoil(one.member_id, piece.stop - piece.start)\n"
            ),
        ),
    ),
    Mutant(
        "digest",
        "the digest of anything is 0",
        ("wrong",),
        (Change("protocol/digest.py", "    return total % MODULUS\n", "    return total % MODULUS * 0\n"),),
    ),
    Mutant(
        "prefix",
        "the ledger counts a slice less of a member that was lost",
        ("wrong", "lost"),
        (
            Change(
                "gradserver/engine/data/rounds.py",
                "        for member_id in exchange.cut:\n            self.cut[member_id, part] = counted(member_id)\n",
                "        for member_id in exchange.cut:\n"
                "            self.cut[member_id, part] = max(counted(member_id) - 1, 0)\n",
            ),
        ),
        events="midpush",
    ),
    Mutant(
        "state",
        "a worker that joins gets a state with another bit",
        ("diverged",),
        (
            Change(
                "worker/learner.py",
                "        return memory\n\n    def end(self)",
                "        memory[-1] ^= memory.size > 4096\n        return memory\n\n    def end(self)",
            ),
        ),
    ),
    Mutant(
        "half-averaged",
        "results of members' reductions are applied before the round is committed, and a void round begins with these",
        ("wrong", "diverged"),
        (
            Change(
                DIRECT,
                "        handle = self._worker.push(self._commit.first, ",
                "        for index, given in self._given.items():\n"
                "            made = self._result(index, given)\n"
                "            if made is not None and made is not given.flat:\n"
                "                given.flat.copy_(made)\n"
                "        handle = self._worker.push(self._commit.first, ",
            ),
            Change(DIRECT, "            flat = given.kept.move()\n", "            given.kept.move()\n"),
        ),
        events="kill,midpush",
        plane="direct",
    ),
    Mutant(
        "momentum",
        "the outer optimizer rounds once where it should twice, at everybody",
        ("wrong",),
        (
            Change(
                OUTER,
                "            velocity.mul_(momentum).add_(gradient)\n",
                "            velocity.copy_(velocity.double().mul_(momentum).add_(gradient))\n",
            ),
        ),
        events="kill,slow",
        options=("--local", "nesterov"),
    ),
    Mutant(
        "forgotten-momentum",
        "a worker that joins gets no momentum of the outer optimizer",
        ("diverged",),
        (Change(AVERAGING, '        self._outer.load_state_dict(state["optimizer"])\n', ""),),
        events="kill,join",
        options=("--local", "nesterov", "--fragments", "2"),
    ),
    Mutant(
        "not-owed",
        "what a lossy encoding of a contribution has lost is forgotten now and then",
        ("wrong",),
        (
            Change(
                "worker/member/coder.py",
                "        return self._feedback.encode(codec, start, stop, values,",
                "        if self._key.number % 8 == 3:\n            self._feedback.residual[start:stop] = 0\n"
                "        return self._feedback.encode(codec, start, stop, values,",
            ),
        ),
        events="kill,slow",
        options=("--wire", "int8"),
    ),
    Mutant(
        "mean-not-owed",
        "what the encoding of a mean has lost is forgotten in every second round",
        ("wrong",),
        (
            Change(
                "gradserver/lossy.py",
                " if self._is_owed else 0\n",
                " if self._is_owed and self._next % 2 == 0 else 0\n",
            ),
        ),
        events="kill,slow",
        options=("--wire", "topk:0.05", "--local", "average"),
    ),
)


def copy(folder: Path) -> None:
    """Copy the product to ``folder``."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=ignored)


def run_chaos(folder: Path, events: str, plane: str = "auto", options: Sequence[str] = ()) -> dict[str, Any]:
    """Return what chaos says of the copy in ``folder`` when ``events`` happen; under "broken" why it could not run."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "gradserver", *CHAOS, "--events", events, "--plane", plane, *options]
    try:
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"broken": f"it had not ended after {_LIMIT:g} s"}
    if not ran.stdout.startswith("{"):
        return {"broken": f"status {ran.returncode}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"}
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def why_not(mutant: Mutant | None, result: dict[str, Any]) -> str:
    """Return why chaos should not say this of ``mutant``, or of the product itself; "" if it should."""
    if "broken" in result:
        return str(result["broken"])
    found = [kind for kind in _KINDS if result[kind]]
    if mutant is None:
        return "; ".join(result["failed_because"])
    if not set(found) & set(mutant.kinds):
        told = f"only {', '.join(found)}" if found else "nothing"
        return f"found {told} in {result['rounds']} rounds; expected: {' or '.join(mutant.kinds)}"
    return ""


def main(names: list[str]) -> int:
    """Plant each fault, or those named, and let chaos look for it."""
    chosen: list[Mutant | None] = [None, *MUTANTS]
    if names:
        chosen = [one for one in chosen if (one.name if one else _CONTROL) in names]
    missed, began = [], time.monotonic()
    for mutant in chosen:
        name, started = mutant.name if mutant else _CONTROL, time.monotonic()
        with tempfile.TemporaryDirectory(prefix="gradserver-mutant-") as temporary:
            folder = Path(temporary)
            copy(folder)
            try:
                for change in mutant.changes if mutant else ():
                    change.make(folder)
                run = (mutant.events, mutant.plane, mutant.options) if mutant else (_EVENTS,)
                result = run_chaos(folder, *run)
                reason = why_not(mutant, result)
            except PlantError as error:
                result, reason = {}, f"cannot be planted: {error}"
        took = time.monotonic() - started
        told = [text for text in result.get("findings", ()) if mutant and text.startswith(mutant.kinds)]
        text = reason or (told[0] if told else f"{result['rounds']} rounds, {result['events']} events, no fault")
        print(f"{'MISSED' if reason else 'found' if mutant else 'clean':7}{name:20}{took:5.0f} s  {text}", flush=True)
        missed += [name] if reason else []
    count = sum(one is not None for one in chosen)
    lost = sum(name != _CONTROL for name in missed)
    print(f"{count - lost} of {count} found, in {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
