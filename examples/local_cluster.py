"""Every collective, by four workers that are threads of this process: no port, no daemon.

    python examples/local_cluster.py

The same function works between processes, with the worker that `gradserver.connect` returns.
"""

from __future__ import annotations

import numpy as np

import gradserver


def work(worker: gradserver.Worker) -> str:
    """Call every collective. Tensors may be torch tensors or numpy arrays."""
    rank, size = worker.rank, worker.world_size

    mean = worker.all_reduce(np.full(3, rank, np.float32))  # in place; the tensor is returned
    weighted = worker.all_reduce(np.array([rank], np.float32), weight=rank)  # sum(w·g) / sum(w)
    largest = worker.all_reduce(np.array([rank]), op="max")  # any numeric element type
    root = worker.broadcast(np.array([100 + rank]), root=2)
    everyone = worker.all_gather(np.array([rank]))  # shape (size, 1)
    part = worker.reduce_scatter(np.arange(size, dtype=np.float32), op="sum")  # this rank's part of the sum

    sending = worker.send(np.array([rank]), target=(rank + 1) % size, async_op=True)  # a handle, to wait for later
    left = worker.recv(np.array([0]), source=(rank - 1) % size)
    sending.wait()
    worker.barrier()

    return (
        f"rank {rank}: mean {mean.tolist()}, weighted {weighted[0]:.3f}, max {largest[0]}, root {root[0]}, "
        f"all {everyone.ravel().tolist()}, part {part[0]:g}, left {left[0]}"
    )


def main() -> None:
    with gradserver.LocalCluster(world_size=4) as cluster:
        for line in cluster.run(work):
            print(line)


if __name__ == "__main__":
    main()
