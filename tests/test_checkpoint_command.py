"""Tests of ``gradserver checkpoint``: what it shows, without torch, and the files that it writes for others."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gradserver import DistributedDataParallel, Job
from gradserver.cli import main
from gradserver.worker.client import Worker
from tests.cluster import ROOT
from tests.replicas import alone

torch.set_num_threads(1)

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from gradserver.cli import main
sys.exit(main(["checkpoint", "show", sys.argv[1]]))
"""


@pytest.fixture
def single(tmp_path: Path) -> Path:
    def work(worker: Worker) -> None:
        model = DistributedDataParallel(nn.Linear(3, 2).bfloat16(), worker)
        Job(model, torch.optim.AdamW(model.parameters(), lr=0.5)).save(tmp_path / "one.gsckpt")

    alone(work)
    return tmp_path / "one.gsckpt"


@pytest.fixture
def several(tmp_path: Path) -> Path:
    def work(worker: Worker) -> None:
        models = {name: DistributedDataParallel(nn.Linear(size, 1), worker) for name, size in (("g", 2), ("d", 3))}
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
        Job(models, optimizers).save(tmp_path / "two.gsckpt")

    alone(work)
    return tmp_path / "two.gsckpt"


def test_show_needs_no_torch(single: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(single)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, "")
    assert single.read_bytes()[-32:].hex() in shown.stdout
    for line in (
        "round       0",
        "model: 8 numbers",
        "  weight  bfloat16 [2, 3]",
        "  bias    bfloat16 [2]",
        "(lr 0.5)",
    ):
        assert line in shown.stdout, shown.stdout


def test_an_exported_model_is_loaded_by_torch(single: Path, tmp_path: Path) -> None:
    assert main(["checkpoint", "export", str(single), str(tmp_path / "model.pt")]) == 0
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    nn.Linear(3, 2).bfloat16().load_state_dict(found)
    assert found["weight"].dtype == torch.bfloat16
    assert not list(tmp_path.glob("*.tmp"))


def test_several_models_are_exported_by_name_or_one_of_them(
    several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.pt"
    assert main(["checkpoint", "show", str(several)]) == 0
    assert "model 'd': 4 numbers" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(several), str(target)]) == 0
    assert {name: sorted(one) for name, one in torch.load(target, weights_only=True).items()} == {
        name: ["bias", "weight"] for name in ("g", "d")
    }
    assert main(["checkpoint", "export", "--model", "d", str(several), str(target)]) == 0
    assert torch.load(target, weights_only=True)["weight"].shape == (1, 3)
    assert main(["checkpoint", "export", "--model", "e", str(several), str(target)]) == 2
    assert "has no model 'e': it has 'd', 'g'" in capsys.readouterr().err.replace("'g', 'd'", "'d', 'g'")


def test_errors_say_what_to_do(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else True)
    assert main(["checkpoint", "export", str(single), str(tmp_path / "m.safetensors")]) == 1
    assert "this needs safetensors, which is not installed: pip install safetensors" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(single), str(tmp_path / "none" / "m.pt")]) == 1
    assert "cannot write" in capsys.readouterr().err
    single.write_bytes(single.read_bytes()[:-1])
    assert main(["checkpoint", "show", str(single)]) == 1
    assert "is not a whole checkpoint" in capsys.readouterr().err
