"""Bugs that the simulation has to find: each replaces one function of the package by a slightly
wrong one.

They patch names rather than text: a text patch breaks with any edit nearby, while a name that was
removed fails at once and says which.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

from prefixd.client.local import arenas, node
from prefixd.proto.payload import crc32c, views_of
from prefixd.server.api import service, session_streams
from prefixd.server.core import reservations, saves, tier_changes, transition
from prefixd.server.core.effects import Effect, IndexDelete
from prefixd.server.runtime import committer, index, loop
from prefixd.server.sharing import deletes
from prefixd.tiers import arena_stores, graves, ledger, records
from prefixd.tiers.store import Damaged, RecoveryBatch, StoreError


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    """Replace `owner.name` by `make(owner.name)`."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def _budget_arithmetic() -> Any:
    """The bytes of a cancelled reservation stay reserved."""

    def wrong(real: Any) -> Any:
        def cancel(self: Any, resident: Any) -> None:
            real(self, resident)
            self.reserved_bytes += resident.stored_bytes

        return cancel

    return _replaced(ledger.Ledger, "cancel", wrong)


def _publish_before_verify() -> Any:
    """Bytes are published even if they do not match the checksum that the client sent."""

    def wrong(real: Any) -> Any:
        def sealed(transition: Any, event: Any, blocking: Any) -> None:
            real(transition, replace(event, expected_crc32c=event.crc32c), blocking)

        return sealed

    return _replaced(saves, "sealed", wrong)


def _record_before_data_sync() -> Any:
    """The record is synced before the payload."""

    def wrong(real: Any) -> Any:
        def apply(self: Any, sealed: Sequence[Any]) -> None:
            with mock.patch.object(self, "_sync_payloads"):
                real(self, sealed)
            if sealed:
                self._sync_payloads(sealed)

        return apply

    return _replaced(arena_stores.DiskStore, "apply", wrong)


def _missed_waiter() -> Any:
    """Waiters are not woken when the save that they wait for fails."""

    def wrong(real: Any) -> Any:
        def wake(self: Any, reservation: Any, *, saved: bool) -> None:
            if saved:
                real(self, reservation, saved=saved)

        return wake

    return _replaced(transition.Transition, "wake", wrong)


def _room_reused_while_its_row_stands() -> Any:
    """The index row of an evicted entry stays."""
    return _replaced(index.IndexWriter, "delete_all", lambda _real: lambda _self, _keys: None)


def _row_removed_after_reuse() -> Any:
    """Index rows are removed some time after their entries."""

    def wrong(real: Any) -> Any:
        def change_index(self: Any, effects: list[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, IndexDelete):
                    later = asyncio.get_running_loop().call_later
                    keys = [entry.key for entry in effect.entries]
                    later(0.005, lambda keys=keys: self.index.delete_all(keys))
            real(self, [one for one in effects if not isinstance(one, IndexDelete)])

        return change_index

    return _replaced(loop.Core, "_change_index", wrong)


def _stale_secret_accepted() -> Any:
    """Session secrets are not checked."""
    return _replaced(session_streams, "compare_digest", lambda _real: lambda _one, _other: True)


def _pin_leak() -> Any:
    """Entries that a session had claimed stay pinned after it ends."""

    def wrong(real: Any) -> Any:
        def unpin(self: Any, claim: int, session: Any, entry: Any) -> None:
            if session.session in self.tables.sessions:
                real(self, claim, session, entry)

        return unpin

    return _replaced(transition.Transition, "unpin", wrong)


def _wrong_restart_order() -> Any:
    """Recovery restores the most recently used entries first."""

    def wrong(real: Any) -> Any:
        def recover(self: Any) -> Iterator[RecoveryBatch]:
            for batch in real(self):
                yield RecoveryBatch(batch.entries[::-1], batch.dropped)

        return recover

    return _replaced(arena_stores.RecordedStore, "recover", wrong)


def _swallowed_task_death() -> Any:
    """A thread ends on a store error without reporting it."""

    def wrong(real: Any) -> Any:
        def run(self: Any) -> None:
            try:
                with mock.patch.object(self, "_attempt", lambda step: step()):
                    real(self)
            except StoreError:
                return

        return run

    return _replaced(committer.Committer, "_run", wrong)


def _damage_taken_for_failure() -> Any:
    """Damaged bytes are treated as a temporary read error."""

    def wrong(real: Any) -> Any:
        def verify_steps(self: Any, entry: Any, payload_crc32c: int) -> Iterator[int]:
            try:
                yield from real(self, entry, payload_crc32c)
            except Damaged as problem:
                raise StoreError(str(problem)) from None

        return verify_steps

    return _replaced(arena_stores.DiskStore, "verify_steps", wrong)


def _failure_taken_for_damage() -> Any:
    """A temporary read error is treated as damage."""

    def wrong(real: Any) -> Any:
        def verify_steps(self: Any, entry: Any, payload_crc32c: int) -> Iterator[int]:
            try:
                yield from real(self, entry, payload_crc32c)
            except StoreError as problem:
                raise Damaged(str(problem)) from None

        return verify_steps

    return _replaced(arena_stores.DiskStore, "verify_steps", wrong)


def _incarnation_not_checked() -> Any:
    """A client trusts index rows of an earlier start even if a later one wrote to the arena."""
    return _replaced(arenas.MappedArena, "written_by", lambda _real: lambda *_: True)


def _tier_decides() -> Any:
    """A recovered record replaces a later save of other bytes in a tier that survives less."""
    return _replaced(
        tier_changes,
        "_outlives",
        lambda _real: lambda _record, there, tier: there.tier < tier,
    )


def _saves_while_it_recovers() -> Any:
    """A tier accepts saves before its recovery is complete."""

    def wrong(real: Any) -> Any:
        def make_room(transition: Any, job: Any, coming: Any) -> Any:
            with mock.patch.object(transition.tables, "closed", {}):
                return real(transition, job, coming)

        return make_room

    return _replaced(reservations, "make_room", wrong)


def _record_outlives_its_entry() -> Any:
    """Records of removed entries are not erased."""
    return _replaced(records.Records, "forget", lambda _real: lambda _self, _entries: None)


def _batch_believed_for_its_first() -> Any:
    """Only the first checksum of a sealed batch is checked."""

    def wrong(real: Any) -> Any:
        def sealed(transition: Any, event: Any, blocking: Any) -> None:
            if event.crc32c[0] == event.expected_crc32c[0]:
                event = replace(event, expected_crc32c=event.crc32c)
            real(transition, event, blocking)

        return sealed

    return _replaced(saves, "sealed", wrong)


def _beyond_the_budget_is_dropped() -> Any:
    """A start takes only the configured size of a file that was enlarged."""

    def wrong(real: Any) -> Any:
        def recover(self: Any) -> Iterator[RecoveryBatch]:
            end = self._slabs_of(self.max_budget_bytes // 2) * self.slab_bytes
            for batch in real(self):
                kept = [one for one in batch.entries if sum(one.record.location[-2:]) <= end]
                yield RecoveryBatch(kept, batch.dropped, batch.following)

        return recover

    return _replaced(arena_stores.RecordedStore, "recover", wrong)


def _wrong_end_evicted_at_a_start() -> Any:
    """A start that finds too much evicts the most recently used entries."""

    def wrong(real: Any) -> Any:
        def resize(transition: Any, asked: Any) -> Any:
            tables = transition.tables
            ledger = tables.ledgers[asked.tier]

            def latest(**_: Any) -> Any:
                *_, key = [None, *ledger.victims()]
                if key is not None:
                    ledger.remove(tables.entries[key])
                return key

            if asked.tier not in tables.closed:
                return real(transition, asked)
            with mock.patch.object(ledger, "next_victim", latest):
                return real(transition, asked)

        return resize

    return _replaced(tier_changes, "resize", wrong)


def _deleted_before_it_is_durable() -> Any:
    """A delete is answered before the record is erased."""

    def wrong(_real: Any) -> Any:
        async def durable_deletes(*_: Any) -> bool:
            return True

        return durable_deletes

    return _replaced(service, "durable_deletes", wrong)


def _deletes_of_a_recovery_are_forgotten() -> Any:
    """Keys that are deleted while a tier recovers are not noted beside its records."""
    return _replaced(graves.Graves, "add", lambda _real: lambda *_: None)


def _hung_tier_is_not_marked() -> Any:
    """The index does not say that a tier's device hangs."""
    return _replaced(index.IndexWriter, "set_hanging", lambda _real: lambda _self, _tiers: None)


def _clock_is_believed() -> Any:
    """A start does not go on from the newest generation that a tier has recorded."""
    return _replaced(arena_stores.RecordedStore, "newest", lambda _real: property(lambda _: 0))


def _device_awaited_by_the_caller() -> Any:
    """A read in place waits for the device in the caller's thread."""

    def wrong(_real: Any) -> Any:
        def cached(self: Any, start: int, room: Any, crc: int, *, check: bool) -> tuple[int, int]:
            piece = views_of(room)[0]
            read_bytes = arenas.os.preadv(self._fd, [piece], start)
            return read_bytes, crc32c(piece[:read_bytes], crc) if check else crc

        return cached

    return _replaced(arenas.FileArena, "_cached", wrong)


def _buffer_filled_after_its_call() -> Any:
    """What a disk brings too late goes into the caller's buffer."""

    def wrong(real: Any) -> Any:
        def read(self: Any, location: Any, target: Any, deadline: Any, *, check: bool) -> Any:
            def fill() -> None:
                arenas.os.preadv(self._fd, views_of(target)[:1], location[0])

            try:
                return real(self, location, target, deadline, check=check)
            except TimeoutError:
                self._reads._threads.submit(fill)
                raise

        return read

    return _replaced(arenas.FileArena, "_read", wrong)


def _arenas_of_the_dead_are_kept() -> Any:
    """A client keeps the arenas of a session that was replaced."""
    return _replaced(node.LocalNode, "let_go", lambda _real: lambda _self: None)


#: Functions that plant each bug, by name.
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
    "beyond the budget is dropped": _beyond_the_budget_is_dropped,
    "wrong end evicted at a start": _wrong_end_evicted_at_a_start,
    "tier decides": _tier_decides,
    "deleted before it is durable": _deleted_before_it_is_durable,
    "deletes of a recovery are forgotten": _deletes_of_a_recovery_are_forgotten,
    "hung tier is not marked": _hung_tier_is_not_marked,
    "clock is believed": _clock_is_believed,
    "device awaited by the caller": _device_awaited_by_the_caller,
    "buffer filled after its call": _buffer_filled_after_its_call,
    "arenas of the dead are kept": _arenas_of_the_dead_are_kept,
}


# ---- of a fleet (`tests.sim.fleet`)


def _lost_deletes_stay_lost() -> Any:
    """Nobody puts back what the engine lost of its log."""

    def wrong(_real: Any) -> Any:
        async def put_back(_self: Any) -> None:
            return

        return put_back

    return _replaced(deletes.Deletes, "_put_back", wrong)


def _claimed_stays() -> Any:
    """A delete of another node leaves what is claimed."""
    return _replaced(
        deletes, "DeleteAsked", lambda real: lambda *args, **_: real(*args, claimed=False)
    )


FLEET_BUGS: Final[dict[str, Callable[[], Any]]] = {
    "lost deletes stay lost": _lost_deletes_stay_lost,
    "claimed stays": _claimed_stays,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant this bug in the package's code."""
    with (BUGS | FLEET_BUGS)[name]():
        yield
