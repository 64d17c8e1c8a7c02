"""What the daemon answers, in the client's words, and what it is asked, in the contract's."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...proto import prefixd_pb2 as pb
from ...proto.errors import InvalidBatch, InvalidSize, PrefixdError
from ...proto.keys import Key
from ...proto.limits import MAX_CLIENT_NAME_CHARS, MAX_MESSAGE_BYTES
from ...proto.vocabulary import SaveReason, Tier
from ..results import Entry, Found, Presence, ReserveStatus, SaveOutcome, SaveStatus
from .link import Link
from .transport import Granted, ReserveItem, SaveTerms


@contextmanager
def understanding() -> Iterator[None]:
    """An answer that does not follow the contract is a failed call, not a crash of the caller."""
    try:
        yield
    except (KeyError, IndexError, ValueError) as problem:
        raise PrefixdError(
            f"the daemon's answer does not follow the contract: {problem!r}"
        ) from None


#: What a message needs beside its header, and for a part of each item, generously.
_FRAMING_BYTES, _PART_BYTES = 64, 32

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


def found_of(key: Key, result: pb.LookupResult) -> Found:
    if result.presence == pb.PRESENCE_PRESENT:
        return Found(Presence.PRESENT, entry_of(key, result.entry))
    if result.presence == pb.PRESENCE_IN_FLIGHT:
        flight = result.in_flight
        return Found(Presence.IN_FLIGHT, None, flight.owner, flight.age_ms)
    return Found(Presence.ABSENT)


def granted_of(link: Link, result: pb.ReserveResult) -> Granted:
    status = ReserveStatus(result.status)
    held = link.reservations.hold(link, result.token) if status is ReserveStatus.GRANTED else None
    return Granted(status, held, result.in_flight.owner, result.in_flight.age_ms)


def outcome_of(key: Key, result: pb.SaveResult) -> SaveOutcome:
    flight = result.in_flight
    return SaveOutcome(key, SaveStatus(result.status), flight.owner, flight.age_ms, result.message)


def header_of(items: Sequence[ReserveItem], terms: SaveTerms) -> pb.SaveHeader:
    return pb.SaveHeader(
        tier=pb.Tier.ValueType(terms.tier),
        reason=pb.SaveReason.ValueType(terms.reason),
        items=[pb.SaveItem(**item._asdict()) for item in items],
        ancestors=terms.ancestors,
        wait_ms=terms.wait_ms,
        ttl_ms=terms.ttl_ms,
        touched=terms.touched,
    )


def max_message_bytes(link: Link) -> int:
    return link.welcome.max_message_bytes or MAX_MESSAGE_BYTES


def check_header(header: pb.SaveHeader, link: Link) -> None:
    """A header is one message, or part of one. Raises InvalidBatch."""
    framing_bytes = _FRAMING_BYTES + _PART_BYTES * len(header.items)
    header_bytes, max_bytes = header.ByteSize() + framing_bytes, max_message_bytes(link)
    if header_bytes > max_bytes:
        raise InvalidBatch(
            f"keys and token ids of {len(header.items)} items are {header_bytes} bytes, more "
            f"than the {max_bytes} of a message: save them in several calls"
        )


def hello(name: str | None) -> pb.Hello:
    """Who this client is. Without a name: the program."""
    if name is None:
        name = Path(sys.argv[0]).name[:MAX_CLIENT_NAME_CHARS] or "client"
    if not 0 < len(name) <= MAX_CLIENT_NAME_CHARS:
        raise InvalidSize(f"a name has 1 ... {MAX_CLIENT_NAME_CHARS} characters, not {len(name)}")
    return pb.Hello(client_name=name, pid=os.getpid(), host=socket.gethostname())
