"""Devices with memory of their own: buckets are copied to the host and back, beside the computation."""
