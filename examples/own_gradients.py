"""A trainer that computes its own gradients. Each block's is averaged while backward computes the next.

It trains a residual network in plain numpy. Two workers train on half of the samples each: threads here, processes with
`gradserver.connect`. They end with the weights of one worker that has all samples.

    python examples/own_gradients.py
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import gradserver

Array = npt.NDArray[np.float32]

INPUTS, WIDTH, BLOCKS, STEPS, RATE = 8, 16, 3, 60, 0.05


class Network:
    """Weights of an embedding, of residual blocks (a weight and a bias each), and of a head."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> Array:
            return rng.normal(0.0, 0.3, shape).astype(np.float32)

        self.embedding, self.head = normal(INPUTS, WIDTH), normal(WIDTH, 1)
        self.blocks = [(normal(WIDTH, WIDTH), normal(WIDTH)) for _ in range(BLOCKS)]


def train(worker: gradserver.Worker, inputs: Array, targets: Array) -> tuple[float, Array]:
    """Train on this worker's share of the samples. Return its last loss, and the weights of all blocks."""
    mine = gradserver.shard_batches(len(inputs), worker.rank, worker.world_size)
    inputs, targets, count, net = inputs[mine], targets[mine], len(mine), Network()
    sizes = (WIDTH * WIDTH, WIDTH)  # elements of each component of a block
    exchange = gradserver.GradientExchange(worker, BLOCKS, sizes, lm_head=net.head.size, embedding=net.embedding.size)
    for step in range(STEPS):
        x, hidden = [inputs @ net.embedding], []
        for weight, bias in net.blocks:
            hidden.append(np.tanh(x[-1] @ weight + bias))
            x.append(x[-1] + hidden[-1])
        error = x[-1] @ net.head - targets
        down = 2 * error / count  # means over this worker's samples; their number is its weight
        gradients = [[x[-1].T @ down]]
        exchange.push_non_block(step, 0, gradients[-1], weight=count)  # returns at once; backward goes on
        down = down @ net.head.T
        for index in reversed(range(BLOCKS)):
            inner = down * (1 - hidden[index] ** 2)
            gradients.append([x[index].T @ inner, inner.sum(axis=0)])
            exchange.push_block(step, index, gradients[-1], weight=count)
            down = down + inner @ net.blocks[index][0].T
        gradients.append([inputs.T @ down])
        exchange.push_non_block(step, 2, gradients[-1], weight=count)
        exchange.finish()  # now all gradients are means over the samples of all workers

        parameters = [(net.head,), *net.blocks[::-1], (net.embedding,)]
        for own, means in zip(parameters, gradients, strict=True):
            for parameter, mean in zip(own, means, strict=True):
                parameter -= RATE * mean
    return float(np.mean(error**2)), np.concatenate([part.ravel() for block in net.blocks for part in block])


def main() -> None:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(41, INPUTS)).astype(np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    with gradserver.LocalCluster(world_size=2) as cluster:
        (first_loss, first), (_, second) = cluster.run(train, inputs, targets)
    with gradserver.LocalCluster(world_size=1) as alone:
        ((loss, reference),) = alone.run(train, inputs, targets)
    print(f"two workers: loss {first_loss:.4f} on rank 0's half; replicas identical: {np.array_equal(first, second)}")
    print(f"one worker: loss {loss:.4f}; weights differ by {np.abs(first - reference).max():.1e} at most")


if __name__ == "__main__":
    main()
