"""The server's end of the transport: ZeroMQ, a local socket of its host, and shared memory."""
