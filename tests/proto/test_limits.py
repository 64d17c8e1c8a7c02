"""The limits fit together: what one allows, no other refuses."""

import pytest
from google.protobuf.message import Message

from prefixd.proto import limits
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.entry import Content, EntryRecord, content_bytes
from prefixd.proto.keys import Key, Namespace
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.tiers.rows import decode_entry, encode_rows
from tests.support.columns import Item, columns

U32, U64 = 2**32 - 1, 2**64 - 1
KEY = b"\xff" * limits.KEY_BYTES
#: The largest values that the numbers of each message can have.
SESSION = pb.SessionRef(incarnation=b"\xff" * 16, session_id=U64)
INFO = pb.EntryInfo(
    tier=pb.TIER_DISK,
    generation=U64,
    payload_bytes=limits.MAX_PAYLOAD_BYTES,
    token_count=U32,
    payload_crc32c=U32,
    layer_count=limits.MAX_LAYERS,
    token_ids_bytes=limits.MAX_TOKEN_IDS_BYTES,
    reason=pb.SAVE_REASON_SHUTDOWN,
)
IN_FLIGHT = pb.InFlight(owner="x" * 2 * limits.MAX_CLIENT_NAME_CHARS, age_ms=U64)
ITEM = Item(
    key=KEY,
    payload_bytes=limits.MAX_PAYLOAD_BYTES,
    token_count=U32,
    layer_count=limits.MAX_LAYERS,
    token_ids=b"\xff" * 4 * limits.DEFAULT_BLOCK_TOKENS,
)
DETAIL = pb.EntryDetail(
    key=KEY,
    info=INFO,
    stored_bytes=U64,
    created_unix_ns=2**63 - 1,
    last_used_unix_ns=2**63 - 1,
    hits=U64,
    pins=U32,
    extents=[limits.MAX_PAYLOAD_BYTES] * 32,
)
BATCH = limits.MAX_BATCH_KEYS


def largest_messages() -> dict[str, Message]:
    result = pb.LookupResult(presence=pb.PRESENCE_IN_FLIGHT, entry=INFO, in_flight=IN_FLIGHT)
    return {
        "lookup": pb.LookupRequest(keys=[KEY] * BATCH),
        "lookup answer": pb.LookupResponse(results=[result] * BATCH),
        "claim": pb.ClaimRequest(session=SESSION, keys=[KEY] * BATCH, mode=pb.CLAIM_MODE_RUN),
        "claim answer": pb.ClaimResponse(results=[pb.ClaimResult(entry=INFO)] * BATCH),
        "release": pb.ReleaseRequest(session=SESSION, claim_ids=[U64] * BATCH),
        "read": pb.ReadRequest(
            session=SESSION,
            ranges=[pb.ReadRange(index=U32, offset_bytes=U64, length_bytes=U64)] * BATCH,
        ),
        "read part": pb.ReadResponse(
            parts=[pb.ReadPart(range=U32, offset_bytes=U64, data=bytes(limits.CHUNK_BYTES))]
        ),
        "write part": pb.SaveRequest(
            reserved=pb.GrantedReservations(session=SESSION),
            parts=[
                pb.WritePart(
                    item=U32,
                    offset_bytes=U64,
                    data=bytes(limits.CHUNK_BYTES),
                    last=True,
                    payload_crc32c=U32,
                )
            ],
        ),
        "blocks with their token ids": pb.SaveRequest(
            header=pb.SaveHeader(
                session=SESSION, **columns([ITEM] * BATCH), ancestors=[KEY] * BATCH, ttl_ms=U32
            )
        ),
        "one entry with all its token ids": pb.SaveRequest(
            header=pb.SaveHeader(
                **columns([Item(KEY, token_ids=bytes(limits.MAX_TOKEN_IDS_BYTES))]),
                ancestors=[KEY] * BATCH,
            ),
            parts=[pb.WritePart(data=bytes(limits.CHUNK_BYTES))],
        ),
        "save answer": pb.SaveResponse(
            results=[pb.SaveResult(in_flight=IN_FLIGHT, message="x" * 500)] * BATCH
        ),
        "page": pb.ListEntriesResponse(entries=[DETAIL] * limits.MAX_PAGE_ENTRIES),
    }


@pytest.mark.parametrize("name", largest_messages())
def test_whatever_the_limits_allow_fits_into_a_message(name: str) -> None:
    assert largest_messages()[name].ByteSize() <= limits.MAX_MESSAGE_BYTES


def test_a_request_without_bytes_is_short() -> None:
    """The bound is several times the size of the largest message, with room for later fields."""
    session = pb.SessionRef(incarnation=b"\xff" * 16, session_id=U64, secret=b"\xff" * 16)
    keys, numbers = [KEY] * BATCH, [U64] * BATCH
    ranges = [pb.ReadRange(index=U32, offset_bytes=U64, length_bytes=U64, token_ids=True)] * BATCH
    told = limits.MAX_TOLD_KEYS_IN_ALL // limits.MAX_TOLD_MISSES
    absent = [pb.AbsentMiss(keys=[KEY] * told, tokens=U64, age_ns=U64)] * limits.MAX_TOLD_MISSES
    requests: list[Message] = [
        pb.LookupRequest(keys=keys, wait_ms=U32),
        pb.ClaimRequest(
            session=session, keys=keys, wait_ms=U32, lease_ms=U32, mode=pb.CLAIM_MODE_RUN
        ),
        pb.ReleaseRequest(session=session, claim_ids=numbers),
        pb.CancelRequest(session=session, tokens=numbers),
        pb.DeleteRequest(session=session, keys=keys),
        pb.PullRequest(session=session, keys=keys, wait_ms=U32, mode=pb.CLAIM_MODE_RUN),
        pb.ReadRequest(session=session, claim_id=U64, ranges=ranges),
        pb.SessionRequest(touch=pb.Touch(keys=keys)),
        pb.SessionRequest(suspect=pb.Suspect(keys=keys)),
        pb.SessionRequest(give_back=pb.GiveBack(claim_ids=numbers)),
        pb.SessionRequest(heartbeat=pb.Heartbeat(usage=pb.Usage(absent=absent))),
        pb.DropRequest(keys=keys),
        pb.CurveRequest(budget_bytes=numbers),
    ]
    assert 4 * max(each.ByteSize() for each in requests) <= limits.MAX_PLAIN_MESSAGE_BYTES


def test_a_message_holds_several_chunks() -> None:
    assert 2 * limits.CHUNK_BYTES <= limits.MAX_MESSAGE_BYTES


def test_what_the_wire_allows_a_record_can_hold() -> None:
    slab_bytes = 2**20
    payload_bytes = limits.MAX_PAYLOAD_BYTES // limits.MAX_LAYERS * limits.MAX_LAYERS
    token_ids_bytes = limits.MAX_TOKEN_IDS_BYTES
    room_bytes = -(-content_bytes(payload_bytes, token_ids_bytes) // slab_bytes) * slab_bytes
    entry = EntryRecord(
        key=Key(KEY),
        tier=Tier.DISK,
        reason=SaveReason.SHUTDOWN,
        generation=U64,
        created_ns=2**63 - 1,
        content=Content(payload_bytes, U32, token_ids_bytes, limits.MAX_LAYERS),
        location=(slab_bytes, room_bytes),
        payload_crc32c=U32,
    )
    ((slab, row),) = encode_rows(entry, slab_bytes)
    assert decode_entry(row, slab, slab_bytes, lambda _: b"") == entry
    assert limits.MAX_PAYLOAD_BYTES <= U64


def test_keys_are_made_of_what_the_limits_say() -> None:
    namespace = Namespace(b"f" * limits.FINGERPRINT_BYTES, "q" * limits.QUANT_BYTES, b"c" * 32)
    assert len(namespace.root) == limits.KEY_BYTES
    assert len(namespace.preamble) == limits.FINGERPRINT_BYTES + limits.QUANT_BYTES + 32


def test_times_are_ordered() -> None:
    session_lost_ms = limits.SESSION_LOST_AFTER_INTERVALS * limits.DEFAULT_HEARTBEAT_INTERVAL_MS
    # A live session renews its claims long before they run out, and a dead session is noticed
    # before its reservations time out.
    assert limits.SESSION_LOST_AFTER_INTERVALS >= 2
    assert limits.IDLE_SESSION_LOST_AFTER_INTERVALS % limits.SESSION_LOST_AFTER_INTERVALS == 0
    assert 10 * limits.DEFAULT_HEARTBEAT_INTERVAL_MS <= limits.DEFAULT_CLAIM_LEASE_MS
    assert session_lost_ms < limits.DEFAULT_RESERVATION_TTL_MS
    assert limits.DEFAULT_CLAIM_LEASE_MS <= limits.MAX_LEASE_MS
    assert limits.DEFAULT_RESERVATION_TTL_MS <= limits.MAX_LEASE_MS
    # A call with the default wait is answered within its deadline, and a save that a client still
    # waits for has not lost its reservation.
    assert 0 < limits.DEFAULT_WAIT_MS < limits.DEFAULT_DEADLINE_MS
    assert limits.DEFAULT_WAIT_MS <= limits.MAX_WAIT_MS
    assert limits.DEFAULT_SAVE_TIMEOUT_MS < limits.DEFAULT_RESERVATION_TTL_MS


def test_one_batch_never_fills_a_table() -> None:
    assert limits.MAX_BATCH_KEYS < limits.MAX_RESERVATIONS_PER_SESSION
    assert limits.MAX_BATCH_KEYS < limits.MAX_CLAIMS_PER_SESSION
    assert limits.MAX_SESSIONS <= limits.MAX_WAITERS


def test_the_save_gates_are_ordered() -> None:
    assert 0 < limits.DEFAULT_MIN_TOKENS <= limits.DEFAULT_COLD_MIN_TOKENS
    assert limits.DEFAULT_COLD_MIN_TOKENS <= limits.DEFAULT_COLD_MAX_TOKENS
    assert limits.DEFAULT_BOUNDARY_TRIM_TOKENS < limits.DEFAULT_BOUNDARY_ALIGN_TOKENS
    assert limits.DEFAULT_BOUNDARY_ALIGN_TOKENS % limits.DEFAULT_BLOCK_TOKENS == 0
    assert 4 * limits.DEFAULT_COLD_MAX_TOKENS <= limits.MAX_TOKEN_IDS_BYTES


COUNTS = {
    "MAX_BATCH_KEYS",
    "MAX_HELD_KEYS",
    "MAX_LAYERS",
    "MAX_LENT_PIECES",
    "MAX_CLIENT_NAME_CHARS",
    "MAX_LABEL_CHARS",
    "MAX_LABELS",
    "MAX_NAMESPACES",
    "MAX_TOLD_KEYS",
    "MAX_TOLD_KEYS_IN_ALL",
    "MAX_TOLD_MISSES",
    "MAX_REPORTED",
    "SESSION_LOST_AFTER_INTERVALS",
    "IDLE_SESSION_LOST_AFTER_INTERVALS",
    "MAX_SESSIONS",
    "MAX_IDENTITIES_PER_SESSION",
    "MAX_ENGINE_CHARS",
    "MAX_CLAIMS_PER_SESSION",
    "MAX_RESERVATIONS_PER_SESSION",
    "MAX_WAITED_KEYS",
    "MAX_WAITED_KEYS_PER_SESSION",
    "MAX_WAITERS",
    "MAX_PAGE_ENTRIES",
    "MAX_RECORDED_LOOKUPS",
    "MAX_RECORDED_IDS",
}


def test_every_limit_is_a_positive_number_with_a_unit() -> None:
    found = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert found
    for name, value in found.items():
        for number in value if isinstance(value, tuple) else (value,):
            assert isinstance(number, int), name
            assert number > 0, name
        assert name.endswith(("_BYTES", "_MS", "_NS", "_TOKENS")) != (name in COUNTS), name
    assert set(found) >= COUNTS
