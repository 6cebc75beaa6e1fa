"""`make gpu` without a GPU: each measurement is rehearsed on the CPU, and the page is made of outcomes of all kinds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gradserver.worker.devices.device import Device
from gradserver.worker.planes import staging
from tests import gpu, gpu_measurements
from tests.fake_device import FakeDevice, checked
from tests.gpu import LINES, Line, Outcome

torch.set_num_threads(1)


class Mark:
    """A time, when the stream has come this far."""

    at = 0.0


class Rehearsal(gpu_measurements.Gpu):
    """The CPU in place of a GPU, with small models."""

    device = torch.device("cpu")
    scale = 1 / 256
    patience = 4.0

    def __init__(self) -> None:
        self.fake = FakeDevice("at once")
        self.refused = False

    def open(self) -> Device:
        return checked(self.fake)

    def mark(self, stream: Any = None) -> Any:
        mark = Mark()
        (stream or self.fake.compute).enqueue(lambda: setattr(mark, "at", time.perf_counter()))
        return mark

    def seconds(self, begin: Any, end: Any) -> float:
        return max(float(end.at - begin.at), 1e-9)

    def wait(self) -> None:
        self.fake.compute.synchronize()

    def forget_peak(self) -> None:
        pass

    def peak(self) -> int:
        return 0

    def refuse_waits(self, refuse: bool) -> None:
        self.refused = refuse


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    made = Rehearsal()
    monkeypatch.setattr(staging, "open_device", lambda _: made.open())
    monkeypatch.delenv("GRADSERVER_URL", raising=False)
    return made


SLOW = ("two-workers", "large-model", "nccl")
"""Measurements with processes that load torch, or with a larger model."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in gpu_measurements.MEASUREMENTS],
)
def test_each_measurement_is_rehearsed(name: str, rehearsal: Rehearsal) -> None:
    found = gpu_measurements.MEASUREMENTS[name](rehearsal)
    assert found.text
    assert "\n" not in found.text
    if name in ("two-workers", "large-model", "waits", "scaler", "codecs", "nccl"):  # which say nothing of time
        assert found.passed, found.text
    assert not rehearsal.refused


def test_the_lines_fit_half_an_hour_and_are_the_measurements() -> None:
    assert sum(line.seconds for line in LINES) <= gpu.TOTAL_SECONDS
    assert gpu.TOTAL_SECONDS <= 1800
    assert [line.name for line in LINES] == [*gpu_measurements.MEASUREMENTS, "tests"]


def test_without_a_device_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    page = tmp_path / "gpu.md"
    assert gpu.main(["--page", str(page)]) == 0
    said = "make gpu: no CUDA device was found, so nothing was run and docs/gpu.md stays as it is\n"
    assert capsys.readouterr().out == said
    assert not page.exists()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(gpu.NEEDED, "no_such_module", "no-such-package")
    assert gpu.main([]) == 2
    assert "has no no-such-package: install them there, or put them on PYTHONPATH" in capsys.readouterr().out


@pytest.mark.long
def test_lines_that_fail_or_hang_cost_no_other_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = 'print("noise"); print(\'{"passed": true, "text": "12 GB/s", "timeline": ["█·"]}\')'
    commands = {
        "nccl": "import os; os.abort()",
        "two-workers": "print('begun', flush=True); import threading; threading.Event().wait()",
        "copies": good,
        "overlap": "print('{of a worker')",
        "large-model": good.replace("true", "false"),
    }
    lines = [Line(name, f"What {name} shows", 8, ("-c", code)) for name, code in commands.items()]
    monkeypatch.setattr(gpu, "LINES", (*lines, Line("memory", "What memory shows", 8, ("-c", good))))
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda: {"device": "one that is planted"})
    page, results = tmp_path / "gpu.md", tmp_path / "results.json"
    assert gpu.main(["--page", str(page), "--results", str(results), "--only", ",".join(commands)]) == 1
    assert gpu.main(["--page", str(page), "--results", str(results), "--only", "memory"]) == 0
    text = page.read_text()
    assert "- device: one that is planted" in text
    assert "| What nccl shows (`nccl`) | did not run | it failed with status -6." in text
    assert "| did not run | it was ended after 8 s. Its last words: begun |" in text
    assert "| What copies shows (`copies`) | yes | 12 GB/s |" in text
    assert "| What overlap shows (`overlap`) | did not run | it failed with status 0." in text
    assert "| What large-model shows (`large-model`) | **no** | 12 GB/s |" in text
    assert "| What memory shows (`memory`) | yes | 12 GB/s |" in text
    assert "```text\n█·\n```" in text
    assert "two-workers: did not run" in capsys.readouterr().out


def test_a_command_goes_on_where_the_one_before_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = "import pathlib; at = pathlib.Path({!r}); at.write_text(at.read_text() + 'x' if at.exists() else 'x'); "
    tells = 'print(\'a word\'); print(\'{"passed": true, "text": "12 GB/s"}\')'

    def line(name: str, seconds: float, code: str) -> Line:
        return Line(name, f"What {name} shows", seconds, ("-c", counts.format(str(tmp_path / name)) + code))

    lines = [line("copies", 20, tells), line("nccl", 20, "raise SystemExit(3)"), line("memory", 500, tells)]
    monkeypatch.setattr(gpu, "LINES", lines)
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda: {"device": "one that is planted"})
    page, results = tmp_path / "gpu.md", tmp_path / "build" / "gpu.json"
    options = ["--page", str(page), "--results", str(results), "--seconds"]
    assert gpu.main([*options, "100"]) == 1
    assert "not run yet: memory" in capsys.readouterr().out
    assert "| What memory shows (`memory`) | not run | not yet |" in page.read_text()
    assert gpu.main([*options, "1000"]) == 1
    said = capsys.readouterr().out
    assert "all lines have run" in said
    assert said.index("memory: yes") < said.index("nccl: did not run"), "what failed before comes last"
    assert gpu.main([*options, "100", "--only", "copies"]) == 0
    ran = {line.name: len((tmp_path / line.name).read_text()) for line in lines}
    assert ran == {"copies": 2, "nccl": 2, "memory": 1}
    assert (tmp_path / "build" / "gpu.json.log").read_text().count("a word") == 3
    assert page.read_text().count("| yes | 12 GB/s |") == 2


def test_tests_that_fail_are_named() -> None:
    said = (
        "FAILED tests/test_a.py::test_one - Error: x\nFAILED tests/test_a.py::test_two[a b]\n2 failed, 3 passed in 1s\n"
    )
    outcome = gpu._judge(Line("tests", "", 1, ()), 1, said)
    assert outcome == Outcome(True, False, "2 failed, 3 passed in 1s: test_one, test_two[a b]")


def test_no_time_is_left_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "facts_of_this_machine", lambda: {"device": "one that is planted"})
    page = tmp_path / "gpu.md"
    assert gpu.main(["--page", str(page), "--seconds", "5"]) == 1
    assert page.read_text().count("| did not run | no time was left of 5 s |") == len(LINES)


def test_the_page_is_that_of_no_device_or_has_its_facts() -> None:
    text = gpu.PAGE.read_text()
    assert text == gpu.page({}, {}) or "\n- device: " in text
    assert "Nothing on this page has run on a GPU" in gpu.page({}, {})


def test_a_line_that_did_not_run_is_not_shown_as_passed() -> None:
    text = gpu.page({"device": "one"}, {"copies": Outcome(False, None, "why", date="2026-01-01 00:00")})
    assert "| did not run | why |" in text
    assert text.count("| not run | not yet |") == len(LINES) - 1


def test_the_environment_names_this_checkout_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("GRADSERVER_URL", "tcp://nowhere:1")
    found = gpu.environment()
    assert found["PYTHONPATH"] == f"{gpu.ROOT}{os.pathsep}/somewhere"
    assert "GRADSERVER_URL" not in found
