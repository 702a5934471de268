"""A program that holds the write lock of a database until its standard input ends.

python locker.py FILE: prints "locked" once it has the lock.
"""

from __future__ import annotations

import sys

import apsw


def main() -> None:
    db = apsw.Connection(sys.argv[1])
    db.set_busy_timeout(30_000)
    db.execute("begin exclusive")
    print("locked", flush=True)
    sys.stdin.read()
    db.execute("rollback")
    db.close()


if __name__ == "__main__":
    main()
