"""Tools beside the library: the launcher, and those that try gradserver out: the demo, the benchmarks, chaos."""
