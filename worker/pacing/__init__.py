"""Unequal workers: each measures itself, and the same numbers give the same shares, or batches, at all of them."""
