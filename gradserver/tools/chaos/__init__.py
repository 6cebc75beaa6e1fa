"""`gradserver chaos`: real processes, faults drawn from a seed, and an oracle that recomputes every round."""
