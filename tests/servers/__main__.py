"""`python -m tests.servers [BUCKET...]`: a SeaweedFS until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading

from tests.servers.seaweed import SeaweedFS


def _main() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    buckets = sys.argv[1:] or ["ratchet"]
    with SeaweedFS(*buckets) as server:
        lines = {"AWS_ENDPOINT_URL": server.endpoint, **server.admin.environment}
        print(*(f"export {name}={value}" for name, value in lines.items()), sep="\n")
        print(f"# buckets: {', '.join(buckets)}; stop with Ctrl-C or SIGTERM", flush=True)
        stop.wait()


if __name__ == "__main__":
    _main()
