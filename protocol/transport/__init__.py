"""What both ends of the transport share: the one part of `gradserver.protocol` that does I/O. The engine uses none."""
