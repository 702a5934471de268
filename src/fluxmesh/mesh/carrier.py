"""Carries a core on an event loop: its datagrams, calls, timers and look-ups, and nothing else.

Every input of the core goes through here, one at a time and in the order in which it came, and the effects
of an input are carried out before the next one. Nothing here decides anything about members.

The stall guard: a timer that is late by more than half a period means that this process, or its loop, stood
still. What came meanwhile is then read first, because answers may lie in the socket, and the core is told how
late it is before a timer of it fires.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final

from fluxmesh.mesh.datagrams import Datagrams
from fluxmesh.mesh.delays import Weather
from fluxmesh.mesh.effects import (
    Arm,
    Call,
    Command,
    Core,
    Disarm,
    Effect,
    Emit,
    Leave,
    Reply,
    Resolve,
    Send,
    Take,
)
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.names import Names
from fluxmesh.mesh.options import parse_seed
from fluxmesh.mesh.ports import Ports
from fluxmesh.mesh.seal import SALT_BYTES, Envelope, Refusal
from fluxmesh.mesh.streams import Streams
from fluxmesh.mesh.timers import Timers
from fluxmesh.mesh.told import Tell

TIMERS_A_TURN: Final = 256  # fired before the loop may do something else,
TURN_NS: Final = 50_000_000  # and for so long
CALLS_MOST: Final = 64  # of ours under way
REFUSALS_KNOWN: Final = 256
TELL_AGAIN_S: Final = 60.0  # the same refusal of the same host is told this often
LAG_KEPT_S: Final = 60.0


class Carrier:
    """`on_event` hears of every Emit, `on_take` of every Take, on the loop. Made and used on one loop;
    `close` ends it."""

    def __init__(
        self,
        core: Core,
        ports: Ports,
        *,
        envelope: Envelope,
        period_ns: int,
        default_port: int,
        names: Names,
        rng: random.Random,
        tell: Tell,
        on_event: Callable[[Emit], None],
        on_take: Callable[[Take], None],
        weather: Weather | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._core = core
        self._envelope = envelope
        self._stall_ns = period_ns // 2
        self._default_port = default_port
        self._names = names
        self._rng = rng
        self._tell = tell
        self._on_event = on_event
        self._on_take = on_take
        self._weather = weather
        self._datagrams = Datagrams(ports.udp, self._loop, self._on_datagram, self._receive_failed)
        self._streams = Streams(
            ports.tcp,
            session=lambda: envelope.session(os.urandom(SALT_BYTES)),
            on_call=self._call_came,
            on_refused=self._refused,
            delay_s=self._stream_delay_s,
        )
        self._timers = Timers()
        self._wake: asyncio.TimerHandle | None = None
        self._wake_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls_out = 0
        self._calls_in: dict[int, asyncio.Future[bytes | None]] = {}
        self._call_number = 0
        self._told: dict[tuple[str, str], float] = {}
        self._closed = False
        self._refused_by: dict[str, int] = {}
        self._refusals_seen: dict[str, int] = {}
        self.stalls = 0
        self.longest_lag_ns = 0  # since the start
        self._lags: deque[tuple[float, int]] = deque(maxlen=1_024)

    # -- life ------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Listen. Nothing is sent before the first command."""
        self._datagrams.start()
        await self._streams.start()

    def command(self, command: Command) -> None:
        if not self._closed:
            self._carry(self._core.command(command, self.now_ns()))

    def leave(self) -> None:
        self.command(Leave())

    async def close(self) -> None:
        """Silence, at once."""
        self._closed = True
        if self._wake is not None:
            self._wake.cancel()
        self._datagrams.close()
        for task in self._tasks:
            task.cancel()
        for waiting in self._calls_in.values():
            if not waiting.done():
                waiting.set_result(None)
        await self._streams.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    def now_ns(self) -> int:
        return int(self._loop.time() * 1e9)

    def counters(self) -> dict[str, int]:
        """The core's, and what went over the sockets."""
        datagrams = self._datagrams
        return {
            **{name.replace(" ", "_"): count for name, count in self._core.counters().items()},
            "datagrams_sent": datagrams.sent,
            "datagrams_received": datagrams.received,
            "bytes_sent": datagrams.sent_bytes,
            "bytes_received": datagrams.received_bytes,
            "send_errors": datagrams.send_errors,
            "unsent": datagrams.unsent,
            "receive_errors": datagrams.receive_errors,
            "stalls": self.stalls,
            "loop_lag_longest_us": self.longest_lag_ns // 1_000,
            "loop_lag_last_minute_us": self._recent_lag_ns() // 1_000,
            **self._streams.counts.as_dict(),
            **{f"refused_{why.replace(' ', '_')}": count for why, count in sorted(self._refused_by.items())},
        }

    # -- effects -----------------------------------------------------------------------------------------
    def _carry(self, effects: list[Effect]) -> None:
        """In their order; what follows from one of them comes after the rest."""
        todo = deque(effects)
        try:
            self._carry_all(todo)
        finally:
            self._set_wake()

    def _carry_all(self, todo: deque[Effect]) -> None:
        while todo and not self._closed:
            effect = todo.popleft()
            if isinstance(effect, Send):
                if not self._send(effect):
                    todo.extend(self._core.on_send_failed(effect.to, self.now_ns()))
            elif isinstance(effect, Arm):
                self._timers.arm(effect.timer, effect.at_ns)
            elif isinstance(effect, Disarm):
                self._timers.disarm(effect.timer)
            elif isinstance(effect, Emit):
                self._on_event(effect)
            elif isinstance(effect, Call):
                self._begin_call(effect)
            elif isinstance(effect, Reply):
                waiting = self._calls_in.pop(effect.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(effect.frame)
            elif isinstance(effect, Take):
                self._on_take(effect)
            else:
                self._spawn(self._resolve(effect))

    def _send(self, send: Send) -> bool:
        sealed = self._envelope.seal(send.data)
        if self._weather is None:
            return self._datagrams.send(send.to, sealed)
        for delay_s in self._weather.deliveries_s(self._rng, send.to):
            if delay_s <= 0:
                self._datagrams.send(send.to, sealed)
            else:
                self._loop.call_later(delay_s, self._send_late, send.to, sealed)
        return True

    def _send_late(self, to: Address, sealed: bytes) -> None:
        if not self._closed:
            self._datagrams.send(to, sealed)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell("error", "mesh step failed", {"error": f"{type(error).__name__}: {error}"})

    # -- timers ------------------------------------------------------------------------------------------
    def _set_wake(self) -> None:
        at_ns = self._timers.next_ns()
        if at_ns is None or self._closed:
            return
        if self._wake is not None:
            if self._wake_ns == at_ns:
                return
            self._wake.cancel()
        self._wake_ns = at_ns
        self._wake = self._loop.call_at(at_ns / 1e9, self._turn)

    def _turn(self) -> None:
        self._wake = None
        try:
            self._fire()
        finally:
            self._set_wake()  # whatever happens: without it no timer would ever fire again

    def _fire(self) -> None:
        now_ns = self.now_ns()
        late_ns = now_ns - (self._timers.next_ns() or now_ns)
        self._note_lag(max(0, late_ns))
        if late_ns > self._stall_ns:
            self.stalls += 1
            self._tell("warning", "mesh stood still", {"late_s": round(late_ns / 1e9, 3)})
            self._datagrams.drain()
            self._carry(self._core.on_stall(late_ns, self.now_ns()))
        until_ns = self.now_ns() + TURN_NS
        for fired in range(TIMERS_A_TURN):
            now_ns = self.now_ns()
            if fired and now_ns >= until_ns:
                break
            timer = self._timers.pop_due(now_ns)
            if timer is None or self._closed:
                break
            try:
                effects = self._core.on_timer(timer, now_ns)
            except Exception:
                # A core arms its round anew in that round: one that failed has to come again.
                self._timers.arm(timer, now_ns + 2 * self._stall_ns)
                raise
            self._carry(effects)

    def _note_lag(self, late_ns: int) -> None:
        self.longest_lag_ns = max(self.longest_lag_ns, late_ns)
        now_s = self._loop.time()
        # Kept falling, so that the first is the longest: what is shorter and older says nothing any more.
        while self._lags and self._lags[-1][1] <= late_ns:
            self._lags.pop()
        self._lags.append((now_s, late_ns))
        while self._lags[0][0] < now_s - LAG_KEPT_S:
            self._lags.popleft()

    def _recent_lag_ns(self) -> int:
        return self._lags[0][1] if self._lags else 0

    # -- datagrams -----------------------------------------------------------------------------------------
    def _on_datagram(self, source: Address, data: bytes) -> None:
        now_ns = self.now_ns()
        opened = self._envelope.open(data, now_ns)
        if isinstance(opened, Refusal):
            self._refused(source, str(opened))
        else:
            self._carry(self._core.on_packet(source, opened, now_ns))

    def _receive_failed(self, error: OSError) -> None:
        self._tell_seldom("warning", "receive failed", "", "receive", error=error.strerror or str(error))

    def _refused(self, source: Address, why: str) -> None:
        if len(self._refused_by) < REFUSALS_KNOWN or why in self._refused_by:
            self._refused_by[why] = self._refused_by.get(why, 0) + 1
        self._tell_seldom("warning", "packet refused", source.host, why, port=source.port)

    def tell_refusals(self) -> None:
        """Say what the core has refused of what opened, such as another version of the protocol: it only
        counts. To be called now and then."""
        for name, count in self._core.counters().items():
            what, _, why = name.partition("_refused_")
            if what in ("packets", "frames") and count > self._refusals_seen.get(name, 0):
                self._refusals_seen[name] = count
                self._tell_seldom("warning", "packet refused", "", why, count=count)

    def _tell_seldom(self, level: str, event: str, host: str, why: str, **fields: object) -> None:
        """At most once a minute for each host and reason: whoever floods us must not fill the log."""
        now_s = self._loop.time()
        last_s = self._told.pop((host, why), None)
        if last_s is None or now_s - last_s >= TELL_AGAIN_S:
            last_s = now_s
            self._tell(level, event, {"host": host, "why": why, **fields})
        self._told[host, why] = last_s
        if len(self._told) > REFUSALS_KNOWN:
            del self._told[next(iter(self._told))]

    # -- calls -----------------------------------------------------------------------------------------------
    def _stream_delay_s(self, to: Address) -> tuple[float, float]:
        if self._weather is None:
            return 0.0, 0.0
        return self._weather.delay_s(self._rng, to), self._weather.back_s(to)

    def _begin_call(self, call: Call) -> None:
        if self._calls_out >= CALLS_MOST:
            self._spawn(self._answered_nothing(call))
        else:
            self._calls_out += 1
            self._spawn(self._call(call))

    async def _answered_nothing(self, call: Call) -> None:
        self._carry(self._core.on_reply(call.call, None, self.now_ns()))

    async def _call(self, call: Call) -> None:
        answer = None
        try:
            answer = await self._streams.call(call.to, call.frame, call.timeout_ns / 1e9)
        finally:
            self._calls_out -= 1
            if not self._closed:
                self._carry(self._core.on_reply(call.call, answer, self.now_ns()))

    async def _call_came(self, source: Address, frame: bytes) -> bytes | None:
        self._call_number += 1
        number = self._call_number
        waiting: asyncio.Future[bytes | None] = self._loop.create_future()
        self._calls_in[number] = waiting
        try:
            self._carry(self._core.on_call(number, source, frame, self.now_ns()))
            return await waiting
        finally:
            self._calls_in.pop(number, None)

    # -- names -----------------------------------------------------------------------------------------------
    async def _resolve(self, resolve: Resolve) -> None:
        parsed = {seed: parse_seed(seed) for seed in resolve.seeds}
        found = await self._names.addresses([host for host, _ in parsed.values()])
        addresses = {
            seed: [Address(host, port or self._default_port) for host in found.get(name, ())]
            for seed, (name, port) in parsed.items()
        }
        if not self._closed:
            self._carry(self._core.on_resolved(addresses, self.now_ns()))
