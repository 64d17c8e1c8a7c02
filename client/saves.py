"""Saves, synchronous or queued, and reservations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import repeat
from types import NoneType
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, TypeVar, cast

from ..proto.entry import Content, check_content, contents_of
from ..proto.errors import CallerError, InvalidBatch, InvalidSize, UnknownReason, UnknownTier
from ..proto.keys import Key, check_key
from ..proto.limits import (
    KEY_BYTES,
    MAX_LEASE_MS,
    MAX_PAYLOAD_BYTES,
    MAX_TOKEN_IDS_BYTES,
    MAX_WAIT_MS,
)
from ..proto.payload import FlatBytes
from ..proto.tokens import token_bytes
from ..proto.vocabulary import SaveReason, SaveStatus, Tier
from .arguments import checked_keys, instances, whole
from .buffers import all_flat, flat_bytes
from .context import CallContext
from .results import ReserveStatus, SaveOutcome
from .thread_pool import CallQueue
from .wire.deadline import Deadline
from .wire.transport import Granted, Holding, Item, SaveTerms, Saving, SessionShare

if TYPE_CHECKING:
    from ..proto.tokens import Tokens
    from .buffers import Payload

T = TypeVar("T")

#: Token ids of one call: they travel in one message, of at most 16 MiB.
_BATCH_TOKEN_IDS_BYTES: Final = 2 * MAX_TOKEN_IDS_BYTES


class SaveItem(NamedTuple):
    """One key to save. The payload is referenced: don't change it before the save is done.

    `token_count`: tokens that the state stands for, at least one; None: not known, and hits with
    this entry count no tokens. `layer_count`: how many equal layers the payload consists of, for
    readers of single layers; 0: it has no layers. `token_ids`: optional, stored with the entry so
    that a verifying read can recompute its key; `bytes` must be u32 little-endian (those of a
    padded block have to be `bytes`).
    """

    key: Key
    payload: Payload
    token_count: int | None = None
    layer_count: int = 0
    token_ids: Tokens | bytes | None = None

    def __repr__(self) -> str:
        key = bytes(self.key).hex()[:16] if isinstance(self.key, bytes) else repr(self.key)
        return f"<SaveItem {key}: a {type(self.payload).__name__}, {self.token_count} tokens>"


def item_of(key: Key, payload: Payload, content: Content, token_ids: bytes) -> SaveItem:
    """What saves an entry again as it was found."""
    token_count = content.token_count or None
    return SaveItem(key, payload, token_count, content.layer_count, token_ids or None)


class ReserveItem(NamedTuple):
    """A key to reserve room for.

    `token_count`: at least 1; None: unknown. `layer_count`: 0, or a divisor of
    `payload_bytes`, for readers that take single layers. `token_ids`: optional, u32 little-endian
    (`tokens.token_bytes`), for verifying reads.
    """

    key: Key
    payload_bytes: int
    token_count: int | None = None
    layer_count: int = 0
    token_ids: bytes = b""


class Reservation:
    """The answer to a request to save one key: the exclusive right to do so, or why not.

    As a context manager it cancels what was not written when the block ends, so that clients that
    wait for the key learn of it at once. One that is dropped is cancelled too, with a
    ResourceWarning. Not thread-safe.
    """

    def __init__(
        self, writer: Writer, item: ReserveItem, granted: Granted, terms: SaveTerms
    ) -> None:
        """Made by the client."""
        self._writer = writer
        self._kind = terms.tier, terms.reason
        self._used = False
        self.item = item
        self.status = granted.status
        self._holding = granted.holding
        #: Which client is saving the key, and for how long (IN_FLIGHT).
        self.owner = granted.owner
        self.age_ms = granted.age_ms
        #: Why the call failed (FAILED).
        self.message = granted.message

    @property
    def key(self) -> Key:
        return self.item.key

    @property
    def granted(self) -> bool:
        """Has this client the right to save the key? True until it is written or cancelled."""
        return self.status is ReserveStatus.GRANTED and not self._used

    @property
    def lost(self) -> bool:
        """Did the right expire, or end with its session, before it was used?"""
        return self._holding is not None and self._holding.why_lost is not None

    def write(self, payload: Payload, *, deadline_ms: int | None = None) -> SaveOutcome:
        """Save the payload, which has exactly the reserved size, and wait until it is published.

        Raises CallerError if there is nothing to write to, InvalidSize for another size.
        """
        return self._writer.write([(self, payload)], deadline_ms)[0]

    def cancel(self, *, deadline_ms: int | None = None) -> bool:
        """Give the right back. Idempotent. False: there was none left."""
        return self._writer.cancel([self], deadline_ms)[0]

    def _take(self) -> Holding | None:
        """Use up the right and return it; None if there is none."""
        if not self.granted:
            return None
        self._used = True
        return self._holding

    def __repr__(self) -> str:
        return f"<Reservation: {self.status.label} {self.key.hex()[:16]}>"

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        if self.granted and not self.lost:
            self._used = True
            self._writer.forget(self)


class Writer:
    """Saves for one client. Thread-safe."""

    queue_type: ClassVar[type[CallQueue]] = CallQueue

    def __init__(
        self,
        context: CallContext,
        *,
        save_timeout_ms: int,
        max_pending_saves: int,
        max_pending_bytes: int,
        savers: int,
    ) -> None:
        self._context = context
        self._transport = context.transport
        self._counters = context.counters
        self._failures = context.failures
        self._save_timeout_ms = save_timeout_ms
        #: Asynchronous saves that are not done yet.
        self.queue = self.queue_type(max_pending_saves, max_pending_bytes, threads=savers)

    def forget(self, dropped: Reservation) -> None:
        """A right that nothing refers to any more is given back soon, as a claim is: other clients
        wait for it. Callable from a finalizer."""
        if dropped._holding is None or not self._context.owner.is_here:
            return  # in a fork it belongs to the original
        self._transport.forget_reservation(dropped._holding)
        what = f"{dropped!r} was neither written nor cancelled"
        warnings.warn(what, ResourceWarning, source=dropped, stacklevel=1)

    def save(
        self, items: Sequence[SaveItem], terms: SaveTerms, deadline_ms: int | None
    ) -> list[SaveOutcome]:
        """See `Client.save_many`."""
        savings, terms = self._checked(items, terms)
        within_ms = (
            self._save_timeout_ms if deadline_ms is None else whole("deadline_ms", deadline_ms)
        )
        # The engine waits no longer than it was promised, whatever the size.
        return self._save_now(savings, terms, Deadline(within_ms))

    def save_async(
        self,
        items: Sequence[SaveItem],
        terms: SaveTerms,
        deadline_ms: int | None,
        result: Callable[[list[SaveOutcome]], T],
    ) -> Future[T]:
        """See `Client.save_many_async`. `result`: what the future gets of the outcomes."""
        savings, terms = self._checked(items, terms)
        if deadline_ms is not None:
            whole("deadline_ms", deadline_ms)
        size_bytes = _size_of(savings)

        def save() -> T:
            deadline = self._context.deadline(
                deadline_ms, wait_ms=terms.wait_ms, transfer_bytes=size_bytes
            )
            return result(self._save_now(savings, terms, deadline))

        def drop() -> T:
            return result(self._dropped([saving.item.key for saving in savings], terms))

        return self.queue.submit(save, drop, size_bytes)

    def save_made(
        self,
        keys: Sequence[Key],
        bunches: Callable[[], Iterable[Sequence[SaveItem]]],
        terms: SaveTerms,
        size_bytes: int,
    ) -> Future[list[SaveOutcome]]:
        """See `Client.save_made_async`."""
        keys = checked_keys(keys)
        whole("payload_bytes", size_bytes)
        terms = _checked_terms(terms)

        def save() -> list[SaveOutcome]:
            outcomes: list[SaveOutcome] = []
            try:
                for items in bunches():
                    before = [*terms.ancestors, *keys[: len(outcomes)]]
                    savings, its_terms = self._checked(items, terms._replace(ancestors=before))
                    deadline = self._context.deadline(None, transfer_bytes=_size_of(savings))
                    outcomes += self._save_now(savings, its_terms, deadline)
            except Exception as problem:
                failed = self._failures.saves(keys[len(outcomes) :], problem)
                kinds = repeat((terms.tier, terms.reason))
                self._counters.saves(failed, [0] * len(failed), kinds)
                outcomes += failed
            return outcomes

        def drop() -> list[SaveOutcome]:
            return self._dropped(keys, terms)

        return self.queue.submit(save, drop, size_bytes)

    def reserve(
        self, items: Sequence[ReserveItem], terms: SaveTerms, deadline_ms: int | None
    ) -> list[Reservation]:
        """See `Client.reserve`."""
        items = [
            item._replace(key=check_key(item.key))
            for item in instances("items", items, ReserveItem)
        ]
        asked = [Item(item.key, _reserved_content(item), item.token_ids) for item in items]
        terms = _checked_terms(terms)
        deadline = self._context.deadline(deadline_ms, wait_ms=terms.wait_ms)
        reservations: list[Reservation] = []
        for batch, batch_terms in self._batches(items, asked, terms):
            start = len(reservations)
            try:
                granted = self._transport.reserve(
                    asked[start : start + len(batch)], batch_terms, deadline
                )
            except Exception as problem:
                self._failures.reason(problem)
                granted = [Granted(ReserveStatus.FAILED, message=str(problem))] * len(batch)
            reservations += [
                Reservation(self, item, each, terms)
                for item, each in zip(batch, granted, strict=True)
            ]
        return reservations

    def write(
        self, writes: Sequence[tuple[Reservation, Payload]], deadline_ms: int | None
    ) -> list[SaveOutcome]:
        """See `Client.write`."""
        self._context.owner.check()
        writes = _checked_writes(writes)
        if len({id(reservation) for reservation, _ in writes}) < len(writes):
            raise InvalidBatch("a write has each reservation once")
        payloads = []
        for reservation, payload in writes:
            view = flat_bytes(payload)
            if not reservation.granted:
                raise CallerError(f"{reservation!r} can't be written (any more)")
            if len(view) != reservation.item.payload_bytes:
                raise InvalidSize(
                    f"{reservation.item.payload_bytes} bytes were reserved, these are {len(view)}"
                )
            payloads.append(view)
        held = [
            (holding, reservation.key)
            for reservation, _ in writes
            if (holding := reservation._take()) is not None
        ]
        sizes_bytes = [len(payload) for payload in payloads]
        deadline = self._context.deadline(deadline_ms, transfer_bytes=sum(sizes_bytes))
        outcomes: list[SaveOutcome] = []
        size = self._transport.max_batch_keys
        for start in range(0, len(held), size):
            batch = held[start : start + size]
            try:
                outcomes += self._transport.write(batch, payloads[start : start + size], deadline)
            except Exception as problem:
                outcomes += self._failures.saves([key for _, key in batch], problem)
        kinds = [reservation._kind for reservation, _ in writes]
        self._counters.saves(outcomes, sizes_bytes, kinds)
        return outcomes

    def cancel(self, reservations: Sequence[Reservation], deadline_ms: int | None) -> list[bool]:
        """See `Client.cancel`."""
        self._context.owner.check()
        given = instances("reservations", reservations, Reservation)
        holdings = [reservation._take() for reservation in given]
        held = [holding for holding in holdings if holding is not None]
        deadline = self._context.deadline(deadline_ms)
        cancelled: list[bool] = []
        size = self._transport.max_batch_keys
        for start in range(0, len(held), size):
            batch = held[start : start + size]
            try:
                cancelled += self._transport.cancel(batch, deadline)
            except Exception as problem:
                self._failures.reason(problem)
                # They end when they expire, or with their session.
                cancelled += [False] * len(batch)
        done = iter(cancelled)
        return [holding is not None and next(done) for holding in holdings]

    def _checked(
        self, items: Sequence[SaveItem], terms: SaveTerms
    ) -> tuple[list[Saving], SaveTerms]:
        items = instances("items", items, SaveItem)
        payloads = all_flat([item.payload for item in items])
        savings = _usual_savings(items, payloads) or list(map(_saving, items, payloads))
        return savings, _checked_terms(terms)

    def _save_now(
        self, savings: Sequence[Saving], terms: SaveTerms, deadline: Deadline
    ) -> list[SaveOutcome]:
        outcomes: list[SaveOutcome] = []
        items = [saving.item for saving in savings]
        share = self._share(terms.tier, deadline) if len(items) > 1 else None
        for batch, batch_terms in self._batches(savings, items, terms, share):
            try:
                outcomes += self._transport.save(batch, batch_terms, deadline)
            except Exception as problem:
                keys = [saving.item.key for saving in batch]
                outcomes += self._failures.saves(keys, problem)
        sizes_bytes = [len(saving.payload) for saving in savings]
        self._counters.saves(outcomes, sizes_bytes, repeat((terms.tier, terms.reason)))
        return outcomes

    def _share(self, tier: Tier, deadline: Deadline) -> SessionShare | None:
        try:
            return self._transport.share(tier, deadline)
        except Exception:
            return None  # the save then fails for the same reason, and reports it

    def _batches(
        self,
        things: Sequence[T],
        items: Sequence[Item],
        terms: SaveTerms,
        share: SessionShare | None = None,
    ) -> Iterator[tuple[Sequence[T], SaveTerms]]:
        """`things` (one for each of `items`) in batches that one call takes, each with its terms:
        the items of earlier batches are ancestors of the later ones. `share`: what a session may
        have reserved at once, if the items have to fit it."""
        max_keys = self._transport.max_batch_keys
        ancestors = terms.ancestors
        if _fit_together(items, max_keys, share):
            yield things, terms._replace(ancestors=ancestors[-max_keys:])
            return
        start = 0
        # Most items are as large as the one before, so that its stored size is kept.
        sized: Content | None = None
        stored_bytes = 0
        while start < len(items):
            stop, room_bytes = start, _BATCH_TOKEN_IDS_BYTES
            share_bytes = share.stored_bytes if share else 0
            keys: set[Key] = set()
            for item in items[start : start + max_keys]:
                key, token_ids_bytes = item.key, len(item.token_ids)
                room_bytes -= token_ids_bytes
                # A call names each key once.
                if key in keys or (keys and room_bytes < 0):
                    break
                if share:
                    if sized != item.content:
                        sized = item.content
                        stored_bytes = share.stored_bytes_of(sized)
                    share_bytes -= stored_bytes
                    if keys and share_bytes < 0:
                        break
                keys.add(key)
                stop += 1
            # When there are more ancestors than a call takes, name those next to the batch: a chain
            # is evicted from its leaf, and the other ancestors are older than these.
            yield things[start:stop], terms._replace(ancestors=ancestors[-max_keys:])
            ancestors = [*ancestors, *(item.key for item in items[start:stop])]
            start = stop

    def _dropped(self, keys: Sequence[Key], terms: SaveTerms) -> list[SaveOutcome]:
        why = "too many saves are waiting, or the client was closed"
        outcomes = [SaveOutcome(key, SaveStatus.DROPPED, message=why) for key in keys]
        kinds = repeat((terms.tier, terms.reason))
        self._counters.saves(outcomes, [0] * len(outcomes), kinds)
        return outcomes


def _size_of(savings: Sequence[Saving]) -> int:
    return sum(len(saving.payload) for saving in savings)


def _fit_together(items: Sequence[Item], max_keys: int, share: SessionShare | None) -> bool:
    """Whether one call takes all of these items for sure, as nearly always."""
    if not items or len(items) > max_keys:
        return False
    keys, contents, token_ids = zip(*items, strict=True)
    if any(token_ids) or len(set(keys)) < len(keys):
        return False
    if share is None:
        return True
    # The first field is the size.
    return len(items) * share.stored_bytes_of(max(contents)) <= share.stored_bytes


def _usual_savings(items: Sequence[SaveItem], payloads: Sequence[FlatBytes]) -> list[Saving] | None:
    """What `_saving` makes of each, checked all at once. None: one of them is not as usual, or is
    wrong, which `_saving` tells."""
    if not items:
        return None
    keys, _, counts, layers, token_ids = zip(*items, strict=True)
    sizes_bytes = list(map(len, payloads))
    usual = (
        set(map(type, keys)) == {bytes}
        and set(map(len, keys)) == {KEY_BYTES}
        and set(map(type, layers)) == {int}
        and not any(layers)
        and set(map(type, counts)) <= {int, NoneType}
        and 0 < (least_bytes := min(sizes_bytes)) <= (most_bytes := max(sizes_bytes))
        and most_bytes <= MAX_PAYLOAD_BYTES
        and (different := set(counts))
        and all(count is None or 0 < count < 2**32 for count in different)
        and set(map(type, token_ids)) == {NoneType}
    )
    if not usual:
        return None
    contents = contents_of(
        len(items),
        least_bytes if least_bytes == most_bytes else sizes_bytes,
        (counts[0] or 0) if len(different) == 1 else [count or 0 for count in counts],
        0,
        0,
    )
    columns = zip(keys, contents, repeat(b""), strict=False)
    return list(map(_made_saving, zip(map(_made_item, columns), payloads, strict=True)))


#: `_make` of the two in a third of its time, for every block.
_made_item = cast("Callable[[tuple[object, ...]], Item]", partial(tuple.__new__, Item))
_made_saving = cast("Callable[[tuple[object, ...]], Saving]", partial(tuple.__new__, Saving))


def _saving(item: SaveItem, payload: FlatBytes) -> Saving:
    token_ids = b"" if item.token_ids is None else item.token_ids
    if not isinstance(token_ids, bytes):
        token_ids = bytes(token_bytes(token_ids))
    content = _content(len(payload), item, len(token_ids))
    return Saving(Item(check_key(item.key), content, token_ids), payload)


def _reserved_content(item: ReserveItem) -> Content:
    return _content(whole("payload_bytes", item.payload_bytes), item, len(item.token_ids))


def _content(payload_bytes: int, item: SaveItem | ReserveItem, token_ids_bytes: int) -> Content:
    """What a caller says of an entry. Raises InvalidSize, CallerError."""
    layer_count, token_count = whole("layer_count", item.layer_count), item.token_count
    # 0 is refused: a count that is not known is None.
    if token_count is not None:
        whole("token_count (or None)", token_count, 1, 2**32 - 1)
    content = Content(payload_bytes, token_count or 0, token_ids_bytes, layer_count)
    check_content(*content)
    return content


def _checked_writes(
    writes: Sequence[tuple[Reservation, Payload]],
) -> Sequence[tuple[Reservation, Payload]]:
    pairs: list[tuple[Reservation, Payload]] = []
    for pair in instances("writes", writes, tuple):
        if len(pair) != 2 or not isinstance(pair[0], Reservation):
            raise CallerError("writes are pairs of a Reservation and its payload")
        pairs.append(pair)
    return pairs


def _checked_terms(terms: SaveTerms) -> SaveTerms:
    if not isinstance(terms.tier, Tier):
        raise UnknownTier(f"a tier is one of Tier, such as Tier.RAM, not {terms.tier!r}")
    if not isinstance(terms.reason, SaveReason):
        raise UnknownReason(f"a save reason is one of SaveReason, not {terms.reason!r}")
    whole("wait_ms", terms.wait_ms, 0, MAX_WAIT_MS)
    whole("ttl_ms", terms.ttl_ms, 0, MAX_LEASE_MS)
    return terms._replace(ancestors=checked_keys(terms.ancestors))
