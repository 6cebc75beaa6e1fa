"""The configuration file: what it may say, what overrides it, and the errors of what it may not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradserver import cli, daemon
from gradserver.configuration import add_flags, settings_of
from gradserver.engine.policy import Lateness, ModeName, OnNonFinite, Policy
from gradserver.options import BY_KEY, each
from gradserver.protocol.errors import InvalidArgumentError
from gradserver.protocol.limits import MIB
from gradserver.protocol.means import mean_of
from tests.cluster import Daemon, joined
from tests.option_tables import PAGE, page

FILE = """\
# two groups of one coordinator
bind = "tcp://127.0.0.1:0"
round-timeout = 600
state-rate = 8.5
quiet = true

[group.default]
workers = "2:8"
quorum = "75%"
nonfinite = "skip"

[group.critics]
workers = 4
mean = "trimmed:0.25"
round-timeout = 60

[group."*"]
workers = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "gradserver.toml"
    path.write_text(FILE)
    return path


def served(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[dict[str, Policy], dict[str, Any]]:
    """Return what `serve` would run with: the policies of groups, and the other settings."""
    found: list[tuple[dict[str, Policy], dict[str, Any]]] = []

    def serve(bind: str, told: dict[str, Policy], credit: int | None, **more: Any) -> int:
        found.append((told, {"bind": bind, "credit": credit, **more}))
        return 0

    monkeypatch.setattr(daemon, "serve", serve)
    assert cli.main(["serve", *arguments]) == 0
    return found[0]


def test_each_group_has_its_own_policies(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies, others = served(monkeypatch, "--config", str(file))
    rate = 8.5 * MIB
    skip = OnNonFinite.SKIP
    assert policies == {
        "default": Policy(2, 8, lateness=Lateness(percent=75.0, staleness=12), state_rate=rate, nonfinite=skip),
        "critics": Policy(4, 4, mean=mean_of("trimmed:0.25"), state_rate=rate, round_timeout=60.0),
        "*": Policy(1, 1, state_rate=rate),
    }
    assert (others["bind"], others["quiet"], others["round_timeout"]) == ("tcp://127.0.0.1:0", True, 600.0)
    assert (others["nonfinite"], others["groups"]) == (OnNonFinite.HALT, None)


def test_a_flag_overrides_the_file_in_all_groups(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--bind", "tcp://127.0.0.1:7000", "--workers", "3", "--mean", "median", "--round-timeout", "5"
    policies, others = served(monkeypatch, "--config", str(file), *flags, "--workers", "*=3:9", "--mode", "sync")
    assert {name: (one.minimum, one.maximum) for name, one in policies.items()} == {
        "default": (3, 3),
        "critics": (4, 4),
        "*": (3, 9),
    }
    assert {str(one.mean) for one in policies.values()} == {"median"}
    assert (others["bind"], others["round_timeout"]) == ("tcp://127.0.0.1:7000", 5.0)


def test_a_group_may_have_a_mode_and_no_size_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[group.a]\nworkers = 4\nmode = "bounded"\nstaleness = 3\n[group.b]\nmean = "median"\n')
    policies, _ = served(monkeypatch, "--config", str(path))
    assert (policies["a"].mode.name, policies["a"].mode.staleness) == (ModeName.BOUNDED, 3)
    assert (policies["b"].minimum, str(policies["b"].mean)) == (0, "median")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quorumm = 3", ":1: there is no option 'quorumm': did you mean 'quorum'?"),
        ("\n\nRound_Timeout = 3", ":3: there is no option 'Round_Timeout': did you mean 'round-timeout'?"),
        ("[group.a]\nworkers = 2\nworker = 3", ":3: there is no option 'worker': did you mean 'workers'?"),
        ("[group.a]\nbind = 'x'", ":2: 'bind' is an option of the coordinator, not of group 'a': put it in front"),
        ("gather = 'soon'", ":1: gather: 'soon' is not a number of seconds"),
        ("gather = true", ":1: gather is a number or a text, not true"),
        ("gather = [1, 2]", ":1: gather is a number or a text, not [1, 2]"),
        ("gather = 4000", ":1: gather: 4000 is out of range: a number of seconds is 0 to 3600"),
        ("quiet = 'yes'", ":1: quiet is true or false, not 'yes'"),
        ("\nlate = 'never'", ":2: late is one of keep, drop, not 'never'"),
        ("[group.a]\nmean = 'krum'", ":2: mean: there is no mean 'krum': F is the number"),
        ("[group.a]\nworkers = 'b=3'", ":2: workers is N or MIN:MAX; name the group by its table, [group.b]"),
        ("[groups.a]\nworkers = 2", "there is no table [groups]: that of a group is [group.NAME]"),
        ("gather =", " is not TOML: Invalid value (at "),
        ("group = 'mine'", ":1: `group` has a table for each group, as [group.NAME]"),
        ("bind = ", "Invalid value (at "),
        ("[group.a]\nworkers = 2\nmean = 'median'", "group 'a': the mean median needs at least 3 workers"),
        ("[group.a]\nquorum = 2", ":2: group 'a': quorum ({}:2) needs the number of workers: give workers, as"),
        ("\nquorum = 2", "quorum ({}:2) needs the number of workers"),
        ("[group.a]\nworkers = 2\nstaleness = 2", ":2: group 'a': staleness is for mode 'bounded' or 'async'"),
        (
            "[group.b]\nworkers = 4\nplane = 'direct'\nmean = 'median'",
            ":2: group 'b': plane direct ({}:3) is not possible with mean median ({}:4): libraries",
        ),
        (
            "plane = 'direct'\n[group.b]\nworkers = 4\nbackup = 1",
            ":3: group 'b': plane direct ({}:1) is not possible with backup 1 ({}:4): workers that",
        ),
        ("bind = 7411", ":1: bind: '7411' is not a coordinator's URL: expected tcp://HOST:PORT"),
        ("groups = ['a', 3]", ":1: groups is a list of names, or a text with commas, not ['a', 3]"),
        ("reconnect = 3", ":1: reconnect needs --join"),
        ("join = 'tcp://127.0.0.1:1'\nrate = 0", "with --join, --rate must be above 0"),
        ("sync = 'round'", ":1: sync needs a directory for the ledger: give --state-dir"),
        ("groups = ['a']\n[group.b]\nworkers = 2", "has group 'b', which --groups does not allow"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "serve", lambda *_, **__: pytest.fail("it served"))
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert cli.main(["serve", "--config", str(path)]) == 2
    told = capsys.readouterr().err
    assert said.replace("{}", str(path)) in told
    assert str(path) in told or "--join" in told
    assert cli.main(["config", "--config", str(path)]) == 2
    assert capsys.readouterr() == ("", told), "config checks what serve does"


def test_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--config", "/nowhere/c.toml"]) == 2
    assert "cannot read the configuration file /nowhere/c.toml: no such file or directory" in capsys.readouterr().err


def test_config_shows_what_holds_and_its_source(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--config", str(file), "--credit", "32", "--json"]) == 0
    rows = {(row["group"], row["option"]): row for row in json.loads(capsys.readouterr().out)}
    assert rows["", "credit"] == {"group": "", "option": "credit", "value": "32", "from": "--credit"}
    assert rows["", "bind"]["from"] == f"{file}:2"
    assert (rows["", "shards"]["value"], rows["", "shards"]["from"]) == ("1", "default")
    assert (rows["critics", "mean"]["value"], rows["critics", "mean"]["from"]) == ("trimmed:0.25", f"{file}:14")
    assert rows["*", "workers"]["from"] == f"{file}:18"
    assert {option for group, option in rows if not group} == {one.key for one in each()} - {"group", "workers"}
    assert cli.main(["config", "--config", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "group 'critics'" in shown
    assert f"{file}:14" in shown


def test_a_reader_that_has_gone_is_no_error(file: Path) -> None:
    command = [sys.executable, "-m", "gradserver", "config", "--json", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141


def test_every_option_has_one_declaration() -> None:
    assert len(BY_KEY) == len(list(each()))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = {action.option_strings[-1] for action in parser._actions} - {"--help", "--config"}
    assert flags == {option.flag for option in each()}
    for option in each():
        assert not option.default or option.is_switch or option.value(option.default) is not None
        assert (option.parse is None) == (option.is_switch or bool(option.choices))
    assert settings_of(parser.parse_args([])).common == {}
    with pytest.raises(InvalidArgumentError, match="--workers has group 'default' twice"):
        settings_of(parser.parse_args(["--workers", "2", "--workers", "default=3"]))


def test_the_reference_follows_from_the_declarations() -> None:
    assert PAGE.read_text("utf-8") == page(), "run python -m tests.option_tables"


def test_groups_of_one_coordinator_differ(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[group.default]\nworkers = 1\nnonfinite = 'skip'\n[group.b]\nworkers = 3\nmean = 'median'\n")
    with (
        Daemon("--config", str(path)) as daemon_,
        joined(daemon_.url, 1) as one,
        joined(daemon_.url, 3, group="b") as three,
    ):
        assert [worker.world_size for worker in (*one, *three)] == [1, 3, 3, 3]
        assert (daemon_.group()["mean"], daemon_.group()["nonfinite"]["policy"]) == ("plain", "skip")
        assert (daemon_.group("b")["mean"], daemon_.group("b")["nonfinite"]["policy"]) == ("median", "halt")
