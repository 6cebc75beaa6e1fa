"""Collectives and transfers for users, on tensors, arrays and objects."""
