"""Tools that try gradserver out: the demo, the benchmarks, and chaos. None of them is needed to train."""
