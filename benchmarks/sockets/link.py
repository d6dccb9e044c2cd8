"""Two network namespaces joined by one link of a given rate, shaped by `tbf` in both directions.

Needs the right to make namespaces (root, or CAP_NET_ADMIN and CAP_SYS_ADMIN), `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BURST_BYTES = {1: 128_000, 10: 1_280_000}
"""About a millisecond of each rate, in Gbit/s."""


@dataclass(frozen=True)
class End:
    """One end of the link: its namespace, interface and address."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command inside the namespace."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def command_of_host(self, *words: str) -> list[str]:
        """A command inside the namespace, on a host of its name: its ranks share memory with each
        other alone.
        """
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.namespace)
        return self.command(*named, *words)


def why_not() -> str | None:
    """The reason why this machine has no shaped link; None where it has."""
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "hostname": "hostname"}
    for tool, package in packages.items():
        if shutil.which(tool) is None:
            return f"the command {tool} is not installed (package {package})"
    name = f"plait-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no right to make a network namespace: {made.stderr.strip()}"
    _run("ip", "netns", "delete", name)
    return None


@contextmanager
def link(gigabits: int) -> Iterator[tuple[End, End]]:
    """Two namespaces and the link between them; both are taken away at the end."""
    number = os.getpid() % 10_000
    ends = tuple(
        End(f"plait{number}-{side}", f"pl{number}{side}", f"10.213.{number % 250}.{place}")
        for place, side in enumerate("ab", start=1)
    )
    one, other = ends
    made: list[str] = []
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
            made.append(end.namespace)
        _run("ip", "link", "add", one.interface, "type", "veth", "peer", "name", other.interface)
        for end in ends:
            _raise_end(end, gigabits)
        yield one, other
    finally:
        for namespace in made:  # its interface goes with it
            _run("ip", "netns", "delete", namespace)


def _raise_end(end: End, gigabits: int) -> None:
    """Give an end its address and its rate."""
    _run("ip", "link", "set", end.interface, "netns", end.namespace)
    _run(*end.command("ip", "addr", "add", f"{end.address}/24", "dev", end.interface))
    _run(*end.command("ip", "link", "set", end.interface, "up"))
    _run(*end.command("ip", "link", "set", "lo", "up"))
    shape = ("tc", "qdisc", "add", "dev", end.interface, "root", "tbf", "rate", f"{gigabits}gbit")
    burst = str(BURST_BYTES.get(gigabits, 128_000 * gigabits))
    _run(*end.command(*shape, "burst", burst, "latency", "50ms"))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
