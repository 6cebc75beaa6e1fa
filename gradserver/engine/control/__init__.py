"""The control half of the engine: groups, who is in them, and what they agreed on. `machine` is the way in."""
