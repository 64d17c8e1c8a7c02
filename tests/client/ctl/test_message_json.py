"""Messages of the daemon as JSON."""

from __future__ import annotations

import json

from prefixd.client.ctl import message_json
from prefixd.proto import prefixd_pb2 as pb

KEY = bytes(range(32))


def test_a_message_becomes_json_with_every_field() -> None:
    data = message_json.as_dict(
        pb.StatsResponse(
            daemon_version="1",
            incarnation=b"\x01\xff",
            tiers=[pb.TierStats(tier=pb.TIER_DISK, entries=2**40)],
            counters={"b": 2, "a": 1},
        )
    )
    assert data["incarnation"] == "01ff"
    assert data["tiers"][0]["tier"] == "disk"
    assert data["tiers"][0]["entries"] == 2**40
    assert data["tiers"][0]["hits"] == 0
    assert list(data["counters"].items()) == [("a", 1), ("b", 2)]
    assert data["sessions"] == 0
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {field.name for field in pb.StatsResponse.DESCRIPTOR.fields}


def test_nested_and_unset_messages() -> None:
    info = pb.EntryInfo(tier=pb.TIER_SHM, reason=pb.SAVE_REASON_COLD)
    entry = pb.EntryDetail(key=KEY, info=info)
    data = message_json.as_dict(pb.InspectResponse(entry=entry))
    assert data["entry"]["key"] == KEY.hex()
    assert data["entry"]["info"]["tier"] == "shm"
    assert data["entry"]["info"]["reason"] == "cold"
    assert data["entry"]["extents"] == []
    assert message_json.as_dict(pb.InspectResponse())["entry"] is None


def test_every_enumeration_has_words_and_the_unknown_stays_a_number() -> None:
    infos = [pb.EntryInfo(tier=number) for number in (0, 1, 2, 3, 99)]  # type: ignore[arg-type]
    tiers = [message_json.label_in(info, "tier") for info in infos]
    assert tiers == ["unspecified", "ram", "shm", "disk", "99"]


def test_a_map_of_messages_is_one_of_objects() -> None:
    stats = pb.StatsResponse(usage={"b": pb.Usage(lookups=2), "a": pb.Usage(misses={"slow": 1})})
    shown = message_json.as_dict(stats)["usage"]
    assert list(shown) == ["a", "b"]
    assert shown["a"]["misses"] == {"slow": 1}
    assert shown["b"]["lookups"] == 2
