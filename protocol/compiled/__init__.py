"""Kernels that numba compiles, if it is installed (``pip install 'gradserver[fast]'``).

`loops` has what numba compiles, `table` makes a table of it, and `loader` compiles in the background, keeps the machine
code on disk, and puts the table in its place. This folder is the one part of the protocol, beside its transport, that
does I/O and has threads. No other module of the protocol imports it.
"""
