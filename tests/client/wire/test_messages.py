"""From the contract's messages to the client's values, and back."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from prefixd.client.wire import messages
from prefixd.client.wire.transport import ReserveItem, SaveTerms
from prefixd.proto import prefixd_pb2 as pb
from prefixd.proto.errors import PrefixdError
from prefixd.proto.vocabulary import Presence, SaveReason, SaveStatus, Tier
from tests.support.columns import items_of
from tests.support.fakes import keys

KEY, OTHER = keys(2)
INFO = pb.EntryInfo(
    tier=pb.TIER_SHM,
    generation=7,
    payload_bytes=5000,
    token_count=16,
    payload_crc32c=99,
    layer_count=4,
    token_ids_bytes=64,
    reason=pb.SAVE_REASON_FINISH,
)


def test_an_entry_keeps_every_field() -> None:
    entry = messages.entry_of(KEY, INFO)
    assert (entry.key, entry.tier, entry.reason) == (KEY, Tier.SHM, SaveReason.FINISH)
    for field in INFO.DESCRIPTOR.fields:
        assert getattr(entry, field.name) == getattr(INFO, field.name), field.name


def test_what_is_found_is_there_or_on_its_way_or_not() -> None:
    present = pb.LookupResult(presence=pb.PRESENCE_PRESENT, entry=INFO)
    assert messages.found_of(KEY, present).entry == messages.entry_of(KEY, INFO)
    flight = pb.InFlight(owner="somebody", age_ms=5)
    in_flight = messages.found_of(
        KEY, pb.LookupResult(presence=pb.PRESENCE_IN_FLIGHT, in_flight=flight)
    )
    assert in_flight.presence is Presence.IN_FLIGHT
    assert (in_flight.owner, in_flight.age_ms) == ("somebody", 5)
    assert messages.found_of(KEY, pb.LookupResult()).presence is Presence.ABSENT


def test_a_header_says_everything_of_a_save() -> None:
    items = [ReserveItem(KEY, 5000, 16, 4, b"ids4"), ReserveItem(OTHER, 1)]
    terms = SaveTerms(Tier.DISK, SaveReason.COLD, [OTHER], 5, 6, [KEY])
    header = messages.header_of(items, terms)
    assert (header.tier, header.reason) == (pb.TIER_DISK, pb.SAVE_REASON_COLD)
    on_the_wire = [items[0], items[1]._replace(token_count=0)]  # nobody said
    assert [ReserveItem(**asdict(item)) for item in items_of(header)] == on_the_wire
    assert (list(header.ancestors), list(header.touched)) == ([OTHER], [KEY])
    assert (header.wait_ms, header.ttl_ms) == (5, 6)


def test_a_column_of_nothing_is_not_sent() -> None:
    terms = SaveTerms(Tier.RAM, SaveReason.COLD)
    header = messages.header_of([ReserveItem(KEY, 1, 2), ReserveItem(OTHER, 2)], terms)
    assert list(header.token_counts) == [2, 0]
    assert not header.layer_counts
    assert not header.token_ids


@pytest.mark.parametrize("status", range(1, 11))
def test_every_status_of_a_save_is_known(status: int) -> None:
    result = pb.SaveResult(status=pb.SaveStatus.ValueType(status), message="why")
    outcome = messages.outcome_of(KEY, result)
    assert (outcome.key, outcome.status, outcome.message) == (KEY, SaveStatus(status), "why")


@pytest.mark.parametrize(
    "answer",
    [
        lambda: messages.entry_of(KEY, pb.EntryInfo(tier=pb.TIER_RAM, reason=0)),
        lambda: messages.outcome_of(KEY, pb.SaveResult()),
        lambda: [][0],
    ],
)
def test_an_answer_outside_the_contract_is_a_failed_call(answer: object) -> None:
    assert callable(answer)
    with (
        pytest.raises(PrefixdError, match="does not follow the contract"),
        messages.understanding(),
    ):
        answer()
