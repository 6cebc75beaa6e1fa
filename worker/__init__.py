"""The worker's side: the client, its PyTorch integration, and data sharding."""
