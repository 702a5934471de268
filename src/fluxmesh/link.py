"""A storage as the SDK uses it: opened at first use, once per process or per loop, and anew after `close`.

Where the driver lives on event loops (Redis), each loop of the program has a storage of its own, so that
`await task.enqueue()` needs no other thread. Everything else goes through the portal.

A loop's storage is held by an async generator: a loop that ends in order (`asyncio.run`, any Runner) closes
its generators, and so the storage; so does the garbage collector when the Link is forgotten.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from fluxmesh.clock import Clock
from fluxmesh.config import Settings
from fluxmesh.portal import current_portal, inherited, is_portals
from fluxmesh.storage.base import Storage, asked_again
from fluxmesh.storage.registry import lives_on_loops, open_storage

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop
Holder = AsyncGenerator[None, None]


async def _held(storage: Storage, owner: weakref.ref[Link], loop: Loop) -> Holder:
    try:
        yield
    finally:
        link = owner()
        if link is not None:
            link.forget(loop)
        await storage.close()


class _Opening:
    """A storage that is being opened, or is open. If it could not be, the next who asks opens it anew."""

    def __init__(self, coroutine: Coroutine[Any, Any, Storage]) -> None:
        self.pid: Final = os.getpid()
        self.future = asyncio.ensure_future(coroutine)

    @property
    def stands(self) -> bool:
        future = self.future
        failed = future.done() and (future.cancelled() or future.exception() is not None)
        return self.pid == os.getpid() and not failed

    async def storage(self) -> Storage:
        # One caller that gives up must not take the opening away from the others.
        return await asyncio.shield(self.future)


class Link:
    """One storage of a Queue, for whichever thread or loop asks."""

    def __init__(self, url: str, settings: Settings, *, create: bool, clock: Clock | None = None) -> None:
        self.url = url
        self.settings = settings
        self.create = create
        self.clock = clock
        self._on_loops = lives_on_loops(url)
        self._openings: dict[Loop, _Opening] = {}
        self._holders: dict[Loop, Holder] = {}

    async def use(self, verb: Callable[[Storage], Awaitable[T]]) -> T:
        """The answer of one storage verb, asked for from any loop. A lost answer is asked for again."""
        if self._on_loops or current_portal().loop is asyncio.get_running_loop():
            return await self._use_here(verb)
        return await asyncio.wrap_future(current_portal().submit(self._use_here(verb)))

    async def _use_here(self, verb: Callable[[Storage], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        opening = self._openings.get(loop)
        if opening is None or not opening.stands:
            self._sweep()
            opening = self._openings[loop] = _Opening(self._open(loop))
        storage = await opening.storage()
        return await asked_again(lambda: verb(storage))

    async def _open(self, loop: Loop) -> Storage:
        storage = await open_storage(self.url, self.settings, create=self.create, clock=self.clock)
        if is_portals(loop):
            portal = current_portal()
            portal.keep(storage)
            weakref.finalize(self, portal.release, storage).atexit = False
        else:
            holder = self._holders[loop] = _held(storage, weakref.ref(self), loop)
            await anext(holder)  # from now on the loop knows of it
        return storage

    def forget(self, loop: Loop) -> None:
        """Its storage is being closed."""
        self._openings.pop(loop, None)
        self._holders.pop(loop, None)

    def _sweep(self) -> None:
        """Let go of what was left by loops that were closed without an end in order, and by a fork."""
        for loop, opening in list(self._openings.items()):
            if opening.pid != os.getpid():
                inherited.append((opening, self._holders.get(loop)))
                self.forget(loop)
            elif loop.is_closed():
                self.forget(loop)

    async def close(self) -> None:
        """Release the storages; the next use opens them anew. Those of other loops of the program are closed
        as soon as their loops come to it, the portal's before this returns."""
        here = asyncio.get_running_loop()
        self._sweep()
        for loop in list(self._openings):
            if loop is here:
                await self._close_here(loop)
            elif loop.is_running():
                closing = asyncio.run_coroutine_threadsafe(self._close_here(loop), loop)
                if is_portals(loop):
                    await asyncio.wrap_future(closing)

    async def _close_here(self, loop: Loop) -> None:
        opening = self._openings.get(loop)
        if opening is None or not opening.stands:
            return
        storage = await opening.storage()
        holder = self._holders.get(loop)
        self.forget(loop)
        if holder is not None:
            await holder.aclose()
        else:
            await current_portal().close(storage)
