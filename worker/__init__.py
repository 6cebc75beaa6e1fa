"""The worker's side: the client, its PyTorch integration, and data sharding."""

from gradserver.worker.eager import run_eagerly

run_eagerly()
