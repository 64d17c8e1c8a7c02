"""Reads the configuration again while the daemon runs, and applies what can change live.

Everything else stays as it is until a restart, and is reported. An invalid configuration changes
nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import structlog

from ..proto import prefixd_pb2 as pb
from ..proto.errors import ConfigError
from .config import sources
from .config.budgets import smaller
from .config.options import Config
from .core.events import LimitsChanged
from .runtime.loop import Core
from .runtime.scrubbing import Scrubber

log = structlog.get_logger("prefixd.config")

#: Limits that the state checks each time. What is held beyond a lowered limit stays.
_LIMITS: Final = {
    "sessions.max_claims_per_session": "max_claims_per_session",
    "sessions.max_reservations_per_session": "max_reservations_per_session",
    "sessions.max_waiters": "max_waiters",
    "sessions.max_waited_keys": "max_waited_keys",
    "sessions.max_waited_keys_per_session": "max_waited_keys_per_session",
    "sessions.max_held_keys": "max_held_keys",
    "sessions.max_pinned_share": "max_pinned_share",
    "sessions.max_reserved_share": "max_reserved_share",
    "sessions.unwritten_ttl": "unwritten_ttl_ns",
}
_LEVEL: Final = "log.level"
_SCRUB_RATE: Final = "server.scrub_rate"


class FileChange(NamedTuple):
    """A file, by its option, whose content differs from what is in use. Holds no secrets."""

    option: str
    running: str
    configured: str


class FilesRead(NamedTuple):
    """The files that the configuration names, read again and found valid."""

    changes: Sequence[FileChange] = ()
    #: Puts them to use; call it on the loop.
    use: Callable[[], None] = lambda: None


class Reloader:
    """The configuration of a running daemon. Belongs to the event loop."""

    def __init__(
        self, config: Config, load: Callable[[], Config], core: Core, scrubber: Scrubber
    ) -> None:
        """`load` reads file, environment and flags again; raises ConfigError."""
        self._load = load
        self._core = core
        self._scrubber = scrubber
        #: option -> (as the file writes it, value)
        self._running = values(config)
        #: Reads the files that were named at the start, on a thread; raises ConfigError.
        self.read_files: Callable[[], FilesRead] = FilesRead

    async def configure(self, apply: bool) -> pb.ConfigureResponse:
        """Report what is configured differently by now and, with `apply`, apply what can change
        live. Raises ConfigError, and has changed nothing then."""
        # On a thread: a file on a hung device must not stop the loop.
        new = values(await asyncio.to_thread(self._load))
        response = pb.ConfigureResponse()
        live_options = []
        for option, (shown, _) in new.items():
            running, _ = self._running[option]
            if shown != running:
                live = self._is_live(option, new)
                response.changed.add(option=option, running=running, configured=shown, live=live)
                live_options += [option] * live
        response.warnings.extend(self._smaller(new))
        files = await asyncio.to_thread(self.read_files)
        named = {each.option for each in response.changed}
        for change in files.changes:
            if change.option not in named:  # a renamed file is read only after a restart
                response.changed.add(live=True, **change._asdict())
        if apply:
            files.use()
            self._apply(new, live_options)
        response.running.update({option: shown for option, (shown, _) in self._running.items()})
        return response

    def _smaller(self, new: dict[str, tuple[str, object]]) -> Iterator[str]:
        """Budgets with which a start would evict: tiers have their budgets from the configuration
        again, whatever they were resized to."""
        for tier, ledger in self._core.state.tables.ledgers.items():
            _, budget_bytes = new[f"{tier.label}.budget"]
            if not isinstance(budget_bytes, int) or not self._core.stores[tier].recorded:
                continue
            if 0 < budget_bytes < ledger.published_bytes:
                yield smaller(tier, budget_bytes, ledger.published_bytes)

    def _is_live(self, option: str, new: dict[str, tuple[str, object]]) -> bool:
        if option == _SCRUB_RATE:  # switching the scrubber on or off takes a restart
            return bool(new[option][1] and self._running[option][1])
        return option == _LEVEL or option in _LIMITS

    def _apply(self, new: dict[str, tuple[str, object]], options: list[str]) -> None:
        limits = []
        for option in options:
            _, value = new[option]
            if option == _LEVEL:
                logging.getLogger().setLevel(str(value).upper())
            elif option == _SCRUB_RATE:
                assert isinstance(value, int)
                self._scrubber.bytes_per_second = value
            else:
                assert isinstance(value, int | float)
                limits.append((_LIMITS[option], value))
            self._running[option] = new[option]
        if limits:
            self._core.post(LimitsChanged(tuple(limits), self._core.clock.now_ns()))

    def override(self, option: str, value: object) -> None:
        """Note that an operator changed a running option. The new value holds until the next start
        or the next reload that changes it."""
        self._running[option] = (sources.options(Config)[option].kind.show(value), value)

    async def reload(self) -> None:
        """What SIGHUP does; the outcome is in the log."""
        try:
            response = await self.configure(True)
        except ConfigError as problem:
            log.error("reload_refused", problem=str(problem))
            return
        for each in response.changed:
            event = "option_changed" if each.live else "option_needs_restart"
            log.info(event, option=each.option, before=each.running, now=each.configured)
        if not response.changed:
            log.info("nothing_to_reload")


def values(config: Config) -> dict[str, tuple[str, object]]:
    """Every option by its name in the file: how the file writes it, and its value."""
    found: dict[str, tuple[str, object]] = {}
    for name, option in sources.options(Config).items():
        value = option.value_in(config)
        found[name] = (option.kind.show(value), value)
    return found
