"""The regions of the demo, and how far they are from each other.

The round trips are rough figures, rounded to 5 ms, of the class that providers of data centres and public
ping statistics give for those places over the ordinary internet. They are no measurement of ours, and nothing
but the demo goes by them. All five processes run on this machine; the delays are made by the weather of the
mesh (mesh/delays.py), half a round trip in each direction. The storage is one file, and has no delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fluxmesh.mesh.delays import write_weather
from fluxmesh.mesh.messages import Address

LOOPBACK: Final = "127.0.0.1"
REGIONS: Final = ("frankfurt", "virginia", "oregon", "singapore", "saopaulo")
BUSY: Final = ("frankfurt", "virginia")  # where the keys of most submissions belong
ROUND_TRIPS_MS: Final[Mapping[tuple[str, str], float]] = {
    ("frankfurt", "virginia"): 90,
    ("frankfurt", "oregon"): 145,
    ("frankfurt", "singapore"): 160,
    ("frankfurt", "saopaulo"): 200,
    ("virginia", "oregon"): 65,
    ("virginia", "singapore"): 220,
    ("virginia", "saopaulo"): 115,
    ("oregon", "singapore"): 165,
    ("oregon", "saopaulo"): 175,
    ("singapore", "saopaulo"): 325,
}


def round_trip_ms(one: str, other: str) -> float:
    """0 to oneself."""
    if one == other:
        return 0.0
    pair = (one, other) if (one, other) in ROUND_TRIPS_MS else (other, one)
    return ROUND_TRIPS_MS[pair]


def weather_of(region: str, ports: Mapping[str, int]) -> str:
    """What delays that region's packets to each of the others, as its environment takes it."""
    return write_weather(
        {
            Address(LOOPBACK, port): round_trip_ms(region, other) / 2
            for other, port in ports.items()
            if other != region
        }
    )


def others(region: str) -> Sequence[str]:
    return [other for other in REGIONS if other != region]
