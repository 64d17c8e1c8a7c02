"""The order of a fleet's deletes, and which values are from after them."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto.errors import LimitReached
from prefixd.proto.keys import Key
from prefixd.proto.namespaces import TenantNamespace
from prefixd.server.core.shares import HOST
from prefixd.server.sharing import delete_log
from prefixd.server.sharing.delete_log import (
    KEYS_A_RECORD,
    NO_STAMP,
    DeleteLog,
    FleetDelete,
    Logged,
    LogPace,
    records_of,
)

TENANT = TenantNamespace("tenant")


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def deletes(number: int, *keys: Key, namespace: str = "") -> FleetDelete:
    return FleetDelete(b"%016d" % number, keys, namespace)


def logged(at: int, record: FleetDelete) -> Logged:
    return Logged(b"%d-0" % at, record.encode())


def read(log: DeleteLog, *records: FleetDelete) -> list[int]:
    """Read these next. Returns their stamps."""
    stamps = []
    for record in records:
        entry = logged(len(log), record)
        log.add(entry)
        stamps.append(entry.stamp)
    return stamps


@given(
    st.binary(min_size=16, max_size=16),
    st.lists(st.binary(min_size=32, max_size=32).map(Key), max_size=KEYS_A_RECORD),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=64),
)
def test_a_record_comes_back(id_: bytes, keys: list[Key], namespace: str) -> None:
    record = FleetDelete(id_, tuple(keys), namespace)
    assert FleetDelete.decode(record.encode()) == record


@given(st.binary(max_size=80))
def test_other_bytes_are_no_record(data: bytes) -> None:
    assert FleetDelete.decode(data) is None or data.startswith(b"pxd1")
    whole = deletes(1, key(1), namespace="n").encode()
    assert FleetDelete.decode(whole[:-1]) is None


def test_many_keys_are_several_records() -> None:
    keys = [key(n) for n in range(2 * KEYS_A_RECORD + 1)]
    records = records_of(keys, (b"%016d" % n for n in range(9)))
    assert [len(record.keys) for record in records] == [KEYS_A_RECORD, KEYS_A_RECORD, 1]
    assert [each for record in records for each in record.keys] == keys
    assert records_of([], ()) == []


def test_a_value_counts_if_its_node_had_done_the_last_delete_of_its_key() -> None:
    log = DeleteLog()
    assert log.allows(key(1), NO_STAMP)
    assert not log.allows(key(1), 77), "a stamp of a record that was not read"
    first, second = read(log, deletes(1, key(1)), deletes(2, key(2)))
    assert [log.allows(key(1), each) for each in (NO_STAMP, first, second)] == [False, True, True]
    assert [log.allows(key(2), each) for each in (NO_STAMP, first, second)] == [False, False, True]
    assert all(log.allows(key(3), each) for each in (NO_STAMP, first, second))
    (again,) = read(log, deletes(3, key(1)))
    assert not log.allows(key(1), second)
    assert log.allows(key(1), again)


def test_a_namespace_is_deleted_by_the_end_of_its_keys() -> None:
    log = DeleteLog()
    mine, other = TENANT.stored([key(1)])[0], TenantNamespace("other").stored([key(1)])[0]
    (stamp,) = read(log, deletes(1, namespace="tenant"))
    assert not log.allows(mine, NO_STAMP)
    assert log.allows(mine, stamp)
    assert log.allows(other, NO_STAMP)


def test_each_record_is_fresh_once() -> None:
    log = DeleteLog()
    record = deletes(1, key(1))
    assert log.add(logged(0, record)) == record
    assert log.add(logged(1, record)) is None
    own = deletes(2, key(2))
    log.expect(own)
    assert not log.allows(key(2), NO_STAMP), "also before the engine has it"
    assert log.missing == [own]
    assert log.add(logged(2, own)) is None
    assert not log.missing
    assert log.allows(key(2), logged(2, own).stamp)
    assert log.add(Logged(b"3-0", b"of a later version")) is None
    assert len(log) == 4


def test_a_node_finds_its_place_again() -> None:
    log = DeleteLog()
    records = [deletes(n, key(n)) for n in range(3)]
    stamps = read(log, *records)
    assert [log.stamp_of(count) for count in range(4)] == [NO_STAMP, *stamps]
    assert log.last == logged(2, records[2])
    assert log.count_to(logged(1, records[1]).mark) == 2
    assert log.count_to(logged(1, deletes(9, key(1))).mark) is None, "another record was there"
    assert log.count_to(logged(5, records[1]).mark) is None
    assert log.count_to(b"") is None


def test_what_is_forgotten_makes_earlier_values_useless() -> None:
    log = DeleteLog(most_records=2)
    stamps = read(log, *(deletes(n, key(n)) for n in range(4)))
    assert not log.complete
    assert not log.allows(key(9), NO_STAMP)
    assert [log.allows(key(9), each) for each in stamps] == [False, False, True, True]
    assert log.allows(key(0), stamps[2]), "it was vouched for later than the delete"
    assert log.stamp_of(1) == NO_STAMP
    assert len(log) == 4


def test_a_log_that_the_engine_lost_is_missing_until_it_is_back() -> None:
    log = DeleteLog()
    record = deletes(1, key(1), namespace="tenant")
    (before,) = read(log, record)
    assert log.begin_again(None, complete=True)
    tenants = TENANT.stored([key(5)])[0]
    for each in (key(1), tenants):
        assert not log.allows(each, NO_STAMP)
        assert not log.allows(each, before)
    assert log.allows(key(2), NO_STAMP)
    assert log.missing == [record]
    (other,) = read(log, deletes(2, key(2)))
    again = logged(7, record)
    assert log.add(again) is None, "it was done here"
    assert not log.missing
    assert not log.allows(key(1), other)
    assert log.allows(key(1), again.stamp)


def test_of_a_log_that_the_engine_cut_nothing_is_put_back() -> None:
    log = DeleteLog()
    read(log, deletes(1, key(1)))
    log.expect(own := deletes(2, key(2)))
    assert not log.begin_again(logged(9, deletes(9, key(9))), complete=False)
    assert log.missing == [own]
    assert not log.allows(key(9), NO_STAMP)


def test_the_lost_end_of_a_log_that_was_cut_before_is_missing_and_nothing_else() -> None:
    log = DeleteLog()
    records = [deletes(number, key(number)) for number in range(4)]
    stamps = read(log, *records)
    # The engine has dropped the first one, and lost the last one.
    assert log.begin_again(logged(1, records[1]), complete=False)
    assert log.missing == records[1:]
    for at in (1, 2):
        assert log.add(logged(at, records[at])) is None
    assert log.missing == records[3:]
    assert not log.allows(key(3), stamps[3])
    assert [log.allows(key(2), each) for each in stamps] == [False, False, True, False]
    assert not log.allows(key(9), stamps[0])


def test_only_the_latest_of_a_lost_log_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete_log, "MAX_PUT_BACK", 2)
    log = DeleteLog()
    records = [deletes(number, key(number)) for number in range(4)]
    read(log, *records)
    assert log.begin_again(None, complete=True)
    assert log.missing == records[2:]


@pytest.mark.parametrize("most_records", [2, 100])
@given(data=st.data())
def test_no_value_from_before_a_delete_is_ever_allowed(
    most_records: int, data: st.DataObject
) -> None:
    """Any records, in any number of logs, of which the node remembers few or all."""
    log = DeleteLog(most_records)
    order: list[tuple[int, FleetDelete]] = []
    stamps = {NO_STAMP}
    for number in range(data.draw(st.integers(1, 12))):
        record = deletes(number, key(data.draw(st.integers(0, 2))))
        if data.draw(st.booleans()):
            log.expect(record)
        else:
            entry = logged(number, record)
            log.add(entry)
            order.append((entry.stamp, record))
            stamps.add(entry.stamp)
        if not data.draw(st.integers(0, 5)):
            log.begin_again(None, complete=data.draw(st.booleans()))
            order.clear()
        in_order = [stamp for stamp, _ in order]
        for stamp in stamps:
            done = in_order.index(stamp) + 1 if stamp in in_order else 0
            later = [record for _, record in order[done:]] + log.missing
            for each in map(key, range(3)):
                if log.allows(each, stamp):
                    assert stamp in (NO_STAMP, *in_order)
                    assert not any(each in record.keys for record in later)


def test_one_tenant_alone_can_not_fill_the_log_within_an_hour() -> None:
    pace, logged_records = LogPace(), 0
    for tenth in range(36_000):
        now_s = tenth / 10
        with suppress(LimitReached):
            while True:
                pace.take("greedy", KEYS_A_RECORD, now_s)
                logged_records += 1
    assert 0.9 < logged_records / delete_log.MAX_RECORDS < 1.1
    with pytest.raises(LimitReached, match=r"again in 0\.\d s"):
        pace.take("greedy", 2 * KEYS_A_RECORD, 3_600.0)
    pace.take("honest", KEYS_A_RECORD * 1_000, 3_600.0)
    pace.take(HOST, KEYS_A_RECORD * delete_log.MAX_RECORDS, 3_600.0)


def test_the_tenants_whose_pace_is_remembered_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete_log, "_PACED_TENANTS", 3)
    pace = LogPace()
    for number in range(10):
        pace.take(f"tenant {number}", 1, 1_000.0 * number)
        assert len(pace._paid_until_s) <= 3
