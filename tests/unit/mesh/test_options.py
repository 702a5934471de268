"""What a worker's part in the mesh may be set to, and what is said about everything else."""

from __future__ import annotations

import base64
import contextlib
import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxmesh.config import Settings, load_settings
from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.messages import Meta
from fluxmesh.mesh.options import NAMES, NUMBERS, MeshWorker, check_member, keygen, parse_seed
from fluxmesh.mesh.seal import Plain, Refusal, Sealed
from fluxmesh.mesh.timing import MS

KEY = base64.b64encode(bytes(range(32))).decode()
OTHER = base64.b64encode(bytes(range(1, 33))).decode()


def keys_of(many: int) -> list[str]:
    return [base64.b64encode(bytes((number,)) * 32).decode() for number in range(many)]


def test_the_defaults_are_those_of_the_contract() -> None:
    options = MeshWorker()
    assert {name: getattr(options, name) for name in NAMES} == {
        "port": 7946,
        "seeds": (),
        "steal": True,
        "affinity_weight": 0.7,
        "local_buffer": 64,
        "steal_batch": 4,
        "steal_threshold": 2,
        "virtual_nodes": 150,
        "bind_addr": None,
        "advertise_addr": None,
        "encryption_key": (),
        "steal_rate_limit": 10,
        "protocol_period_ms": 500,
        "indirect_ping_count": 3,
        "suspicion_multiplier": 4,
        "insecure": False,
    }
    assert options.bind_host == "127.0.0.1"
    assert MeshWorker(encryption_key=KEY).bind_host == "0.0.0.0"


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"port": 80}, "mesh_port", "80 is not from 1,024 to 65,534"),
        ({"port": 65_535}, "mesh_port", "not from"),
        ({"port": "7946"}, "mesh_port", "'7946' is not a whole number"),
        ({"port": True}, "mesh_port", "not a whole number"),
        ({"port": 7946.0}, "mesh_port", "not a whole number"),
        ({"seeds": "host:80"}, "mesh_seeds", "the port of 'host:80' is not from 1,024 to 65,534"),
        ({"seeds": ["host:port"]}, "mesh_seeds", "the port of"),
        ({"seeds": ["host:"]}, "mesh_seeds", "the port of"),
        ({"seeds": ["host:٣٣٣٣"]}, "mesh_seeds", "the port of"),
        ({"seeds": ["no host"]}, "mesh_seeds", "'no host' is no host"),
        ({"seeds": ["http://host:7946"]}, "mesh_seeds", "is no host"),
        ({"seeds": ["10.0.0"]}, "mesh_seeds", "is no host"),
        ({"seeds": ["300.1.1.1:7946"]}, "mesh_seeds", "is no host"),
        ({"seeds": ["0.0.0.0:7946"]}, "mesh_seeds", "unspecified address"),
        ({"seeds": ["[ff02::1]:7946"]}, "mesh_seeds", "multicast address"),
        ({"seeds": [7]}, "mesh_seeds", "not text"),
        ({"seeds": 7}, "mesh_seeds", "not text"),
        ({"seeds": [f"host{number}" for number in range(257)]}, "mesh_seeds", "257 seeds"),
        ({"steal": "no"}, "mesh_steal", "'no' is not True or False"),
        ({"insecure": 1}, "mesh_insecure", "1 is not True or False"),
        ({"affinity_weight": 1.1}, "mesh_affinity_weight", "1.1 is not from 0.0 to 1.0"),
        ({"affinity_weight": float("nan")}, "mesh_affinity_weight", "nan is not from"),
        ({"affinity_weight": "much"}, "mesh_affinity_weight", "is not a number"),
        ({"local_buffer": -1}, "mesh_local_buffer", "not from 0"),
        ({"steal_batch": 0}, "mesh_steal_batch", "not from 1"),
        ({"steal_threshold": -1}, "mesh_steal_threshold", "not from 0"),
        ({"virtual_nodes": 0}, "mesh_virtual_nodes", "not from 1 to 1,000"),
        ({"virtual_nodes": 1_001}, "mesh_virtual_nodes", "not from 1 to 1,000"),
        ({"steal_rate_limit": -1}, "mesh_steal_rate_limit", "not from 0"),
        ({"steal_rate_limit": float("inf")}, "mesh_steal_rate_limit", "not from 0"),
        ({"protocol_period_ms": 10}, "mesh_protocol_period_ms", "not from 50 to 60,000"),
        ({"indirect_ping_count": 17}, "mesh_indirect_ping_count", "not from 0 to 16"),
        ({"suspicion_multiplier": 0}, "mesh_suspicion_multiplier", "not from 1 to 100"),
        ({"bind_addr": "localhost"}, "mesh_bind_addr", "'localhost' is not an IP address"),
        ({"bind_addr": "224.0.0.1"}, "mesh_bind_addr", "multicast address"),
        ({"bind_addr": 7}, "mesh_bind_addr", "not an IP address"),
        ({"advertise_addr": "0.0.0.0"}, "mesh_advertise_addr", "unspecified address"),
        ({"advertise_addr": "0.0.0.0:7946"}, "mesh_advertise_addr", "unspecified address"),
        ({"advertise_addr": "::"}, "mesh_advertise_addr", "unspecified address"),
        ({"advertise_addr": "239.1.2.3"}, "mesh_advertise_addr", "multicast address"),
        ({"advertise_addr": "host:80"}, "mesh_advertise_addr", "the port of"),
        ({"advertise_addr": 7}, "mesh_advertise_addr", "not text"),
        ({"encryption_key": "not base64!"}, "mesh_encryption_key", "the key is not base64"),
        ({"encryption_key": KEY[:-1]}, "mesh_encryption_key", "the key is not base64"),
        ({"encryption_key": [KEY, "é"]}, "mesh_encryption_key", "key 2 of 2 is not base64"),
        (
            {"encryption_key": base64.b64encode(bytes(31)).decode()},
            "mesh_encryption_key",
            "base64 of 31 bytes, not of 32",
        ),
        ({"encryption_key": keys_of(5)}, "mesh_encryption_key", "5 keys, at most 4"),
        ({"encryption_key": [KEY, KEY]}, "mesh_encryption_key", "key 2 of 2 is there twice"),
        ({"encryption_key": bytes(32)}, "mesh_encryption_key", "not text"),
        ({"encryption_key": [bytes(32)]}, "mesh_encryption_key", "not text"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_option(
    arguments: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(InvalidOption) as refused:
        MeshWorker(**arguments)
    assert refused.value.field == field
    assert words in refused.value.message
    assert refused.value.hint or "True or False" in words


def test_an_unknown_argument_is_told_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="'seed'; did you mean seeds"):
        MeshWorker(seed="a")  # type: ignore[call-arg]


# --- keys -----------------------------------------------------------------------------------------------


def test_a_new_key_is_32_bytes_of_chance_in_base64() -> None:
    made = {keygen() for _ in range(20)}
    assert len(made) == 20
    assert {len(base64.b64decode(key, validate=True)) for key in made} == {32}
    assert MeshWorker(encryption_key=made.pop()).encryption_key


@pytest.mark.parametrize("value", [KEY, [KEY, OTHER], f" {KEY} , {OTHER},", (KEY,), ""])
def test_keys_are_one_text_a_list_or_a_text_with_commas(value: str | list[str]) -> None:
    expected = [key for key in (KEY, OTHER) if key in value]
    assert list(MeshWorker(encryption_key=value).encryption_key) == expected


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.just(KEY), st.text(min_size=8, max_size=60), st.binary(min_size=1, max_size=48)))
def test_a_key_never_shows(value: str | bytes) -> None:
    text = value if isinstance(value, str) else base64.b64encode(value).decode()
    try:
        shown = repr(MeshWorker(encryption_key=text)) + str(MeshWorker(encryption_key=text))
    except InvalidOption as refused:
        shown = str(refused) + repr(refused)
    secret = text.strip().strip(",")
    assert len(secret) < 8 or secret not in shown


def test_the_first_key_seals_and_without_one_nothing_is_sealed() -> None:
    one = MeshWorker(encryption_key=[KEY, OTHER]).envelope(label="a", salt=bytes(12))
    other = MeshWorker(encryption_key=OTHER).envelope(label="a", salt=bytes(11) + b"\x01")
    plain = MeshWorker().envelope(label="a", salt=bytes(12))
    assert isinstance(one, Sealed)
    assert isinstance(plain, Plain)
    assert one.open(other.seal(b"x"), 0) == b"x"
    assert other.open(one.seal(b"x"), 0) is Refusal.WRONG_KEY
    assert plain.open(one.seal(b"x"), 0) is Refusal.SEALED


# --- together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seeds", ["10.0.0.1", "jobs-1:7946", "localhost,10.0.0.1:7946", "[2001:db8::1]:7946"]
)
def test_a_seed_elsewhere_needs_a_key(seeds: str) -> None:
    with pytest.raises(InvalidOption, match="is missing, and the seed") as refused:
        MeshWorker(seeds=seeds).resolved()
    assert refused.value.field == "mesh_encryption_key"
    assert "fluxmesh mesh keygen" in refused.value.hint
    assert MeshWorker(seeds=seeds, encryption_key=KEY).resolved().bind_host == "0.0.0.0"


def test_the_own_machines_name_as_a_seed_is_told_what_does_without_a_key() -> None:
    with pytest.raises(InvalidOption, match="may be on another machine") as refused:
        MeshWorker(seeds="this-host").resolved()
    assert "localhost" in refused.value.hint


def test_a_name_to_listen_at_is_told_to_be_an_address() -> None:
    with pytest.raises(InvalidOption, match="'this-host' is not an IP address") as refused:
        MeshWorker(bind_addr="this-host")
    assert "not a name" in refused.value.hint


@pytest.mark.parametrize(
    "seeds", ["", "localhost", "localhost:8000", "127.0.0.1", "127.3.2.1:9000", "[::1]:7946", "::1"]
)
def test_seeds_on_this_machine_need_no_key(seeds: str) -> None:
    options = MeshWorker(seeds=seeds).resolved()
    assert options.bind_host == "127.0.0.1"
    assert not options.is_exposed


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "10.0.0.7"])
def test_listening_to_elsewhere_without_a_key_must_be_meant(bind: str) -> None:
    with pytest.raises(InvalidOption, match="can be reached from elsewhere") as refused:
        MeshWorker(bind_addr=bind).resolved()
    assert refused.value.field == "mesh_bind_addr"
    assert MeshWorker(bind_addr=bind, insecure=True).resolved().is_exposed
    assert not MeshWorker(bind_addr=bind, encryption_key=KEY).resolved().is_exposed


def test_what_is_not_given_is_a_setting_and_what_is_given_is_not() -> None:
    some = SimpleNamespace(
        mesh_port=9_000, mesh_seeds="localhost:9100", mesh_steal=False, mesh_encryption_key=KEY
    )
    options = MeshWorker(port=7946, steal_batch=7).resolved(some)
    assert options.port == 7946  # given, though it is the default
    assert options.steal_batch == 7
    assert options.seeds == ("localhost:9100",)
    assert options.steal is False
    assert options.encryption_key == (KEY,)
    assert options.virtual_nodes == 150


def test_each_option_is_a_setting_with_the_same_default_and_the_same_bounds() -> None:
    assert MeshWorker().resolved(Settings()) == MeshWorker()
    for name, (_, least, most) in NUMBERS.items():
        for value in (least, most):
            assert getattr(load_settings({f"mesh_{name}": value}), f"mesh_{name}") == value
        for value in (least - 1, most + 1):
            with pytest.raises(InvalidOption, match=f"mesh_{name}"):
                load_settings({f"mesh_{name}": value})


def test_each_process_of_a_worker_has_two_ports_of_its_own() -> None:
    assert [MeshWorker(port=8_000).resolved(child=child).port for child in range(3)] == [8_000, 8_002, 8_004]
    with pytest.raises(InvalidOption, match=r"process 3 would have port 65,536"):
        MeshWorker(port=65_530).resolved(child=3)


@pytest.mark.parametrize(
    ("bind", "first"),
    [
        (None, "127.0.0.1:8000"),
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "[::1]:8000"),
        ("10.0.0.7", "10.0.0.7:8000"),
        ("2001:db8::7", "[2001:db8::7]:8000"),
    ],
)
def test_processes_of_a_worker_find_each_other_by_the_first_of_them(bind: str | None, first: str) -> None:
    options = MeshWorker(port=8_000, seeds="host-1", bind_addr=bind, encryption_key=KEY)
    assert options.resolved(child=0).seeds == ("host-1",)
    second = options.resolved(child=1)
    assert second.seeds == ("host-1", first)
    assert second.sibling_seed == first
    assert pickle.loads(pickle.dumps(second)).sibling_seed == first
    named = MeshWorker(port=8_000, seeds=[first], bind_addr=bind, encryption_key=KEY).resolved(child=1)
    assert named.seeds == (first,)
    assert named.sibling_seed is None


@pytest.mark.parametrize(
    ("worker_id", "queues", "field", "words"),
    [
        ("é" * 101, ("default",), "id", "not 1 to 200 bytes"),
        ("a:b", ("default",), "id", "a brace or a colon"),
        (
            "worker",
            tuple(f"queue-of-mine-{number}" for number in range(60)),
            "queues",
            "of which 512 are allowed",
        ),
    ],
)
def test_what_every_other_member_would_refuse_is_refused_at_the_start(
    worker_id: str, queues: tuple[str, ...], field: str, words: str
) -> None:
    with pytest.raises(InvalidOption, match=words) as refused:
        check_member(worker_id, Meta(queues, (2,), 8))
    assert refused.value.field == field
    check_member("worker", Meta(("default",), (0, 1, 2, 3), 8))


def test_the_three_knobs_of_time_reach_the_protocol() -> None:
    timing = MeshWorker(protocol_period_ms=200, indirect_ping_count=5, suspicion_multiplier=6).timing()
    assert (timing.period_ns, timing.indirect_ping_count, timing.suspicion_multiplier) == (200 * MS, 5, 6)


# --- values ---------------------------------------------------------------------------------------------


def test_options_are_a_value() -> None:
    options = MeshWorker(port=8_000, seeds="localhost, localhost:9000,", encryption_key=KEY)
    assert options.seeds == ("localhost", "localhost:9000")
    for again in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert again == options
        assert hash(again) == hash(options)
    assert options != MeshWorker(port=8_000)
    with pytest.raises(AttributeError, match="frozen"):
        options.port = 9_000
    assert repr(MeshWorker(port=8_000)) == "MeshWorker(port=8000)"


def test_a_whole_weight_is_told_to_others_by_the_same_bytes() -> None:
    assert isinstance(MeshWorker(affinity_weight=1).affinity_weight, float)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", ("host", None)),
        (" host.example:7946 ", ("host.example", 7946)),
        ("10.0.0.7", ("10.0.0.7", None)),
        ("10.0.0.7:1024", ("10.0.0.7", 1024)),
        ("[2001:db8::7]:7946", ("2001:db8::7", 7946)),
        ("[2001:DB8:0::7]", ("2001:db8::7", None)),
        ("2001:db8::7", ("2001:db8::7", None)),
        ("[::ffff:10.0.0.7]:7946", ("10.0.0.7", 7946)),
        ("my_service.my-net.", ("my_service.my-net.", None)),
        ("7946host", ("7946host", None)),
    ],
)
def test_a_seed_is_a_host_with_or_without_a_port(text: str, expected: tuple[str, int | None]) -> None:
    assert parse_seed(text) == expected


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_seed_or_refused_as_one(text: str) -> None:
    with contextlib.suppress(InvalidOption):
        host, port = parse_seed(text)
        assert host
        assert port is None or 1_024 <= port <= 65_534
