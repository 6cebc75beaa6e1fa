"""Planes: how the gradients of a module travel. `gradserver.worker.torch_ddp.rounds` does not know which one it is."""
