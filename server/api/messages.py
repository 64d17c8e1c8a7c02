"""From the wire to the values of the core, and back: requests are parsed and checked, results are
put into messages.

Everything that a caller can get wrong about the form of a request is refused here, with a
sentence; what comes out is well-formed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from ...proto import limits
from ...proto import prefixd_pb2 as pb
from ...proto.entry import Column, contents_of
from ...proto.errors import (
    InvalidBatch,
    InvalidKey,
    InvalidSize,
    MalformedMessage,
    UnknownReason,
    UnknownTier,
)
from ...proto.keys import Key
from ...proto.vocabulary import SaveReason, SaveStatus, Tier
from ..core.effects import (
    ClaimAnswer,
    Closed,
    FlightInfo,
    Found,
    LookupAnswer,
    OverShare,
    Reserved,
    SaveEnded,
    WriteOrder,
)
from ..core.entries import EntryState
from ..core.events import KeyToSave, TierState

V = TypeVar("V")
M = TypeVar("M", bound=Message)

_KEY_BYTES = limits.KEY_BYTES

# ---- bytes

#: The fields of a longer message are counted before it is parsed. A batch of keys is shorter, and
#: most longer messages have a few large fields: payloads.
LOOKED_THROUGH_BYTES: Final = 256 * 2**10
#: A save of as many entries as a call may have, with every field set, has half as many fields.
MOST_FIELDS: Final = 2**16
#: Values of a packed column that count as one field: they take the memory of one.
_PACKED: Final = 8
_MAX_VARINT_BITS: Final = 64


def parse(kind: type[M], data: bytes) -> M:
    """Parse a message. Raises MalformedMessage for bytes that are none, and for too many fields: an
    empty part of a save is two bytes on the wire and dozens in memory, so that millions of them
    would hold the loop for longer than a second."""
    try:
        if len(data) > LOOKED_THROUGH_BYTES and fields_of(kind, data) > MOST_FIELDS:
            raise MalformedMessage(f"{len(data)} bytes with more than {MOST_FIELDS} fields")
        return kind.FromString(data)
    except (DecodeError, IndexError) as problem:
        raise MalformedMessage(
            f"{len(data)} bytes that are no {kind.DESCRIPTOR.name}: {problem}"
        ) from None


def fields_of(kind: type[Message], data: bytes) -> int:
    """Count the fields of a message and of the messages in it, up to MOST_FIELDS + 1. Raises
    DecodeError or IndexError for some of the bytes that are no such message."""
    return MOST_FIELDS - max(-1, _left(kind.DESCRIPTOR, data, 0, len(data), MOST_FIELDS))


def _left(kind: Any, data: bytes, at: int, end: int, left: int) -> int:
    """`left` less the fields of the message in data[at:end]. Negative: there are more fields."""
    messages, columns = _known(kind)
    while at < end and left >= 0:
        left -= 1
        tag, at = _varint(data, at)
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length_bytes, at = _varint(data, at)
                number, start = tag >> 3, at
                at += length_bytes
                if number in columns:
                    left -= length_bytes // _PACKED
                elif length_bytes and (inner := messages.get(number)) is not None:
                    left = _left(inner, data, start, at, left)
            case 5:
                at += 4
            case wire_type:
                raise DecodeError(f"wire type {wire_type}")
    if at > end and left >= 0:
        raise DecodeError("a field is longer than what it is in")
    return left


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at data[at], and the offset behind it."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    for shift in range(7, _MAX_VARINT_BITS, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise DecodeError("a number of more than 64 bits")


@cache
def _known(kind: Any) -> tuple[dict[int, Any], frozenset[int]]:
    """Message fields by number, and the numbers of the fields that can be packed columns."""
    messages = {f.number: f.message_type for f in kind.fields if f.message_type is not None}
    columns = frozenset(
        f.number
        for f in kind.fields
        if f.message_type is None and f.cpp_type != FieldDescriptor.CPPTYPE_STRING
    )
    return messages, columns


# ---- requests


def batch_of(name: str, elements: Collection[object]) -> None:
    """Refuse a batch that is empty or over-long."""
    if not elements:
        raise InvalidBatch(f"{name} is empty; name at least one")
    if len(elements) > limits.MAX_BATCH_KEYS:
        raise InvalidBatch(
            f"{name} has {len(elements)} elements, at most {limits.MAX_BATCH_KEYS} go into one call"
        )


def keys_of(name: str, raw: Sequence[bytes], *, may_be_empty: bool = False) -> tuple[Key, ...]:
    """Check a batch of keys. Raises InvalidBatch, InvalidKey."""
    if raw or not may_be_empty:
        batch_of(name, raw)
    keys = tuple(raw)
    if set(map(len, keys)) - {_KEY_BYTES}:
        index, key = next((n, key) for n, key in enumerate(keys) if len(key) != _KEY_BYTES)
        raise InvalidKey(f"{name}[{index}] has {len(key)} bytes; a key has {_KEY_BYTES}")
    return cast("tuple[Key, ...]", keys)


def tier_of(number: int, configured: Collection[Tier]) -> Tier:
    """The tier with this number, if the daemon has it. Raises UnknownTier."""
    names = ", ".join(tier.label for tier in configured)
    try:
        tier = Tier(number)
    except ValueError:
        raise UnknownTier(f"tier {number} does not exist; this daemon has {names}") from None
    if tier not in configured:
        raise UnknownTier(f"the {tier.label} tier is not configured; this daemon has {names}")
    return tier


def reason_of(number: int) -> SaveReason:
    try:
        return SaveReason(number)
    except ValueError:
        names = ", ".join(reason.label for reason in SaveReason)
        raise UnknownReason(f"save reason {number} does not exist; there are {names}") from None


def milliseconds(name: str, value: int, default: int, most: int) -> int:
    """A requested time in nanoseconds; 0 stands for the default. Raises InvalidSize."""
    if value > most:
        raise InvalidSize(f"{name} is {value}, at most {most} ms are allowed")
    return (value or default) * 1_000_000


def wait_until(now_ns: int, wait_ms: int) -> int:
    """The time until which a call may wait."""
    return now_ns + milliseconds("wait_ms", wait_ms, 0, limits.MAX_WAIT_MS)


def items_of(header: pb.SaveHeader) -> tuple[KeyToSave, ...]:
    """The items of a save. Raises PrefixdError, also when a key is named twice."""
    keys = keys_of("keys", header.keys)
    if len(set(keys)) != len(keys):
        raise InvalidBatch("a key is named twice in one save")
    sizes_bytes = _column("payload_bytes", header.payload_bytes, keys, 0)
    layer_counts = _column("layer_counts", header.layer_counts, keys, 0)
    token_ids = _column("token_ids", header.token_ids, keys, b"")
    # Checked all at once: nearly always all are right.
    least_bytes, most_bytes = min(sizes_bytes), max(sizes_bytes)
    if not (least_bytes > 0 and most_bytes <= limits.MAX_PAYLOAD_BYTES):
        raise _wrong_size(sizes_bytes)
    if any(layer_counts):
        _check_layers(sizes_bytes, layer_counts)
    ids_bytes: Column = 0
    if any(token_ids):
        _check_token_ids(token_ids)
        ids_bytes = tuple(map(len, token_ids))
    token_counts = _column("token_counts", header.token_counts, keys, 0)
    contents = contents_of(
        len(keys),
        most_bytes if least_bytes == most_bytes else sizes_bytes,
        token_counts,
        ids_bytes,
        layer_counts if any(layer_counts) else 0,
    )
    return tuple(map(_item, zip(keys, contents, token_ids, strict=True)))


#: `KeyToSave._make` in a third of its time, for every block.
_item = cast("Callable[[tuple[object, ...]], KeyToSave]", partial(tuple.__new__, KeyToSave))


def _column(name: str, values: Sequence[V], keys: Sequence[Key], absent: V) -> Sequence[V]:
    """One value for each key."""
    if not values:
        return (absent,) * len(keys)
    if len(values) != len(keys):
        raise InvalidBatch(f"{name} has {len(values)} elements for {len(keys)} keys")
    return tuple(values)


def _wrong_size(sizes_bytes: Sequence[int]) -> InvalidSize:
    most = limits.MAX_PAYLOAD_BYTES
    index = next(n for n, size_bytes in enumerate(sizes_bytes) if not 0 < size_bytes <= most)
    return InvalidSize(f"payload_bytes[{index}] is {sizes_bytes[index]}, allowed are 1 to {most}")


def _check_layers(sizes_bytes: Sequence[int], layer_counts: Sequence[int]) -> None:
    for index, (size_bytes, layers) in enumerate(zip(sizes_bytes, layer_counts, strict=True)):
        if layers > limits.MAX_LAYERS or (layers and size_bytes % layers):
            raise InvalidSize(
                f"layer_counts[{index}]: {size_bytes} bytes are no {layers} layers of one size"
            )


def _check_token_ids(token_ids: Sequence[bytes]) -> None:
    for index, ids in enumerate(token_ids):
        if len(ids) > limits.MAX_TOKEN_IDS_BYTES or len(ids) % 4:
            raise InvalidSize(
                f"token_ids[{index}] has {len(ids)} bytes; they are 4 bytes each, "
                f"at most {limits.MAX_TOKEN_IDS_BYTES}"
            )


def parts_of(request: pb.SaveStagedRequest) -> StagedParts:
    """The parts that lie in staging memory: at most one of each payload, as large as a slot."""
    columns: tuple[Collection[Any], ...] = (
        request.items,
        request.staging_offset_bytes,
        request.length_bytes,
        request.last_parts,
        request.payload_crc32c,
    )
    lengths = list(map(len, columns))
    if len(set(lengths)) != 1:
        raise MalformedMessage(f"the columns of {lengths[0]} parts have {lengths} values")
    check_parts(request.items)
    return StagedParts(*map(list, columns))


def check_parts(parts: Collection[object]) -> None:
    """Refuse more parts than a message can bring payloads, without looking at any of them."""
    if len(parts) > limits.MAX_BATCH_KEYS:
        raise InvalidBatch(
            f"{len(parts)} parts in one message, at most {limits.MAX_BATCH_KEYS} go into one"
        )


class StagedParts(NamedTuple):
    """Parts of payloads in staging memory, in columns."""

    items: list[int]
    staging_offset_bytes: list[int]
    length_bytes: list[int]
    lasts: list[bool]
    payload_crc32c: list[int]


# ---- results


def info_of(entry: EntryState) -> pb.EntryInfo:
    return pb.EntryInfo(
        tier=entry.tier.value,  # type: ignore[arg-type]  # the numbers are those of the wire
        generation=entry.generation,
        payload_bytes=entry.payload_bytes,
        token_count=entry.token_count,
        payload_crc32c=entry.payload_crc32c,
        layer_count=entry.layer_count,
        token_ids_bytes=entry.token_ids_bytes,
        reason=entry.reason.value,  # type: ignore[arg-type]
    )


def flight_of(flight: FlightInfo) -> pb.InFlight:
    # Served time steps back after the daemon was late; an age may then be negative.
    return pb.InFlight(owner=flight.owner, age_ms=max(0, flight.age_ns) // 1_000_000)


def lookup_response(answer: LookupAnswer, incarnation: bytes, *, brief: bool) -> pb.LookupResponse:
    if brief:
        presences = map(_presence, answer.results)
        return pb.LookupResponse(incarnation=incarnation, presences=presences)
    return pb.LookupResponse(incarnation=incarnation, results=map(_lookup_result, answer.results))


def _presence(found: Found) -> pb.Presence.ValueType:
    if isinstance(found, EntryState):
        return pb.PRESENCE_PRESENT
    return pb.PRESENCE_ABSENT if found is None else pb.PRESENCE_IN_FLIGHT


def _lookup_result(found: Found) -> pb.LookupResult:
    if isinstance(found, EntryState):
        return pb.LookupResult(presence=pb.PRESENCE_PRESENT, entry=info_of(found))
    if found is None:
        return pb.LookupResult(presence=pb.PRESENCE_ABSENT)
    return pb.LookupResult(presence=pb.PRESENCE_IN_FLIGHT, in_flight=flight_of(found))


def claim_response(answer: ClaimAnswer, *, brief: bool) -> pb.ClaimResponse:
    response = pb.ClaimResponse(claim_id=answer.claim, lease_ms=answer.lease_ns // 1_000_000)
    results = zip(answer.results, answer.claimed, strict=True)
    if brief:
        response.generations.extend(
            [
                found.generation if claimed and isinstance(found, EntryState) else 0
                for found, claimed in results
            ]
        )
    else:
        response.results.extend(
            [
                pb.ClaimResult(
                    claimed=claimed,
                    presence=_presence(found),
                    entry=info_of(found) if isinstance(found, EntryState) else None,
                )
                for found, claimed in results
            ]
        )
    return response


def reserve_result(reserved: Reserved) -> pb.ReserveResult:
    if isinstance(reserved, WriteOrder):
        return pb.ReserveResult(status=pb.RESERVE_STATUS_GRANTED, token=reserved.token)
    refused = refused_save(reserved)
    return pb.ReserveResult(
        status=_RESERVE_STATUS[refused.status],
        in_flight=refused.in_flight if refused.HasField("in_flight") else None,
    )


_RESERVE_STATUS = {
    pb.SAVE_STATUS_PRESENT: pb.RESERVE_STATUS_PRESENT,
    pb.SAVE_STATUS_IN_FLIGHT: pb.RESERVE_STATUS_IN_FLIGHT,
    pb.SAVE_STATUS_TOO_LARGE: pb.RESERVE_STATUS_TOO_LARGE,
    pb.SAVE_STATUS_NO_ROOM: pb.RESERVE_STATUS_NO_ROOM,
}
_WHY_CLOSED = {
    TierState.RECOVERING: "it looks through what an earlier start left, and secures memory",
    TierState.HUNG: "its device does not answer",
    TierState.UNAVAILABLE: "it could not be opened, for a reason that the daemon's health says",
}
_WHY_NOT = {
    SaveStatus.PRESENT: "it is published already",
    SaveStatus.TOO_LARGE: "it is larger than the tier; retrying can't help",
    SaveStatus.NO_ROOM: "everything in the tier is pinned or reserved; retrying may help",
}


def refused_save(reserved: FlightInfo | SaveStatus | Closed | OverShare) -> pb.SaveResult:
    """The result of an item that was not granted."""
    if isinstance(reserved, OverShare):
        option = f"{reserved.tier.label}.shares"
        if reserved.for_ever:
            return pb.SaveResult(
                status=pb.SAVE_STATUS_TOO_LARGE,
                message=f"it is larger than what {option} leaves to its namespace; retrying can't "
                "help",
            )
        return pb.SaveResult(
            status=pb.SAVE_STATUS_NO_ROOM,
            message=f"with what is pinned and reserved it would take what {option} gives to other "
            "namespaces; retrying may help",
        )
    if isinstance(reserved, Closed):
        why = f"the {reserved.tier.label} tier takes no saves now: {_WHY_CLOSED[reserved.state]}"
        return pb.SaveResult(
            status=pb.SAVE_STATUS_NO_ROOM, message=f"{why}; retrying later may help"
        )
    if isinstance(reserved, FlightInfo):
        return pb.SaveResult(
            status=pb.SAVE_STATUS_IN_FLIGHT,
            in_flight=flight_of(reserved),
            message=f"{reserved.owner} is saving it; waiting may help",
        )
    return pb.SaveResult(
        status=reserved.value,  # type: ignore[arg-type]
        message=_WHY_NOT[reserved],
    )


#: What a caller can do about a save that was granted and failed.
_WHAT_NOW = {
    SaveStatus.CRC_MISMATCH: "send it again",
    SaveStatus.LENGTH_MISMATCH: "retrying the same can't help",
    SaveStatus.LOST: "retrying from the start may help",
    SaveStatus.DEVICE_FULL: "retrying may help",
    SaveStatus.FAILED: "retrying may help",
}


def ended_save(ended: SaveEnded) -> pb.SaveResult:
    what_now = _WHAT_NOW.get(ended.outcome)
    return pb.SaveResult(
        status=ended.outcome.value,  # type: ignore[arg-type]
        message=f"{ended.why}; {what_now}" if what_now else ended.why,
    )


def entry_detail(entry: EntryState) -> pb.EntryDetail:
    return pb.EntryDetail(
        key=entry.key,
        info=info_of(entry),
        stored_bytes=entry.stored_bytes,
        created_unix_ns=entry.generation,
        last_used_unix_ns=entry.last_used_ns,
        hits=entry.hits,
        pins=entry.pins,
        extents=entry.location,
        namespace=entry.label,
    )


def tiers_of(numbers: Collection[int], configured: Collection[Tier]) -> tuple[Tier, ...]:
    """The tiers with these numbers, each once. Raises InvalidBatch, UnknownTier."""
    if len(numbers) > len(Tier):
        raise InvalidBatch(f"tiers has {len(numbers)} elements, and there are {len(Tier)} tiers")
    return tuple(dict.fromkeys(tier_of(number, configured) for number in numbers))
