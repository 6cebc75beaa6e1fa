"""Options of a coordinator and of its groups, each declared once.

From a declaration follow its flag (``--rejoin-for``), its key in a configuration file (``rejoin-for``). So do the
checks and their errors, the line of ``gradserver config``, and its row in the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from gradserver.arguments import audit, mean, mib, names, number, quorum, rate, seconds, size, sync, url, workers_of
from gradserver.protocol.limits import MAX_SHARDS, MAX_STALENESS, MAX_TIMEOUT, MAX_WORLD_SIZE, ROUND_TIMEOUT
from gradserver.protocol.planes import WISHES

DEFAULT_BIND: Final = "tcp://127.0.0.1:7411"


class Of(Enum):
    """Process, or part of one, that an option is about."""

    BOTH = "coordinators and data shards"
    COORDINATOR = "coordinators"
    LEDGER = "coordinators with --state-dir"
    SHARD = "data shards"


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of one option.

    Attributes:
        key: the key in a configuration file; the flag has two hyphens in front.
        help: text for people, without the default.
        parse: function that gives the value of a text; None for a switch, or if ``choices`` are all values.
        metavar: the value, for people.
        choices: all values, if they are names.
        default: text of the default; empty if there is none, or if ``help`` explains it.
        of: the processes that it is about.
        per_group: True if a group's table may have it, too.
        repeated: True if the flag may be repeated.
        only_flag: True if a configuration file says it in another way.
    """

    key: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str = ""
    choices: tuple[str, ...] = ()
    default: str = ""
    of: Of = Of.COORDINATOR
    per_group: bool = False
    repeated: bool = False
    only_flag: bool = False

    @property
    def name(self) -> str:
        """The key as Python writes it."""
        return self.key.replace("-", "_")

    @property
    def flag(self) -> str:
        """The option as it is written on the command line."""
        return f"--{self.key}"

    @property
    def is_switch(self) -> bool:
        """True if it has no value."""
        return self.parse is None and not self.choices

    def value(self, text: str) -> Any:
        """Return the value of a text; argparse.ArgumentTypeError says what is wrong with it."""
        return text if self.parse is None else self.parse(text)


GENERAL: Final = (
    Option(
        "bind",
        "address to listen on, as tcp://HOST:PORT. With the default only this machine can connect. Others can "
        "with an address of this machine, which should be a private one. Port 0 picks a free port",
        url,
        "URL",
        default=DEFAULT_BIND,
        of=Of.BOTH,
    ),
    Option("credit", "limit of the MiB that one worker has in flight; less on slow links", mib, "MIB", default="16"),
    Option("quiet", "log warnings only", of=Of.BOTH),
    Option(
        "nonfinite",
        "policy for a gradient that contains NaN or Inf. halt: the group halts with an error that names worker, bucket "
        "and parameter. leave-out: the slice is left out of the mean. skip: no worker applies the round. propagate: "
        "the mean is computed as torch does, which a GradScaler needs. A group that survives its coordinator "
        "(--state-dir) keeps the policy with which it began",
        choices=("halt", "leave-out", "skip", "propagate"),
        default="halt",
        per_group=True,
    ),
    Option(
        "mean",
        "rule by which gradients are averaged. plain: the weighted mean. Robust rules withstand wrong gradients of a "
        "few workers. median: the middle value of each element. trimmed:B: the mean without the share B of the "
        "smallest values, and of the largest. clipped:C: the mean with norms of at most C times the median norm. "
        "krum:F: multi-Krum, for F faulty workers. Such groups do not use the direct and hierarchical planes",
        mean,
        "RULE",
        default="plain",
        per_group=True,
    ),
    Option(
        "outliers",
        "policy for a worker with gradients that are far off those of the others for several rounds: much larger or "
        "smaller, or opposite. report: it is named in log, status and ledger. leave-out: it is evicted too, if the "
        "group can go on without it, and may join again in 10 minutes. halt: the group halts with an error that names "
        "it. With the latter two, gradients go over the coordinator; on the direct plane they are not measured",
        choices=("report", "leave-out", "halt"),
        default="report",
        per_group=True,
    ),
    Option(
        "audit",
        "share of the rounds in which two or three workers compute the same samples of DataRanges. A gradient that "
        "does not agree within TOLERANCE (relative, default 1e-5) and rounding is named in log, status and ledger",
        audit,
        "SHARE[:TOLERANCE]",
        default="off",
        per_group=True,
    ),
    Option(
        "plane",
        "way of the gradients that a group must go by, so that a worker which cannot is refused. direct: from worker "
        "to worker, by NCCL or gloo. hierarchical: so within each host, and from one worker of each to the "
        "coordinator. tcp, shm: to the coordinator. auto: direct if each worker has a CUDA device of its own; else "
        "hierarchical if the workers of a host have; else each worker's channel to the coordinator",
        choices=WISHES,
        default="auto",
        per_group=True,
    ),
)
GROUPS: Final = (
    Option(
        "workers",
        "number of workers in the group; without this option each worker passes world_size. MIN:MAX (or MIN:) makes "
        "the group elastic: it begins with MIN to MAX workers, and continues without those that leave or are lost "
        "while MIN are left. Repeat the flag for further groups: `--workers 2:8 --workers critics=1:4`; `*=1:8` "
        "applies to every group that is not named",
        workers_of,
        "[GROUP=]N|MIN:MAX",
        per_group=True,
        repeated=True,
    ),
    Option(
        "group",
        "group that --workers applies to if it names none (default: default)",
        str,
        "NAME",
        only_flag=True,
    ),
    Option(
        "groups",
        "serve only groups of these names; `any` allows every name (default: the groups of --workers; without "
        "--workers, any)",
        names,
        "NAME,…",
    ),
    Option(
        "gather",
        "seconds that an elastic group waits for more than MIN workers before it begins",
        seconds(0, 3600),
        "S",
        default="2",
        per_group=True,
    ),
    Option(
        "rejoin-for",
        "seconds that a group with fewer than MIN workers waits, between two rounds, for the lost worker or for "
        "another one to join with the state of a member. With 0 it ends at once, with an error that names the worker "
        "(default: 0 for --workers N; for MIN:MAX the longest timeout of its workers)",
        seconds(0, 86_400),
        "S",
        per_group=True,
    ),
)
MODES: Final = (
    Option(
        "mode",
        "what a round waits for. sync: for a gradient of each worker. bounded: for half of the workers (or --quorum), "
        "and for each worker with a gradient that would be more than --staleness updates late. async: for one worker "
        "(or --quorum). Replicas with equally many updates stay equal in all modes",
        choices=("sync", "bounded", "async"),
        default="sync",
        per_group=True,
    ),
    Option(
        "staleness",
        "with --mode bounded or async: most updates between the weights that a gradient was computed with, and the "
        "round that it counts in. An older gradient is refused, and its samples are handed out again (no limit with "
        "async, unless it is given). With --late keep: most rounds between the one that a straggler was late for, and "
        "the one that its gradient counts in; all that it keeps is dropped then (12, unless it is given)",
        number(int, 0, MAX_STALENESS, "a number of updates"),
        "S",
        per_group=True,
    ),
    Option(
        "damping",
        "with --mode bounded or async, or --late keep: factor of a gradient that is s updates late. inverse: "
        "1 / (1 + s)",
        choices=("none", "inverse"),
        default="none",
        per_group=True,
    ),
)
LATENESS: Final = (
    Option(
        "quorum",
        "close a round when Q workers, or P percent of those present, have contributed everything and the stragglers "
        "have had their grace period (default: wait for all)",
        quorum,
        "Q|P%",
        per_group=True,
    ),
    Option(
        "grace",
        "with --quorum: shortest grace period of stragglers, in seconds",
        seconds(0, 3600),
        "S",
        default="0.5",
        per_group=True,
    ),
    Option(
        "backup",
        "instead of --quorum: close a round as soon as all workers but any B have contributed everything",
        number(int, 1, MAX_WORLD_SIZE - 1, "a number of workers"),
        "B",
        per_group=True,
    ),
    Option(
        "late",
        "with --quorum or --backup: keep carries over what a straggler contributed too late, to its next "
        "contribution; drop discards it",
        choices=("keep", "drop"),
        default="keep",
        per_group=True,
    ),
    Option(
        "backlog",
        "limit of the MiB of unread results, of each member. Above it a member is left out, and the others wait for "
        "a learner; with 0 they always wait for learners",
        number(int, 0, 1 << 20, "a number of MiB"),
        "MIB",
        default="64",
        per_group=True,
    ),
    Option(
        "state-timeout",
        "seconds that the members wait at most while a learner receives the state from its donor; they wait for the "
        "first byte an eighth of that time",
        seconds(1, 86_400),
        "S",
        default="120",
        per_group=True,
    ),
    Option(
        "state-rate",
        "slowest transfer of that state, in MiB per second; below it the group continues without the learner",
        number(float, 0.001, 1e6, "a number of MiB", "{:g} to {:g}"),
        "MIB",
        default="4",
        per_group=True,
    ),
)
SILENCE: Final = (
    Option(
        "dead-after",
        "seconds from the break of a connection until its worker is lost",
        seconds(0.5, 3600),
        "S",
        default="1",
        of=Of.BOTH,
    ),
    Option(
        "frozen-after",
        "seconds of silence after which a worker is lost, as it is frozen or unreachable; a worker that computes is "
        "not silent",
        seconds(0.5, 3600),
        "S",
        default="3",
        of=Of.BOTH,
    ),
    Option(
        "round-timeout",
        "seconds that a group waits for a worker that is alive but busy with validation, compilation or a checkpoint",
        seconds(0.5, MAX_TIMEOUT),
        "S",
        default=f"{ROUND_TIMEOUT:g}",
        per_group=True,
    ),
)
SHARDS: Final = (
    Option(
        "shards",
        "number of data shards, which are processes of this machine; the coordinator is the first",
        number(int, 1, MAX_SHARDS, "a number of data shards"),
        "S",
        default="1",
    ),
    Option(
        "allow-shards",
        "accept data shards that were started elsewhere with --join. Every host that can reach the port can then "
        "offer one, and can withhold or falsify the slices that it holds (default: accept only those of --shards)",
    ),
    Option(
        "join",
        "run a data shard of the coordinator at URL instead of a coordinator. The coordinator must allow it "
        "(--allow-shards). --bind is then by default a free port of the address that reaches the coordinator",
        url,
        "URL",
        of=Of.SHARD,
    ),
    Option(
        "reconnect",
        "with --join: seconds to wait until a lost coordinator with --state-dir has been started again",
        seconds(0, 3600),
        "S",
        default="60",
        of=Of.SHARD,
    ),
    Option(
        "rate",
        "rate of this machine's link: 10 for 10 Gbit/s, or 200mbit. The size of slices follows from it, and each data "
        "shard's part; a coordinator with 0 gets only small ones (default: workers measure it, all shards are alike)",
        rate,
        "RATE",
        of=Of.BOTH,
    ),
)
LEDGER: Final = (
    Option(
        "state-dir",
        "write the ledger to DIR: the contributions to each round, with times and digests (see `gradserver ledger`). "
        "A coordinator that was killed and is started again with the same DIR, and the same options, continues its "
        "groups",
        str,
        "DIR",
    ),
    Option(
        "ledger-hashes",
        "write digests of contributions and results to the ledger, of every round or of as many rounds as take 2 % of "
        "the time. With `all`, the lowest rank also hashes the results of each round that members reduce among "
        "themselves",
        choices=("on", "off", "all"),
        default="on",
        of=Of.LEDGER,
    ),
    Option(
        "ledger-keep",
        "limit of the ledger's size, such as 500MiB or 2GiB; above it the oldest files are deleted",
        size,
        "SIZE",
        default="1GiB",
        of=Of.LEDGER,
    ),
    Option(
        "journal-quota",
        "limit of what one group writes to the ledger in an hour by joins, departures, plans and leases. Above it the "
        "coordinator refuses such requests. Rounds do not count; 0KiB means no limit",
        size,
        "SIZE",
        default="256MiB",
        of=Of.LEDGER,
    ),
    Option(
        "sync",
        "flush the ledger to disk never, at this interval in seconds, or behind every round. A power failure loses "
        "what was not flushed; the death of the coordinator alone loses nothing",
        sync,
        "none|SECONDS|round",
        default="1",
        of=Of.LEDGER,
    ),
)
SECTIONS: Final = {
    "gradients": GENERAL[3:],
    "groups": GROUPS,
    "modes": MODES,
    "stragglers and learners": LATENESS,
    "liveness": SILENCE,
    "data shards": SHARDS,
    "ledger and durability (--state-dir)": LEDGER,
}
"""Options by the title of their part of the help; those that are in none come first."""


def each() -> Iterator[Option]:
    """Yield all options."""
    yield from GENERAL[:3]
    for options in SECTIONS.values():
        yield from options


BY_KEY: Final = {option.key: option for option in each()}
