"""What the author of a backend tells the suite about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final, Literal

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.storage.base import Storage
from fluxmesh.storage.values import WorkerRef

NAMESPACE: Final = "fluxmesh"
CorruptField = Literal["payload", "options", "result", "error", "history"]


class Backend(ABC):
    """One empty storage, made anew for each test, and the keys to its back door.

    Obligations: several `open` calls share one storage, also with different namespaces, and also from one
    event loop. A Storage takes all its time from the clock it was opened with: a ManualClock that does not
    move stands still for due times, leases and tokens. Waits (`wait_for...`, `subscribe`)
    measure their timeouts on the event loop.
    """

    # Which of a Clock's readings leases run on. "boot" also gets the tests of a reboot.
    lease_clock: ClassVar[Literal["boot", "wall"]] = "wall"
    # Tables that may keep rows after retention is through with everything, and why, for the reader.
    kept_tables: ClassVar[dict[str, str]] = {}

    @abstractmethod
    async def open(
        self, clock: Clock, *, namespace: str = NAMESPACE, settings: Settings | None = None
    ) -> Storage:
        """Open the storage, create it if it is not there. The suite closes what it opened."""

    @abstractmethod
    def rows(self, namespace: str = NAMESPACE) -> dict[str, int]:
        """Rows (or keys) of every table (or kind of key) of the namespace, tables without rows too."""

    @abstractmethod
    def corrupt(self, job_id: str, field: CorruptField, blob: bytes, namespace: str = NAMESPACE) -> None:
        """Overwrite a stored field of a job, past the storage's verbs."""

    @abstractmethod
    def forget_worker(self, worker: WorkerRef, namespace: str = NAMESPACE) -> None:
        """Delete the record of one worker epoch, past the storage's verbs."""
