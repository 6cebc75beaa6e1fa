"""Several groups of one coordinator, each elastic by its own numbers."""

from __future__ import annotations

import numpy as np

import gradserver
from gradserver.worker.client import Worker
from tests.cluster import Daemon, together, wait_until


def test_each_group_is_elastic_by_its_own_numbers() -> None:
    options = "--workers", "2:3", "--workers", "critics=1:2", "--workers", "*=1:1", "--gather", "0"
    with Daemon("--quiet", *options) as daemon:

        def join(place: tuple[str, str]) -> Worker:
            group, name = place
            return gradserver.connect(daemon.url, group=group, name=name, timeout=10.0)

        places = [("default", "a"), ("default", "b"), ("critics", "c"), ("another", "d")]
        workers = together(places, join)
        assert [worker.world_size for worker in workers] == [2, 2, 1, 1]
        for worker in workers:
            assert worker._session.membership.member_ids, "this group is not elastic"
        workers[1].close()
        wait_until(lambda: daemon.group("default")["state"] == "active", "the group has heard of it")
        for worker in workers:
            worker.close()


def test_a_named_group_goes_on_when_a_worker_leaves() -> None:
    with Daemon("--quiet", "--workers", "2", "--workers", "critics=1:2") as daemon:

        def join(name: str) -> Worker:
            return gradserver.connect(daemon.url, world_size=2, group="critics", name=name, timeout=10.0)

        one, other = together(["a", "b"], join)
        other.close()
        assert one.all_reduce(np.ones(1, np.float32), op="sum").tolist() == [1.0]
        one.close()
