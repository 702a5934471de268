"""What SQLite is told to do for a file, and a disk that is full."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from fluxmesh.errors import StorageUnreachable
from fluxmesh.storage.sqlite.connection import connect, told
from tests.unit.sqlite.bench import Bench


@pytest.mark.parametrize(("durability", "level"), [("process", 1), ("power", 2)])
def test_power_syncs_the_log_with_every_commit_and_process_does_not(
    durability: str, level: int, tmp_path: Path
) -> None:
    db = connect(tmp_path / "jobs.db", durability=durability, create=True)
    assert db.pragma("synchronous") == level
    assert db.pragma("journal_mode") == "wal"
    db.close()


def test_a_full_disk_is_told_and_what_was_stored_stays(bench: Bench) -> None:
    kept = bench.db.execute("CREATE TABLE filler (blob)").fetchall()
    assert kept == []
    bench.db.pragma("max_page_count", bench.db.pragma("page_count") + 4)
    with pytest.raises(apsw.FullError) as caught:
        bench.db.execute("INSERT INTO filler VALUES (zeroblob(1000000))")
    error = told(caught.value, bench.path)
    assert isinstance(error, StorageUnreachable)
    assert "the disk is full" in str(error)
    assert bench.db.execute("SELECT count(*) FROM filler").fetchall() == [(0,)]
    assert bench.db.pragma("integrity_check") == "ok"
