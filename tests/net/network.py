"""Hosts with addresses of their own, wired to one bridge: network namespaces, veth pairs, nftables.

All names begin with a prefix and the process id, so that two runs do not meet, and what a killed run left
behind is removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.mesh.peer import Orders
from tests.mesh.processes import Peer

PREFIX = "fluxnet"
PORT = 7_946
_HOSTS = Path("/etc/netns")


def lacking() -> str:
    """What keeps this machine from making the network; "" if nothing does."""
    if os.geteuid() != 0:
        return "it takes root"
    for tool, package in (("ip", "iproute2"), ("nft", "nftables")):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package {package})"
    return ""


def call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Host:
    """One machine of the network."""

    def __init__(self, space: str, number: int) -> None:
        self.space = space
        self.number = number
        self.address = f"10.77.0.{10 + number}"

    def run(self, *words: str) -> str:
        return call("ip", "netns", "exec", self.space, *words)

    def drop(self, *matches: str) -> None:
        """Drop what comes in and matches, besides what is dropped already."""
        for match in matches:
            self.run("nft", f"add rule inet faults incoming {match} drop")

    def drop_from(self, others: Iterable[Host], what: str = "") -> None:
        self.drop(*(f"ip saddr {other.address} {what}" for other in others))

    def heal(self) -> None:
        self.run("nft", "flush chain inet faults incoming")

    def peer(self, worker_id: str, **orders: object) -> Peer:
        """A node on this machine, not started."""
        told = Orders(worker_id=worker_id, epoch=1, port=PORT, host=self.address, **orders)  # type: ignore[arg-type]
        return Peer(told, prefix=("ip", "netns", "exec", self.space))

    def knows(self, names: dict[str, str]) -> None:
        """Put these names into its hosts file. Before the first call the file has to be there already:
        `ip netns exec` mounts it over /etc/hosts when a process starts."""
        text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items())
        folder = _HOSTS / self.space
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(text)


class Network:
    """So many hosts on one bridge, which is in a namespace of its own."""

    def __init__(self, number: int) -> None:
        self._bridge = f"{PREFIX}-{os.getpid()}-bridge"
        self.hosts = [Host(f"{PREFIX}-{os.getpid()}-{n}", n) for n in range(number)]

    def __enter__(self) -> Network:
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        call("ip", "netns", "add", self._bridge)
        on_bridge = ("ip", "-n", self._bridge)
        call(*on_bridge, "link", "add", "wire", "type", "bridge")
        call(*on_bridge, "link", "set", "wire", "up")
        for host in self.hosts:
            call("ip", "netns", "add", host.space)
            port = f"port{host.number}"
            call(
                "ip",
                "-n",
                host.space,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                port,
                "netns",
                self._bridge,
            )
            call(*on_bridge, "link", "set", port, "master", "wire", "up")
            call("ip", "-n", host.space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            call("ip", "-n", host.space, "link", "set", "eth0", "up")
            call("ip", "-n", host.space, "link", "set", "lo", "up")
            host.run("nft", "add table inet faults")
            host.run("nft", "add chain inet faults incoming { type filter hook input priority 0; }")

    def set_mtu(self, size: int) -> None:
        for host in self.hosts:
            call("ip", "-n", self._bridge, "link", "set", f"port{host.number}", "mtu", str(size))
            call("ip", "-n", host.space, "link", "set", "eth0", "mtu", str(size))

    def split(self, one: Iterable[Host], other: Iterable[Host]) -> None:
        """Nothing passes between these two groups."""
        one, other = list(one), list(other)
        for host in one:
            host.drop_from(other)
        for host in other:
            host.drop_from(one)

    def heal(self) -> None:
        for host in self.hosts:
            host.heal()

    def __exit__(self, *_: object) -> None:
        for space in (self._bridge, *(host.space for host in self.hosts)):
            _remove(space)


def remove_leftovers() -> None:
    """What runs have left whose process is gone."""
    for line in call("ip", "netns", "list").splitlines():
        space = line.split()[0] if line else ""
        parts = space.split("-")
        if parts[0] == PREFIX and len(parts) == 3 and not Path(f"/proc/{parts[1]}").exists():
            _remove(space)


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20, check=False)
    shutil.rmtree(_HOSTS / space, ignore_errors=True)
