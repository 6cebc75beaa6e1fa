"""The driver of torch's own tests: nothing but a pass reads as one, and the list is what does not pass."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.conformance import expected, page, repository
from tests.conformance.crew import Kind, Outcome, verdict
from tests.conformance.expected import Entry, counted, drift, entries, figures
from tests.conformance.suite import MODULE, SuiteError, adapted

# ── a made-up suite ───────────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import json, os, sys, time, unittest
from dataclasses import asdict
from pathlib import Path
import torch, torch.distributed as dist
from tests.conformance.crew import Crew
from tests.conformance.suite import Suite

class Case(unittest.TestCase):
    def test_all_ranks_pass(self):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
    def test_one_rank_fails(self):
        assert self.rank == 0, "rank 1 fails"
        dist.barrier()
    @unittest.skip("never")
    def test_skipped_before(self): ...
    def test_one_rank_skips(self):
        if self.rank == 1: raise unittest.SkipTest("not here")
    def test_skips_by_status(self):
        sys.exit(75)
    def test_exits(self):
        sys.exit(0)
    def test_dies(self):
        if self.rank == 1: os._exit(9)
    def test_hangs(self):
        if self.rank == 1: time.sleep(60)
    def test_cannot_leave(self):
        if self.rank == 1: dist.destroy_process_group = dist.get_rank.missing
    def test_has_a_group_of_its_own(self):
        assert dist.get_world_size() == 2 and os.getpid() != int(sys.argv[2])

folder = Path(sys.argv[1])
for name in ("barrier", "init_dir"):
    (folder / name).mkdir()
crew = Crew(Suite("gloo", 2, Case, folder, {75: "no GPU"}, lambda test: 10.0))
found = {}
for test in unittest.defaultTestLoader.getTestCaseNames(Case):
    found[test] = asdict(crew.run(test, 1.5))
crew.end()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("made_up")), "0"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=100)
    return {test: Outcome(**{**one, "kind": Kind(one["kind"])}) for test, one in json.loads(done.stdout).items()}


def test_a_test_passes_only_if_all_ranks_pass(made_up: dict[str, Outcome]) -> None:
    assert {test: str(outcome.kind) for test, outcome in made_up.items()} == {
        "test_all_ranks_pass": "pass",
        "test_cannot_leave": "fail",
        "test_dies": "crash",
        "test_exits": "fail",
        "test_hangs": "hang",
        "test_has_a_group_of_its_own": "pass",
        "test_one_rank_fails": "fail",
        "test_one_rank_skips": "skip",
        "test_skipped_before": "skip",
        "test_skips_by_status": "skip",
    }


def test_an_outcome_says_why_it_is_none_that_passed(made_up: dict[str, Outcome]) -> None:
    assert made_up["test_one_rank_fails"].why == "AssertionError: rank 1 fails"
    assert made_up["test_one_rank_skips"].why == "not here"
    assert made_up["test_skips_by_status"].why == "no GPU"
    assert made_up["test_dies"].why == "rank 1 ended with status 9"
    assert made_up["test_hangs"].why == "rank 1 is not done after 1.5 s"
    assert "in test_hangs" in made_up["test_hangs"].details


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.PASS])
def test_no_other_outcome_of_a_rank_reads_as_passed(kind: Kind) -> None:
    passed = Outcome(Kind.PASS)
    assert verdict([passed, Outcome(kind, "this"), passed]) == Outcome(kind, "this")
    assert verdict([passed, passed]) == passed


# ── drift ─────────────────────────────────────────────────────────────────────────────────────────────

PASS, SKIP, FAIL = Outcome(Kind.PASS), Outcome(Kind.SKIP, "no GPU"), Outcome(Kind.FAIL, "ValueError: 3.")


@pytest.mark.parametrize(
    ("here", "listed", "gloo", "line"),
    [
        (PASS, None, PASS, None),
        (SKIP, None, SKIP, None),
        (PASS, None, SKIP, None),
        (FAIL, Kind.FAIL, PASS, None),
        (SKIP, Kind.SKIP, PASS, None),
        (FAIL, None, PASS, "test_a: fail, ValueError: 3. The list does not have it."),
        (FAIL, None, FAIL, "test_a: fail, ValueError: 3. The list does not have it."),
        (PASS, Kind.FAIL, PASS, "test_a passes. Take it from the list."),
        (SKIP, None, PASS, "test_a is skipped (no GPU), and gloo runs it."),
        (SKIP, None, FAIL, "test_a is skipped (no GPU), and gloo runs it."),
        (SKIP, Kind.FAIL, PASS, "test_a: skip, no GPU. The list expects 'fail'."),
        (Outcome(Kind.HANG), Kind.FAIL, PASS, "test_a: hang. The list expects 'fail'."),
        (None, Kind.FAIL, PASS, "test_a is in the list, and this torch has no such test."),
    ],
)
def test_any_drift_is_told(here: Outcome | None, listed: Kind | None, gloo: Outcome, line: str | None) -> None:
    outcomes = {} if here is None else {"test_a": here}
    wanted = {} if listed is None else {"test_a": listed}
    assert list(drift(outcomes, wanted, {"test_a": gloo})) == ([] if line is None else [line])


def test_figures_of_a_whole_run_are_those_that_are_written_down(tmp_path: Path) -> None:
    path = tmp_path / "figures.toml"
    path.write_text(
        '[[run]]\ntorch = "2.13.0"\nworld = 2\ngloo = [3, 0, 1]\ngradserver = [2, 1, 1]\ndate = "2026-11-28"\n'
    )
    (row,) = rows = figures(path)
    assert (row.world, row.gloo) == (2, (3, 0, 1))
    counts = {"gloo": (3, 0, 1), "gradserver": (2, 1, 1)}
    assert list(expected.drift_of_figures(rows, "2.13.0+cpu", 2, counts)) == []
    assert list(expected.drift_of_figures(rows, "2.14.0", 2, {"gloo": (9, 9, 9)})) == []
    (line,) = expected.drift_of_figures(rows, "2.13.0", 2, counts | {"gradserver": (1, 1, 2)})
    assert line == "gradserver: 1 passed, 1 not, 2 skipped. The figures say 2 passed, 1 not, 1 skipped."
    assert counted({"a": PASS, "b": SKIP, "c": FAIL, "d": Outcome(Kind.CRASH)}) == (1, 2, 1)


# ── the list ──────────────────────────────────────────────────────────────────────────────────────────


def test_each_test_of_the_list_has_one_reason() -> None:
    listed = entries()
    for entry in listed:
        assert entry.reason.endswith("."), entry
        assert len(entry.reason.split()) >= 5, entry
        assert list(entry.tests) == sorted(set(entry.tests)), entry
        assert entry.tests, entry
        assert set(entry.worlds) <= {2, 4, 8}, entry
        assert entry.backend in ("gloo", "gradserver"), entry
    for torch in {"2.13.0", "2.14.1", *(entry.since for entry in listed)}:
        for world in (2, 4, 8):
            holding = [entry for entry in listed if entry.holds("gradserver", world, torch)]
            names = [test for entry in holding for test in entry.tests]
            assert len(names) == len(set(names)), (torch, world)


def test_an_entry_holds_for_its_worlds_and_versions() -> None:
    entry = Entry(reason="So it is.", tests=("test_a",), worlds=(4,), since="2.13", before="2.14")
    assert entry.holds("gradserver", 4, "2.13.0+cpu")
    assert entry.holds("gradserver", 4, "2.13.1")
    assert not entry.holds("gradserver", 2, "2.13.0")
    assert not entry.holds("gloo", 4, "2.13.0")
    assert not entry.holds("gradserver", 4, "2.14.0a0+git12ab")
    assert not entry.holds("gradserver", 4, "2.12.1")


def test_the_page_has_the_list_and_the_figures() -> None:
    assert page.written() == page.PAGE.read_text(), "python -m tests.conformance.page writes it anew"


def test_the_figures_count_what_the_list_has() -> None:
    for row in figures():
        for backend, counts in (("gloo", row.gloo), ("gradserver", row.gradserver)):
            listed = expected.kinds(entries(), backend, row.world, row.torch)
            assert counts[1] == sum(kind != Kind.SKIP for kind in listed.values()), row


# ── torch's texts ─────────────────────────────────────────────────────────────────────────────────────


def test_conditions_on_gloo_become_conditions_on_both() -> None:
    text = '@require({"gloo"})\nif BACKEND != "gloo" and BACKEND == "gloo":\n    ...\n'
    assert adapted(text, "ours") == (
        '@require({"gloo", "ours"})\nif BACKEND not in ("gloo", "ours") and BACKEND in ("gloo", "ours"):\n    ...\n'
    )


@pytest.mark.parametrize("part", ['{"gloo"}', 'BACKEND != "gloo"', 'BACKEND == "gloo"'])
def test_conditions_of_another_shape_are_no_success(part: str) -> None:
    text = '{"gloo"} BACKEND != "gloo" BACKEND == "gloo"'.replace(part, "")
    with pytest.raises(SuiteError, match="how does it speak of gloo now"):
        adapted(text, "ours")


def test_the_installed_torch_speaks_of_gloo_in_these_ways() -> None:
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    text = adapted(Path(spec.origin).read_text(), "ours")
    conditions = [line for line in text.splitlines() if "BACKEND" in line and '"gloo"' in line and '"ours"' not in line]
    assert conditions == []


# ── torch's repository ────────────────────────────────────────────────────────────────────────────────

FILE = '''"""A file of tests."""
from __future__ import annotations

import unittest
import torch.distributed as dist

class Case(unittest.TestCase):
    def test_both(self):
        assert dist.is_available()
    def test_gloo_alone(self):
        assert len("gloo") == 4, "another name"
    def test_ours_alone(self):
        assert len("gloo") != 4
    @unittest.skip("no GPU")
    def test_neither(self): ...
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "pytorch" / "test" / "distributed"
    (folder / "_composable" / "fsdp").mkdir(parents=True)
    (folder / "test_device_mesh.py").write_text(FILE)
    yield tmp_path / "pytorch"
    assert (folder / "test_device_mesh.py").read_text() == FILE


def test_files_of_a_checkout_run_with_both_backends(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert repository.main([str(checkout), "test_device_mesh.py", "test_c10d_pypg.py"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "test_device_mesh.py gloo 2 passed, 1 failed, 1 skipped",
        "test_device_mesh.py gradserver 2 passed, 1 failed, 1 skipped",
        f"test_c10d_pypg.py: there is none in {checkout}/test/distributed",
        "test_device_mesh.py: Case::test_gloo_alone failed: AssertionError: another name",
    ]


def test_a_file_that_is_not_done_in_time_is_told() -> None:
    command = ["sh", "-c", "echo 'test_a.py::test_first PASSED [ 50%]'; sleep 600 & wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        report = repository.read(*repository.output_of(process, 1.0))
    assert str(report).endswith("and not done")
    assert report.outcomes == {"test_first": "passed"}
    (line,) = repository.differences(repository.Report({"test_slow": "passed"}, {}, True), report)
    assert line == "test_slow missing: no reason given"


def test_names_of_gloo_are_replaced() -> None:
    text = repository.with_ours("run(dist.Backend.GLOO, c10d.Backend.GLOO, 'gloo', 'cpu:gloo,cuda:nccl')\n")
    assert text.endswith("""run("gradserver", "gradserver", "gradserver", 'cpu:gradserver,cuda:nccl')\n""")
    assert text.splitlines()[0] == repository.BEGINNING


def test_a_test_that_is_named_after_its_backend_is_compared_with_the_other_ones() -> None:
    gloo = repository.Report({"GlooCase::test_gloo": "passed", "Case::test_gloo": "passed"}, {}, True)
    ours = repository.Report({"GradserverCase::test_gradserver": "passed", "Case::test_gloo": "failed"}, {}, True)
    assert list(repository.differences(gloo, ours)) == ["Case::test_gloo failed: no reason given"]
