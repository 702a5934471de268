"""Order 20 reports on each of 12 tenants, in any order, and tell how many of them were cold."""

import random
import sys
from collections import Counter

from app import report

TENANTS = [f"tenant-{number}" for number in range(12)]


def main(*, keyed: bool) -> None:
    wanted = TENANTS * 20
    random.shuffle(wanted)
    if keyed:
        jobs = [report.options(affinity_key=tenant).delay(tenant) for tenant in wanted]
    else:
        jobs = [report.delay(tenant) for tenant in wanted]  # one key for all: the name of the task
    results = [job.result(timeout=120) for job in jobs]
    cold = sum(bool(result["cold"]) for result in results)
    by_process = Counter(result["process"] for result in results)
    print(f"{len(results)} reports, {cold} of them cold; by process: {sorted(by_process.values())}")


if __name__ == "__main__":
    main(keyed="--without-keys" not in sys.argv[1:])
