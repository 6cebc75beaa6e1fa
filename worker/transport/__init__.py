"""Ways of a worker to the coordinator and its data shards: ZeroMQ, local sockets of its host, shared memory."""
