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

from ...proto import frames
from ...proto.errors import (
    DeadlineExceeded,
    LimitReached,
    PrefixdError,
    UnknownStaging,
    UnreadableMemory,
)
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, DeleteStatus, Presence, Tier
from ..results import Entry, Found, SaveOutcome
from ..wire.deadline import Deadline
from ..wire.link import Holding, Link
from ..wire.remote import RemoteTransport, Stage
from ..wire.sinks import renumbered
from ..wire.transport import (
    Claimed,
    Copied,
    Granted,
    Looked,
    Range,
    ReserveItem,
    SaveTerms,
    Saving,
    Share,
    Sink,
)
from . import lending, staging
from .calls import LocalCalls
from .found import found_in, in_place
from .node import InPlace, LocalNode
from .staging import StagingMemory

logger = logging.getLogger("prefixd.client")

#: What is read in place, and is handed over at once.
IN_PLACE: Final = (frames.INDEX, frames.RAM, frames.SHM, frames.DISK)
#: What the hand-over may take of a call, which goes on over gRPC without it.
HAND_OVER_S: Final = 0.5
#: After a hand-over that took longer, calls don't try again for so long.
RETRY_HAND_OVER_S: Final = 5.0
#: Reads are reported with the next save or heartbeat; so many are reported at once.
MAX_PENDING_TOUCHES: Final = 512


class LocalTransport:
    """`transport.Transport` over shared memory where it can be. Thread-safe."""

    def __init__(self, remote: RemoteTransport) -> None:
        """Owns `remote` from now on."""
        self._remote = remote
        self._lock = threading.Lock()
        #: The session that `_node` was handed over to.
        self._link: Link | None = None
        self._node: LocalNode | None = None
        #: Before this moment, on the monotonic clock, no hand-over is asked for.
        self._not_before_s = 0.0
        #: The same for an index in place of one that was revoked.
        self._no_index_before_s = 0.0
        #: The same for staging memory.
        self._no_staging_before_s = 0.0
        self._closed = False
        # A lock of its own: heartbeats take it, and must not wait for a hand-over.
        self._touches_lock = threading.Lock()
        self._pending_touches: list[Key] = []

    # ---- the node

    def _current(self, deadline: Deadline | None = None) -> LocalNode | None:
        """The node of the current session; None: there is none.

        With a deadline, waits for a session if there is none yet. Raises PrefixdError.
        """
        link = self._link
        if link is None or link.why_ended:
            if deadline is not None:
                self._remote.link(deadline)
            self._switch(deadline)
        return self._node

    def _indexed(self, deadline: Deadline | None = None) -> LocalNode | None:
        """The same, of a node with an index: without one, nothing can be read in place."""
        node = self._current(deadline)
        if node is not None and not node.indexed:
            self._renew_index(node, deadline)
        return node if node is not None and node.indexed else None

    def _renew_index(self, node: LocalNode, deadline: Deadline | None) -> None:
        """A daemon that revoked its index makes another one: ask for it now and then. What else
        was handed over stays as it is. Raises DeadlineExceeded."""
        within_s = HAND_OVER_S if deadline is None else min(HAND_OVER_S, deadline.left_s() / 2)
        if time.monotonic() < self._no_index_before_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._no_index_before_s = time.monotonic() + RETRY_HAND_OVER_S
            with node.calls.line(within_s) as line:
                node.take(*line.hand_over(node.ref, within_s, [frames.INDEX]))
        except (OSError, PrefixdError) as problem:
            logger.info("no new index: %s", problem)
        finally:
            self._lock.release()

    def _staging(self, node: LocalNode, deadline: Deadline) -> StagingMemory | None:
        """This session's staging memory, which is handed over when a save first needs it: most of
        what it takes is memory that has to be put under it."""
        if node.staging is not None or frames.STAGING in node.refused:
            return node.staging
        within_s = min(HAND_OVER_S, deadline.left_s() / 2)
        if not self._lock.acquire(timeout=within_s):
            return None
        try:
            if node.staging is None and time.monotonic() >= self._no_staging_before_s:
                self._no_staging_before_s = time.monotonic() + RETRY_HAND_OVER_S
                with node.calls.line(within_s) as line:
                    node.take(*line.hand_over(node.ref, within_s, [frames.STAGING]))
                self._no_staging_before_s = 0.0
        except (OSError, PrefixdError) as problem:
            logger.info("no staging memory: %s", problem)
        finally:
            self._lock.release()
        return node.staging

    def _switch(self, deadline: Deadline | None) -> None:
        """Take the node of the current session. While there is none the last node stays: what it
        has is still right, also of a daemon that died. Raises DeadlineExceeded."""
        link = self._remote.current
        if link is None or link is self._link:
            return
        within_s = HAND_OVER_S if deadline is None else min(HAND_OVER_S, deadline.left_s())
        until_s = time.monotonic() + within_s
        # Another call may be asking for it. Half of the time is left for asking over gRPC.
        if not self._lock.acquire(timeout=within_s / 2):
            return
        try:
            self._take_node(link, until_s)
        finally:
            self._lock.release()

    def _take_node(self, link: Link, until_s: float) -> None:
        """With the lock."""
        if link is self._link or self._closed:
            return
        old, self._node, self._link = self._node, None, None
        if old is not None:
            old.calls.close()
            self._take_touches()  # of entries of an earlier session
            self._not_before_s = self._no_staging_before_s = 0.0
        now_s = time.monotonic()
        if now_s >= until_s or now_s < self._not_before_s:
            return
        try:
            node = _hand_over(link, until_s - now_s)
        except DeadlineExceeded:
            logger.info("no local fast path yet: the daemon took too long to hand it over")
            self._not_before_s = time.monotonic() + RETRY_HAND_OVER_S
            return
        if self._closed:
            if node is not None:
                node.calls.close()
            return
        self._node, self._link = node, link
        link.before_heartbeat = self._report_touches
        if node is not None:
            link.calls = node.calls
            link.on_end.append(node.calls.hang_up)

    def refused(self) -> dict[str, str]:
        node = self._current()
        if node is None:
            why = "there is no hand-over from this daemon"
            return dict.fromkeys((frames.INDEX, frames.STAGING), why)
        self._staging(node, Deadline(HAND_OVER_S * 1e3))
        return dict(node.refused)

    # ---- in place

    def find(self, keys: Iterable[Key], mode: ClaimMode, deadline: Deadline) -> Looked | None:
        node = self._indexed(deadline)
        if node is None:
            return None
        positions, entries, rows = found_in(node, keys, mode)
        return Looked(positions, entries, in_place(node, entries, rows) if rows else None)

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> list[bool]:
        node = self._indexed(deadline)
        if node is None or node.index is None:
            return self._remote.exist(keys, deadline)
        return node.index.contains(keys)

    def peek(self, keys: Sequence[Key]) -> list[bool] | None:
        link, node = self._link, self._node
        if link is None or link.why_ended or node is None:
            return None
        index = node.index
        return index.contains(keys) if index is not None and index.live else None

    def peek_one(self, key: Key) -> bool | None:
        link, node = self._link, self._node
        if link is None or link.why_ended or node is None or node.index is None:
            return None
        return node.index.has(key)

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> int:
        node = self._indexed(deadline)
        if node is None or node.index is None:
            return self._remote.leading_run(keys, deadline)
        found = node.index.find(keys, stop_at=False)
        return len(found) - (None in found)

    @property
    def shares(self) -> bool:
        link = self._link  # known without a lock: each search asks
        return (self._remote if link is None or link.why_ended else link.welcome).shares

    def pull(self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, deadline: Deadline) -> int:
        return self._remote.pull(keys, mode, wait_ms, deadline)

    def delete(self, keys: Sequence[Key], deadline: Deadline) -> list[DeleteStatus]:
        return self._remote.delete(keys, deadline)

    def copy(
        self,
        entries: Sequence[Entry],
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        in_place: object | None = None,
    ) -> list[Copied]:
        node = self._indexed()
        if node is None:
            return [Copied.GONE] * len(entries)
        # Of an earlier session nothing counts but what is found again.
        if isinstance(in_place, InPlace) and in_place.node is node:
            return node.copy(entries, targets, check, in_place.rows)
        return node.copy(entries, targets, check)

    def views(self, claim: Holding, entries: Sequence[Entry]) -> list[list[memoryview]] | None:
        if claim.why_lost is not None:
            return None  # nothing would keep the bytes there
        held = claim.in_place
        known = held.rows if isinstance(held, InPlace) else {}
        node = held.node if isinstance(held, InPlace) else self._indexed()
        found = None if node is None else node.views(entries, known)
        if node is None or found is None:
            return None
        views, rows = found
        if rows.keys() - known.keys():
            claim.in_place = InPlace(node, {**known, **rows})
        return views

    def touch(self, keys: Sequence[Key]) -> None:
        with self._touches_lock:
            self._pending_touches += keys
            if len(self._pending_touches) < MAX_PENDING_TOUCHES:
                return
            # Here, so that a save never finds more than it may report.
            reported, self._pending_touches = self._pending_touches, []
        self._remote.touch(reported)

    def _report_touches(self) -> None:
        self._remote.touch(self._take_touches())

    def _take_touches(self) -> list[Key]:
        with self._touches_lock:
            taken, self._pending_touches = self._pending_touches, []
            return taken

    # ---- the read side

    @property
    def max_batch_keys(self) -> int:
        return self._remote.max_batch_keys

    @property
    def connected(self) -> bool:
        return self._remote.connected

    @property
    def under_pressure(self) -> bool:
        return self._remote.under_pressure

    def wait(self, deadline: Deadline) -> bool:
        return self._remote.wait(deadline)

    def share(self, tier: Tier, deadline: Deadline) -> Share | None:
        return self._remote.share(tier, deadline)

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """In place unless it is to wait: the index does not know what is in flight."""
        if not wait_ms:
            looked = self.find(keys, ClaimMode.ANY, deadline)
            if looked is not None:
                answers = [Found(Presence.ABSENT)] * len(keys)
                for position, entry in zip(looked.positions, looked.entries, strict=True):
                    answers[position] = Found(Presence.PRESENT, entry)
                return answers
        return self._remote.lookup(keys, wait_ms, deadline)

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        """Only of what the index has: a miss costs the daemon nothing."""
        node = None if wait_ms else self._indexed(deadline)
        if node is not None:
            positions, entries, rows = found_in(node, keys, mode)
            if not entries:
                return Claimed(None, [], [], in_flight=False)
            holding = self._remote.claim_known(entries, lease_ms, deadline)
            if holding is not None:
                holding.in_place = in_place(node, entries, rows)
                return Claimed(holding, positions, entries, in_flight=False)
        return self._remote.claim(keys, mode, wait_ms, lease_ms, deadline)

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        """Parts of payloads in place where that is possible; the rest from the daemon."""
        node = self._indexed()
        rest: list[int] = []
        for number, wanted in enumerate(ranges):
            part = wanted.length_bytes < wanted.entry.payload_bytes and not wanted.token_ids
            data = (
                node.read(wanted.entry, wanted.offset_bytes, wanted.length_bytes)
                if node is not None and part
                else None
            )
            if data is None:
                rest.append(number)
            else:
                sink(number, 0, data)
        if rest:
            asked = [ranges[number] for number in rest]
            self._remote.read(claim, asked, renumbered(sink, rest), deadline)

    def fetch(self, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> bool:
        """What could not be copied in place."""
        return self._remote.fetch(ranges, sink, deadline)

    def fetch_found(
        self,
        keys: Sequence[Key],
        mode: ClaimMode,
        room_bytes: Sequence[int],
        begin: Callable[[Claimed], Sink],
        deadline: Deadline,
    ) -> bool:
        """Not where it takes no trip at all."""
        if self._indexed(deadline) is not None:
            return False
        return self._remote.fetch_found(keys, mode, room_bytes, begin, deadline)

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """Of a claim whose rows are known, they alone decide: what was read or viewed under it is
        good as long as they stand, whatever became of the claim. The daemon is told without
        waiting for an answer."""
        held = [claim.in_place for claim in claims]
        told = [n for n, each in enumerate(held) if isinstance(each, InPlace)]
        asked = [n for n, each in enumerate(held) if not isinstance(each, InPlace)]
        results = [isinstance(each, InPlace) and each.stands() for each in held]
        self._give_back([claims[n] for n in told])
        if asked:
            answers = self._remote.release([claims[n] for n in asked], deadline)
            for number, answer in zip(asked, answers, strict=True):
                results[number] = answer
        return results

    def _give_back(self, claims: Sequence[Holding]) -> None:
        node = self._node
        mine = [claim for claim in claims if claim.link is self._link]
        if not mine or node is None:
            return  # they ended with their session
        try:
            node.calls.give_back(node.ref, [claim.number for claim in mine])
        except (PrefixdError, OSError):
            self._remote.give_back(mine)

    def forget(self, claim: Holding) -> None:
        self._remote.forget(claim)

    def suspect(self, keys: Sequence[Key]) -> None:
        self._remote.suspect(keys)

    # ---- the write side

    def reserve(
        self, items: Sequence[ReserveItem], terms: SaveTerms, deadline: Deadline
    ) -> list[Granted]:
        return self._remote.reserve(items, self._with_touches(terms), deadline)

    def cancel(self, reservations: Sequence[Holding], deadline: Deadline) -> list[bool]:
        return self._remote.cancel(reservations, deadline)

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        """From where they lie, or through staging memory, if the daemon can."""
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
        """From where they lie, or through staging memory, if the daemon can."""
        terms = self._with_touches(terms)
        staged = self._staged(
            [saving.payload for saving in items],
            deadline,
            lambda node, stage: self._remote.save_staged(stage, node.ref, items, terms, deadline),
        )
        return staged or self._remote.save(items, terms, deadline)

    def _staged(
        self,
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
        save: Callable[[LocalNode, Stage], list[SaveOutcome]],
    ) -> list[SaveOutcome] | None:
        """None: this can be saved in neither way, and nothing has happened."""
        node = self._current(deadline)
        if node is None:
            return None
        if node.lends and lending.can_lend(payloads):
            try:
                return save(node, partial(lending.save, node.calls))
            except UnreadableMemory as problem:
                node.lends = False
                logger.info("saving through staging memory from now on: %s", problem)
            except (LimitReached, UnknownStaging, OSError) as problem:
                logger.info("saving through staging memory: %s", problem)
        memory = self._staging(node, deadline) if any(map(len, payloads)) else None
        if memory is None:
            return None
        try:
            return save(node, partial(staging.save, memory, node.calls))
        except (UnknownStaging, OSError) as problem:
            logger.info("saving over gRPC: %s", problem)
        return None

    def _with_touches(self, terms: SaveTerms) -> SaveTerms:
        """A save makes room: what was read before it has to count before it."""
        return terms._replace(touched=self._take_touches())

    def close(self, within_s: float) -> None:
        # Not with the lock: a call that takes a node at this moment sees it when it has one.
        self._closed = True
        self._report_touches()
        self._remote.close(within_s)
        node, self._node, self._link = self._node, None, None
        if node is not None:
            node.calls.close()


# ---- the hand-over


def _hand_over(link: Link, within_s: float) -> LocalNode | None:
    """Ask the daemon of `link` for its descriptors. None: it has none for us.

    Raises DeadlineExceeded.
    """
    path = link.welcome.local_socket
    if not path:
        return None
    calls = LocalCalls(path, link.ref, link.connection)
    try:
        with calls.line(within_s) as line:
            descriptors, refused = line.hand_over(link.ref, within_s, IN_PLACE)
        node = LocalNode(descriptors, refused, link.ref, calls)
    except DeadlineExceeded:
        raise
    except (OSError, PrefixdError) as problem:
        logger.info("no local fast path: %s", problem)
        return None
    for feature, why in node.refused.items():
        logger.info("no local fast path for %s: %s", feature, why)
    return node
