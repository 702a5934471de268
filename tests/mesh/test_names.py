"""Names of seeds, and weather."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.delays import Weather, parse_weather, write_weather
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.names import Names, look_up
from tests.mesh.sockets import run, until


def test_addresses_are_taken_as_they_are_and_names_are_asked_for() -> None:
    asked = []

    def lookup(host: str) -> Sequence[str]:
        asked.append(host)
        return ["10.0.0.1", "fd00::1"]

    async def main() -> None:
        found = await Names(lookup).addresses(["192.0.2.1", "::1", "worker-0.jobs", "worker-0.jobs"])
        assert found == {
            "192.0.2.1": ["192.0.2.1"],
            "::1": ["::1"],
            "worker-0.jobs": ["10.0.0.1", "fd00::1"],
        }

    run(main())
    assert asked == ["worker-0.jobs"]


def test_a_name_that_fails_has_no_addresses_and_is_asked_for_again() -> None:
    answers: list[Sequence[str] | OSError] = [OSError("no such name"), [], ["10.0.0.1"]]

    def lookup(_host: str) -> Sequence[str]:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def main() -> None:
        names = Names(lookup)
        tries = [(await names.addresses(["late"]))["late"] for _ in range(3)]
        assert tries == [[], [], ["10.0.0.1"]]

    run(main())


def test_a_name_service_that_hangs_holds_up_nothing_and_gets_one_question_a_name() -> None:
    released = threading.Event()
    asked = []

    def lookup(host: str) -> Sequence[str]:
        asked.append(host)
        if host == "hangs":
            released.wait(10)
        return ["10.0.0.1"]

    async def main() -> None:
        names = Names(lookup, within_s=0.05)
        for _ in range(3):
            assert await names.addresses(["hangs", "answers"]) == {"hangs": [], "answers": ["10.0.0.1"]}
        assert asked.count("hangs") == 1
        released.set()
        await until(lambda: not names._under_way)
        assert (await names.addresses(["hangs"]))["hangs"] == ["10.0.0.1"]

    run(main())


def test_a_name_whose_lookup_raises_something_unforeseen_is_asked_for_again() -> None:
    asked = []

    def lookup(host: str) -> Sequence[str]:
        asked.append(host)
        if len(asked) == 1:
            raise ValueError("embedded null character")
        return ["10.0.0.1"]

    async def main() -> None:
        names = Names(lookup)
        assert [(await names.addresses(["a"]))["a"] for _ in range(2)] == [[], ["10.0.0.1"]]

    run(main(), 3)


def test_a_name_for_which_no_thread_could_be_had_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_to_spare(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        names = Names(lambda _: ["10.0.0.1"])
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", none_to_spare)
            assert (await names.addresses(["a"]))["a"] == []
        assert (await names.addresses(["a"]))["a"] == ["10.0.0.1"]

    run(main(), 3)


def test_the_systems_own_lookup_knows_localhost_once_a_family() -> None:
    found = look_up("localhost")
    assert "127.0.0.1" in found
    assert len(found) == len(set(found))


class TestWeather:
    def test_loss_and_doubling_have_the_shares_that_were_asked_for(self) -> None:
        weather = Weather(loss=0.3, double=0.1, delay_ms=20, jitter_ms=10)
        rng = random.Random(5)
        copies = [weather.deliveries_s(rng) for _ in range(10_000)]
        assert sum(not one for one in copies) == pytest.approx(3_000, abs=150)
        assert sum(len(one) == 2 for one in copies) == pytest.approx(700, abs=80)
        assert all(0.02 <= delay <= 0.03 for one in copies for delay in one)

    def test_its_text_is_read_back(self) -> None:
        assert parse_weather("loss=0.3, delay_ms=40") == Weather(loss=0.3, delay_ms=40)

    def test_a_peer_may_be_further_away_than_others(self) -> None:
        far = Address("127.0.0.1", 7948)
        weather = parse_weather("delay_ms=5,127.0.0.1:7948=75")
        assert weather == Weather(delay_ms=5, to_ms={far: 75.0})
        rng = random.Random(5)
        assert weather.deliveries_s(rng, far) == [0.08]
        assert weather.deliveries_s(rng, Address("127.0.0.1", 7950)) == [0.005]
        assert (weather.delay_s(rng, far), weather.back_s(far)) == (0.08, 0.075)
        assert parse_weather(write_weather({far: 0.5})) == Weather(to_ms={far: 0.5})

    @pytest.mark.parametrize(
        "text",
        ["", "loss", "loss=2", "delay_ms=-1", "rain=1", "loss=nan", "loss=x", "to_ms=1", "host:x=1", ":1=1"],
    )
    def test_what_is_no_weather_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidOption, match="is no weather"):
            parse_weather(text)
