"""The hub of the plain pyzmq comparison: waits for a message from every worker, then answers them all.

It makes two hops and nothing else: no engine, no sum, no check. It is started as ``python -m
gradserver.tools.bench.hub URL WORKERS``, and prints its URL.
"""

from __future__ import annotations

import sys

import zmq


def main() -> int:
    """Answer messages until the process is ended."""
    url, workers = sys.argv[1], int(sys.argv[2])
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(url)
    print(router.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        for message in [router.recv_multipart() for _ in range(workers)]:
            router.send_multipart(message)


if __name__ == "__main__":
    sys.exit(main())
