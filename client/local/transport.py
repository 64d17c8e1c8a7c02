"""The client's way to a daemon on the same host: what can be done in place is, the rest is gRPC.

Looking up, reading and staging saves go through what the daemon handed over (`node.LocalNode`);
claims, reservations and everything else through the remote transport that this one wraps. Where
the hand-over, or a part of it, is refused, that part goes over gRPC as well, with the same
results.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import lmdb

from ...proto import local
from ...proto.errors import ClaimLost, DeadlineExceeded, PrefixdError, RecordError, UnknownStaging
from ...proto.index import IndexRow, generation_of, unpack_fixed, unpack_row
from ...proto.keys import Key
from ...proto.vocabulary import SaveReason, Tier
from ..deadline import Deadline
from ..link import Holding, Link
from ..remote import RemoteTransport, Stage
from ..results import ClaimMode, Entry, Found, Presence, SaveOutcome
from ..transport import Claimed, Granted, Range, ReserveItem, SaveTerms, Saving, Sink
from . import staging
from .calls import LocalCalls
from .node import LocalNode

logger = logging.getLogger("prefixd.client")

#: What the hand-over may take of a call, which goes on over gRPC without it.
HAND_OVER_S: Final = 0.5
#: After a hand-over that took longer, calls don't try again for so long.
RETRY_HAND_OVER_S: Final = 5.0
#: Reads wait for the next save or heartbeat to be told; so many are told at once.
MAX_UNTOLD_READS: Final = 512

#: What a damaged or closed environment, or a row of another version, raises.
_UNREADABLE: Final = (lmdb.Error, RecordError, KeyError)
_TIERS: Final = {int(tier): tier for tier in Tier}
_REASONS: Final = {int(reason): reason for reason in SaveReason}


class LocalTransport:
    """`transport.Transport` over shared memory where it can be. Thread-safe."""

    def __init__(self, remote: RemoteTransport) -> None:
        """Owns `remote` from now on."""
        self._remote = remote
        self._lock = threading.Lock()
        #: The session that `_node` was handed over to.
        self._link: Link | None = None
        self._node: LocalNode | None = None
        #: Before this moment, on the monotonic clock, nobody asks for a hand-over.
        self._not_before_s = 0.0
        self._closed = False
        # A lock of its own: heartbeats take it, and must not wait for a hand-over.
        self._untold_lock = threading.Lock()
        self._untold: list[Key] = []

    # ---- the node

    def _enter(self, deadline: Deadline | None = None) -> LocalNode | None:
        """The node of the current session, for use until its `leave`; None: there is none.

        With a deadline, waits for a session if there is none yet. Raises PrefixdError.
        """
        link = self._link
        if link is None or link.why_ended:
            if deadline is not None:
                self._remote.link(deadline)
            self._current(deadline)
        node = self._node
        return node if node is not None and node.enter() else None

    def _enter_to_read(self, deadline: Deadline | None = None) -> LocalNode | None:
        """The same, of a node that has an index: without it nothing can be read in place."""
        node = self._enter(deadline)
        if node is not None and not node.indexed:
            node.leave()
            return None
        return node

    def _current(self, deadline: Deadline | None) -> None:
        """Have the node of the current session, if there is one. Raises DeadlineExceeded."""
        link = self._remote.current
        if link is self._link:
            return
        within_s = HAND_OVER_S if deadline is None else min(HAND_OVER_S, deadline.left_s())
        with self._lock:
            if link is self._link or self._closed:
                return
            old, self._node, self._link = self._node, None, None
            if old is not None:
                old.close()
                self._take_untold()  # nobody knows what became of those entries
                self._not_before_s = 0.0
            if link is None or time.monotonic() < self._not_before_s:
                return
            try:
                self._node = _hand_over(link, within_s)
            except DeadlineExceeded:
                logger.info("no local fast path yet: the daemon took too long to hand it over")
                self._not_before_s = time.monotonic() + RETRY_HAND_OVER_S
                return
            self._link = link
            link.before_heartbeat = self._tell_untold
            if self._node is not None:
                link.calls = self._node.calls

    def refused(self) -> dict[str, str]:
        node = self._enter()
        if node is None:
            why = "there is no hand-over from this daemon"
            return dict.fromkeys((local.INDEX, local.STAGING), why)
        node.leave()
        return dict(node.refused)

    # ---- in place

    def find(
        self, keys: Iterable[Key], mode: ClaimMode, deadline: Deadline
    ) -> list[tuple[int, Entry]] | None:
        found = self._look(keys, mode, deadline)
        return None if found is None else [(at, _entry(key, row)) for at, key, row in found]

    def _look(
        self, keys: Iterable[Key], mode: ClaimMode, deadline: Deadline
    ) -> list[tuple[int, Key, bytes]] | None:
        """What `find` finds, as the index has it: positions, keys and packed rows."""
        node = self._enter_to_read(deadline)
        if node is None:
            return None
        try:
            return _find(node, keys, mode)
        except _UNREADABLE as problem:
            logger.warning("the index can't be read: %s", problem)
            return None
        finally:
            node.leave()

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> list[bool]:
        node = self._enter_to_read(deadline)
        if node is not None:
            try:
                return [data is not None for data in node.get(keys)]
            except _UNREADABLE as problem:
                logger.warning("the index can't be read: %s", problem)
            finally:
                node.leave()
        return self._remote.exist(keys, deadline)

    def copy(self, entries: Sequence[Entry], sink: Sink) -> list[bool]:
        node = self._enter_to_read()
        if node is None:
            return [False] * len(entries)
        try:
            keys = [entry.key for entry in entries]
            copied = [
                _copy(node, number, entry, row, sink)
                for number, (entry, row) in enumerate(zip(entries, node.rows(keys), strict=True))
            ]
            return [
                done and data is not None and generation_of(data) == entry.generation
                for done, data, entry in zip(copied, node.get(keys), entries, strict=True)
            ]
        except _UNREADABLE as problem:
            logger.warning("can't read in place: %s", problem)
            return [False] * len(entries)
        finally:
            node.leave()

    def views(self, claim: Holding, entries: Sequence[Entry]) -> list[list[memoryview]] | None:
        node = self._enter_to_read()
        if node is None:
            return None
        try:
            found = [claim.rows.get(entry.key) for entry in entries]
            if None in found:
                found = node.get(entry.key for entry in entries)
            views: list[list[memoryview]] = []
            for entry, data in zip(entries, found, strict=True):
                row = None if data is None else unpack_row(data)
                if row is None or row.generation != entry.generation:
                    return None
                if row.tier not in node.arenas:
                    return None
                views.append(node.views(row, 0, row.payload_bytes))
            return views if claim.why_lost is None else None
        except _UNREADABLE as problem:
            logger.warning("can't read in place: %s", problem)
            return None
        finally:
            node.leave()

    def touch(self, keys: Sequence[Key]) -> None:
        with self._untold_lock:
            self._untold += keys
            if len(self._untold) < MAX_UNTOLD_READS:
                return
            # Here, so that a save never finds more than it may tell.
            told, self._untold = self._untold, []
        self._remote.touch(told)

    def _tell_untold(self) -> None:
        self._remote.touch(self._take_untold())

    def _take_untold(self) -> list[Key]:
        with self._untold_lock:
            told, self._untold = self._untold, []
            return told

    # ---- the read side

    @property
    def max_batch_keys(self) -> int:
        return self._remote.max_batch_keys

    @property
    def connected(self) -> bool:
        return self._remote.connected

    def wait(self, deadline: Deadline) -> bool:
        return self._remote.wait(deadline)

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """In place unless it is to wait: the index does not know what is in flight."""
        if not wait_ms:
            found = self.find(keys, ClaimMode.ANY, deadline)
            if found is not None:
                answers = [Found(Presence.ABSENT)] * len(keys)
                for position, entry in found:
                    answers[position] = Found(Presence.PRESENT, entry)
                return answers
        return self._remote.lookup(keys, wait_ms, deadline)

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        """Only of what the index has: a miss costs the daemon nothing."""
        found = None if wait_ms else self._look(keys, mode, deadline)
        if found == []:
            return Claimed(None, [], [], in_flight=False)
        if found:
            entries = [_entry(key, row) for _, key, row in found]
            holding = self._remote.claim_known(entries, lease_ms, deadline)
            if holding is not None:
                holding.rows = {key: row for _, key, row in found}
                return Claimed(holding, [at for at, _, _ in found], entries, in_flight=False)
        return self._remote.claim(keys, mode, wait_ms, lease_ms, deadline)

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        """In place what can be, the rest over gRPC; both under the claim."""
        rest = list(range(len(ranges)))
        node = self._enter_to_read()
        if node is not None:
            try:
                rest = [n for n, wanted in enumerate(ranges) if not _read(node, n, wanted, sink)]
            finally:
                node.leave()
        if rest:
            self._remote.read(
                claim,
                [ranges[number] for number in rest],
                lambda number, offset, data: sink(rest[number], offset, data),
                deadline,
            )
        if claim.why_lost is not None:
            raise ClaimLost(claim.why_lost)

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Without waiting, where the index proves that nothing of it was taken away: while a row
        stands, nothing else is written to its extents."""
        node = self._enter_to_read()
        if node is None:
            return self._remote.release(claims, deadline)
        try:
            if not _unchanged(node, claims):
                return self._remote.release(claims, deadline)
            node.calls.give_back(node.ref, [claim.number for claim in claims])
        except (PrefixdError, OSError):
            self._remote.give_back(claims)
        finally:
            node.leave()
        return [True] * len(claims)

    def forget(self, claim: Holding) -> None:
        self._remote.forget(claim)

    def suspect(self, keys: Sequence[Key]) -> None:
        self._remote.suspect(keys)

    # ---- the write side

    def reserve(
        self, items: Sequence[ReserveItem], terms: SaveTerms, deadline: Deadline
    ) -> list[Granted]:
        return self._remote.reserve(items, self._with_reads(terms), deadline)

    def cancel(self, reservations: Sequence[Holding], deadline: Deadline) -> list[bool]:
        return self._remote.cancel(reservations, deadline)

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[memoryview],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        """Through staging memory if there is some."""
        staged = self._staged(
            payloads,
            deadline,
            lambda node, stage: self._remote.write_staged(
                stage, node.ref, reservations, payloads, deadline
            ),
        )
        return staged or self._remote.write(reservations, payloads, deadline)

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        """Through staging memory if there is some."""
        terms = self._with_reads(terms)
        staged = self._staged(
            [saving.payload for saving in items],
            deadline,
            lambda node, stage: self._remote.save_staged(stage, node.ref, items, terms, deadline),
        )
        return staged or self._remote.save(items, terms, deadline)

    def _staged(
        self,
        payloads: Sequence[memoryview],
        deadline: Deadline,
        save: Callable[[LocalNode, Stage], list[SaveOutcome]],
    ) -> list[SaveOutcome] | None:
        """None: this can't be saved through staging memory, and nothing has happened."""
        node = self._enter(deadline)
        if node is None:
            return None
        try:
            if node.staging is not None and any(map(len, payloads)):
                return save(node, partial(staging.save, node.staging, node.calls))
        except (UnknownStaging, OSError) as problem:
            logger.info("saving over gRPC: %s", problem)
        finally:
            node.leave()
        return None

    def _with_reads(self, terms: SaveTerms) -> SaveTerms:
        """A save makes room: what was read before it has to count before it."""
        return terms._replace(touched=self._take_untold())

    def close(self) -> None:
        self._tell_untold()
        self._remote.close()
        with self._lock:
            self._closed = True
            node, self._node = self._node, None
        if node is not None:
            node.close()


# ---- the hand-over


def _hand_over(link: Link, within_s: float) -> LocalNode | None:
    """Ask the daemon of `link` for its descriptors. None: it has none for us.

    Raises DeadlineExceeded.
    """
    path = link.welcome.local_socket
    if not path:
        return None
    calls = LocalCalls(path, link.connection.stub)
    try:
        with calls.line(within_s) as line:
            response, fds = line.hand_over(link.ref, within_s)
        node = LocalNode(response, fds, link.ref, calls)
    except DeadlineExceeded:
        raise
    except (OSError, PrefixdError) as problem:
        logger.info("no local fast path: %s", problem)
        return None
    for feature, why in node.refused.items():
        logger.info("no local fast path for %s: %s", feature, why)
    return node


# ---- rows


def _unchanged(node: LocalNode, claims: Sequence[Holding]) -> bool:
    """Are these claims of this session, and stands every row that they were made of?"""
    try:
        return all(
            claim.why_lost is None and node.unchanged(claim.entries, claim.rows) for claim in claims
        )
    except _UNREADABLE:
        return False


def _entry(key: Key, data: bytes) -> Entry:
    tier, reason, layers, tokens, crc32c, ids_bytes, generation, payload = unpack_fixed(data)
    return Entry(
        key, _TIERS[tier], payload, tokens, crc32c, layers, ids_bytes, generation, _REASONS[reason]
    )


def _find(node: LocalNode, keys: Iterable[Key], mode: ClaimMode) -> list[tuple[int, Key, bytes]]:
    match mode:
        case ClaimMode.RUN:
            return [(at, key, row) for at, (key, row) in enumerate(node.get_run(keys))]
        case ClaimMode.FIRST:
            first = node.get_first(keys)
            return [] if first is None else [first]
        case ClaimMode.ANY:
            wanted = list(keys)
            found = enumerate(zip(wanted, node.get(wanted), strict=True))
            return [(at, key, row) for at, (key, row) in found if row is not None]


def _copy(node: LocalNode, number: int, entry: Entry, row: IndexRow | None, sink: Sink) -> bool:
    """Hand a whole payload to `sink` from where it lies. False: it is not there any more."""
    if row is None or row.generation != entry.generation or not node.readable(row.tier):
        return False
    try:
        _pour(node, number, entry.key, row, 0, row.payload_bytes, sink)
    except RecordError:
        return False  # evicted since
    return True


def _read(node: LocalNode, number: int, wanted: Range, sink: Sink) -> bool:
    """The same for a range, under a claim. False: not from here."""
    entry = wanted.entry
    if wanted.token_ids or not node.readable(entry.tier):
        return False
    try:
        (row,) = node.rows([entry.key])
        if row is None or row.generation != entry.generation:
            return False
        _pour(node, number, entry.key, row, wanted.offset_bytes, wanted.length_bytes, sink)
    except _UNREADABLE as problem:
        logger.warning("can't read %s in place: %s", entry.key.hex(), problem)
        return False
    return True


def _pour(
    node: LocalNode,
    number: int,
    key: Key,
    row: IndexRow,
    offset_bytes: int,
    length_bytes: int,
    sink: Sink,
) -> None:
    if row.tier == Tier.DISK:
        for done_bytes, chunk in node.disk_chunks(key, offset_bytes, length_bytes):
            sink(number, done_bytes, chunk)
        return
    done_bytes = 0
    for view in node.views(row, offset_bytes, length_bytes):
        sink(number, done_bytes, view)
        done_bytes += len(view)
