"""What a producer may ask for, and how it hears of what it may not: by field, short, with a hint."""

from __future__ import annotations

import contextlib
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxmesh import codec
from fluxmesh.errors import InvalidOption, InvalidPayload, PayloadTooLarge, UsageError
from fluxmesh.ids import is_job_id, new_job_id
from fluxmesh.job import JobOptions, Priority
from fluxmesh.submission import (
    FIELDS,
    MAX_HEADER_BYTES,
    MAX_NAME,
    OPTION_FIELDS,
    Submission,
    checked_arguments,
    checked_name,
    checked_tier,
    normalised,
    prepare,
)

US = 1_000_000
HUGE = pytest.param(10**5_000, id="5,000 digits")


def prepared(**fields: Any) -> Any:
    return prepare({"task": "work", **fields})


def refused(**fields: Any) -> InvalidOption:
    with pytest.raises(InvalidOption) as caught:
        prepared(**fields)
    message = str(caught.value)
    assert len(message) < 400, "a message is for reading"
    assert message.isprintable()
    return caught.value


def test_a_bare_submission_leaves_everything_to_its_task() -> None:
    template = prepared()
    assert (template.task, template.queue, template.tier, template.options) == ("work", None, None, None)
    job = template.job([1], {"k": 2})
    assert is_job_id(job.id)
    assert codec.decode_payload(job.payload) == ([1], {"k": 2})
    assert (job.delay_us, job.run_at_us, job.expires_in_us, job.payload_hash, job.tags) == (None,) * 4 + ((),)


def test_every_field_arrives_where_it_belongs() -> None:
    job_id = new_job_id()
    template = prepared(
        queue="mail", priority="critical", max_retries=5, backoff_strategy="linear", backoff_base_seconds=2,
        max_backoff_seconds=9.5, jitter="full", timeout_seconds=30, delay_seconds=1.5, expires_in_seconds=60,
        idempotency_key="i", unique_key="u", affinity_key="a", concurrency_key="c", concurrency_limit=3,
        max_crashes=2, tags=["x", "y", "x"], headers={"traceparent": "00-1"}, id=job_id,
    )  # fmt: skip
    job = template.job([], {})
    assert codec.decode_options(job.options) == JobOptions(
        5, "linear", 2.0, 9.5, "full", 30.0, "a", ("x", "y"), {"traceparent": "00-1"}, 2, "i"
    )
    assert (job.id, job.queue, job.tier, job.delay_us, job.expires_in_us) == (
        job_id,
        "mail",
        0,
        1_500_000,
        60 * US,
    )
    assert (job.idempotency_key, job.unique_key, job.concurrency_key, job.concurrency_limit) == (
        "i",
        "u",
        "c",
        3,
    )
    assert job.payload_hash == codec.payload_hash("work", [], {})
    assert job.tags == ("x", "y")


def test_short_names_mean_the_long_ones() -> None:
    assert normalised({"timeout": 1, "delay": 2, "expires_in": 3}) == {
        "timeout_seconds": 1,
        "delay_seconds": 2,
        "expires_in_seconds": 3,
    }


def test_none_and_unset_leave_a_field_out() -> None:
    assert normalised({"task": "t", "queue": None, "timeout": None}) == {"task": "t"}


def test_one_field_by_two_names_is_refused() -> None:
    assert refused(timeout=1, timeout_seconds=1).field in ("timeout", "timeout_seconds")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("prioritty", "priority"), ("max_retry", "max_retries"), ("timeout_s", "timeout"), ("delays", "delay")],
)
def test_an_unknown_option_is_refused_with_a_suggestion(name: str, suggestion: str) -> None:
    error = refused(**{name: 1})
    assert error.field == name
    assert suggestion in error.hint


def test_an_unknown_option_that_is_like_nothing_is_refused_too() -> None:
    assert refused(zzzzzz=1).field == "zzzzzz"
    assert refused(**{"z" * 100_000: 1}).hint


def test_the_fields_are_those_of_the_submission() -> None:
    assert set(FIELDS) == set(Submission.__struct_fields__)
    assert {"timeout", "delay", "queue"} <= OPTION_FIELDS
    assert not OPTION_FIELDS & {"task", "args", "kwargs"}


class TestNames:
    @pytest.mark.parametrize("name", ["a", "x" * MAX_NAME, "shop.orders.run", "zażółć", "日本語", "a b"])
    def test_a_name_is_up_to_200_printable_characters(self, name: str) -> None:
        assert checked_name("task", name) == name

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "x" * 201,
            "x" * 1_000_000,
            "a\nb",
            "a\x00b",
            "\x1b[31m",
            "\ud800",
            "\u200b",
            None,
            5,
            b"x",
            ["x"],
        ],
    )
    @pytest.mark.parametrize(
        "field", ["task", "queue", "idempotency_key", "unique_key", "affinity_key", "concurrency_key"]
    )
    def test_anything_else_is_refused_by_field(self, field: str, name: object) -> None:
        if name is None and field != "task":
            return  # left out
        assert refused(**{field: name}).field == field

    def test_a_missing_task_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="task"):
            prepare({})

    @pytest.mark.parametrize("queue", ["critical", "high", "low"])
    def test_a_queue_cannot_be_named_like_a_tier(self, queue: str) -> None:
        error = refused(queue=queue)
        assert error.field == "queue"
        assert f"priority='{queue}'" in error.hint

    @pytest.mark.parametrize("queue", ["a:b", "{a}", "a}"])
    def test_a_queue_has_no_braces_and_colons(self, queue: str) -> None:
        assert refused(queue=queue).field == "queue"

    def test_the_queue_default_is_a_queue(self) -> None:
        assert prepared(queue="default").queue == "default"


class TestTiers:
    @pytest.mark.parametrize(
        ("given", "tier"),
        [("critical", 0), ("high", 1), ("default", 2), ("low", 3), (0, 0), (3, 3), (Priority.HIGH, 1)],
    )
    def test_a_tier_is_a_number_or_a_name(self, given: int | str, tier: int) -> None:
        assert checked_tier(given) == tier
        assert prepared(priority=given).tier == tier

    @pytest.mark.parametrize(
        "given", [-1, 4, 1.0, True, "HIGH", "", "urgent", "x" * 1_000_000, [], {}, math.nan, HUGE]
    )
    def test_anything_else_is_refused_with_the_list(self, given: object) -> None:
        error = refused(priority=given)
        assert error.field == "priority"
        assert "critical, high, default, low" in error.hint


class TestNumbers:
    @pytest.mark.parametrize("field", ["max_retries", "max_crashes"])
    @pytest.mark.parametrize("value", [-1, 1.5, "3", True, math.nan, 10**9, 10**400, HUGE, []])
    def test_counts_are_whole_and_in_range(self, field: str, value: object) -> None:
        assert refused(**{field: value}).field == field

    def test_no_retries_is_a_number_of_retries_but_no_crash_is_none_of_crashes(self) -> None:
        assert codec.decode_options(prepared(max_retries=0).options).max_retries == 0
        assert refused(max_crashes=0).field == "max_crashes"

    @pytest.mark.parametrize(
        "field",
        [
            "timeout_seconds",
            "expires_in_seconds",
            "delay_seconds",
            "backoff_base_seconds",
            "max_backoff_seconds",
        ],
    )
    @pytest.mark.parametrize(
        "value", [-1, -0.001, math.nan, math.inf, -math.inf, 1e300, 10**400, HUGE, "5", True, []]
    )
    def test_durations_are_finite_seconds_in_range(self, field: str, value: object) -> None:
        assert refused(**{field: value}).field == field

    @pytest.mark.parametrize("field", ["timeout_seconds", "expires_in_seconds"])
    def test_a_time_that_is_over_at_once_is_refused(self, field: str) -> None:
        assert refused(**{field: 0}).field == field

    def test_no_delay_is_a_delay(self) -> None:
        assert prepared(delay=0).delay_us == 0

    def test_a_job_cannot_expire_before_it_is_due(self) -> None:
        assert refused(delay=10, expires_in=10).field == "expires_in_seconds"
        assert prepared(delay=10, expires_in=10.5).expires_in_us == 10_500_000

    @pytest.mark.parametrize("value", [0, -1, 1.5, True, 10**400, "2"])
    def test_a_concurrency_limit_is_at_least_one(self, value: object) -> None:
        assert refused(concurrency_key="k", concurrency_limit=value).field == "concurrency_limit"

    def test_a_concurrency_key_alone_means_one_at_a_time_and_a_limit_alone_is_refused(self) -> None:
        assert prepared(concurrency_key="k").concurrency_limit == 1
        assert refused(concurrency_limit=3).field == "concurrency_limit"


class TestRunAt:
    @pytest.mark.parametrize(
        "given",
        [
            1_900_000_000,
            1_900_000_000.0,
            "2030-03-17T17:46:40Z",
            "2030-03-17T19:46:40+02:00",
            datetime(2030, 3, 17, 17, 46, 40, tzinfo=UTC),
            datetime(2030, 3, 17, 12, 46, 40, tzinfo=timezone(timedelta(hours=-5))),
        ],
    )
    def test_one_instant_may_be_written_in_many_ways(self, given: object) -> None:
        assert prepared(run_at=given).run_at_us == 1_900_000_000 * US

    @pytest.mark.parametrize(
        "given",
        [
            "30000-01-01T00:00:00Z",
            253_402_300_800,
            1e300,
            -1,
            math.nan,
            math.inf,
            10**400,
            HUGE,
            True,
            "tomorrow",
            "",
            "x" * 1_000_000,
            "2030-01-01T00:00:00",
            datetime(2030, 1, 1),  # noqa: DTZ001
            "1969-12-31T23:59:59Z",
            [],
        ],
    )
    def test_anything_else_is_refused(self, given: object) -> None:
        assert refused(run_at=given).field == "run_at"

    def test_an_instant_and_a_delay_together_are_refused(self) -> None:
        assert refused(run_at=1_900_000_000, delay=5).field == "run_at"


class TestChoices:
    @pytest.mark.parametrize("field", ["backoff_strategy", "jitter"])
    @pytest.mark.parametrize("value", ["", "expo", 1, None.__class__, [], "x" * 1_000_000])
    def test_a_choice_that_does_not_exist_is_refused_with_the_list(self, field: str, value: object) -> None:
        error = refused(**{field: value})
        assert error.field == field
        assert "one of" in error.hint


class TestTagsAndHeaders:
    @pytest.mark.parametrize("tags", ["x", 5, {"x"}, [5], [""], ["x" * 201], ["a\nb"], ["x"] * 51, b"ab"])
    def test_tags_are_a_short_list_of_names(self, tags: object) -> None:
        assert refused(tags=tags).field == "tags"

    @pytest.mark.parametrize(
        "headers",
        [
            [("a", "b")],
            "x",
            {"a": 1},
            {1: "a"},
            {"": "a"},
            {"a": "\ud800"},
            {"a": "x" * MAX_HEADER_BYTES},
            {str(index): "" for index in range(65)},
        ],
    )
    def test_headers_are_a_small_object_of_texts(self, headers: object) -> None:
        assert refused(headers=headers).field == "headers"

    def test_empty_ones_are_as_good_as_none(self) -> None:
        assert prepared(tags=[], headers={}).options is None


class TestIds:
    @pytest.mark.parametrize("job_id", ["", "1", 5, b"x", new_job_id().upper(), "x" * 1_000_000, []])
    def test_an_id_is_a_uuid_v7(self, job_id: object) -> None:
        assert refused(id=job_id).field == "id"

    def test_jobs_of_one_template_have_ids_of_their_own(self) -> None:
        template = prepared()
        assert template.job([], {}).id != template.job([], {}).id


class TestArguments:
    def test_arguments_that_are_too_large_or_too_deep_are_refused(self) -> None:
        with pytest.raises(PayloadTooLarge):
            prepared().job(["x" * (1 << 20)], {})
        deep: list[Any] = []
        for _ in range(10_000):
            deep = [deep]
        with pytest.raises(PayloadTooLarge):
            prepared(idempotency_key="i").job([deep], {})

    def test_arguments_that_json_cannot_hold_are_refused(self) -> None:
        with pytest.raises(InvalidPayload, match="kwargs"):
            prepared().job([], {"k": {1, 2}})

    @pytest.mark.parametrize(("args", "kwargs"), [({}, {}), ("x", {}), (None, {}), ([], []), ([], None)])
    def test_arguments_given_as_data_are_a_list_and_an_object(self, args: object, kwargs: object) -> None:
        with pytest.raises(InvalidPayload, match=r"args|kwargs"):
            checked_arguments(args, kwargs)

    def test_the_hash_does_not_depend_on_the_order_of_kwargs(self) -> None:
        template = prepared(idempotency_key="i")
        one, two = template.job([], {"a": 1, "b": 2}), template.job([], {"b": 2, "a": 1})
        assert one.payload_hash == two.payload_hash


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.text(), max_size=3),
)


@given(fields=st.dictionaries(st.sampled_from(FIELDS), junk, max_size=5))
def test_whatever_is_asked_for_is_prepared_or_refused_as_a_mistake(fields: dict[str, Any]) -> None:
    with contextlib.suppress(UsageError):
        prepare(fields)
