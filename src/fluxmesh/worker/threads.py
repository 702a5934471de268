"""`def` bodies on threads: as many as there are slots, made when first needed, interruptible from the loop.

A body is interrupted by an asynchronous exception (PyThreadState_SetAsyncExc), which the interpreter raises
at its next bytecode. The exception must hit nothing but the body: not the pool's own code, and not the
next job on the thread. Hence
* it is only ever sent under the call's lock while the call is in phase ENTERED;
* the thread leaves that phase under the same lock and takes back what was sent and not yet raised;
* one exception of each kind, so two in all, are sent to one call; the code around the body catches two;
* what was taken back leaves CPython's flag for it up (3.11: every thread then runs slower, and one with a
  trace function never goes on), so one more is raised and caught where it does no harm.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, Final

from fluxmesh.obs.log import get_logger
from fluxmesh.outcome import JobInterrupted, JobTimeout
from fluxmesh.worker.forked import end_if_forked

_log = get_logger("worker")
_set_async_exc: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_LATE: Final = (JobTimeout, JobInterrupted)
_TURNS: Final = 100_000  # far more than the interpreter needs to raise what was sent
_UNKNOWN: Final = JobInterrupted("the body was interrupted")
Interruption = type[JobTimeout] | type[JobInterrupted]


class Phase(IntEnum):
    QUEUED = 0
    ENTERED = 1
    LEFT = 2


class ThreadCall:
    """One body on a thread. After LEFT, `error` is what it raised; None: it returned `value`. `on_left` is
    called on the thread when the body has ended, perhaps more than once, and must be quick; `on_end` on the
    loop, when that turns. `may_enter` is asked on the thread in the moment in which the body would begin: a
    process that was stopped before may wake up in a world where the job is another's. `refused`: it never
    began."""

    __slots__ = (
        "_args",
        "_context",
        "_function",
        "_ident",
        "_kwargs",
        "_lock",
        "_may_enter",
        "_on_left",
        "_sent",
        "abandoned",
        "error",
        "on_end",
        "phase",
        "refused",
        "took_s",
        "value",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        context: contextvars.Context,
        on_end: Callable[[ThreadCall], None],
        on_left: Callable[[], None] | None = None,
        may_enter: Callable[[], bool] | None = None,
    ) -> None:
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._context = context
        self._lock = threading.Lock()
        self._ident = 0
        self._on_left = on_left
        self._may_enter = may_enter
        self._sent: set[Interruption] = set()
        self.refused = False
        self.on_end = on_end
        self.abandoned = False  # its thread was replaced and ends with it
        self.phase = Phase.QUEUED
        self.took_s = 0.0  # on its thread
        self.value: Any = None
        self.error: BaseException | None = _UNKNOWN

    def interrupt(self, kind: Interruption) -> bool:
        """Raise `kind` in the body at its next bytecode; a body not entered yet never is. False: too late,
        or this kind was sent before."""
        with self._lock:
            if self.phase is Phase.LEFT or kind in self._sent:
                return False
            self._sent.add(kind)
            if self.phase is Phase.ENTERED:
                _set_async_exc(ctypes.c_ulong(self._ident), ctypes.py_object(kind))
            return True

    def withdraw(self) -> None:
        """The job is another's: a body not entered yet never is. Any thread."""
        with self._lock:
            self.refused = self.refused or self.phase is Phase.QUEUED

    def abandon(self) -> bool:
        """Give the thread up along with the body. False: the body has ended."""
        with self._lock:
            if self.phase is Phase.LEFT:
                return False
            self.abandoned = True
            return True

    def execute(self) -> None:
        """Run the body on this thread. Raises nothing, whatever the body and late interruptions do."""
        try:
            try:
                try:
                    self._call()
                finally:
                    self._leave()
            except _LATE as late:
                self._note_late(late)
                self._leave()
        except _LATE as late:
            self._note_late(late)
            self._leave()

    def _call(self) -> None:
        pid = os.getpid()
        try:
            with self._lock:
                if self._sent:
                    return  # interrupted before it began
                if self.refused or not (self._may_enter is None or self._may_enter()):
                    self.refused = True
                    return
                self._ident = threading.get_ident()
                self.phase = Phase.ENTERED
            self.value = self._context.run(self._function, *self._args, **self._kwargs)
            self.error = None
        except BaseException as error:  # of any kind: it is the body's, and ends no more than the body
            self.error = error
        end_if_forked(pid, self.error)

    def _note_late(self, late: BaseException) -> None:
        if self.error is _UNKNOWN:
            self.error = late  # it came between the body's end and the note of it

    def _leave(self) -> None:
        with self._lock:
            taken_back = self.phase is Phase.ENTERED and bool(self._sent)
            if taken_back:
                _set_async_exc(ctypes.c_ulong(self._ident), None)
            # First: once this call counts as left, nothing may be there any more to be written to.
            if self._on_left is not None:
                self._on_left()
            self.phase = Phase.LEFT
        if taken_back:
            self._lower_flag()

    def _lower_flag(self) -> None:
        try:
            _set_async_exc(ctypes.c_ulong(self._ident), ctypes.py_object(JobInterrupted))
            for _ in range(_TURNS):
                pass
        except _LATE:
            pass


class ThreadPool:
    """Daemon threads that run calls for one loop. Ends are handed over in batches, in the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, name: str, *, at_exit: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop
        self._name = name
        self._at_exit = at_exit  # called on each thread when it ends
        self._queue: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._ended: deque[ThreadCall] = deque()
        self._handing_over = False
        self._busy = 0  # calls submitted and neither ended nor abandoned
        self._threads = 0
        self._made = 0
        self._closed = False

    @property
    def threads(self) -> int:
        """Threads that take calls."""
        return self._threads

    def submit(self, call: ThreadCall) -> None:
        """Run it on a free thread, or a new one. The caller bounds how many run at once: its slots.
        Raises RuntimeError if the system refuses another thread; the call is not run then."""
        if self._busy >= self._threads:
            self._made += 1
            name = f"{self._name}-{self._made}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
            self._threads += 1
        self._busy += 1
        self._queue.put(call)

    def abandon(self, call: ThreadCall) -> bool:
        """Its body does not end: count on another thread from now on. The thread ends when the body does.
        False: it has ended, and its end is about to be handed over."""
        if not call.abandon():
            return False
        self._busy -= 1
        self._threads -= 1
        return True

    def close(self) -> None:
        """Let idle threads end. Those with a body end with it."""
        self._closed = True
        for _ in range(self._threads):
            self._queue.put(None)

    def _work(self) -> None:
        try:
            self._take_calls()
        finally:
            if self._at_exit is not None:
                self._at_exit()

    def _take_calls(self) -> None:
        now = self._loop.time  # a clock that any thread may read
        while True:
            call = self._queue.get()
            if call is None:
                return
            began_s = now()
            call.execute()
            call.took_s = now() - began_s
            self._ended.append(call)
            if not self._handing_over:
                self._handing_over = True
                try:
                    self._loop.call_soon_threadsafe(self._hand_over)
                except RuntimeError:
                    return  # the loop is closed: nobody is left to be told
            if call.abandoned:
                return
            del call

    def _hand_over(self) -> None:
        # First the flag, then the queue: an end appended meanwhile is either taken here or announced anew.
        self._handing_over = False
        while self._ended:
            call = self._ended.popleft()
            if not call.abandoned:
                self._busy -= 1
            try:
                call.on_end(call)
            except Exception:
                _log.exception("the end of a job could not be handled")
