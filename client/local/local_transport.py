"""The transport for a daemon on the same host: a remote transport that uses shared memory, too.

Look-ups, reads and the payloads of saves use the memory that the daemon handed over
(`node.LocalNode`). Everything else is done as by the remote transport. When the daemon refuses the
hand-over, or a part of it, that part goes over gRPC as well, with the same results.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

from ...proto import frames
from ...proto import prefixd_pb2 as pb
from ...proto.errors import (
    DeadlineExceeded,
    LimitReached,
    PrefixdError,
    UnknownStaging,
    UnreadableMemory,
)
from ...proto.keys import Key
from ...proto.payload import FlatBytes
from ...proto.vocabulary import ClaimMode, Presence, Tier
from ..results import Entries, Found, SaveOutcome
from ..wire import messages
from ..wire.deadline import Deadline
from ..wire.framed_calls import FramedCalls
from ..wire.link import Link
from ..wire.remote_transport import RemoteTransport
from ..wire.transport import (
    Claimed,
    Copied,
    Granted,
    Holding,
    Item,
    Looked,
    Range,
    Renumbered,
    SaveTerms,
    Saving,
    Sink,
)
from .disk_reads import DiskReads
from .node import InPlace, LocalNode
from .staging import StagingMemory, can_lend, save_lent, save_staged

logger = logging.getLogger("prefixd.client")

#: What is needed for reads in place. It is handed over at the start of a session.
IN_PLACE: Final = (frames.INDEX, frames.RAM, frames.SHM, frames.DISK)
_ARENAS: Final[dict[int, str]] = {
    Tier.RAM: frames.RAM,
    Tier.SHM: frames.SHM,
    Tier.DISK: frames.DISK,
}
#: How much of a look-up's time the hand-over may take. The call then goes on over gRPC. A save
#: waits for half of its time: where a daemon has so much to do that it is late with a hand-over,
#: saves over gRPC take many times as long as staged ones.
HAND_OVER_S: Final = 0.5
#: After a failed hand-over, the next attempt waits this long.
RETRY_HAND_OVER_S: Final = 5.0
#: Reads are reported with the next save or heartbeat. This many are reported at once: a report
#: wakes three threads here, and the daemon takes 2 ms for it.
MAX_PENDING_TOUCHES: Final = 2048

#: Saves payloads through local memory; gets the first message without parts. Raises PrefixdError,
#: OSError.
Stage: TypeAlias = Callable[[pb.SaveStagedRequest], list[pb.SaveResult]]


class LocalTransport(RemoteTransport):
    """`transport.Transport` that uses shared memory where it can. Thread-safe."""

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        #: The session that `_node` was handed to.
        self._link: Link | None = None
        self._node: LocalNode | None = None
        #: No hand-over is asked for before these moments, on the monotonic clock: of the node for a
        #: look-up or for a save, which waits longer, and of single parts that come later.
        self._not_before_s = 0.0
        self._save_not_before_s = 0.0
        self._part_not_before_s: dict[str, float] = {}
        self._closed = False
        self._reads = DiskReads()
        # Not `_lock`: heartbeats take this one, and must not wait for a hand-over.
        self._touches_lock = threading.Lock()
        self._pending_touches: list[Key] = []

    def _session_opened(self, link: Link) -> None:
        super()._session_opened(link)
        self._let_go()

    # ---- the node

    def _current(
        self, deadline: Deadline | None = None, *, saving: bool = False
    ) -> LocalNode | None:
        """The node of the current session; None: there is none.

        With a deadline, waits for the first session. Raises PrefixdError.
        """
        link = self._link
        if link is None or link.why_ended:
            if deadline is not None:
                self.link(deadline)
            self._switch(deadline, saving=saving)
        return self._node

    def _indexed(self, deadline: Deadline | None = None) -> LocalNode | None:
        """`_current`, if it has a live index: without one, nothing can be read in place."""
        node = self._current(deadline)
        if node is not None and not node.indexed:
            self._renew_index(node, deadline)
        return node if node is not None and node.indexed else None

    def _renew_index(self, node: LocalNode, deadline: Deadline | None) -> None:
        """Ask for another index now and then: a daemon that revoked its index makes a new one. The
        rest of what was handed over stays. Raises DeadlineExceeded."""
        within_s = HAND_OVER_S if deadline is None else min(HAND_OVER_S, deadline.left_s() / 2)
        if self._may_ask(frames.INDEX) and self._lock.acquire(blocking=False):
            self._take_part(node, frames.INDEX, "new index", within_s)

    def _take_arenas(self, node: LocalNode, deadline: Deadline) -> None:
        """Ask now and then for the arenas of tiers that had none when the session began."""
        try:
            within_s = min(HAND_OVER_S, deadline.left_s() / 2)
        except DeadlineExceeded:
            return  # another call will
        for tier in node.lacking.copy():
            node.lacking.discard(tier)
            name = _ARENAS.get(tier, "")
            if name and self._may_ask(name) and self._lock.acquire(blocking=False):
                self._take_part(node, name, f"arena {name}", within_s)

    def _staging(self, node: LocalNode, deadline: Deadline) -> StagingMemory | None:
        """This session's staging memory. It is handed over when a save first needs it, because
        allocating it takes most of the time of a hand-over."""
        if node.staging is not None:
            return node.staging
        if frames.STAGING in node.refused and not self._may_ask(frames.STAGING):
            return None
        within_s = deadline.left_s() / 2
        if self._lock.acquire(timeout=within_s):
            self._take_part(node, frames.STAGING, "staging memory", within_s)
        return node.staging

    def _may_ask(self, part: str) -> bool:
        return time.monotonic() >= self._part_not_before_s.get(part, 0.0)

    def _take_part(self, node: LocalNode, part: str, what: str, within_s: float) -> None:
        """Have one part of the node handed over, unless another call has just asked for it. Called
        with the lock, and releases it."""
        try:
            if self._may_ask(part):
                self._part_not_before_s[part] = time.monotonic() + RETRY_HAND_OVER_S
                with node.calls.connection(within_s) as connection:
                    node.take(*connection.hand_over(node.ref, within_s, [part]))
        except (OSError, PrefixdError) as problem:
            logger.info("no %s: %s", what, problem)
        finally:
            self._lock.release()

    def _switch(self, deadline: Deadline | None, *, saving: bool) -> None:
        """Take the node of the current session. While there is no session the last node stays: what
        it validates is right even after the daemon has died. Raises DeadlineExceeded."""
        link = self.current
        if link is None or link is self._link:
            return
        within_s = HAND_OVER_S if deadline is None else min(HAND_OVER_S, deadline.left_s())
        if saving and deadline is not None:
            within_s = deadline.left_s() / 2
        until_s = time.monotonic() + within_s
        # Another call may be getting it at this moment. Half of the time is left for gRPC.
        if not self._lock.acquire(timeout=within_s / 2):
            return
        try:
            self._take_node(link, until_s, saving=saving)
        finally:
            self._lock.release()

    def _let_go(self) -> None:
        """There is a session with the next daemon, so the memory of the last one is not needed any
        more, even if no call ever asks for the new one: an idle client would hold it for ever."""
        if not self._lock.acquire(blocking=False):
            return  # a call is taking the new node
        try:
            if self._link is not None and self._link.why_ended:
                self._drop_node()
        finally:
            self._lock.release()

    def _drop_node(self) -> None:
        """Called with the lock."""
        old, self._node, self._link = self._node, None, None
        if old is not None:
            old.let_go()
            self._take_touches()  # dropped: they are of an earlier session
            self._not_before_s = self._save_not_before_s = 0.0
            self._part_not_before_s.pop(frames.STAGING, None)

    def _take_node(self, link: Link, until_s: float, *, saving: bool) -> None:
        """Called with the lock."""
        if link is self._link or self._closed:
            return
        self._drop_node()
        now_s = time.monotonic()
        if now_s >= until_s:
            return
        if now_s < (self._save_not_before_s if saving else self._not_before_s):
            return
        try:
            calls = self.local_calls(link)
            node = None if calls is None else _hand_over(link, calls, until_s - now_s, self._reads)
        except DeadlineExceeded:
            logger.info("no local fast path yet: the daemon took too long to hand it over")
            self._not_before_s = time.monotonic() + RETRY_HAND_OVER_S
            if saving:
                self._save_not_before_s = self._not_before_s
            return
        if self._closed:
            return
        self._node, self._link = node, link
        link.before_heartbeat = self._report_touches
        if node is not None and link.framed is not node.calls:
            link.go_over(node.calls)

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
        return Looked(*node.find(keys, mode))

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> Sequence[int]:
        node = self._indexed(deadline)
        index = None if node is None else node.index
        return super().exist(keys, deadline) if index is None else index.tiers(keys)

    def peek(self, keys: Sequence[Key]) -> Sequence[int] | None:
        link, node = self._link, self._node
        if link is None or link.why_ended or node is None:
            return None
        index = node.index
        return index.tiers(keys) if index is not None and index.live else None

    def peek_one(self, key: Key) -> int | None:
        link, node = self._link, self._node
        if link is None or link.why_ended or node is None or (index := node.index) is None:
            return None
        return index.tier_of(key)

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> Sequence[int]:
        node = self._indexed(deadline)
        index = None if node is None else node.index
        if index is None:
            return super().leading_run(keys, deadline)
        tiers = index.tiers(keys, stop_at=False)
        return tiers if all(tiers) else tiers[:-1]

    @property
    def shares(self) -> bool:
        link = self._link  # without a lock, because every search reads this
        return super().shares if link is None or link.why_ended else link.welcome.shares

    def copy(
        self,
        entries: Entries,
        targets: Sequence[FlatBytes],
        check: Sequence[bool],
        deadline: Deadline,
    ) -> list[Copied]:
        node = self._indexed()
        if node is None:
            return [Copied.GONE] * len(entries)
        copies = node.copy(entries, targets, check, deadline)
        if node.lacking:
            self._take_arenas(node, deadline)
        return copies

    def views(self, claim: Holding, entries: Entries) -> list[list[memoryview]] | None:
        if claim.why_lost is not None:
            return None  # nothing pins the bytes
        held = claim.in_place
        node = held.node if isinstance(held, InPlace) else self._indexed()
        found = None if node is None else node.views(entries)
        if node is None or found is None:
            return None
        views, seen = found
        if not isinstance(held, InPlace):
            claim.in_place = seen
        elif seen.placed is not held.placed:
            claim.in_place = InPlace(node, list({*held.placed, *seen.placed}))
        return views

    def touch(self, keys: Sequence[Key]) -> None:
        with self._touches_lock:
            self._pending_touches += keys
            if len(self._pending_touches) < MAX_PENDING_TOUCHES:
                return
            # Report them here, so that a save never has more than it may report.
            reported, self._pending_touches = self._pending_touches, []
        super().touch(reported)

    def _report_touches(self) -> None:
        super().touch(self._take_touches())

    def _take_touches(self) -> list[Key]:
        with self._touches_lock:
            taken, self._pending_touches = self._pending_touches, []
            return taken

    # ---- the read side

    def lookup(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """In place, unless it has to wait: the index does not show saves in flight."""
        if not wait_ms:
            looked = self.find(keys, ClaimMode.ANY, deadline)
            if looked is not None:
                results = [Found(Presence.ABSENT)] * len(keys)
                for position, entry in zip(looked.positions, looked.entries, strict=True):
                    results[position] = Found(Presence.PRESENT, entry)
                return results
        return super().lookup(keys, wait_ms, deadline)

    def claim(
        self, keys: Sequence[Key], mode: ClaimMode, wait_ms: int, lease_ms: int, deadline: Deadline
    ) -> Claimed:
        """Claim only what the index has: a miss takes no call."""
        node = None if wait_ms else self._indexed(deadline)
        if node is not None:
            positions, entries = node.find(keys, mode)
            if not entries:
                return Claimed(None, [], entries, in_flight=False)
            holding = self.claim_known(entries, lease_ms, deadline)
            if holding is not None:
                holding.in_place = entries.in_place
                return Claimed(holding, positions, entries, in_flight=False)
        return super().claim(keys, mode, wait_ms, lease_ms, deadline)

    def streams(self, payload_bytes: int) -> int:
        """One where payloads are read in place; over TCP as many as the way asks for."""
        return 1 if self._indexed() is not None else super().streams(payload_bytes)

    def read(self, claim: Holding, ranges: Sequence[Range], sink: Sink, deadline: Deadline) -> None:
        """Read parts of payloads in place where that is possible, the rest with a call."""
        node = self._indexed()
        rest: list[int] = []
        for number, each in enumerate(ranges):
            data = None
            is_part = each.length_bytes < each.entry.payload_bytes and not each.token_ids
            if node is not None and is_part:
                data = node.read(each.entry, each.offset_bytes, each.length_bytes, deadline)
            if data is None:
                rest.append(number)
            else:
                sink(number, 0, data)
        if rest:
            remaining = [ranges[number] for number in rest]
            super().read(claim, remaining, Renumbered(sink, rest), deadline)

    def fetch_found(
        self,
        keys: Sequence[Key],
        mode: ClaimMode,
        room_bytes: Sequence[int],
        begin: Callable[[Claimed], Sink],
        deadline: Deadline,
    ) -> bool:
        """Only without an index: with one, reading takes no call at all."""
        if self._indexed(deadline) is not None:
            return False
        return super().fetch_found(keys, mode, room_bytes, begin, deadline)

    def release(self, claims: Sequence[Holding], deadline: Deadline) -> list[bool]:
        """If the rows of a claim are known, this needs no call: what was viewed under the claim is
        good as long as they stand, and whether it was lost the session has told. The daemon is told
        without waiting for a response."""
        results = [
            claim.why_lost is None
            and isinstance(claim.in_place, InPlace)
            and claim.in_place.stands(deadline)
            for claim in claims
        ]
        self._give_back([claim for claim in claims if isinstance(claim.in_place, InPlace)])
        others = [n for n, claim in enumerate(claims) if not isinstance(claim.in_place, InPlace)]
        if others:
            released = super().release([claims[n] for n in others], deadline)
            for number, result in zip(others, released, strict=True):
                results[number] = result
        return results

    def _give_back(self, claims: Sequence[Holding]) -> None:
        node = self._node
        current = [claim for claim in claims if claim.link is self._link]
        if not current or node is None:
            return  # the claims ended with their session
        try:
            node.calls.give_back(node.ref, [claim.number for claim in current])
        except (PrefixdError, OSError):
            self.give_back(current)

    # ---- the write side

    def reserve(self, items: Sequence[Item], terms: SaveTerms, deadline: Deadline) -> list[Granted]:
        return super().reserve(items, self._with_touches(terms), deadline)

    def write(
        self,
        reservations: Sequence[tuple[Holding, Key]],
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
    ) -> list[SaveOutcome]:
        def write(node: LocalNode, stage: Stage) -> list[SaveOutcome]:
            link = self._writer(reservations, deadline)
            _check_same(link, node)
            opening = pb.SaveStagedRequest(reserved=messages.reserved_of(link.ref, reservations))
            results = self._call_held("SaveStaged", link, partial(stage, opening))
            return messages.outcomes_of([key for _, key in reservations], results)

        staged = self._staged(payloads, deadline, write)
        return staged or super().write(reservations, payloads, deadline)

    def save(
        self, items: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        terms = self._with_touches(terms)

        def save(node: LocalNode, stage: Stage) -> list[SaveOutcome]:
            def send(link: Link, _timeout_s: float) -> list[pb.SaveResult]:
                _check_same(link, node)
                return stage(pb.SaveStagedRequest(header=messages.header_in(link, items, terms)))

            _, results = self._call("SaveStaged", deadline, send)
            return messages.outcomes_of([saving.item.key for saving in items], results)

        staged = self._staged([saving.payload for saving in items], deadline, save)
        return staged or super().save(items, terms, deadline)

    def _staged(
        self,
        payloads: Sequence[FlatBytes],
        deadline: Deadline,
        save: Callable[[LocalNode, Stage], list[SaveOutcome]],
    ) -> list[SaveOutcome] | None:
        """Save lent payloads, or through staging memory. None: neither is possible, and nothing has
        happened."""
        node = self._current(deadline, saving=True)
        if node is None:
            return None
        if node.lends and can_lend(payloads):
            try:
                return save(
                    node, lambda opening: save_lent(node.calls, opening, payloads, deadline)
                )
            except UnreadableMemory as problem:
                node.lends = False
                logger.info("saving through staging memory from now on: %s", problem)
            except (LimitReached, UnknownStaging, OSError) as problem:
                logger.info("saving through staging memory: %s", problem)
        memory = self._staging(node, deadline) if any(map(len, payloads)) else None
        if memory is None:
            return None
        try:
            return save(
                node, lambda opening: save_staged(memory, node.calls, opening, payloads, deadline)
            )
        except UnknownStaging as problem:
            logger.info("saving over gRPC: %s", problem)
            if node.staging is memory:
                # The daemon took it back. Saves that still use it keep the mapping.
                node.staging = None
                self._part_not_before_s.pop(frames.STAGING, None)
        except OSError as problem:
            logger.info("saving over gRPC: %s", problem)
        return None

    def _with_touches(self, terms: SaveTerms) -> SaveTerms:
        """Report reads with the save, so that they count before it makes room."""
        return terms._replace(touched=self._take_touches())

    def close(self, within_s: float) -> None:
        # Without the lock: a call that is taking a node checks `_closed` when it has it.
        self._closed = True
        self._report_touches()
        super().close(within_s)
        self._reads.close()
        self._node = self._link = None


def _check_same(link: Link, node: LocalNode) -> None:
    """Raises UnknownStaging, before anything is sent, if the session of this node has ended."""
    if link.ref != node.ref:
        raise UnknownStaging("the session that it was handed to has ended")


# ---- the hand-over


def _hand_over(
    link: Link, calls: FramedCalls, within_s: float, reads: DiskReads
) -> LocalNode | None:
    """Ask the daemon of `link` for its descriptors. None: it has none for this client.

    Raises DeadlineExceeded.
    """
    try:
        with calls.connection(within_s) as connection:
            descriptors, refused = connection.hand_over(link.ref, within_s, IN_PLACE)
        node = LocalNode(descriptors, refused, link.ref, calls, reads)
    except DeadlineExceeded:
        raise
    except (OSError, PrefixdError) as problem:
        logger.info("no local fast path: %s", problem)
        return None
    for feature, why in node.refused.items():
        logger.info("no local fast path for %s: %s", feature, why)
    return node
