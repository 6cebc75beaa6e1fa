"""Tests that the engine does what it did, event by event, and repeats itself if it is told the same."""

from __future__ import annotations

from functools import cache

import pytest

from tests.test_shard_laws import small_shares
from tests.traces import PATH, scenarios, summary, traced


@cache
def _before() -> dict[str, str]:
    return dict(line.split(": ") for line in PATH.read_text().splitlines())


def test_every_scenario_has_a_trace() -> None:
    assert list(_before()) == list(scenarios())


@pytest.mark.parametrize("name", scenarios())
def test_the_engine_does_what_it_did_and_the_same_again(name: str) -> None:
    """Test the engine. A change that means to alter this writes the file anew: `python -m tests.traces`."""
    engines = traced(scenarios()[name])

    same = _before().get(name) == " ".join(summary(engines))
    assert same, f"compare `python -m tests.traces {name!r}` with that of the commit before"
    with small_shares():  # as when they were recorded
        for trace in engines.made:
            assert trace.replayed() == trace.lines
    assert sum(len(trace.events) for trace in engines.made) > 10
