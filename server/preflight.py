"""The start without the start: everything that a start would refuse, found before it touches
anything, and all of it at once.

What is only in use at the moment (a port, a directory, a socket) is left to the start itself: a
check beside a running daemon is good, and a start may succeed another time.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator

from ..proto.errors import ConfigError
from ..proto.vocabulary import Tier
from . import assembly
from .config.budgets import Plan
from .config.loading import unusable
from .config.machine import make_source
from .config.options import Config
from .credentials import tls_problems, tokens_of


def problems(config: Config, plan: Plan | None) -> Iterator[str]:
    """A sentence for each, which begins with the option. `plan`: None if there is none."""
    yield from unusable(config, plan)
    yield from tls_problems(config.server)
    yield from _refusal(lambda: tokens_of(config))
    yield from _refusal(lambda: assembly.check_sharing(config))
    if config.shared.engine and plan and Tier[config.shared.tier.upper()] not in plan.tiers:
        yield f"shared.tier: the tier {config.shared.tier} has no budget"
    yield from _refusal(lambda: make_source(config.pressure.source))
    yield from _refusal(lambda: _check_tracing(config))
    server = config.server
    for option, address in (
        ("server.tcp", server.tcp),
        ("server.data", "" if server.data == "auto" else server.data),
        ("server.metrics", server.metrics),
    ):
        if address and (why := _not_here(address)):
            yield f"{option}: can't listen on {address}: {why}"


def _refusal(check: Callable[[], object]) -> Iterator[str]:
    """The sentence of the ConfigError that `check` raises, if it does."""
    try:
        check()
    except ConfigError as problem:
        yield str(problem)


def _check_tracing(config: Config) -> None:
    with assembly.tracing_of(config):
        pass


def _not_here(address: str) -> str:
    """Why no process of this user can listen at an address, even if nobody else does."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(place)
    except OSError as problem:
        return "" if problem.errno == errno.EADDRINUSE else problem.strerror or str(problem)
    return ""
