"""Responses of the daemon as values of the client, and the client's requests as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import is_
from typing import Final, cast

from ...proto import prefixd_pb2 as pb
from ...proto.errors import PrefixdError
from ...proto.keys import Key
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import Presence, SaveReason, SaveStatus, Tier
from ..results import Entry, Found, ReserveStatus, SaveOutcome
from .link import Link
from .transport import Granted, Range, ReserveItem, SaveTerms


@contextmanager
def understanding() -> Iterator[None]:
    """An answer that does not follow the contract is a failed call, not a crash of the caller."""
    try:
        yield
    except (KeyError, IndexError, ValueError) as problem:
        raise PrefixdError(
            f"the daemon's answer does not follow the contract: {problem!r}"
        ) from None


_TIERS: Final = {int(tier): tier for tier in Tier}
_REASONS: Final = {int(reason): reason for reason in SaveReason}


def entry_of(key: Key, info: pb.EntryInfo) -> Entry:
    """Raises KeyError for a tier or reason of a later version."""
    return Entry(
        key,
        _TIERS[info.tier],
        info.payload_bytes,
        info.token_count,
        info.payload_crc32c,
        info.layer_count,
        info.token_ids_bytes,
        info.generation,
        _REASONS[info.reason],
    )


def claimed_of(
    keys: Sequence[Key], response: pb.ClaimResponse
) -> tuple[list[int], list[Entry], bool]:
    """Positions and entries of what was claimed; is one of the others being saved? Raises
    PrefixdError."""
    positions, entries, in_flight = [], [], False
    with understanding():
        for position, result in enumerate(response.results):
            if result.claimed:
                positions.append(position)
                entries.append(entry_of(keys[position], result.entry))
            elif result.presence == pb.PRESENCE_IN_FLIGHT:
                in_flight = True
    return positions, entries, in_flight


def found_of(key: Key, result: pb.LookupResult) -> Found:
    if result.presence == pb.PRESENCE_PRESENT:
        return Found(Presence.PRESENT, entry_of(key, result.entry))
    if result.presence == pb.PRESENCE_IN_FLIGHT:
        flight = result.in_flight
        return Found(Presence.IN_FLIGHT, None, flight.owner, flight.age_ms)
    return Found(Presence.ABSENT)


def present_of(keys: Sequence[Key], response: pb.LookupResponse) -> list[bool]:
    """Of a brief look-up. Raises PrefixdError where it is not one for each key."""
    if len(response.presences) != len(keys):
        raise PrefixdError(
            f"the daemon said of {len(response.presences)} keys what it was asked of {len(keys)}"
        )
    return [presence == pb.PRESENCE_PRESENT for presence in response.presences]


def granted_of(link: Link, result: pb.ReserveResult) -> Granted:
    status = ReserveStatus(result.status)
    held = link.reservations.hold(link, result.token) if status is ReserveStatus.GRANTED else None
    return Granted(status, held, result.in_flight.owner, result.in_flight.age_ms)


#: What most saves come to.
_SAVED: Final = pb.SaveResult(status=pb.SAVE_STATUS_SAVED)


def results_of(response: pb.SaveStagedResponse | pb.SaveLentResponse) -> list[pb.SaveResult]:
    """How each item ended; empty: they have not."""
    return list(response.results) or [_SAVED] * min(response.all_saved, MAX_BATCH_KEYS)


#: `SaveOutcome(key, SaveStatus.SAVED)` in a third of its time, for every block.
_SAVED_COLUMNS: Final = tuple(map(repeat, SaveOutcome(Key(b""), SaveStatus.SAVED)[1:]))
_saved = cast("Callable[[tuple[object, ...]], SaveOutcome]", partial(tuple.__new__, SaveOutcome))


def outcome_of(key: Key, result: pb.SaveResult) -> SaveOutcome:
    flight = result.in_flight
    return SaveOutcome(key, SaveStatus(result.status), flight.owner, flight.age_ms, result.message)


def outcomes_of(keys: Sequence[Key], results: Sequence[pb.SaveResult]) -> list[SaveOutcome]:
    """Raises PrefixdError where they are not one for each key."""
    if len(results) == len(keys) and all(map(is_, results, repeat(_SAVED))):
        return list(map(_saved, zip(keys, *_SAVED_COLUMNS, strict=False)))
    with understanding():
        return [outcome_of(key, result) for key, result in zip(keys, results, strict=True)]


def range_of(wanted: Range) -> pb.ReadRange:
    return pb.ReadRange(
        index=wanted.place,
        offset_bytes=wanted.offset_bytes,
        length_bytes=wanted.length_bytes,
        token_ids=wanted.token_ids,
    )


def header_of(items: Sequence[ReserveItem], terms: SaveTerms) -> pb.SaveHeader:
    keys, sizes_bytes, token_counts, layer_counts, token_ids = zip(*items, strict=True)
    return pb.SaveHeader(
        tier=pb.Tier.ValueType(terms.tier),
        reason=pb.SaveReason.ValueType(terms.reason),
        keys=keys,
        payload_bytes=sizes_bytes,
        token_counts=[count or 0 for count in token_counts],
        # What nothing is said with is not sent.
        layer_counts=layer_counts if any(layer_counts) else (),
        token_ids=token_ids if any(token_ids) else (),
        ancestors=terms.ancestors,
        wait_ms=terms.wait_ms,
        ttl_ms=terms.ttl_ms,
        touched=terms.touched,
    )
