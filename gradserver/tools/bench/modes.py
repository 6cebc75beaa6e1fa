"""The rows of the suite `modes`: the modes, and the conditions under which each trains.

A mode's kind says how a worker wraps the model (`gradserver.tools.bench.mode_kinds`), and its options go to the wrapper
and to ``gradserver serve``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from gradserver.tools.common.as_json import AsJson


@dataclass(frozen=True)
class Scenario(AsJson):
    """Conditions of a training.

    Attributes:
        name: name in tables.
        slowness: for each worker, how many times longer its steps take than they do on this machine.
        rate: rate of each worker's link, in bytes per second; 0 for the loopback.
    """

    name: str
    slowness: tuple[float, ...]
    rate: float = 0.0


@dataclass(frozen=True)
class Mode(AsJson):
    """One way to train: a row of the table.

    Attributes:
        name: name in tables, and on the command line.
        kind: name of the function that wraps the module, in `gradserver.tools.bench.mode_kinds.KINDS`.
        options: options of the wrapper.
        wire: format in which contributions travel.
        serve: further options of the coordinator.
    """

    name: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    wire: str = "fp32"
    serve: tuple[str, ...] = ()


_LOCAL: Final = {"every": 16, "mixing": 0.5}
_STREAMING: Final = {"every": 16, "fragments": 4, "delay": 4}
MODES: Final = (
    Mode("sync", "synchronous"),
    Mode("sync-int8", "synchronous", wire="int8"),
    Mode("balanced", "balanced"),
    Mode("ranges", "ranges"),
    Mode("cadence", "cadence"),
    Mode("bounded", "unawaited", serve=("--mode", "bounded", "--staleness", "4")),
    Mode("async", "unawaited", serve=("--mode", "async")),
    Mode("local-average", "local", {"every": 16, "outer": "average"}),
    Mode("local-diloco", "local", {"every": 16}),
    Mode("local", "local", dict(_LOCAL)),
    Mode("local-balanced", "local", {**_LOCAL, "balance": True}),
    Mode("streaming", "local", dict(_STREAMING)),
    Mode("streaming-auto", "local", {**_STREAMING, "delay": "auto"}),
    Mode("streaming-int8", "local", dict(_STREAMING), wire="int8"),
    Mode("streaming-balanced", "local", {**_STREAMING, "balance": True}),
)
"""All modes, in the order of the table. The first one is what the others' loss is compared with."""
USUAL: Final = (
    "sync",
    "balanced",
    "ranges",
    "cadence",
    "bounded",
    "async",
    "local",
    "local-balanced",
    "streaming",
    "streaming-auto",
)
"""Modes that are measured unless others are named."""
SCENARIOS: Final = ("equal", "unequal", "link")
_PAUSES: Final = 1.5
"""Slowness of all devices where they are unequal. So there is a core for each process whenever it computes."""


def scenario_of(name: str, workers: int, slow: float, rate: float) -> Scenario:
    """Return a scenario of `SCENARIOS`, in which a slower worker is ``slow`` times slower, and links have this rate."""
    even, uneven = (1.0,) * workers, (slow, *(1.0,) * (workers - 1))
    known = {
        "equal": Scenario("equal workers", even),
        "unequal": Scenario(f"the first worker {slow:g} times slower", tuple(_PAUSES * one for one in uneven)),
        "link": Scenario(f"links of {8 * rate / 1e6:g} Mbit/s", even, rate),
    }
    return known[name]
