"""The embedded storage: one SQLite file, any number of processes of one machine."""

from fluxmesh.storage.sqlite.backend import SqliteStorage, open_backend

__all__ = ["SqliteStorage", "open_backend"]
