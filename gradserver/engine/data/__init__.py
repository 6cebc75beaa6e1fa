"""The data half of the engine: exchanges of slices, and what members gave to them. `half` is the way in."""
