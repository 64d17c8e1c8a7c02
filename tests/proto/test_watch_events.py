"""Events that are packed by hand are those that protobuf reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto import watch_events
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier

U64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32).map(Key)
LABELS = st.text("ab/._-0", max_size=64)


@given(
    st.sampled_from(Tier),
    KEYS,
    U64,
    U64,
    U64,
    st.integers(0, 2**32 - 1),
    st.sampled_from(SaveReason),
    st.none() | st.just(b"") | KEYS,
    LABELS,
    st.binary(max_size=40_000),
)
def test_a_published_entry(
    tier: Tier,
    key: Key,
    sequence: int,
    generation: int,
    payload_bytes: int,
    token_count: int,
    reason: SaveReason,
    parent: bytes | None,
    label: str,
    token_ids: bytes,
) -> None:
    body = watch_events.published(
        tier, key, sequence, generation, payload_bytes, token_count, reason, parent, label
    )
    meant = pb.WatchEvent(
        kind=pb.WATCH_KIND_PUBLISHED,
        tier=pb.Tier.ValueType(tier),
        key=key,
        sequence=sequence,
        generation=generation,
        payload_bytes=payload_bytes,
        token_count=token_count,
        reason=pb.SaveReason.ValueType(reason),
        parent=parent,
        namespace=label,
    )
    assert pb.WatchEvent.FromString(body) == meant
    assert watch_events.is_published(body)
    assert (watch_events.tier_number(body), watch_events.key_of(body)) == (tier, key)
    assert watch_events.generation_of(body) == generation
    meant.token_ids = token_ids
    assert pb.WatchEvent.FromString(watch_events.with_token_ids(body, token_ids)) == meant
    response = watch_events.response(b"i" * 16, [body, body], sequence)
    meant.token_ids = b""
    assert pb.WatchResponse.FromString(response) == pb.WatchResponse(
        incarnation=b"i" * 16, events=[meant, meant], sequence=sequence
    )


@given(st.sampled_from(Tier), KEYS, U64, U64)
def test_an_evicted_entry(tier: Tier, key: Key, sequence: int, generation: int) -> None:
    body = watch_events.evicted(tier, key, sequence, generation)
    assert pb.WatchEvent.FromString(body) == pb.WatchEvent(
        kind=pb.WATCH_KIND_EVICTED,
        tier=pb.Tier.ValueType(tier),
        key=key,
        sequence=sequence,
        generation=generation,
    )
    assert not watch_events.is_published(body)
    assert (watch_events.tier_number(body), watch_events.key_of(body)) == (tier, key)


def test_the_numbers_are_those_of_the_contract() -> None:
    assert watch_events.PUBLISHED == pb.WATCH_KIND_PUBLISHED
    assert watch_events.EVICTED == pb.WATCH_KIND_EVICTED
    assert watch_events.response(b"", [], 0) == b"\x0a\x00\x19" + bytes(8)
