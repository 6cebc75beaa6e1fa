"""A member's own part of the protocol: what it has begun, what it may send, and what it holds.

Nothing here reads a clock, takes a lock, starts a thread or touches a socket. `gradserver.worker.session` calls it with
its lock held, and carries out what it returns.
"""
