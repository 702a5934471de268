"""A walk over every key of a namespace: what is wrong with it, in words. No code of the scripts is used."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any, Final

_PREFIX: Final = b"fluxmesh:"
_QUEUED_PLACES: Final = ("0", "1", "2", "3")
_ENDED: Final = {"5": "ended:COMPLETED", "6": "dlq", "7": "ended:CANCELLED", "8": "ended:EXPIRED"}
_LISTS: Final = ("all", "by:queue:{queue}", "by:task:{task}")

Hash = dict[str, str]


def snapshot(client: Any) -> dict[bytes, bytes]:
    """Every key of the database, as the server dumps it."""
    names = sorted(client.keys())
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.dump(name)
        return dict(zip(names, pipe.execute(), strict=True))


def restore(client: Any, keys: dict[bytes, bytes]) -> None:
    with client.pipeline(transaction=False) as pipe:
        pipe.flushdb()
        for name, dump in keys.items():
            pipe.restore(name, 0, dump)
        pipe.execute()


class Keys:
    """The namespace, read once."""

    def __init__(self, client: Any) -> None:
        names = client.keys(_PREFIX + b"*")
        with client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.type(name)
            kinds = pipe.execute()
            for name, kind in zip(names, kinds, strict=True):
                {
                    b"hash": pipe.hgetall,
                    b"set": pipe.smembers,
                    b"string": pipe.get,
                    b"zset": lambda name: pipe.zrange(name, 0, -1, withscores=True),
                }[kind](name)
            values = pipe.execute()
        self.hashes: dict[str, Hash] = {}
        self.zsets: dict[str, dict[str, float]] = {}
        self.sets: dict[str, set[str]] = {}
        self.texts: dict[str, str] = {}
        for name, kind, value in zip(names, kinds, values, strict=True):
            self._keep(name.removeprefix(_PREFIX).decode(), kind, value)
        self.jobs = {
            name.removeprefix("jobs:"): record
            for name, record in self.hashes.items()
            if name.startswith("jobs:")
        }

    def _keep(self, name: str, kind: bytes, value: Any) -> None:
        if kind == b"hash":
            self.hashes[name] = {key.decode(): field.decode("latin-1") for key, field in value.items()}
        elif kind == b"zset":
            self.zsets[name] = {member.decode(): score for member, score in value}
        elif kind == b"set":
            self.sets[name] = {member.decode() for member in value}
        else:
            self.texts[name] = value.decode()


def _home(job: Hash) -> tuple[str, str]:
    """The set in which a job has to be, and the field that is its score."""
    place = job["place"]
    return {
        "0": (f"delayed:{job['tier']}", "due_us"),
        "1": (f"queue:{job['queue']}:{job['tier']}", "seq"),
        "2": (f"parked:{job.get('lane')}", "seq"),
        "3": (f"in_flight:{job.get('worker_id')}.{job.get('lane')}", ""),
        "4": (f"in_flight:{job.get('worker_id')}.{job.get('lane')}", ""),
    }.get(place) or (_ENDED[place], "ended_us")


def _places(keys: Keys) -> dict[str, set[str]]:
    """Each id: the sets in which it is, of those that are places."""
    kinds = ("delayed:", "queue:", "parked:", "in_flight:", "ended:", "dlq")
    found: dict[str, set[str]] = defaultdict(set)
    for name, members in keys.zsets.items():
        if name.startswith(kinds):
            for job_id in members:
                found[job_id].add(name)
    return found


def lost(keys: Keys) -> list[str]:
    """Jobs that no verb will ever meet: they are not in the set that their record names."""
    wrong = []
    for job_id, job in keys.jobs.items():
        home, field = _home(job)
        score = keys.zsets.get(home, {}).get(job_id)
        if score is None or (field and score != float(job[field])):
            wrong.append(f"{job_id} is not in {home}, or not where it says: {job}")
    return wrong


def strays(keys: Keys) -> list[str]:
    """Members of places that have no business there."""
    return [
        f"{job_id} is in {sorted(names)}, and its record says {keys.jobs.get(job_id)}"
        for job_id, names in _places(keys).items()
        if job_id not in keys.jobs or names != {_home(keys.jobs[job_id])[0]}
    ]


def _expect(what: str, stored: Any, walked: Any) -> list[str]:
    return [] if stored == walked else [f"{what}: stored {stored}, walked {walked}"]


def _counted(keys: Keys, name: str) -> dict[str, int]:
    return {field: int(n) for field, n in keys.hashes.get(name, {}).items() if n != "0"}


def miscounts(keys: Keys) -> list[str]:
    """Counters that are not what the walk counts."""
    tally: Counter[str] = Counter()
    running: Counter[str] = Counter()
    failed = 0
    for job in keys.jobs.values():
        tally[f"{job['queue']}:{job['tier']}:{job['place']}"] += 1
        if job["place"] == "4":
            running["t:" + job["task"]] += 1
            if "concurrency_key" in job:
                running["k:" + job["concurrency_key"]] += 1
        failed += job["place"] == "6" and job.get("reason") in ("error", "timeout")
    counters = keys.hashes.get("counters", {})
    return [
        *_expect("tally", _counted(keys, "tally"), dict(tally)),
        *_expect("running", _counted(keys, "running"), dict(running)),
        *_expect("failed", int(counters.get("failed", 0)), failed),
    ]


def dangling(keys: Keys) -> list[str]:
    """What hangs on places, and does not agree with them."""
    jobs = keys.jobs
    unique = {
        f"unique:{job['queue']}:{job['unique_key']}": job_id
        for job_id, job in jobs.items()
        if "unique_key" in job and job["place"] in (*_QUEUED_PLACES, "4")
    }
    fingerprints = Counter(
        job["fingerprint"] for job in jobs.values() if job["place"] == "6" and "fingerprint" in job
    )
    lanes: dict[str, set[str]] = defaultdict(set)
    for name in keys.zsets:
        if name.startswith("parked:"):
            kind, _, _, ref = name.removeprefix("parked:").split(":", 3)
            lanes[f"lanes_of:{kind}:{ref}"].add(name.removeprefix("parked:"))
    expires = {
        job_id: float(job["expires_us"])
        for job_id, job in jobs.items()
        if job["place"] in _QUEUED_PLACES and "expires_us" in job
    }
    owners = {job["lane"] for job in jobs.values() if job["place"] in ("3", "4")}
    listed = {name: members for name, members in keys.zsets.items() if name.split(":")[0] in ("all", "by")}
    by_list: dict[str, set[str]] = defaultdict(set)
    for job_id, template in itertools.product(jobs, _LISTS):
        by_list[template.format_map(jobs[job_id])].add(job_id)
    return [
        *_expect("unique keys", {n: t for n, t in keys.texts.items() if n.startswith("unique:")}, unique),
        *_expect("groups", keys.zsets.get("groups", {}), dict(fingerprints)),
        *_expect("lanes", {n: m for n, m in keys.sets.items() if n.startswith("lanes_of:")}, dict(lanes)),
        *_expect("expires", keys.zsets.get("expires", {}), expires),
        *_expect(
            "held", set(keys.zsets.get("held", {})), {i for i, job in jobs.items() if job["place"] == "3"}
        ),
        *_expect("owners without a name", owners - keys.hashes.get("owners", {}).keys(), set()),
        *_expect(
            "lists",
            {name: set(members) for name, members in listed.items() if not name.startswith("by:tag")},
            dict(by_list),
        ),
    ]


def faults(keys: Keys) -> list[str]:
    """Everything that is wrong."""
    return [*lost(keys), *strays(keys), *miscounts(keys), *dangling(keys)]
