"""The hierarchical plane over gloo: one mean for all, by way of one leader of each host."""

from __future__ import annotations

import pytest
import torch

from gradserver.worker.planes.epochs import Directs
from gradserver.worker.planes.levels import Levels
from tests.cluster import members, together
from tests.hosts import hosted
from tests.test_direct import floats, train


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab", "aaa"])
def test_members_of_several_hosts_get_the_bits_of_one_mean_as_the_coordinator_gives_it_within_rounding(
    hosts: str,
) -> None:
    with hosted(hosts) as workers:
        assert {worker.plane for worker in workers} == {"hierarchical"}
        leveled = together(workers, train)
        joint = [Directs.of(worker).joint for worker in workers]
        assert [isinstance(one, Levels) and one.leads for one in joint] == [
            hosts.index(host) == rank for rank, host in enumerate(hosts)
        ]
        assert {Directs.of(worker).voids for worker in workers} == {0}
    with members("memory", len(hosts)) as workers:
        reduced = together(workers, train)
    assert len(set(leveled)) == len(set(reduced)) == 1
    assert torch.allclose(floats(leveled[0]), floats(reduced[0]), rtol=0, atol=1e-5)
