"""The common part of both ends' transports: all of `gradserver.protocol` that does I/O. The engine uses none."""
