"""The address that others are told: never one at which nobody can be reached."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import pytest

from fluxmesh.errors import InvalidOption
from fluxmesh.mesh.advertise import Lookup, Source, advertised_address, find_address
from fluxmesh.mesh.messages import Address
from fluxmesh.mesh.options import MeshWorker

KEY = base64.b64encode(bytes(range(32))).decode()


def names(table: Mapping[str, Sequence[str]] | None = None) -> Lookup:
    return lambda name: (table or {}).get(name, ())


def ways(table: Mapping[str, str] | None = None, default: str | None = None) -> Source:
    """By the beginning of where it goes to."""

    def source(host: str, port: int) -> str | None:
        found = [own for start, own in (table or {}).items() if host.startswith(start)]
        return found[0] if found else default

    return source


def found(options: MeshWorker, lookup: Lookup | None = None, source: Source | None = None) -> Address | str:
    return advertised_address(options, lookup or names(), source or ways())


def keyed(**options: object) -> MeshWorker:
    return MeshWorker(encryption_key=KEY, **options)  # type: ignore[arg-type]


def test_a_given_address_comes_first_with_its_own_port_or_ours() -> None:
    assert found(keyed(advertise_addr="192.0.2.9", port=8_000, bind_addr="10.0.0.7")) == Address(
        "192.0.2.9", 8_000
    )
    assert found(keyed(advertise_addr="192.0.2.9:9000")) == Address("192.0.2.9", 9_000)
    assert found(keyed(advertise_addr="[2001:db8::9]:9000", bind_addr="::")) == Address("2001:db8::9", 9_000)


def test_a_given_name_is_looked_up_for_an_address_of_our_kind() -> None:
    lookup = names({"me.example": ["2001:db8::9", "192.0.2.9"]})
    assert found(keyed(advertise_addr="me.example:9000"), lookup) == Address("192.0.2.9", 9_000)
    assert found(keyed(advertise_addr="me.example", bind_addr="::"), lookup) == Address("2001:db8::9", 7_946)


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        ([], "me.example has no address: it does not resolve on this machine"),
        (["2001:db8::9"], "me.example has no address of the kind that 0.0.0.0 hears"),
        (["0.0.0.0"], "me.example: unspecified address"),
        (["224.0.0.1"], "me.example: multicast address"),
        (["127.0.1.1"], "me.example: loopback, and there are seeds on other machines"),
    ],
)
def test_a_given_name_that_leads_nowhere_is_refused_and_nothing_else_is_tried(
    addresses: list[str], words: str
) -> None:
    options = keyed(advertise_addr="me.example", seeds="10.0.0.1")
    answer = found(options, names({"me.example": addresses}), ways(default="10.0.0.7"))
    assert isinstance(answer, str)
    assert words in answer


def test_of_a_name_with_several_addresses_the_first_good_one_counts() -> None:
    lookup = names({"me.example": ["127.0.1.1", "192.0.2.9"]})
    assert found(keyed(advertise_addr="me.example", seeds="10.0.0.1"), lookup) == Address("192.0.2.9", 7_946)


def test_what_is_told_must_be_heard_by_a_worker_that_listens_at_loopback_only() -> None:
    with pytest.raises(InvalidOption, match=r"listens at 127\.0\.0\.1 only") as refused:
        MeshWorker(insecure=True, seeds="192.0.2.9", advertise_addr="192.0.2.2").resolved()
    assert refused.value.field == "mesh_advertise_addr"
    assert "mesh_bind_addr" in refused.value.hint
    with pytest.raises(InvalidOption, match=r"listens at 127\.0\.0\.1 only"):
        keyed(advertise_addr="192.0.2.2:8000", bind_addr="127.0.0.1").resolved()
    answer = found(MeshWorker(advertise_addr="me.example"), names({"me.example": ["192.0.2.9"]}))
    assert answer == "me.example: 192.0.2.9 is told to others, but this worker listens at 127.0.0.1 only"
    assert found(MeshWorker(advertise_addr="127.0.0.5").resolved()) == Address("127.0.0.5", 7_946)
    assert found(keyed(advertise_addr="192.0.2.2").resolved()) == Address("192.0.2.2", 7_946)


def test_a_single_address_that_it_listens_at_comes_second() -> None:
    source = ways(default="10.0.0.9")
    assert found(keyed(bind_addr="10.0.0.7", seeds="10.0.0.1"), source=source) == Address("10.0.0.7", 7_946)
    assert found(MeshWorker(port=8_000)) == Address("127.0.0.1", 8_000)


def test_the_way_to_the_first_seed_that_has_one_comes_third() -> None:
    lookup = names({"later": [], "seed": ["10.1.0.1"]})
    source = ways({"10.1.": "10.1.0.7"}, default="192.0.2.7")
    assert found(keyed(seeds="later,seed:8000"), lookup, source) == Address("10.1.0.7", 7_946)


def test_the_way_is_asked_for_by_the_seeds_own_port() -> None:
    asked = []

    def source(host: str, port: int) -> str | None:
        asked.append((host, port))
        return None

    found(keyed(seeds="10.0.0.1:8000,10.0.0.2"), source=source)
    assert asked[:2] == [("10.0.0.1", 8_000), ("10.0.0.2", 7_946)]


def test_d14_with_names_that_do_not_resolve_yet_the_default_route_counts() -> None:
    source = ways(default="192.0.2.7")
    assert found(keyed(seeds="later,much-later"), names(), source) == Address("192.0.2.7", 7_946)
    assert found(keyed(), names(), source) == Address("192.0.2.7", 7_946)


def test_a_worker_that_hears_ipv6_only_is_reached_by_ipv6() -> None:
    source = ways({"2001:": "2001:db8::7"}, default="192.0.2.7")
    assert found(keyed(bind_addr="::", seeds="[2001:db8::1]"), source=source) == Address("2001:db8::7", 7_946)


def test_loopback_is_told_only_if_every_seed_is_there() -> None:
    source = ways({"127.": "127.0.0.1"}, default="192.0.2.7")
    assert found(keyed(seeds="127.0.0.1"), source=source) == Address("127.0.0.1", 7_946)
    assert found(keyed(seeds="127.0.0.1,10.0.0.1"), source=source) == Address("192.0.2.7", 7_946)
    answer = found(keyed(seeds="127.0.0.1,10.0.0.1", bind_addr="127.0.0.1"), source=source)
    assert answer == "it listens at 127.0.0.1 only, which the seeds on other machines cannot reach"


def test_all_processes_of_a_worker_tell_the_same_address() -> None:
    source = ways({"127.": "127.0.0.1"}, default="192.0.2.7")
    for child in range(3):
        answer = found(keyed().resolved(child=child), source=source)
        assert answer == Address("192.0.2.7", 7_946 + 2 * child)


@pytest.mark.parametrize("own", ["0.0.0.0", "::", "224.0.0.1", "127.0.0.1", "fe80::1%eth0", "nonsense"])
def test_d02_what_the_machine_shows_is_held_to_the_same_bounds(own: str) -> None:
    answer = found(keyed(seeds="10.0.0.1", bind_addr="::"), source=ways(default=own))
    assert answer == "no way leads to a seed, and there is no default route"


def test_an_ipv4_address_in_the_form_of_ipv6_is_told_as_ipv4() -> None:
    answer = found(keyed(bind_addr="::", seeds="10.0.0.1"), source=ways(default="::ffff:10.0.0.7"))
    assert answer == Address("10.0.0.7", 7_946)


def test_this_machine_shows_an_address_for_itself() -> None:
    assert find_address(MeshWorker(seeds="localhost:7950", port=8_000)) == Address("127.0.0.1", 8_000)
    assert find_address(keyed(seeds="127.0.0.1")) == Address("127.0.0.1", 7_946)


def test_a_machine_that_shows_none_is_told_what_to_give() -> None:
    with pytest.raises(InvalidOption, match="which the seeds on other machines cannot reach") as refused:
        find_address(keyed(seeds="10.0.0.1", bind_addr="127.0.0.1"))
    assert refused.value.field == "mesh_advertise_addr"
    assert "mesh_bind_addr" in refused.value.hint
    with pytest.raises(InvalidOption, match="does not resolve") as refused:
        find_address(keyed(advertise_addr="nobody.invalid"))
    assert "mesh_advertise_addr" in refused.value.hint
