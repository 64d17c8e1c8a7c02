"""The lists of the `Admin` service. Each page takes the loop equally long, wherever in the list it
is. The daemon keeps nothing between pages: the cursor says where the next one begins."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from itertools import islice

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidKey, InvalidSize, UnknownClaim
from ...tiers.ledger import Ledger
from ..core.entries import SHARDS, Entry
from ..core.journal import CAUSES, Happened
from ..core.sessions import Claim, Reservation
from ..runtime.loop import Core
from ..runtime.slices import Slices
from . import messages
from .calls import Caller
from .usage import SessionUsage, UsageBook, bounded

_DEFAULT_PAGE_ENTRIES = 100
#: Keys that are shown of a claim, and keys in a page of claims.
_SHOWN_KEYS = 8
_MAX_PAGE_KEYS = 100_000
#: Bounds of a `why`: the beginning of a key, events, and entries.
_MIN_KEY_BYTES = 2
_MOST_EVENTS = 1_000
_MOST_PRESENT = 100
#: The owner of claims and reservations whose session has ended.
_ENDED = "(ended)"


class Lists:
    """See prefixd.proto for what each rpc promises."""

    def __init__(self, core: Core, usage: UsageBook) -> None:
        """`usage`: what clients count."""
        self._core = core
        self._usage = usage
        #: what went from and to other nodes, by the beginning of keys, so much at most; set by the
        #: daemon
        self.shared_events: Callable[[bytes, int], Sequence[pb.SharedEvent]] = lambda *_: ()

    async def list_entries(
        self, request: pb.ListEntriesRequest, _caller: Caller
    ) -> pb.ListEntriesResponse:
        t = self._core.state.tables
        tier = messages.tier_of(request.tier, t.ledgers)
        page_entries = _page_of("page_entries", request.page_entries)
        response, slices = pb.ListEntriesResponse(), Slices()
        if request.next_victims:
            page = await self._next_victims(t.ledgers[tier], page_entries, slices)
            await detailed(response.entries, page, slices)
            return response
        shard, last = _cursor_of(request.cursor)
        # A shard is read at one moment; its entries come in the order of their keys.
        for number in range(shard, SHARDS):
            room = page_entries - len(response.entries)
            entries = [e for e in t.entries.shards[number].values() if e.tier is tier]
            keys = sorted(e.key for e in entries if number > shard or e.key > last)
            response.entries.extend(messages.entry_detail(t.entries[key]) for key in keys[:room])
            if len(response.entries) == page_entries:
                if room:
                    response.next_cursor = number.to_bytes(2, "big") + keys[room - 1]
                return response
            await slices.pause()
        return response

    async def _next_victims(self, ledger: Ledger, page_entries: int, slices: Slices) -> list[Entry]:
        """A page of the entries that leave next, those that are pinned behind them."""
        t = self._core.state.tables
        # At one moment: the order must not change meanwhile.
        leaving = ledger.victims(lambda key: t.entries[key].stored_bytes)
        found = dict.fromkeys(t.entries[key] for key in islice(leaving, page_entries))
        # What is pinned is found by its claims; they may hold the same entries again and again.
        most_held = 10 * page_entries
        for claim in list(islice(t.claims.values(), most_held)):
            if len(found) >= page_entries or most_held <= 0:
                break
            await slices.pause()
            most_held -= len(claim.entries)
            found.update((e, None) for e in claim.entries if e.tier is ledger.tier and e.published)
        return list(found)[:page_entries]

    async def why(self, request: pb.WhyRequest, _caller: Caller) -> pb.WhyResponse:
        t = self._core.state.tables
        beginning = request.key
        if not _MIN_KEY_BYTES <= len(beginning) <= limits.KEY_BYTES:
            raise InvalidKey(f"a key begins with {_MIN_KEY_BYTES} to {limits.KEY_BYTES} bytes")
        journal = t.journal
        response = pb.WhyResponse(
            remembered_events=len(journal), remembered_since_unix_ns=journal.since_ns()
        )
        newest: list[Happened] = []
        slices = Slices()
        for happened in journal.newest_of(beginning):
            if happened is None:
                await slices.pause()
                continue
            newest.append(happened)
            if len(newest) == _MOST_EVENTS:
                break
        for happened in reversed(newest):
            cause = CAUSES.get(happened.what)
            owner, label = journal.who(happened.session)
            response.events.add(
                key=happened.key,
                what=happened.what.name.lower() if cause is None else "evicted",
                tier=pb.Tier.ValueType(happened.tier),
                at_unix_ns=happened.at_ns,
                reason=pb.SaveReason.ValueType(happened.reason),
                cause=cause.value if cause else "",
                session_id=happened.session,
                owner=owner,
                label=label,
            )
            await slices.pause()
        response.shared.extend(self.shared_events(beginning, _MOST_EVENTS))
        for shard in t.entries.shards:
            there = [e for e in shard.values() if e.key.startswith(beginning)]
            room = _MOST_PRESENT - len(response.present)
            response.present.extend(messages.entry_detail(entry) for entry in there[:room])
            await slices.pause()
        return response

    async def list_claims(
        self, request: pb.ListClaimsRequest, _caller: Caller
    ) -> pb.ListClaimsResponse:
        claims = self._core.state.tables.claims
        page_claims = _page_of("page_claims", request.page_claims)
        if request.claim_id:
            claim = claims.get(request.claim_id)
            if claim is None:
                raise UnknownClaim(f"nobody holds claim {request.claim_id}")
            return pb.ListClaimsResponse(claims=[self._claim_detail(claim, len(claim.entries))])
        response, slices = pb.ListClaimsResponse(), Slices()
        keys = 0
        for number in _after(claims, request.cursor):
            if len(response.claims) == page_claims or keys > _MAX_PAGE_KEYS:
                response.next_cursor = response.claims[-1].claim_id
                break
            claim = claims.get(number)
            if claim is not None:  # it has not ended meanwhile
                keys += len(claim.entries)
                response.claims.append(self._claim_detail(claim, _SHOWN_KEYS))
                await slices.pause()
        return response

    def _claim_detail(self, claim: Claim, shown_keys: int) -> pb.ClaimDetail:
        t = self._core.state.tables
        served_ns = t.served_ns(self._core.clock.now_ns())
        session = t.sessions.get(claim.session)
        renewed_ns = max(claim.taken_ns, session.heartbeat_ns if session else 0)
        return pb.ClaimDetail(
            claim_id=claim.claim,
            session_id=claim.session,
            owner=session.owner if session else _ENDED,
            age_ms=_ms(served_ns - claim.taken_ns),
            lease_left_ms=_ms(renewed_ns + claim.lease_ns - served_ns),
            keys=[entry.key for entry in claim.entries[:shown_keys]],
            payload_bytes=sum(entry.payload_bytes for entry in claim.entries),
            entries=len(claim.entries),
        )

    async def list_reservations(
        self, request: pb.ListReservationsRequest, _caller: Caller
    ) -> pb.ListReservationsResponse:
        reservations = self._core.state.tables.reservations
        page = _page_of("page_reservations", request.page_reservations)
        tokens = _after(reservations, request.cursor)
        response, slices = pb.ListReservationsResponse(), Slices()
        if len(tokens) > page:
            response.next_cursor = tokens[page - 1]
        for token in tokens[:page]:
            reservation = reservations.get(token)
            if reservation is not None:  # it has not ended meanwhile
                response.reservations.append(self._reservation_detail(reservation))
                await slices.pause()
        return response

    def _reservation_detail(self, r: Reservation) -> pb.ReservationDetail:
        t = self._core.state.tables
        served_ns = t.served_ns(self._core.clock.now_ns())
        return pb.ReservationDetail(
            token=r.token,
            key=r.key,
            session_id=r.session,
            owner=t.sessions[r.session].owner if r.session in t.sessions else _ENDED,
            tier=r.tier.value,  # type: ignore[arg-type]
            stage=r.stage.name.lower(),
            age_ms=_ms(served_ns - r.reserved_ns),
            ttl_left_ms=_ms(r.expires_ns - served_ns),
            payload_bytes=r.entry.payload_bytes,
            stored_bytes=r.entry.stored_bytes,
            waiters=len(r.waiters),
        )

    async def list_sessions(
        self, request: pb.ListSessionsRequest, _caller: Caller
    ) -> pb.ListSessionsResponse:
        t = self._core.state.tables
        now_ns = t.served_ns(self._core.clock.now_ns())
        response, slices = pb.ListSessionsResponse(), Slices()
        for session in list(t.sessions.values()):
            told = self._usage.sessions.get(session.session, SessionUsage())
            response.sessions.append(
                pb.SessionDetail(
                    session_id=session.session,
                    owner=session.owner,
                    age_ms=_ms(now_ns - session.opened_ns),
                    heartbeat_age_ms=_ms(now_ns - session.heartbeat_ns),
                    claims=len(session.claims),
                    reservations=len(session.tokens),
                    label=session.label,
                    lookups=bounded(told.lookups),
                    hits=bounded(told.hits),
                    restores=bounded(told.restores),
                    restored_bytes=bounded(told.restored_bytes),
                    saves=session.saves,
                    saved_bytes=session.saved_bytes,
                )
            )
            await slices.pause()
        return response


async def detailed(
    details: MutableSequence[pb.EntryDetail], entries: Iterable[Entry], slices: Slices
) -> None:
    """Add what there is to say of entries, which may have left meanwhile."""
    for entry in entries:
        details.append(messages.entry_detail(entry))
        await slices.pause()


def _page_of(name: str, asked: int) -> int:
    if asked > limits.MAX_PAGE_ENTRIES:
        raise InvalidSize(f"{name} is above {limits.MAX_PAGE_ENTRIES}")
    return asked or _DEFAULT_PAGE_ENTRIES


def _cursor_of(cursor: bytes) -> tuple[int, bytes]:
    """The shard to go on with, and the last key of it that was listed."""
    if not cursor:
        return 0, b""
    shard = int.from_bytes(cursor[:2], "big")
    if len(cursor) != 2 + limits.KEY_BYTES or shard >= SHARDS:
        raise InvalidSize("the cursor is not one that a page gave")
    return shard, cursor[2:]


def _after(table: Iterable[int], cursor: int) -> list[int]:
    """The numbers above `cursor` of a table that gives them out in ascending order."""
    numbers = list(table)
    return numbers[bisect_right(numbers, cursor) :]


def _ms(duration_ns: int) -> int:
    return max(0, duration_ns) // 1_000_000
