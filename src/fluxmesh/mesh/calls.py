"""What is asked of us over TCP, and what becomes of the answers to our own questions."""

from __future__ import annotations

from fluxmesh.mesh.donating import Donor
from fluxmesh.mesh.effects import Reply
from fluxmesh.mesh.joining import Joiner
from fluxmesh.mesh.membership import Membership
from fluxmesh.mesh.messages import (
    Address,
    Compare,
    Exchange,
    Frame,
    MetaGet,
    NodeRef,
    Refused,
    Standing,
    Steal,
    StreamFrame,
    Taken,
    TcpAck,
    TcpPing,
)
from fluxmesh.mesh.particulars import Particulars
from fluxmesh.mesh.probe import Prober
from fluxmesh.mesh.pushpull import PushPull
from fluxmesh.mesh.stealing import Thief
from fluxmesh.mesh.voice import Pending, Voice
from fluxmesh.mesh.wire import decode_frame


class Calls:
    """Hands each half of a call to the part that it concerns."""

    def __init__(
        self,
        *,
        voice: Voice,
        membership: Membership,
        prober: Prober,
        pushpull: PushPull,
        particulars: Particulars,
        joiner: Joiner,
        thief: Thief,
        donor: Donor,
    ) -> None:
        self.voice = voice
        self.membership = membership
        self.prober = prober
        self.pushpull = pushpull
        self.particulars = particulars
        self.joiner = joiner
        self.thief = thief
        self.donor = donor

    # --- asked of us ------------------------------------------------------------------------------------

    def on_call(self, call: int, src: Address, frame: bytes, now: int, *, is_present: bool) -> None:
        request = decode_frame(frame)
        if isinstance(request, str):
            self.voice.count(f"frames_refused_{request}")
            self.voice.put(Reply(call, None))
            return
        sender = request.sender
        self.voice.count("calls_received")
        if sender.worker_id == self.voice.me.worker_id:
            self.membership.meet_own_id(sender, request.incarnation, src)
            # The sender of the answer says it all: who dialled itself, or is an older run, sees it there.
            body: Frame = Refused("the same worker id")
        else:
            body = self._answer(request, now, is_present=is_present)
        self.voice.reply(call, request.call, body)

    def _answer(self, request: StreamFrame, now: int, *, is_present: bool) -> Frame:
        sender = request.sender
        match request.body:
            case Compare() as body:
                return self.pushpull.answer_compare(body)
            case Exchange() as body:
                answer = self.pushpull.answer_exchange(body, sender, now)
                self.joiner.succeeded(sender)
                return answer
            case MetaGet(target=target):
                return self.particulars.answer(target)
            case TcpPing(target=target, about=about):
                if target != self.voice.me:
                    return Refused("another run")
                if about is not None and about.worker_id == self.voice.me.worker_id:
                    self.membership.hear(about, now, teller=self.voice.table.find(sender))
                return TcpAck(target)
            case Steal() as wish:
                return self.donor.answer(wish, sender, now, is_present=is_present)
            case Taken(jobs=jobs):
                return self.donor.taken(jobs, sender, now)
            case _:
                return Refused("not a request")

    # --- asked by us ------------------------------------------------------------------------------------

    def on_reply(self, call: int, pending: Pending, frame: bytes | None, now: int) -> None:
        answer = None if frame is None else decode_frame(frame)
        if isinstance(answer, str):
            self.voice.count(f"frames_refused_{answer}")
            answer = None
        elif answer is not None and answer.call != call:
            self.voice.count("frames_refused_another call")
            answer = None
        sender = None if answer is None else answer.sender
        body = None if answer is None else answer.body
        if answer is not None and sender is not None and sender.worker_id == self.voice.me.worker_id:
            self.membership.meet_own_id(sender, answer.incarnation, pending.to)
            body = None
        self._was_answered(sender)
        if pending.kind == "meta":
            self.particulars.on_reply(pending, body, now)
        elif pending.kind == "tcp_ping":
            if isinstance(body, TcpAck) and sender == pending.ref == body.target:
                self.prober.on_tcp_ack(pending, now)
        elif pending.kind == "steal":
            self.thief.on_answer(call, body, sender, now)
        elif pending.kind == "taken":
            self.thief.on_noted(pending, body, sender, now)
        else:
            self._on_push_pull(pending, body, sender, now)

    def _on_push_pull(self, pending: Pending, body: Frame | None, sender: NodeRef | None, now: int) -> None:
        goes_on = False
        has_left = self.voice.record.standing == Standing.LEFT  # then nobody need hear of us who has not yet
        if body is not None and sender is not None and not (has_left and pending.kind == "compare"):
            if pending.kind == "compare":
                is_complete, goes_on = self.pushpull.on_compared(pending, body)
            else:
                is_complete = self.pushpull.on_exchanged(body, sender, now)
                self._was_answered(sender)
            if is_complete:
                self.joiner.succeeded(sender)
        if not goes_on:
            self.joiner.ended(pending.to, pending.why, sender, now)

    def _was_answered(self, sender: NodeRef | None) -> None:
        member = None if sender is None else self.voice.table.find(sender)
        if member is not None:
            self.membership.answered(member)
