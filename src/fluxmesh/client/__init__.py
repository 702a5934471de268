"""A typed client of a FluxMesh server, blocking (`Client`) and asynchronous (`AsyncClient`).

For programs that submit and watch jobs over HTTP and run none. Needs the extra `client`."""

from __future__ import annotations

from fluxmesh.client.answers import Metrics, QueueNumbers, Replayed, Submitted
from fluxmesh.client.faces import AsyncClient, Client
from fluxmesh.client.problems import ServerRefused

__all__ = [
    "AsyncClient",
    "Client",
    "Metrics",
    "QueueNumbers",
    "Replayed",
    "ServerRefused",
    "Submitted",
]
