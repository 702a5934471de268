"""A program whose event loop ends under a body that goes on: `python -m tests.service.outliving FILE`.

It says "left" when the loop is gone, lets the body end at a line on its standard input, and ends at the next.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

from tests.service.workshop import Workshop


def main(path: Path) -> None:
    release, inside = threading.Event(), threading.Event()

    async def serve() -> None:
        shop = Workshop(path.parent, hard_grace_s=0.0)

        @shop.task("stuck")
        def stuck() -> None:
            inside.set()
            release.wait(30)

        worker = shop.make_worker("gone")
        await worker.start()
        await asyncio.to_thread(inside.wait, 10)
        await worker.stop(0)
        assert worker.left_running == 1

    asyncio.run(serve())
    print("left", flush=True)
    sys.stdin.readline()
    release.set()
    sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
