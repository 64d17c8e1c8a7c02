"""Makes deletes reach every node: reads the fleet's log of deletes, and appends this node's to it
(`Deletes`). And makes them reach the shared engine (`Withdrawals`).

A node reads the log every `SharedStore.log_every_s`. What it has under a deleted key goes, claimed
or not. When that is durable it notes how far it is, in each tier with records: after a restart, or
after any time without the engine, it goes on from there. What it saves in the meantime goes, too: a
save counts as older than a delete that its node did not know of.

Where the log does not have what it noted, the node knows that it may have missed deletes. If the
engine only keeps later records it drops everything. If the engine has lost the log, or its end, the
nodes that remember it put back the latest records; what none remembers is lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, Final, TypeVar

import structlog

from ...proto.errors import LimitReached, PrefixdError
from ...proto.keys import Key
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.namespaces import tag_of
from ...proto.vocabulary import DeleteStatus, Tier
from ...tiers.store import Store
from ..core.effects import DeleteAnswer
from ..core.events import DeleteAsked
from ..core.shares import Holder, Shares
from ..runtime.loop import Core
from ..runtime.recovery import durable_deletes
from ..runtime.rounds import Slices
from .delete_log import NO_STAMP, DeleteLog, FleetDelete, LogPace, records_of
from .engine_link import EngineLink
from .engine_store import LogPage, NodeState

T = TypeVar("T")
log = structlog.get_logger("prefixd.sharing")

#: Records that may wait for the engine: some megabytes.
MAX_WAITING: Final = 4_096
#: How long the engine may take for a part of the log.
_LOG_WITHIN_S: Final = 2.0
#: How long the tiers may take to erase what was deleted, before the next look at the log.
_ERASED_WITHIN_S: Final = 1.0
#: Between two attempts at what is left to do.
_AGAIN_S: Final = 0.2
#: Before this node puts lost records back, up to this: another node may do it first.
_PUT_BACK_WITHIN_S: Final = 1.0
#: Records that are put back before the log is read again.
_PUT_BACK_AT_ONCE: Final = 128
#: Searches wait for the first reading of the log as long as fewer attempts at it have failed.
_PATIENCE: Final = 2
#: Deleted keys that may wait until that is durable: 100 bytes each.
MAX_KEYS: Final = 2**20
_DELETED_AT_ONCE: Final = 128
#: In the place of a namespace: all that is here.
_EVERYTHING: Final = ""
#: A number after any record's.
_LATER: Final = 2**63

#: Deleted keys that the engine may still have: some megabytes.
MAX_HELD: Final = 65_536
#: How long the engine may take to drop a batch in the background, and when it is asked again.
_DROPPED_WITHIN_S: Final = 10.0
_DROPPED_AGAIN_S: Final = 1.0


class Withdrawals:
    """Takes deleted entries back from the shared engine, where every node would find them. Belongs
    to the event loop.

    Without this, the next search of a deleted key would fetch it back. A key is held from before
    its entry is deleted until the engine has dropped it: meanwhile this node doesn't fetch it.
    Where the engine does not answer it is asked again, as long as this daemon lives.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        #: Deleted keys that the engine may still have, the oldest first, and who deletes them.
        self._held: dict[Key, Holder] = {}
        self._shares: Final = Shares("deletes that the shared engine has not done", MAX_HELD)
        self._work = asyncio.Event()

    def __contains__(self, key: Key) -> bool:
        """Whether the key is held."""
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, keys: Sequence[Key], holder: Holder = Holder()) -> None:  # noqa: B008  # immutable
        """Do not fetch these keys any more, as they are about to be deleted. Raises LimitReached,
        and then holds none."""
        new = dict.fromkeys(key for key in keys if key not in self._held)
        if len(new) > self._shares.total:
            raise LimitReached(f"{len(new)} are more {self._shares.what} than there may be")
        if new:
            self._shares.take(holder, len(new))
        self._held |= dict.fromkeys(new, holder)

    def release(self, keys: Iterable[Key]) -> None:
        """These keys were not deleted after all."""
        for key in keys:
            self._let_go(key)

    def _let_go(self, key: Key) -> None:
        holder = self._held.pop(key, None)
        if holder is not None:
            self._shares.give(holder)

    async def withdraw(self, keys: Sequence[Key], deadline_s: float) -> bool:
        """Have the engine drop held keys. False: it has not done so by `deadline_s`
        (`time.monotonic`); then it is asked again in the background."""
        for key in keys:
            # A later save of the key is to be offered, not to extend the life of the old one.
            self._link.known.forget(key)
        dropping = asyncio.ensure_future(self._drop(keys, deadline_s))
        await asyncio.wait({dropping}, timeout=max(0.0, deadline_s - monotonic()))
        return dropping.done() and dropping.result()

    async def run(self) -> None:
        """Ask the engine again about keys that it did not drop."""
        while not self._link.closed:
            await self._work.wait()
            self._work.clear()
            some = list(islice(self._held, MAX_BATCH_KEYS))
            if some and not await self._drop(some, monotonic() + _DROPPED_WITHIN_S):
                await asyncio.sleep(_DROPPED_AGAIN_S)

    async def _drop(self, keys: Sequence[Key], deadline_s: float) -> bool:
        left: list[Key] = []
        for start in range(0, len(keys), MAX_BATCH_KEYS):
            some = keys[start : start + MAX_BATCH_KEYS]
            left += await self._drop_batch(some, deadline_s)
        if left:
            self._work.set()
        return not left

    async def _drop_batch(self, keys: Sequence[Key], deadline_s: float) -> Sequence[Key]:
        """Returns the keys that the engine may still have."""
        if self._link.closed:
            return keys
        left = await self._link.call(lambda: self._link.store.drop(keys, deadline_s))
        dropped = set(keys).difference(left)
        for key in dropped:
            self._let_go(key)
            # It may have been offered again while this was under way.
            self._link.known.forget(key)
        self._link.counters.withdrawn += len(dropped)
        return left


class Deletes:
    """Belongs to the event loop; blocking calls run on a thread of its own."""

    def __init__(self, core: Core, link: EngineLink, withdrawals: Withdrawals) -> None:
        self._core = core
        self._link = link
        self._withdrawals = withdrawals
        self.log: Final = DeleteLog()
        self._pace: Final = LogPace()
        #: The deletes that are durably done here, for what is offered from now on.
        self.stamp = NO_STAMP
        #: Set once the log was read to its end: before that, nothing is fetched.
        self.known: Final = asyncio.Event()
        #: Attempts to read it that failed before, although the engine was there.
        self._failures = 0
        #: From this record on, what was offered is known to the link.
        self._known_since = 0
        #: What was read since the end was reached, each with its number.
        self._read_records: list[tuple[int, FleetDelete]] = []
        #: Deleted keys, while that is not durable. True: an entry may be there.
        self._keys: dict[Key, bool] = {}
        #: Keys that were announced since `_keys` was last gone through.
        self._announced: set[Key] = set()
        #: Namespaces that are to be deleted, `_EVERYTHING` or one, and which tiers had not read all
        #: their records when that was last begun; None: it was not begun.
        self._namespaces: dict[str, frozenset[Tier] | None] = {}
        self._mark = b""
        #: The latest call of each store.
        self._asked: dict[Tier, asyncio.Future[Any]] = {}
        #: Records that the log did not have when it was last read to its end, and when to put them
        #: there (`time.monotonic`).
        self._absent: dict[bytes, float] = {}
        self._wake: Final = asyncio.Event()
        #: Set for a moment, whenever namespaces were deleted.
        self._cleared: Final = asyncio.Event()
        self._threads: Final = ThreadPoolExecutor(1, "prefixd-shared-deletes")

    @property
    def waiting(self) -> int:
        """What is not durably done, and what the log does not have yet. On any thread."""
        keys = len(self._keys) + len(self._announced)
        return keys + len(self._namespaces) + self.log.missing_count

    def take_room(self, tenant: str, keys: int) -> None:
        """A tenant is about to delete so many keys. Raises LimitReached if too many deletes wait
        for the engine's log, or if that is more than the log takes of one tenant."""
        if self.log.missing_count >= MAX_WAITING:
            raise LimitReached("too many deletes while the shared engine does not log them")
        self._pace.take(tenant, keys, monotonic())

    async def ready(self) -> bool:
        """Wait for the first reading of the log: before that, nothing may be fetched. False: the
        engine is not reached, or does not give it."""
        if not self.known.is_set():
            if self._failures >= _PATIENCE or not self._reached():
                return False
            await self.known.wait()
        return True

    def allows(self, key: Key, stamp: int) -> bool:
        """Whether an entry of another node may be used that was vouched for with this stamp."""
        if not self.log.knows(stamp):
            self._wake.set()  # there may be deletes that this node has not read
        return self.log.allows(key, stamp)

    async def announce(self, keys: Sequence[Key], deadline_s: float) -> bool:
        """Tell the other nodes of a delete that this node has done. False: it is not in the log by
        `deadline_s` (`time.monotonic`); then it is tried again in the background."""
        self._announced.update(keys)
        return await self._announce(records_of(keys, _new_ids()), deadline_s)

    async def announce_clear(self, namespace: str, deadline_s: float) -> bool:
        """Tell the other nodes to delete a namespace. What has come here meanwhile goes, too. True:
        it is gone already, so later saves stay. See `announce`."""
        self._namespaces[namespace] = None
        record = FleetDelete(next(_new_ids()), (), namespace)
        if not await self._announce([record], deadline_s):
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s - monotonic()):
                while namespace in self._namespaces:
                    await self._cleared.wait()
        return namespace not in self._namespaces

    async def _announce(self, records: Sequence[FleetDelete], deadline_s: float) -> bool:
        for record in records:
            self.log.expect(record)
        logging = asyncio.ensure_future(self._log(records, deadline_s))
        await asyncio.wait({logging}, timeout=max(0.0, deadline_s - monotonic()))
        self._wake.set()
        return logging.done() and logging.result()

    async def run(self) -> None:
        while not self._link.closed:
            self._wake.clear()
            reached = self._reached()
            if await self._read():
                await self._begin_log()
                await self._put_back()
            elif reached:
                self._failures += 1
            if self.known.is_set():
                with suppress(PrefixdError):  # the daemon stops
                    await self._settle()
            busy = self._keys or self._namespaces or not self.known.is_set()
            with suppress(TimeoutError):
                wait_s = _AGAIN_S if busy else self._link.store.log_every_s
                await asyncio.wait_for(self._wake.wait(), wait_s)
                await asyncio.sleep(_AGAIN_S)  # also one that is woken all the time

    def close(self) -> None:
        """End the thread. A running call ends by its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- the log

    def _reached(self) -> bool:
        """Whether some node of the engine is in use."""
        return any(node.state is NodeState.SERVING for node in self._link.store.statuses())

    async def _read(self) -> bool:
        """Read to the end of the log, and note what is to be deleted. False: the engine did not
        answer; the next call goes on."""
        while True:
            last = self.log.last
            page = await self._page(b"" if last is None else last.place)
            if page is None:
                return False
            records = page.records
            if last is None:
                self.log.complete = not page.trimmed
            elif records and records[0] == last:
                records = records[1:]
            else:
                page = await self._page(b"")
                if page is None:
                    return False
                self._begin_again(page)
                continue
            if not records:
                break
            for logged in records:
                if (record := self.log.add(logged)) is not None:
                    self._read_records.append((len(self.log), record))
        if self.log.forgotten > self._known_since:
            # What was offered before can't be judged any more: it is offered again when it is used.
            self._link.known.clear()
            self._known_since = len(self.log)
        done = 0 if self.known.is_set() else await self._done_before()
        self.known.set()
        for number, record in self._read_records:
            if number > done:
                self._note(record)
        self._read_records.clear()
        return True

    def _begin_again(self, page: LogPage) -> None:
        """The log does not have the last record any more. `page`: its beginning."""
        first = page.records[0] if page.records else None
        if self.log.begin_again(first, complete=not page.trimmed):
            log.warning("shared_deletes_lost", why="the engine lost deletes of its log")
        else:
            self._drop_everything("the engine has only later deletes than this node has seen")
        self._read_records = [(_LATER, record) for _, record in self._read_records]
        # What was done before is none of the deletes of this log.
        self.stamp = NO_STAMP
        self._known_since = 0
        self._link.known.clear()

    async def _done_before(self) -> int:
        """The number of records whose deletes were done by an earlier start, in every tier."""
        recorded = [store for store in self._core.stores.values() if store.recorded]
        marks = [await self._answer_of(store.tier, store.followed) or b"" for store in recorded]
        counts = [self.log.count_to(mark) for mark in marks]
        if None in counts and not self.log.complete:
            self._drop_everything("the engine may have dropped deletes that this node has not seen")
        return min((count or 0 for count in counts), default=0)

    def _drop_everything(self, why: str) -> None:
        log.warning("shared_deletes_missed", why=f"{why}: all of its entries go")
        self._namespaces[_EVERYTHING] = None

    def _note(self, record: FleetDelete) -> None:
        self._link.counters.deletes_learned += bool(record.keys or record.namespace)
        for key in record.keys:
            self._keys[key] = True
            self._link.known.forget(key)
        if record.namespace:
            self._namespaces[record.namespace] = None
        if len(self._keys) > MAX_KEYS:
            self._keys.clear()
            self._drop_everything("too many deletes wait, as a tier does not serve")

    async def _begin_log(self) -> None:
        """Give an empty log a record that deletes nothing, if what is offered may outlive the log:
        `NO_STAMP` would be right in the next log, too."""
        if not self._link.store.outlives_log or self.log.last is not None or self.log.missing:
            return
        record = FleetDelete(next(_new_ids()))
        self.log.expect(record)
        await self._log([record], monotonic() + _LOG_WITHIN_S)
        self._wake.set()

    async def _put_back(self) -> None:
        """Append what the log does not have, although this node has announced it, or has read it
        before the engine lost it."""
        now_s = monotonic()
        missing = {record.id: record for record in self.log.missing}
        for id_ in self._absent.keys() - missing.keys():
            del self._absent[id_]
        # The calls that append them for the first time have ended by the second look.
        due = sorted((at_s, id_) for id_, at_s in self._absent.items() if now_s >= at_s)
        for id_ in missing:
            self._absent.setdefault(id_, now_s + _PUT_BACK_WITHIN_S * secrets.randbits(8) / 256)
        if due:
            some = [missing[id_] for _, id_ in due[:_PUT_BACK_AT_ONCE]]
            await self._log(some, now_s + _LOG_WITHIN_S)
        if missing:
            self._wake.set()

    async def _page(self, place: bytes) -> LogPage | None:
        deadline_s = monotonic() + _LOG_WITHIN_S
        return await self._call(lambda: self._link.store.read_log(place, deadline_s))

    async def _log(self, records: Sequence[FleetDelete], deadline_s: float) -> bool:
        encoded = [record.encode() for record in records]
        logged = await self._call(lambda: self._link.store.log(encoded, deadline_s))
        return logged == len(records)

    async def _call(self, call: Callable[[], T]) -> T | None:
        """Make a blocking call. None: this ends."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except RuntimeError:
            return None

    # ---- the entries here

    async def _settle(self) -> None:
        """Delete what is to be deleted. If all of it is durably gone, note how far that is."""
        count, generation = len(self.log), self._core.state.tables.stamp_ns
        self._keys = dict.fromkeys(self._announced, False) | self._keys
        self._announced.clear()
        for namespace in list(self._namespaces):
            await self._delete_namespace(namespace)
        self._cleared.set()
        self._cleared.clear()
        await self._delete([key for key, there in self._keys.items() if there])
        keys = [key for key, in_flight in self._keys.items() if not in_flight]
        until_s = monotonic() + _ERASED_WITHIN_S
        if not await durable_deletes(self._core, keys, generation, until_s):
            return
        for key in keys:
            if not self._keys[key]:
                del self._keys[key]
        if not (self._keys or self._namespaces):
            self.stamp = self.log.stamp_of(count)
            await self._write_mark(count)

    async def _delete(self, keys: Sequence[Key]) -> None:
        """Delete entries, claimed or not. Saves in flight are left for the next time."""
        core, slices = self._core, Slices()
        for start in range(0, len(keys), _DELETED_AT_ONCE):
            part = tuple(keys[start : start + _DELETED_AT_ONCE])
            question = DeleteAsked(
                core.next_request(), None, part, core.clock.now_ns(), claimed=True
            )
            try:
                answer = await core.ask(question, DeleteAnswer)
            except PrefixdError as problem:
                log.debug("shared_delete_waits", why=str(problem))
                return
            for key, status in zip(part, answer.results, strict=True):
                self._keys[key] = status is DeleteStatus.IN_FLIGHT
            await slices.pause()

    async def _delete_namespace(self, namespace: str) -> None:
        """Delete a namespace, unless that was done and no tier has read more records since."""
        tables = self._core.state.tables
        closed = frozenset(tables.closed)
        if closed and self._namespaces[namespace] == closed:
            return
        self._namespaces[namespace] = closed
        tag = tag_of(namespace)
        slices = Slices()
        self._keys |= {key: True for key in tables.in_flight if not namespace or key.endswith(tag)}
        for shard in tables.entries.shards:
            found = [
                entry.key
                for entry in shard.values()
                if not namespace or entry.label == namespace or entry.key.endswith(tag)
            ]
            for key in found:
                self._link.known.forget(key)
            self._keys |= dict.fromkeys(found, True)
            await self._delete(found)
            # Nothing in such a key says that it belongs to the namespace: it would be fetched back.
            of_label = [key for key in found if namespace and not key.endswith(tag)]
            if of_label:
                await self._withdraw(of_label)
            await slices.pause()
        if not closed and self._namespaces[namespace] is not None:  # or it is to be done once more
            del self._namespaces[namespace]

    async def _withdraw(self, keys: Sequence[Key]) -> None:
        """Have the engine drop keys, later if it does not answer."""
        deadline_s = monotonic() + _LOG_WITHIN_S
        try:
            self._withdrawals.hold(keys)
        except LimitReached:  # then it is asked once
            await self._link.call(partial(self._link.store.drop, keys, deadline_s))
        else:
            await self._withdrawals.withdraw(keys, deadline_s)

    async def _write_mark(self, count: int) -> None:
        """Note in each tier up to which record its deletes are done."""
        logged = self.log.at(count - 1)
        if logged is None or logged.mark == self._mark:
            return
        for store in self._core.stores.values():
            follow = partial(_follow, store, logged.mark)
            if store.recorded and not await self._answer_of(store.tier, follow):
                return  # a restart does some of them again
        self._mark = logged.mark

    async def _answer_of(self, tier: Tier, call: Callable[[], T]) -> T | None:
        """Make a call of a store. None: its device doesn't answer in time, or still does an earlier
        call, or can't."""
        earlier = self._asked.get(tier)
        if earlier is not None and not earlier.done():
            return None
        try:
            asked = self._core.devices.run(tier, call)
        except PrefixdError:  # the daemon stops
            return None
        self._asked[tier] = asked
        asked.add_done_callback(_problem_of)  # nobody may be there to see it
        await asyncio.wait({asked}, timeout=_ERASED_WITHIN_S)
        if not asked.done() or asked.cancelled():
            return None
        problem = _problem_of(asked)
        if problem is not None:
            log.debug("shared_mark", tier=tier.label, why=str(problem))
            return None
        return asked.result()


def _follow(store: Store, mark: bytes) -> bool:
    store.follow(mark)
    return True


def _problem_of(asked: asyncio.Future[Any]) -> BaseException | None:
    return None if asked.cancelled() else asked.exception()


def _new_ids() -> Iterator[bytes]:
    while True:
        yield secrets.token_bytes(16)
