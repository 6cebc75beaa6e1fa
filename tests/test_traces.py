"""Tests that the engine does what it did, event by event, and repeats itself if it is told the same."""

from __future__ import annotations

import pytest

from tests.test_shard_laws import small_shares
from tests.traces import PATH, all_summaries, scenarios, traced


def test_the_engine_does_what_it_did() -> None:
    """Test the engine. A change that means to alter this writes the file anew: `python -m tests.traces`."""
    before = dict(line.split(": ") for line in PATH.read_text().splitlines())
    now = dict(line.split(": ") for line in all_summaries())

    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    assert not changed, f"compare `python -m tests.traces {changed[0]!r}` with that of the commit before"


@pytest.mark.parametrize("name", scenarios())
def test_recorded_events_give_the_same_commands_again(name: str) -> None:
    engines = traced(scenarios()[name])

    with small_shares():  # as when they were recorded
        for trace in engines.made:
            assert trace.replayed() == trace.lines
    assert sum(len(trace.events) for trace in engines.made) > 10
