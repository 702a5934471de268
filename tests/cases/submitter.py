"""A producer of C21: submits one order from many threads at once and prints what it was answered.

python submitter.py THREADS KEY KWARGS: prints "ready", waits for a line, then prints a JSON list.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from fluxmesh import Queue


def main() -> None:
    threads, key, kwargs = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    queue = Queue()
    queue.counts()  # the file is open
    gate = threading.Barrier(threads)

    def submit(_: int) -> dict[str, object]:
        gate.wait(30)
        handle = queue.submit("order", kwargs=kwargs, idempotency_key=key)
        return {"id": handle.id, "deduplicated": handle.deduplicated}

    print("ready", flush=True)
    sys.stdin.readline()
    with ThreadPoolExecutor(threads) as pool:
        print(json.dumps(list(pool.map(submit, range(threads)))))


if __name__ == "__main__":
    main()
