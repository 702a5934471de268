"""What goes through the pipe between a worker and a body process: whole messages out of any pieces."""

from __future__ import annotations

import msgspec
import pytest

from fluxmesh.config import Settings
from fluxmesh.job import JobError, Outcome
from fluxmesh.outcome import End
from fluxmesh.storage.values import ClaimedJob
from fluxmesh.worker.ending import Raised
from fluxmesh.worker.isolated.frames import (
    FRAME_MAX_BYTES,
    Broken,
    Ended,
    Hello,
    Inflow,
    Ready,
    Start,
    Started,
    Stop,
    Told,
    framed,
    from_body,
    from_worker,
)

JOB = ClaimedJob("id", 1 << 60, "task", "default", 2, b"\x92\x90\x80", None, 0, 2, 0, 0, 1)
ERROR = JobError("ValueError", "no", ("a.py:1 f",), "trace")
FROM_WORKER = [
    Hello(b"spec", "w", Settings(url="sqlite:///x.db"), ("info", "json")),
    Start(JOB, 5),
    Stop(7, True),
]
FROM_BODY = [
    Ready(),
    Broken("why"),
    Started(7),
    Told(7, 50.0, None),
    Ended(7, End(Outcome.COMPLETED, b"x" * 70_000), None, (1.0, "text")),
    Ended(7, None, Raised(ERROR, End(Outcome.SNOOZED, delay_s=3.0), stopped=True)),
]


@pytest.mark.parametrize("size", [1, 3, 4, 1_000, 1 << 20])
def test_messages_come_whole_out_of_pieces_of_any_size(size: int) -> None:
    for messages, decoder in ((FROM_WORKER, from_worker), (FROM_BODY, from_body)):
        stream = b"".join(framed(message) for message in messages)
        inflow = Inflow()
        found = [
            message
            for at in range(0, len(stream), size)
            for message in inflow.take(stream[at : at + size], decoder)
        ]
        assert found == messages


@pytest.mark.parametrize(
    "junk", [(FRAME_MAX_BYTES + 1).to_bytes(4, "big"), b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x80"]
)
def test_what_is_no_message_is_refused(junk: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        list(Inflow().take(junk, from_body))


def test_one_side_does_not_take_the_others_messages() -> None:
    with pytest.raises(msgspec.MsgspecError):
        list(Inflow().take(framed(Ready()), from_worker))
