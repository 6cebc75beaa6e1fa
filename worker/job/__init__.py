"""A training job: its state, saved, loaded, and sent to workers that join."""
