"""DistributedDataParallel, and the parts that trainers with gradients of their own use of it."""
