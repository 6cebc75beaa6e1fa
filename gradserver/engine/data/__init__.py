"""The data half of the engine: exchanges of slices, and who has given what to them. `half` is the way in."""
