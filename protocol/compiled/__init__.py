"""Kernels that numba compiles, if it is installed (``pip install 'gradserver[fast]'``).

`loops` and `sparse` have what numba compiles, and `table` makes a table of it. `loader` compiles in the background,
keeps the machine code on disk, and puts the table in its place. Like the protocol's transport, this folder does I/O and
has a thread. No other module of the protocol imports it.
"""
