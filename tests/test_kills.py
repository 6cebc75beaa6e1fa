"""Tests of coordinators that are killed every other second, in each kind of group."""

from __future__ import annotations

import pytest

from tests.kills import CASES, Case, run


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_weights_are_those_that_they_must_be(case: Case) -> None:
    outcome = run(case, seconds=12.0, every=2.0)
    assert outcome.kills >= 2
    assert outcome.same
