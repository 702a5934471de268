"""Which URLs and addresses a webhook may go to."""

from __future__ import annotations

from typing import Any

import pytest

from fluxmesh.outcome import DeadLetter
from fluxmesh.webhook import Target, is_public, target_of


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://shop.example", Target("https", "shop.example", 443, "/")),
        (
            "http://shop.example:8080/a/b?c=d%20e&f=g#h",
            Target("http", "shop.example", 8080, "/a/b?c=d%20e&f=g"),
        ),
        ("https://[2606:4700::1111]/x", Target("https", "2606:4700::1111", 443, "/x")),
        ("HTTPS://Shop.Example/Ü", Target("https", "shop.example", 443, "/%C3%9C")),
        ("https://büro.example/", Target("https", "xn--bro-hoa.example", 443, "/")),
    ],
)
def test_what_a_url_means(url: str, target: Target) -> None:
    assert target_of(url) == target


@pytest.mark.parametrize(
    "url",
    [
        None, 7, "", "shop.example/hook", "ftp://shop.example/", "file:///etc/passwd", "http://", "https:///x",
        "http://shop.example:99999/", "http://shop.example:x/", "http://[::1", "http://me:pw@shop.example/",
        "http://me@shop.example/", "http://shop.example/a\r\nHost: evil", "http://shop.example/a b",
        "http://shop.example/\x00", "http://" + "a" * 9_000, "http://" + "ü" * 80 + "/", "http://a..ü/",
    ],
)  # fmt: skip
def test_what_is_no_url_to_post_to_is_given_up_at_once(url: Any) -> None:
    with pytest.raises(DeadLetter, match=r"^url: "):
        target_of(url)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.8.8.8", "169.254.169.254", "172.16.0.1",
        "192.0.2.1", "192.168.1.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:7f00:1", "64:ff9b::7f00:1",
        "64:ff9b:1::1", "2002:7f00:1::", "2001:db8::1", "fc00::1", "fd12::1", "fe80::1", "fe80::1%eth0",
        "fec0::1", "ff02::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_of_the_open_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::"],
)
def test_addresses_that_are(address: str) -> None:
    assert is_public(address)
