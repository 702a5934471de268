"""The fast storage for a fleet: one Redis or Valkey server, any number of machines."""

from fluxmesh.storage.redis.backend import RedisStorage, open_backend

__all__ = ["RedisStorage", "open_backend"]
