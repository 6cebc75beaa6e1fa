"""`gradserver run`: starts workers on one or more hosts, shows their output, and ends them together.

The launcher runs an agent on each host: a child of its own here, a remote shell's command elsewhere. The agent starts
the workers of its host and passes on what they print. When the launcher ends, even by SIGKILL, the agent reads the end
of its standard input, and ends its workers with all of their children.
"""
