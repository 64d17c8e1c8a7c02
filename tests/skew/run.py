"""What two releases are tried with. Bytes are never wrong; what both understand is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.daemon import eventually, temporary_directories
from tests.support.outside import DaemonProcess
from tests.support.ports import free_ports
from tests.support.redis_servers import RedisServer

VISITOR: Final = Path(__file__).with_name("visitor.py")
COUNT: Final = 12
TIERS: Final = ("ram", "shm", "disk")
#: How a client reaches a daemon: over the local socket and the index; over TCP and the data socket;
#: or over gRPC alone, where the daemon has no data socket.
ROUTES: Final = ("local", "data", "grpc")


@dataclass(frozen=True)
class Release:
    """A version of prefixd, by its interpreter. `options` come before a program that it runs."""

    name: str
    python: str
    options: tuple[str, ...] = ()

    def visit(self, *arguments: object) -> Any:
        """Run the visitor, and return what it says. Raises RuntimeError if it fails."""
        environment = {name: at for name, at in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, *self.options, str(VISITOR), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd="/",
            env=environment,
        )
        if done.returncode:
            raise RuntimeError(f"a client of {self.name} failed:\n{done.stderr[-4000:]}")
        return json.loads(done.stdout)


@dataclass
class Report:
    """What was tried: a line each, and what was not as promised."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def add(self, what: str, *, promised: bool, **found: Any) -> None:
        self.lines.append({"what": what, "as promised": promised, **found})
        if not promised:
            self.broken.append(what)


@contextmanager
def daemon_of(
    release: Release, *flags: str, directories: tuple[Path, Path] | None = None
) -> Iterator[tuple[DaemonProcess, str]]:
    """A daemon of this release with all tiers, and its address over TCP."""
    with ExitStack() as stack:
        directory, shm = directories or stack.enter_context(temporary_directories())
        (port,) = free_ports(1)
        budgets = ("--ram.budget=2MiB", "--shm.budget=2MiB", "--disk.budget=8MiB")
        slabs = ("--ram.slab=4KiB", "--shm.slab=4KiB", "--disk.slab=4KiB")
        tcp = f"--server.tcp=127.0.0.1:{port}"
        daemon = DaemonProcess(
            directory, shm, (*budgets, *slabs, "--server.staging=1MiB", tcp, *flags)
        )
        daemon._command[0] = release.python
        with daemon:
            yield daemon, f"127.0.0.1:{port}"


def try_clients(
    report: Report,
    daemons: Release,
    clients: Release,
    routes: Sequence[str] = ROUTES,
    tiers: Sequence[str] = TIERS,
) -> None:
    """Clients of one release with a daemon of the other, by these routes and in these tiers; and
    what each then reads of what the other saved."""
    for route in routes:
        flags = ["--server.data="] if route == "grpc" else []
        with daemon_of(daemons, *flags) as (daemon, tcp):
            at = daemon.address if route == "local" else tcp
            for number, tier in enumerate(tiers):
                for seed, saves, restores in (
                    (2 * number, clients, daemons),
                    (2 * number + 1, daemons, clients),
                ):
                    saved = saves.visit("save", at, route, seed, COUNT, tier)
                    found = restores.visit("restore", at, route, seed, COUNT, tier)
                    whole = found["run"] == found["found"] == COUNT
                    report.add(
                        f"{saves.name} saves, {restores.name} restores, daemon of {daemons.name}: "
                        f"{route}, {tier}",
                        promised=whole and not found["wrong"],
                        saved=saved["statuses"],
                        found=found["found"],
                        rpcs=found["rpcs"],
                        wrong=found["wrong"],
                        failures=saved["failures"] | found["failures"],
                    )


def try_keys(report: Report, one: Release, other: Release) -> None:
    """The same tokens have the same keys in both."""
    keys = [release.visit("keys")["keys"] for release in (one, other)]
    report.add("keys of a namespace and tokens", promised=keys[0] == keys[1], keys=len(keys[0]))


def try_files(report: Report, before: Release, after: Release, *, kept: bool) -> None:
    """A daemon of one release takes over the tiers of the other. `kept`: what is durable has to be
    there; else it may be, and is never wrong."""
    for ends in ("stopped", "killed"):
        with temporary_directories() as directories:
            with daemon_of(before, directories=directories) as (daemon, _):
                for seed, tier in enumerate(TIERS):
                    before.visit("save", daemon.address, "local", seed, COUNT, tier)
                if ends == "killed":
                    daemon.kill()
            with daemon_of(after, directories=directories) as (daemon, _):
                for seed, tier in enumerate(TIERS):
                    told = after.visit("restore", daemon.address, "local", seed, COUNT, tier)
                    durable = kept and tier != "ram"
                    report.add(
                        f"{after.name} opens what {before.name} left ({ends}): {tier}",
                        promised=not told["wrong"] and (told["found"] == COUNT or not durable),
                        found=told["found"],
                        wrong=told["wrong"],
                    )


def try_fleet(report: Report, releases: Sequence[Release]) -> None:
    """A node of each release on one engine: each saves what the other then searches."""
    if shutil.which("redis-server") is None:
        report.lines.append({"what": "a fleet of both", "skipped": "no redis-server"})
        return
    for payloads in ("engine", "nodes"):
        with ExitStack() as stack:
            directory, _ = stack.enter_context(temporary_directories())
            engine = RedisServer(
                directory / "redis", "--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl"
            )
            stack.callback(engine.kill)
            engine.start()
            nodes = []
            for release in releases:
                (port,) = free_ports(1)
                flags = [
                    f"--shared.engine={engine.url}", f"--shared.payloads={payloads}",
                    "--shared.write=all",
                ]  # fmt: skip
                if payloads == "nodes":
                    flags += [
                        f"--shared.address=127.0.0.1:{port}",
                        f"--server.tcp=127.0.0.1:{port}",
                    ]
                nodes.append(stack.enter_context(daemon_of(release, *flags))[0])
            for seed, (saver, searcher) in enumerate(((0, 1), (1, 0))):
                releases[saver].visit("save", nodes[saver].address, "local", seed, COUNT, "ram")

                def offered(node: DaemonProcess = nodes[saver]) -> bool:
                    with node.admin() as admin:
                        return admin.stats().shared["offered_entries"] >= COUNT

                eventually(offered)
                told = releases[searcher].visit(
                    "restore", nodes[searcher].address, "local", seed, COUNT, "ram"
                )
                report.add(
                    f"a node of {releases[searcher].name} searches what one of "
                    f"{releases[saver].name} offers: payloads = {payloads}",
                    promised=not told["wrong"],
                    found=told["found"],
                    wrong=told["wrong"],
                )


def run(previous: Release, this: Release) -> Report:
    """Everything, both ways."""
    report = Report()
    try_keys(report, previous, this)
    try_clients(report, daemons=this, clients=previous)
    try_clients(report, daemons=previous, clients=this)
    try_files(report, previous, this, kept=True)
    try_files(report, this, previous, kept=False)
    try_fleet(report, (previous, this))
    return report
