"""Which file a URL means, which file systems are refused, what is in the SQL files, where a job can be."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from fluxmesh.affinity import slot_of
from fluxmesh.errors import InvalidOption, StorageMissing, StorageRefused, StorageUnreachable
from fluxmesh.job import TERMINAL, Status
from fluxmesh.storage.registry import resolved_url
from fluxmesh.storage.sqlite import place
from fluxmesh.storage.sqlite.connection import (
    check_present,
    connect,
    file_system,
    path_of,
    prepare_schema,
    refuse_network_file_system,
)
from fluxmesh.storage.sqlite.sqltext import Statements
from tests.unit.sqlite.bench import Bench, tables


class TestUrl:
    @pytest.mark.parametrize(
        ("url", "path"),
        [
            ("sqlite:////var/lib/tasks.db", "/var/lib/tasks.db"),
            ("sqlite:////var/a%20b.db", "/var/a b.db"),
            ("sqlite:////tmp/100%25.db", "/tmp/100%.db"),
        ],
    )
    def test_four_slashes_name_an_absolute_file(self, url: str, path: str) -> None:
        assert path_of(url) == Path(path)

    def test_three_slashes_name_one_beside_the_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert path_of("sqlite:///tasks.db") == tmp_path / "tasks.db"
        assert path_of("sqlite:///data/tasks.db") == tmp_path / "data" / "tasks.db"
        monkeypatch.setenv("HOME", "/home/someone")
        assert path_of("sqlite:///~/tasks.db") == Path("/home/someone/tasks.db")

    @pytest.mark.parametrize(
        "url",
        [
            "sqlite://",
            "sqlite:///",
            "sqlite://tasks.db",
            "sqlite:///a.db?mode=ro",
            "sqlite:///a.db#x",
            "sqlite:///a%00b",
        ],
    )
    def test_what_names_no_file_is_refused_with_an_example(self, url: str) -> None:
        with pytest.raises(InvalidOption, match=r"sqlite:///tasks\.db"):
            path_of(url)

    @pytest.mark.parametrize(
        "name", ["tasks.db", "a b.db", "100%.db", "a%20b.db", "what?.db", "#1.db", "zażółć.db"]
    )
    def test_a_path_means_the_file_of_that_very_name(self, tmp_path: Path, name: str) -> None:
        assert path_of(resolved_url(None, tmp_path / name)) == tmp_path / name

    def test_a_link_means_the_file_it_points_to_so_that_its_bells_are_shared(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "link.db").symlink_to("data/tasks.db")
        assert path_of(f"sqlite:///{tmp_path}/link.db") == tmp_path / "data" / "tasks.db"


class TestFileSystem:
    MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:26 / /mnt rw - tmpfs tmpfs rw
31 30 0:27 / /mnt/share rw shared:9 - nfs4 server:/share rw,vers=4.2
32 22 0:28 / /mnt/with\\040blank rw - cifs //server/x rw
33 22 0:29 / /mnt/shared rw - ext4 /dev/sdb1 rw
a line that means nothing
"""

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/srv/tasks.db", "ext4"),
            ("/mnt/tasks.db", "tmpfs"),
            ("/mnt/share/tasks.db", "nfs4"),
            ("/mnt/share/deep/er/tasks.db", "nfs4"),
            ("/mnt/shared/tasks.db", "ext4"),
            ("/mnt/with blank/tasks.db", "cifs"),
        ],
    )
    def test_the_innermost_mount_tells(self, path: str, kind: str) -> None:
        assert file_system(Path(path), self.MOUNTS) == kind

    def test_a_later_mount_hides_an_earlier_one_of_the_same_place(self) -> None:
        later = "40 22 0:30 / /mnt/share rw - ext4 /dev/sdc1 rw\n"
        assert file_system(Path("/mnt/share/x.db"), self.MOUNTS + later) == "ext4"

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real")
        mounts = f"1 0 8:1 / / rw - ext4 x rw\n2 1 0:9 / {tmp_path.resolve()}/real rw - nfs x rw\n"
        assert file_system(tmp_path / "link" / "x.db", mounts) == "nfs"

    def test_this_machine_knows_its_own(self, tmp_path: Path) -> None:
        assert file_system(tmp_path / "x.db") or not Path("/proc/self/mountinfo").exists()

    @pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"])
    def test_network_file_systems_are_refused(self, kind: str) -> None:
        with pytest.raises(StorageRefused, match="local disk"):
            refuse_network_file_system(Path("/mnt/x.db"), kind)

    @pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "fuse.something", ""])
    def test_local_ones_and_unknown_ones_are_not(self, kind: str) -> None:
        refuse_network_file_system(Path("/mnt/x.db"), kind)


class TestOpening:
    def test_a_missing_file_is_not_created_unless_asked_for(self, tmp_path: Path) -> None:
        with pytest.raises(StorageMissing):
            check_present(tmp_path / "x.db", create=False)
        with pytest.raises(StorageUnreachable, match="does not exist"):
            check_present(tmp_path / "none" / "x.db", create=True)
        with pytest.raises(StorageUnreachable, match="folder"):
            check_present(tmp_path, create=True)
        check_present(tmp_path / "x.db", create=True)
        assert list(tmp_path.iterdir()) == []

    def test_a_database_of_another_program_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "other.db"
        with sqlite3.connect(path) as other:
            other.execute("create table job (id)")
        other.close()
        db = connect(path, durability="process")
        with pytest.raises(StorageRefused, match="another program"):
            prepare_schema(db, Statements("fluxmesh"), path)
        assert tables(db) == {"job"}
        db.close()

    def test_a_file_from_before_the_mesh_gets_what_it_lacks_and_keeps_what_it_has(self, bench: Bench) -> None:
        bench.db.execute(f'drop table "{bench.sql.namespace}:mesh"')
        bench.db.execute(f"update \"{bench.sql.namespace}:meta\" set value = 7 where name = 'epoch'")
        prepare_schema(bench.db, bench.sql, bench.path)
        assert bench.db.execute(f'select count(*) from "{bench.sql.namespace}:mesh"').get == 0
        found = f"select value from \"{bench.sql.namespace}:meta\" where name = 'epoch'"
        assert bench.db.execute(found).get == 7

    def test_a_file_from_before_the_slots_gets_the_column_and_serves_older_programs_still(
        self, bench: Bench
    ) -> None:
        old = bench.put()
        bench.db.execute(f'alter table "{bench.sql.namespace}:job" drop column slot')
        prepare_schema(bench.db, bench.sql, bench.path)
        prepare_schema(bench.db, bench.sql, bench.path)
        # As a program writes that does not know of it.
        row = (900, "older", 1, "2:default", 9, 9, "default", 2, "work", 1, b"\x92\x90\x80")
        bench.db.execute(
            f'insert into "{bench.sql.namespace}:job"'
            " (rid, id, place, lane, pos, seq, queue, tier, task, created_us, payload)"
            " values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
        new = bench.put(affinity_key="k")
        given = {job.id: job.slot for job in bench.claim(bench.worker(), 3)}
        assert given == {old: None, "older": None, new: slot_of("k")}

    def test_a_newer_schema_is_refused_with_the_way_out(self, bench: Bench) -> None:
        bench.db.execute("pragma user_version = 99")
        with pytest.raises(StorageRefused, match=r"schema 99.*update"):
            prepare_schema(bench.db, bench.sql, bench.path)

    def test_a_file_that_is_no_database_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "x.db"
        path.write_text("This is a letter, and not a short one. " * 100)
        with pytest.raises(StorageRefused, match="not a sound SQLite database"):
            connect(path, durability="process")

    def test_preparing_twice_changes_nothing_and_a_second_namespace_is_beside_the_first(
        self, bench: Bench
    ) -> None:
        before = tables(bench.db)
        prepare_schema(bench.db, bench.sql, bench.path)
        assert tables(bench.db) == before
        prepare_schema(bench.db, Statements("shop"), bench.path)
        assert len(tables(bench.db)) == 2 * len(before)
        bench.put()
        assert next(bench.db.execute('select count(*) from "shop:job"'))[0] == 0


class TestStatements:
    def test_every_statement_can_be_prepared_in_any_namespace(self, bench: Bench) -> None:
        sql = Statements("a.b-c")
        prepare_schema(bench.db, sql, bench.path)
        for name, text in sql.items():
            if not name.startswith("schema."):
                list(bench.db.execute(f"explain {text}", [1] * text.count("?")))
            assert "<" not in text.replace("<=", "").replace("<>", "").replace(" < ", ""), name

    def test_comments_are_not_part_of_a_statement(self) -> None:
        assert not [name for name, text in Statements("n").items() if "--" in text or not text]

    def test_a_statement_that_does_not_exist_is_an_error(self) -> None:
        with pytest.raises(KeyError):
            Statements("n")["reads.nothing"]


class TestPlaces:
    def test_every_status_has_a_place_and_every_place_a_status(self) -> None:
        assert set(place.PLACES) == set(Status)
        assert sorted(at for places in place.PLACES.values() for at in places) == list(range(9))
        assert all(place.STATUS[at] is status for status, places in place.PLACES.items() for at in places)

    def test_the_terminal_places_are_the_last_ones(self) -> None:
        assert set(place.TERMINAL_PLACE) == set(TERMINAL)
        assert min(place.TERMINAL_PLACE.values()) == place.COMPLETED == max(place.PLACES[Status.RUNNING]) + 1
        assert all(place.STATUS[at] is status for status, at in place.TERMINAL_PLACE.items())

    def test_lanes_tell_what_they_are_of(self) -> None:
        assert place.ready_lane(0, "mail") == "0:mail"
        assert place.task_lane(1, "mail", "a:b").split(":", 3) == ["1", "mail", "t", "a:b"]
        assert place.key_lane(1, "mail", "k:1").split(":", 3) == ["1", "mail", "k", "k:1"]
