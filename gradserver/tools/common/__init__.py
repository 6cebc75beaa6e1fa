"""Parts that the benchmarks, chaos and the demo share: processes, terminal, pictures, emulated hosts."""
