"""Bodies beside each other: two of one job, more of one key or task than its limit allows.

One exception is documented: a run whose owner was frozen for longer than its lease may still go on when the
job runs elsewhere. It is counted.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from fluxmesh.testing.history import Violation
from fluxmesh.testing.history_runs import NEVER_NS, NS, Index, Run

# A body that was on its way when its process was stopped begins so soon after it goes on.
_ON_ITS_WAY_NS: Final = NS // 5


class Overlaps:
    """`excused` is complete once `violations` was walked to its end."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.excused = 0

    def violations(self) -> Iterator[Violation]:
        for job_id, runs in self._index.runs_of.items():
            if job_id not in self._index.touched:
                yield from self._of_job(job_id, runs)
        limits = self._key_limits()
        yield from self._above(self._by_key(limits), limits, "concurrency key")
        by_task: dict[str, list[Run]] = defaultdict(list)
        for run in self._index.runs:
            if run.task in self._index.history.max_concurrent:
                by_task[run.task].append(run)
        yield from self._above(by_task, self._index.history.max_concurrent, "max_concurrent of")

    # -- two bodies of one job ---------------------------------------------------------------------------
    def _of_job(self, job_id: str, runs: list[Run]) -> Iterator[Violation]:
        for before, after in itertools.pairwise(runs):
            if after.token <= before.token and not self._was_on_its_way(after):
                what = f"token {after.token} follows {before.token}"
                yield self._index.violation("token does not grow", job_id, what)
        for at, after in enumerate(runs):
            beside = [run for run in runs[:at] if run.end_ns > after.start_ns]
            for before in beside:
                if self._is_excused(before, after):
                    self.excused += 1
                else:
                    span = (min(before.end_ns, after.end_ns) - after.start_ns) / NS
                    what = f"two bodies at once for {span:.3f} s, tokens {before.token} and {after.token}"
                    yield self._index.violation("overlap", job_id, what)

    def _is_excused(self, before: Run, after: Run) -> bool:
        if after.token < before.token:
            return self._was_on_its_way(after)
        return min(before.end_ns, after.end_ns) <= self._excused_until_ns(before, after)

    def _excused_until_ns(self, before: Run, after: Run) -> float:
        """Until when the first may go on beside the second, because its own process was stopped and its
        lease had lapsed by then: it is told so by the beat that follows, and has to heed that."""
        index = self._index
        owners = index.owners_of(before)
        told_ns = (index.history.lease_s + index.history.unheeding_s) * NS
        return max(
            (
                index.unstopped_ns(owners, stop.end_ns, told_ns)
                for pid in owners
                for stop in index.stops_of.get(pid, ())
                if stop.start_ns + index.patience_ns <= min(stop.end_ns, after.start_ns)
                and stop.end_ns >= before.start_ns - _ON_ITS_WAY_NS
            ),
            default=float("-inf"),
        )

    def _was_on_its_way(self, run: Run) -> bool:
        """It was claimed, its process was stopped for longer than its lease, and it begins as that ends."""
        index = self._index
        return any(
            0 <= run.start_ns - stop.end_ns <= _ON_ITS_WAY_NS
            and stop.end_ns - stop.start_ns >= index.patience_ns
            for pid in index.owners_of(run)
            for stop in index.stops_of.get(pid, ())
        )

    # -- more than a limit allows ------------------------------------------------------------------------
    def _key_limits(self) -> dict[str, int]:
        limits: dict[str, int] = {}
        for story in self._index.history.stories:
            record = story.record
            if record.concurrency_key is not None and record.concurrency_limit is not None:
                known = limits.get(record.concurrency_key, 0)
                limits[record.concurrency_key] = max(known, record.concurrency_limit)
        return limits

    def _by_key(self, limits: Mapping[str, int]) -> dict[str, list[Run]]:
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self._index.runs:
            story = self._index.stories.get(run.job)
            if story is not None and story.record.concurrency_key in limits:
                found[str(story.record.concurrency_key)].append(run)
        return found

    def _above(
        self, groups: Mapping[str, Iterable[Run]], limits: Mapping[str, int], word: str
    ) -> Iterator[Violation]:
        for name, runs in groups.items():
            known = [run for run in runs if run.job not in self._index.touched]
            worst = _most_at_once([(run.start_ns, self._permit_end_ns(run), run) for run in known])
            if len(worst) > limits[name]:
                what = f"{len(worst)} bodies at once, {word} {name!r} allows {limits[name]}"
                yield self._index.violation("limit exceeded", "", what, *(run.tell() for run in worst[:6]))

    def _permit_end_ns(self, run: Run) -> float:
        """Until when it held its permit: it loses it with its lease."""
        lapse_ns = self._index.lapse_of(self._index.owners_of(run), run.start_ns, run.end_ns)
        return run.end_ns if lapse_ns is None else max(run.start_ns, lapse_ns)


def _most_at_once(spans: list[tuple[int, float, Run]]) -> list[Run]:
    """The most runs whose spans share one instant."""
    open_runs: list[tuple[float, Run]] = []
    worst: list[Run] = []
    for start_ns, end_ns, run in sorted(spans, key=lambda span: span[0]):
        open_runs = [one for one in open_runs if one[0] > start_ns]
        if end_ns == NEVER_NS or end_ns > start_ns:
            open_runs.append((end_ns, run))
        if len(open_runs) > len(worst):
            worst = [one[1] for one in open_runs]
    return worst
