"""How a worker reaches the coordinator and its data shards: ZeroMQ, local sockets of its host, shared memory."""
