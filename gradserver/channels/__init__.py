"""How workers reach the coordinator: ZeroMQ, a local socket of its host, and shared memory."""
