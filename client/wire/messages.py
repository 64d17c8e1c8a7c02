"""The daemon's responses as values of the client, and the client's requests as messages.

The messages of a save are encoded here and not by protobuf, which would copy every payload three
times on its way into a message (into `bytes`, into its arena, out of it; a quarter of the time of a
save). Protobuf encodes a part without its data, and the data is appended as the field that it is,
so that the bytes of a payload are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import is_
from typing import Final, cast

from ...proto import prefixd_pb2 as pb
from ...proto.entry import Content, columns_of
from ...proto.errors import InvalidBatch, PrefixdError
from ...proto.keys import Key
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.payload import FlatBytes, crc32c_of, views_of
from ...proto.vocabulary import Presence, SaveReason, SaveStatus, Tier
from ..results import Entries, Entry, Found, ReserveStatus, SaveOutcome
from .link import Link
from .transport import Granted, Holding, Item, Range, SaveTerms, Saving


@contextmanager
def understanding() -> Iterator[None]:
    """Turn the errors of a response that breaks the contract into PrefixdError."""
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
        Content(info.payload_bytes, info.token_count, info.token_ids_bytes, info.layer_count),
        info.payload_crc32c,
        info.generation,
        _REASONS[info.reason],
    )


def claimed_of(keys: Sequence[Key], response: pb.ClaimResponse) -> tuple[list[int], Entries, bool]:
    """Positions and entries of what was claimed, and whether one of the other keys is being saved.
    Raises PrefixdError."""
    positions: list[int] = []
    entries: list[Entry] = []
    in_flight = False
    with understanding():
        for position, result in enumerate(response.results):
            if result.claimed:
                positions.append(position)
                entries.append(entry_of(keys[position], result.entry))
            elif result.presence == pb.PRESENCE_IN_FLIGHT:
                in_flight = True
    return positions, Entries(entries), in_flight


def found_of(key: Key, result: pb.LookupResult) -> Found:
    if result.presence == pb.PRESENCE_PRESENT:
        return Found(Presence.PRESENT, entry_of(key, result.entry))
    if result.presence == pb.PRESENCE_IN_FLIGHT:
        flight = result.in_flight
        return Found(Presence.IN_FLIGHT, None, flight.owner, flight.age_ms)
    return Found(Presence.ABSENT)


def present_of(keys: Sequence[Key], response: pb.LookupResponse) -> list[bool]:
    """The results of a brief look-up. Raises PrefixdError unless there is one for each key."""
    if len(response.presences) != len(keys):
        raise PrefixdError(
            f"the daemon answered for {len(response.presences)} keys instead of {len(keys)}"
        )
    return [presence == pb.PRESENCE_PRESENT for presence in response.presences]


def granted_of(link: Link, result: pb.ReserveResult) -> Granted:
    status = ReserveStatus(result.status)
    held = link.reservations.hold(link, result.token) if status is ReserveStatus.GRANTED else None
    return Granted(status, held, result.in_flight.owner, result.in_flight.age_ms)


#: The result of nearly every save.
_SAVED: Final = pb.SaveResult(status=pb.SAVE_STATUS_SAVED)


def results_of(response: pb.SaveStagedResponse | pb.SaveLentResponse) -> list[pb.SaveResult]:
    """The result of each item; empty: the save has not ended."""
    return list(response.results) or [_SAVED] * min(response.all_saved, MAX_BATCH_KEYS)


#: Makes `SaveOutcome(key, SaveStatus.SAVED)` in a third of the time that the call takes; there is
#: one for every block.
_SAVED_COLUMNS: Final = tuple(map(repeat, SaveOutcome(Key(b""), SaveStatus.SAVED)[1:]))
_saved = cast("Callable[[tuple[object, ...]], SaveOutcome]", partial(tuple.__new__, SaveOutcome))


def outcome_of(key: Key, result: pb.SaveResult) -> SaveOutcome:
    flight = result.in_flight
    return SaveOutcome(key, SaveStatus(result.status), flight.owner, flight.age_ms, result.message)


def outcomes_of(keys: Sequence[Key], results: Sequence[pb.SaveResult]) -> list[SaveOutcome]:
    """Raises PrefixdError unless there is one result for each key."""
    if len(results) == len(keys) and all(map(is_, results, repeat(_SAVED))):
        return list(map(_saved, zip(keys, *_SAVED_COLUMNS, strict=False)))
    with understanding():
        return [outcome_of(key, result) for key, result in zip(keys, results, strict=True)]


def range_of(requested: Range) -> pb.ReadRange:
    return pb.ReadRange(
        index=requested.place,
        offset_bytes=requested.offset_bytes,
        length_bytes=requested.length_bytes,
        token_ids=requested.token_ids,
    )


def read_request(claim: Holding, ranges: Sequence[Range]) -> pb.ReadRequest:
    return pb.ReadRequest(
        session=claim.link.ref, claim_id=claim.number, ranges=map(range_of, ranges)
    )


def reserved_of(
    session: pb.SessionRef, reservations: Sequence[tuple[Holding, Key]]
) -> pb.GrantedReservations:
    return pb.GrantedReservations(
        session=session, tokens=[holding.number for holding, _ in reservations]
    )


def header_of(items: Sequence[Item], terms: SaveTerms) -> pb.SaveHeader:
    keys, contents, token_ids = zip(*items, strict=True)
    sizes_bytes, token_counts, _, layer_counts = columns_of(contents)
    return pb.SaveHeader(
        tier=pb.Tier.ValueType(terms.tier),
        reason=pb.SaveReason.ValueType(terms.reason),
        keys=keys,
        payload_bytes=sizes_bytes,
        token_counts=token_counts,
        # Columns without information are left out.
        layer_counts=layer_counts if any(layer_counts) else (),
        token_ids=token_ids if any(token_ids) else (),
        ancestors=terms.ancestors,
        wait_ms=terms.wait_ms,
        ttl_ms=terms.ttl_ms,
        touched=terms.touched,
    )


def header_in(link: Link, items: Sequence[Saving], terms: SaveTerms) -> pb.SaveHeader:
    """The header of a save in this session. Raises InvalidBatch if it does not fit into one
    message."""
    header = header_of([saving.item for saving in items], terms)
    header.session.CopyFrom(link.ref)
    framing_bytes = _FRAMING_BYTES + _PART_BYTES * len(header.keys)
    header_bytes = header.ByteSize() + framing_bytes
    if header_bytes > link.max_message_bytes:
        raise InvalidBatch(
            f"keys and token ids of {len(header.keys)} items are {header_bytes} bytes, more "
            f"than the {link.max_message_bytes} of a message: save them in several calls"
        )
    return header


# ---- payloads

_LENGTH_DELIMITED: Final = 2
#: What a message and its part need beside the data, at most.
_OVERHEAD_BYTES: Final = 128
#: What a message needs beside its header, and what a part of each item needs, at most.
_FRAMING_BYTES, _PART_BYTES = 64, 32


def _tag(field: int) -> bytes:
    """The bytes before a field of bytes, or a message, on the wire (fields below 16)."""
    return bytes([field << 3 | _LENGTH_DELIMITED])


_PARTS_TAG: Final = _tag(pb.SaveRequest.PARTS_FIELD_NUMBER)
_DATA_TAG: Final = _tag(pb.WritePart.DATA_FIELD_NUMBER)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def pack(
    opening: bytes,
    payloads: Sequence[FlatBytes],
    *,
    chunk_bytes: int,
    max_message_bytes: int,
) -> Iterator[bytes]:
    """The encoded messages of a Save stream.

    `opening` is the encoded first message without parts. `payloads`, one for each item, are flat
    bytes, referenced until the last message is out. Parts are at most `chunk_bytes` long; a message
    holds one, or as many small ones as make up a chunk. The CRC32C is computed chunk by chunk while
    the payload is cut, when the chunk is in the CPU cache.
    """
    chunk_bytes = min(chunk_bytes, max_message_bytes - _OVERHEAD_BYTES)
    pieces: list[bytes | memoryview] = [opening]
    size_bytes = len(opening)
    for item, payload in enumerate(payloads):
        crc = 0
        for offset in range(0, len(payload), chunk_bytes):
            data = payload[offset : offset + chunk_bytes]
            full = size_bytes >= chunk_bytes
            if full or size_bytes + len(data) + _OVERHEAD_BYTES > max_message_bytes:
                yield b"".join(pieces)
                pieces, size_bytes = [], 0
            crc = crc32c_of(data, crc)
            part = pb.WritePart(item=item, offset_bytes=offset)
            if offset + len(data) == len(payload):
                part.last, part.payload_crc32c = True, crc
            head = part.SerializeToString() + _DATA_TAG + _varint(len(data))
            length_bytes = len(head) + len(data)
            pieces += [_PARTS_TAG, _varint(length_bytes), head, *views_of(data)]
            size_bytes += length_bytes + _OVERHEAD_BYTES
    yield b"".join(pieces)
