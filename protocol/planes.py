"""Names of the planes: the ways of a group's gradients.

A group has one plane at a time. The coordinator chooses it (`gradserver.engine.control.planes`), and tells it with each
membership. On `TCP`, `SHM` and `IN_PROCESS` gradients go to the coordinator, over the channel of each worker. On
`DIRECT` they go from worker to worker, in a process group of torch.distributed. On `HIERARCHICAL` they do so in each
host, and one worker of each host exchanges with the coordinator.
"""

from __future__ import annotations

from typing import Final

TCP: Final = "tcp"
SHM: Final = "shm"
IN_PROCESS: Final = "in_process"
DIRECT: Final = "direct"
CHANNELS: Final = (TCP, SHM, IN_PROCESS)
"""Planes of the coordinator, the farthest first."""
HIERARCHICAL: Final = "hierarchical"
AMONG_MEMBERS: Final = (DIRECT, HIERARCHICAL)
"""Planes on which members reduce among themselves, and a round counts when all of them have committed it."""
PLANES: Final = (*CHANNELS, *AMONG_MEMBERS)
AUTO: Final = "auto"
"""In place of a plane: any, as the coordinator chooses."""
WISHES: Final = (AUTO, *PLANES)
NCCL: Final = "nccl"
GLOO: Final = "gloo"
