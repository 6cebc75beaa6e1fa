"""The data of each worker: samplers, and ranges that the coordinator hands out."""
