"""Tests that `make test-lowest` tries what pyproject.toml allows."""

from __future__ import annotations

import re
import tomllib

from tests.cluster import ROOT


def test_the_oldest_versions_that_are_allowed_are_those_that_are_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [*project["optional-dependencies"]["torch"], *project["optional-dependencies"]["demo"]]
    allowed = dict(re.findall(r"^(\w+)>=([\d.]+)$", "\n".join([*project["dependencies"], *extras]), re.MULTILINE))
    tried = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "lowest.txt").read_text(), re.MULTILINE))

    assert allowed.keys() == tried.keys()
    for name, version in tried.items():
        assert version.split(".")[: len(allowed[name].split("."))] == allowed[name].split("."), name
        assert set(version.removeprefix(allowed[name])) <= {".", "0"}, name
