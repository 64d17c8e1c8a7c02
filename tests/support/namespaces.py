"""A private network: hosts are network namespaces on one switch, and links can be cut silently or
made slow. Needs root. Does not touch the machine's own network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest

_NET: Final = "10.77.0"
#: The MAC address of no host.
_UNUSED_MAC: Final = "02:00:00:00:00:fe"
_RELAY: Final = Path(__file__).with_name("slow_link.py")


@cache
def why_unavailable() -> str:
    """Why a network can't be made here, or an empty string if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs ip and tc (Debian: iproute2)"
    name = f"pd-{os.getpid()}-try"
    done = _try("ip", "netns", "add", name)
    if done.returncode == 0:
        done = _try("ip", "-n", name, "link", "add", "t0", "type", "veth", "peer", "name", "t1")
        _try("ip", "netns", "del", name)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _run(*command: str) -> None:
    done = _try(*command)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A namespace with one link to the switch. A command behind `prefix` runs in it."""

    def __init__(self, network: Network, number: int) -> None:
        self.address: Final = f"{_NET}.{number}"
        self._space: Final = f"{network.name}-{number}"
        self._switch: Final = network.switch
        self._port: Final = f"p{number}"
        self.prefix: Final = ("ip", "netns", "exec", self._space)
        #: The file that `setns` enters the namespace with.
        self.space: Final = f"/run/netns/{self._space}"

    def cut(self) -> None:
        """Silently drop everything between this host and all others."""
        _run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        _run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def cut_from(self, other: Host) -> None:
        """Silently drop everything between these two hosts. The others still reach both."""
        for here, there in ((self, other), (other, self)):
            neighbour = (there.address, "lladdr", _UNUSED_MAC, "dev", "eth0", "nud", "permanent")
            _run("ip", "-n", here._space, "neigh", "replace", *neighbour)

    def mend_to(self, other: Host) -> None:
        for here, there in ((self, other), (other, self)):
            _run("ip", "-n", here._space, "neigh", "del", there.address, "dev", "eth0")


class Network:
    """A switch with its hosts. `network` makes and removes it."""

    def __init__(self, stack: ExitStack) -> None:
        self.name: Final = f"pd-{os.getpid()}"
        self.switch: Final = f"{self.name}-0"
        self._stack = stack
        self._hosts = 0
        self._space(self.switch)
        self._on_switch("link", "add", "br0", "type", "bridge")
        self._on_switch("addr", "add", f"{_NET}.254/24", "dev", "br0")
        self._on_switch("link", "set", "br0", "up")
        #: In front of a command that runs on no host but reaches every host.
        self.prefix: Final = ("ip", "netns", "exec", self.switch)

    def host(self, *, delay_ms: float = 0, rate_mbit: float = 0) -> Host:
        """Add a host. `delay_ms`, `rate_mbit`: of each direction of its link; a rate of 0 is
        unlimited, and a link without delay has no rate."""
        self._hosts += 1
        made = Host(self, self._hosts)
        port, host_end = made._port, f"f{self._hosts}"
        self._space(made._space)
        if not delay_ms:
            self._pair(port, made)
        else:
            # Two links lead from the host to the switch, with the relay between them.
            self._pair(host_end, made)
            self._on_switch("link", "add", port, "type", "veth", "peer", "name", f"r{self._hosts}")
            self._on_switch("link", "set", f"r{self._hosts}", "up")
            self._on_switch("link", "set", port, "master", "br0", "up")
            _run(*made.prefix, sys.executable, str(_RELAY), "plain", "eth0")
            _run(*self.prefix, sys.executable, str(_RELAY), "plain", port)
            for end in (host_end, f"r{self._hosts}"):
                if rate_mbit:
                    shape = ("rate", f"{rate_mbit:g}mbit", "burst", "32kbit", "latency", "400ms")
                    _run("tc", "-n", self.switch, "qdisc", "add", "dev", end, "root", "tbf", *shape)
            self._relay(host_end, f"r{self._hosts}", delay_ms)
        if not delay_ms:
            self._on_switch("link", "set", port, "master", "br0", "up")
        _run("ip", "-n", made._space, "addr", "add", f"{made.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            _run("ip", "-n", made._space, "link", "set", interface, "up")
        return made

    def _space(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._stack.callback(_run, "ip", "netns", "del", name)

    def _pair(self, end: str, host: Host) -> None:
        peer = ("peer", "name", "eth0", "netns", host._space)
        self._on_switch("link", "add", end, "type", "veth", *peer)
        self._on_switch("link", "set", end, "up")

    def _on_switch(self, *arguments: str) -> None:
        _run("ip", "-n", self.switch, *arguments)

    def _relay(self, one: str, other: str, delay_ms: float) -> None:
        command = [*self.prefix, sys.executable, str(_RELAY), "relay", one, other, str(delay_ms)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        self._stack.callback(process.stdout.close)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout.readline() == b"relaying\n"


@contextmanager
def network() -> Iterator[Network]:
    """A network for one test. Skips the test where it can't be made."""
    if why := why_unavailable():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Network(stack)
