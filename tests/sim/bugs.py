"""Bugs that a simulation is worth nothing without finding: each replaces one named thing of the
code by something slightly wrong.

They are functions, not patches of text: a patch stops applying with the first edit nearby, where
a name that is gone fails at once, with its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from prefixd.client.local import arenas
from prefixd.server.api import sessions
from prefixd.server.core import reservations, saves, transition
from prefixd.server.core.effects import Effect, IndexDelete
from prefixd.server.runtime import committer, index, loop
from prefixd.tiers import arena_stores, ledger, records
from prefixd.tiers.store import Damaged, RecoveryBatch, StoreError


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace `owner.name` by what `make` makes of it."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _budget_arithmetic() -> Any:
    """A reservation that is given up stays booked."""

    def wrong(real: Any) -> Any:
        def cancel(self: Any, resident: Any) -> None:
            real(self, resident)
            self.reserved_bytes += resident.stored_bytes

        return cancel

    return _instead(ledger.Ledger, "cancel", wrong)


def _publish_before_verify() -> Any:
    """Whatever arrived is what was meant."""

    def wrong(real: Any) -> Any:
        def sealed(transition: Any, event: Any, blocking: Any) -> None:
            real(transition, replace(event, expected_crc32c=event.crc32c), blocking)

        return sealed

    return _instead(saves, "sealed", wrong)


def _record_before_data_sync() -> Any:
    """The record is durable before the bytes that it names."""

    def wrong(real: Any) -> Any:
        def apply(self: Any, sealed: Sequence[Any]) -> None:
            with mock.patch.object(self, "_sync_payloads"):
                real(self, sealed)
            if sealed:
                self._sync_payloads(sealed)

        return apply

    return _instead(arena_stores.DiskStore, "apply", wrong)


def _missed_waiter() -> Any:
    """Who waits for a save that comes to nothing is not told."""

    def wrong(real: Any) -> Any:
        def wake(self: Any, reservation: Any, *, saved: bool) -> None:
            if saved:
                real(self, reservation, saved=saved)

        return wake

    return _instead(transition.Transition, "wake", wrong)


def _room_reused_while_its_row_stands() -> Any:
    """An evicted entry stays listed."""
    return _instead(index.IndexWriter, "delete", lambda _real: lambda _self, _key: True)


def _row_removed_after_reuse() -> Any:
    """Rows go some time after their entries."""

    def wrong(real: Any) -> Any:
        def change_index(self: Any, effects: list[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, IndexDelete):
                    later = asyncio.get_running_loop().call_later
                    later(0.005, lambda key=effect.key: self.index.delete(key))
            real(self, [one for one in effects if not isinstance(one, IndexDelete)])

        return change_index

    return _instead(loop.Core, "_change_index", wrong)


def _stale_secret_accepted() -> Any:
    """A secret is not looked at."""
    return _instead(sessions, "compare_digest", lambda _real: lambda _one, _other: True)


def _pin_leak() -> Any:
    """What a session held when it ended stays pinned."""

    def wrong(real: Any) -> Any:
        def unpin(self: Any, claim: int, session: Any, entry: Any) -> None:
            if session.session in self.tables.sessions:
                real(self, claim, session, entry)

        return unpin

    return _instead(transition.Transition, "unpin", wrong)


def _wrong_restart_order() -> Any:
    """What survived is adopted the most recent first."""

    def wrong(real: Any) -> Any:
        def recover(self: Any) -> Iterator[RecoveryBatch]:
            for batch in real(self):
                yield RecoveryBatch(batch.entries[::-1], batch.dropped)

        return recover

    return _instead(arena_stores.RecordedStore, "recover", wrong)


def _swallowed_task_death() -> Any:
    """A thread that meets a failure ends, and nobody knows."""

    def wrong(real: Any) -> Any:
        def run(self: Any) -> None:
            try:
                with mock.patch.object(self, "_attempt", lambda step: step()):
                    real(self)
            except StoreError:
                return

        return run

    return _instead(committer.Committer, "_run", wrong)


def _damage_taken_for_failure() -> Any:
    """Bytes that are not those that were saved count as unreadable for now."""

    def wrong(real: Any) -> Any:
        def verify_steps(self: Any, entry: Any, payload_crc32c: int) -> Iterator[int]:
            try:
                yield from real(self, entry, payload_crc32c)
            except Damaged as problem:
                raise StoreError(str(problem)) from None

        return verify_steps

    return _instead(arena_stores.DiskStore, "verify_steps", wrong)


def _failure_taken_for_damage() -> Any:
    """Bytes that can't be read now count as lost."""

    def wrong(real: Any) -> Any:
        def verify_steps(self: Any, entry: Any, payload_crc32c: int) -> Iterator[int]:
            try:
                yield from real(self, entry, payload_crc32c)
            except StoreError as problem:
                raise Damaged(str(problem)) from None

        return verify_steps

    return _instead(arena_stores.DiskStore, "verify_steps", wrong)


def _incarnation_not_checked() -> Any:
    """A client believes the rows of an earlier start whatever wrote to the arena since."""
    return _instead(arenas.MappedArena, "written_by", lambda _real: lambda _self, _start: True)


def _saves_while_it_recovers() -> Any:
    """A tier takes saves before all that it holds is known."""

    def wrong(real: Any) -> Any:
        def make_room(transition: Any, job: Any, coming: Any) -> Any:
            with mock.patch.object(transition.tables, "closed", {}):
                return real(transition, job, coming)

        return make_room

    return _instead(reservations, "make_room", wrong)


def _record_outlives_its_entry() -> Any:
    """What left is not erased."""
    return _instead(records.Records, "forget", lambda _real: lambda _self, _entries: None)


def _batch_believed_for_its_first() -> Any:
    """Of a batch that is sealed as one the first checksum stands for all."""

    def wrong(real: Any) -> Any:
        def sealed(transition: Any, event: Any, blocking: Any) -> None:
            if event.crc32c[0] == event.expected_crc32c[0]:
                event = replace(event, expected_crc32c=event.crc32c)
            real(transition, event, blocking)

        return sealed

    return _instead(saves, "sealed", wrong)


#: By name: what breaks the code.
BUGS: Final[dict[str, Callable[[], Any]]] = {
    "budget arithmetic": _budget_arithmetic,
    "publish before verify": _publish_before_verify,
    "record before data sync": _record_before_data_sync,
    "missed waiter": _missed_waiter,
    "room reused while its row stands": _room_reused_while_its_row_stands,
    "row removed after reuse": _row_removed_after_reuse,
    "stale secret accepted": _stale_secret_accepted,
    "pin leak": _pin_leak,
    "wrong restart order": _wrong_restart_order,
    "swallowed task death": _swallowed_task_death,
    "damage taken for failure": _damage_taken_for_failure,
    "failure taken for damage": _failure_taken_for_damage,
    "saves while it recovers": _saves_while_it_recovers,
    "record outlives its entry": _record_outlives_its_entry,
    "batch believed for its first": _batch_believed_for_its_first,
    "incarnation not checked": _incarnation_not_checked,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The code has this bug meanwhile."""
    with BUGS[name]():
        yield
