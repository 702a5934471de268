"""Log events: quiet as a library, one line an event as a program."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.obs import log


@pytest.fixture(autouse=True)
def _manners_of_a_library() -> Iterator[None]:
    log.reset()
    yield
    log.reset()


def rendered(level: str, format: str) -> tuple[log.Logger, io.StringIO]:
    stream = io.StringIO()
    log.configure(level, format, stream)
    return log.get_logger("test"), stream


def test_unconfigured_warnings_reach_the_standard_logger_and_lesser_events_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = log.get_logger("test")
    with caplog.at_level(logging.DEBUG, logger="fluxmesh"):
        logger.info("not heard")
        logger.warning("jobs reaped", count=3)
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("fluxmesh", "WARNING", "jobs reaped count=3")
    ]
    assert caplog.records[0].__dict__["fluxmesh_logger"] == "test"


def test_unconfigured_nothing_is_printed_and_structlog_is_not_loaded() -> None:
    code = (
        "import sys\n"
        "from fluxmesh.obs.log import get_logger\n"
        "get_logger('x').error('boom', a=1)\n"
        "assert 'structlog' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_json_is_one_object_a_line_with_utc_time() -> None:
    logger, stream = rendered("info", "json")
    logger.bind(worker="w1").info("jobs reaped", count=3, text="two\nlines")
    line, end = stream.getvalue().split("\n")
    event = json.loads(line)
    stamp = event.pop("timestamp")
    assert event == {
        "event": "jobs reaped",
        "level": "info",
        "logger": "test",
        "worker": "w1",
        "count": 3,
        "text": "two\nlines",
    }
    assert stamp.endswith("Z")
    assert abs(datetime.fromisoformat(stamp) - datetime.now(UTC)) < timedelta(minutes=1)
    assert end == ""


def test_text_is_for_people_and_plain_where_there_is_no_terminal() -> None:
    logger, stream = rendered("info", "text")
    logger.warning("jobs reaped", count=3, how="two\nlines")
    text = stream.getvalue()
    assert "jobs reaped" in text
    assert "count=3" in text
    assert text.count("\n") == 1
    assert "\x1b" not in text


def test_events_below_the_level_are_not_rendered_and_a_hot_path_can_ask() -> None:
    logger, stream = rendered("warning", "json")
    logger.debug("no")
    logger.info("no")
    assert not logger.enabled(log.INFO)
    assert logger.enabled(log.WARNING)
    logger.warning("yes")
    logger.error("yes")
    assert stream.getvalue().count("\n") == 2


@pytest.mark.parametrize("format", log.FORMATS)
def test_an_exception_is_told_with_its_stack(format: str) -> None:
    logger, stream = rendered("info", format)
    try:
        raise KeyError("lost")
    except KeyError:
        logger.exception("round failed")
    assert "Traceback" in stream.getvalue()
    assert "KeyError" in stream.getvalue()


@pytest.mark.parametrize("format", log.FORMATS)
def test_fields_of_any_kind_and_name_are_told(format: str) -> None:
    logger, stream = rendered("info", format)
    circle: list[object] = []
    circle.append(circle)
    logger.info("odd", event="shadow", circle=circle, key={(1, 2): object()}, text="\ud800")
    assert "odd" in stream.getvalue()
    assert "shadow" in stream.getvalue()


def test_a_closed_stream_harms_nobody() -> None:
    logger, stream = rendered("info", "json")
    stream.close()
    logger.error("nobody hears this")


@pytest.mark.parametrize(("level", "format"), [("loud", "text"), ("info", "xml")])
def test_unknown_levels_and_formats_are_refused(level: str, format: str) -> None:
    with pytest.raises(InvalidOption, match=r"is unknown"):
        log.configure(level, format)
