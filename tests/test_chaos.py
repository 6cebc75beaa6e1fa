"""`gradserver chaos`: what is drawn can be survived, and is; and a coordinator that errs is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gradserver.cli import main
from gradserver.tools.chaos.command import ways_of
from gradserver.tools.chaos.judge import before_and_after, calm_rate
from gradserver.tools.chaos.report import leaks, too_few, wrongs
from gradserver.tools.chaos.schedule import DEFAULT, SPECS, draw
from gradserver.tools.chaos.uses import Use
from tests.cluster import ROOT, wait_until
from tests.examples import examples


@settings(max_examples=examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    workers=st.integers(2, 32),
    seconds=st.floats(10, 600),
    every=st.floats(0.2, 5),
    kinds=st.lists(st.sampled_from(sorted(SPECS)), min_size=1, unique=True),
)
def test_what_is_drawn_can_be_survived(seed: int, workers: int, seconds: float, every: float, kinds: list[str]) -> None:
    ways = ways_of(workers, kinds)
    spare = workers - max(1, workers // 2)
    schedule = draw(seed, ways, spare, seconds, every, kinds)
    assert schedule == draw(seed, ways, spare, seconds, every, kinds)
    assert schedule.events == sorted(schedule.events)
    until: dict[str, float] = {}
    out: dict[str, float] = {}
    for event in schedule.events:
        spec = SPECS[event.kind]
        assert schedule.storm <= event.at <= schedule.calm
        assert spec.low <= event.amount <= spec.high
        who = "newcomer" if event.kind == "join" else event.target
        assert until.get(who, 0.0) <= event.at, "hit again before it can have recovered"
        until[who] = event.at + event.amount + spec.recovery
        assert until[who] < seconds, "not back before the end"
        if spec.way is not None:
            assert ways[event.target] is spec.way
        if spec.out:
            out[event.target] = until[who]
            assert sum(moment > event.at for moment in out.values()) <= spare


def test_a_minute_has_a_hundred_events() -> None:
    ways = ways_of(8, list(DEFAULT))
    for seed in range(20):
        events = draw(seed, ways, 4, 60.0, 0.3, DEFAULT).events
        assert len(events) >= 100
        assert set(Counter(event.kind for event in events)) >= {"stop", "kill", "midpush"}


@given(
    seed=st.integers(0, 1000),
    every=st.floats(0.2, 3.0),
    apart=st.floats(0.0, 10.0),
    coordinator=st.none() | st.floats(3.0, 30.0),
)
def test_events_that_stop_all_workers_are_far_enough_apart(
    seed: int, every: float, apart: float, coordinator: float | None
) -> None:
    ways = ways_of(8, list(SPECS))
    schedule = draw(seed, ways, 4, 120.0, every, list(SPECS), coordinator, apart)
    halts = [event.at for event in schedule.events if event.kind in ("freeze", "partition", "coordinator", "shard")]
    least = apart if coordinator is None else min(apart, coordinator)
    assert all(later - at >= least - 1e-6 for at, later in pairwise(halts))
    kills = sum(event.kind == "coordinator" for event in schedule.events)
    assert coordinator is None or kills >= int((schedule.calm - schedule.storm - 1e-6) / coordinator)


def test_another_seed_is_another_storm() -> None:
    ways = ways_of(8, list(DEFAULT))
    assert draw(1, ways, 4, 60.0, 0.3, DEFAULT).events != draw(2, ways, 4, 60.0, 0.35, DEFAULT).events


def test_what_a_process_has_more_of_is_told_if_it_is_the_same() -> None:
    before = {"coordinator": (1, Use(20, 4, 50 << 20)), "w0": (2, Use(20, 4, 50 << 20))}
    after = {"coordinator": (1, Use(90, 4, 500 << 20)), "w0": (3, Use(90, 90, 1 << 30))}
    assert leaks(before, after) == [
        "coordinator has 70 descriptors more than before the storm",
        "coordinator has 450 MiB more than before the storm",
    ]
    assert leaks(before, before) == []


def test_rates_are_compared_on_both_sides_of_an_event_and_of_the_storm() -> None:
    spans = {"begun": 0.0, "storm": 10.0, "calm": 80.0, "end": 100.0}
    moments = [n / 10 for n in range(1000) if not 30 <= n / 10 < 32]  # ten a second, but for what an event costs
    assert calm_rate(moments, spans) == pytest.approx(10.0)
    assert before_and_after(moments, [30.0, 60.0], spans) == pytest.approx([1.0, 1.0])
    slower = [moment for moment in moments if moment < 30 or round(moment * 10) % 2]
    assert before_and_after(slower, [30.0, 60.0], spans) == pytest.approx([0.5, 1.0], rel=0.02)
    assert calm_rate(slower, spans) == pytest.approx((10 * 10 + 15 * 5) / 25, rel=0.02)
    assert before_and_after(moments, [30.0, 36.0, 70.0], spans) == pytest.approx([1.0])
    assert before_and_after(moments, [], spans) == []
    assert calm_rate([], {}) is None


def test_a_run_fails_for_each_reason() -> None:
    fine: dict[str, Any] = dict.fromkeys(("wrong", "double", "lost", "diverged", "fault"), 0)
    fine |= {"longest_stall": 3.0, "leaks": []}
    assert wrongs(fine, 15.0) == []
    for kind in ("wrong", "double", "lost", "diverged", "fault"):
        assert wrongs({**fine, kind: 2}, 15.0)
    assert wrongs({**fine, "longest_stall": 16.0}, 15.0)
    assert wrongs({**fine, "leaks": ["w0 has 3 MiB more"]}, 15.0)


def test_a_run_fails_if_too_few_events_have_met_something() -> None:
    result = {"events": 9, "events_by_kind": {"kill": 5, "drop": 4}}
    assert too_few(result, {}) == too_few(result, {"": 9, "kill": 5}) == []
    assert too_few(result, {"": 10, "drop": 5, "reset": 1}) == [
        "only 9 events took effect, fewer than 10",
        "only 4 drop events took effect, fewer than 5",
        "only 0 reset events took effect, fewer than 1",
    ]


def test_options_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "--events", "kill,earthquake"])
    assert "'earthquake' is not an event; the events are kill, midpush, stop" in capsys.readouterr().err
    assert main(["chaos", "--events", "stop,shard"]) == 2
    assert "the event shard requires a further data shard: --shards 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chaos", "--least", "100,earthquake=1"])
    assert "'earthquake' is not an event" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chaos", "--least", "kill=many"])
    assert "'kill=many' is neither a number nor KIND=N, as in 100,kill=5" in capsys.readouterr().err
    assert main(["chaos", "--events", "kill,stop", "--least", "5,kill=1,drop=1"]) == 2
    assert "--least names drop, which is not among --events kill,stop" in capsys.readouterr().err
    assert main(["chaos", "--events", "stop,slow", "--kills", "5"]) == 2
    assert "--kills requires the event kill or midpush" in capsys.readouterr().err
    assert main(["chaos", "--mean", "krum:2", "--workers", "7"]) == 2
    assert "--mean krum:2 needs 7 workers, and one more that can be lost: --workers 8" in capsys.readouterr().err
    assert main(["chaos", "--mean", "median", "--plane", "direct"]) == 2
    text = "--plane direct is not possible with --mean median: libraries that reduce among workers only add up. Leave"
    assert text in capsys.readouterr().err
    for mode in ("bounded", "async"):
        assert main(["chaos", "--mode", mode, "--plane", "hierarchical"]) == 2
        text = f"--plane hierarchical is not possible with --mode {mode}: workers that reduce among themselves wait for"
        assert text in capsys.readouterr().err
    assert main(["chaos", "--local", "nesterov", "--plane", "direct"]) == 2
    assert "--plane direct is not possible with --local: the coordinator makes these means" in capsys.readouterr().err
    assert main(["chaos", "--wire", "int8", "--plane", "direct"]) == 2
    assert "--plane direct is not possible with --wire int8" in capsys.readouterr().err
    assert main(["chaos", "--local", "average", "--mode", "async"]) == 2
    assert "--local is not possible with --mode async" in capsys.readouterr().err
    assert main(["chaos", "--fragments", "2"]) == 2
    assert "--fragments requires --local average or --local nesterov" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chaos", "--wire", "int7"])
    assert "there is no codec 'int7'" in capsys.readouterr().err
    (tmp_path / "something").touch()
    assert main(["chaos", "--keep", str(tmp_path)]) == 2
    assert "is not empty: name a new folder" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("rule", ["trimmed:0.25", "krum:1"])
def test_deaths_are_survived_with_a_robust_mean(rule: str) -> None:
    command = [sys.executable, "-m", "gradserver", "chaos", "--mean", rule, "--workers", "6", "--shards", "2", "--json"]
    storm = ["--seconds", "20", "--every", "1", "--events", "kill,midpush,shard", "--least", "3"]
    ran = subprocess.run([*command, *storm], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout)["mean"] == rule


@pytest.mark.long
@pytest.mark.parametrize(
    "workload",
    [
        ["--local", "nesterov"],
        ["--local", "nesterov", "--fragments", "2", "--wire", "int8"],
        ["--local", "average", "--shards", "2"],
        ["--wire", "topk:0.05"],
        ["--wire", "int8", "--shards", "2"],
        ["--wire", "bf16", "--mode", "async"],
    ],
    ids=" ".join,
)
def test_storms_are_survived_with_local_sgd_and_lossy_wires(workload: list[str]) -> None:
    command = [sys.executable, "-m", "gradserver", "chaos", *workload, "--workers", "4", "--json"]
    storm = ["--seconds", "25", "--every", "0.8", "--events", "kill,midpush,slow,join", "--coordinator-kill", "6"]
    ran = subprocess.run([*command, *storm, "--least", "5"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout)
    assert result["rounds"] > 30
    assert result["events_by_kind"]["coordinator"] >= 1


@pytest.mark.long
def test_a_short_storm_is_survived(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradserver", "chaos", "--workers", "4", "--seconds", "20", "--json"]
    least = ["--least", "10,stop=1"]
    ran = subprocess.run(
        [*command, *least, "--keep", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout)
    assert result["passed"]
    assert result["rounds"] > 50
    assert (tmp_path / "plan.txt").read_text().count("\n") == result["events"] + result["events_missed"]


@pytest.mark.long
@pytest.mark.parametrize("plane", ["direct", "hierarchical", "quicker"])
def test_deaths_of_workers_that_reduce_among_themselves_are_survived(plane: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradserver", "chaos", "--plane", plane, "--workers", "4", "--seconds", "60"]
    options = ["--events", "kill,midpush", "--every", "1.5", "--kills", "6", "--json", "--keep", str(tmp_path)]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = json.loads(ran.stdout)
    assert result["kills"] >= 6
    assert result["not_counted"] <= result["kills"], "a death costs one contribution"
    assert result["ways"]["direct"] > 0 < result["ways"]["void"]
    assert result["subgroups"] > 0
    assert (result["sums_among_workers"] > 0) == (plane == "direct")


@pytest.mark.long
def test_a_storm_on_two_emulated_hosts_is_survived() -> None:
    command = [sys.executable, "-m", "gradserver", "chaos", "--plane", "hierarchical", "--workers", "4", "--json"]
    options = ["--seconds", "30", "--every", "2", "--coordinator-kill", "10", "--seed", "3", "--least", "3"]
    ran = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout)["passed"]


@pytest.mark.long
def test_nothing_survives_a_run_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradserver", "chaos", "--workers", "3", "--events", "stop,delay,reset"]
    with subprocess.Popen(
        [*command, "--keep", str(tmp_path / "run")], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    ) as run:
        heard = tmp_path / "run" / "heard.jsonl"
        wait_until(lambda: heard.exists() and b'"round"' in heard.read_bytes(), "they train")
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert len(children) >= 6  # coordinator, relay, wires, and workers
        run.kill()
    wait_until(lambda: not any(is_running(int(child)) for child in children), "all of them have ended")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


SABOTAGE = """
import sys
import numpy as np
from gradserver import reducer

original = reducer.reduce
def reduce(command):
    made = original(command)
    if WHEN and command.keep:
        made = np.frombuffer(bytes(made), np.uint8).copy()
        made[5] ^= 1
    return made.data if isinstance(made, np.ndarray) else made
reducer.reduce = reduce
from gradserver.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("when", "kinds", "found"),
    [
        ("command.key.number == 20 and command.key.part == 0", ("wrong", "diverged"), "round 20"),
        ("'/' in command.group", ("fault",), "the sub-group of w"),
    ],
    ids=["of a round", "of a sub-group"],
)
def test_a_coordinator_that_gets_one_bit_wrong_is_found_out(
    when: str,
    kinds: tuple[str, ...],
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gradserver.tools.chaos import fleet

    monkeypatch.setattr(fleet, "COORDINATOR", ("-c", SABOTAGE.replace("WHEN", when)))
    options = ["--workers", "4", "--seconds", "10", "--events", "slow", "--json", "--keep", str(tmp_path)]
    assert main(["chaos", *options]) == 1
    result = json.loads(capsys.readouterr().out)
    assert not result["passed"]
    assert sum(result[kind] for kind in kinds) > 0
    assert any(found in finding for finding in result["findings"]), result["findings"]
