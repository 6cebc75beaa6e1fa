"""The control half of the engine: groups, their members, and what these agreed on. `machine` is the way in."""
