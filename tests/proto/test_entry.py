"""What is said of an entry as one value, and what the entry takes in its extents."""

from __future__ import annotations

import pytest

from prefixd.proto.entry import (
    Content,
    EntryRecord,
    HasContent,
    columns_of,
    content_bytes,
    contents_of,
    pack_content,
    shared,
    unpack_content,
)
from prefixd.proto.errors import InvalidSize
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier

CONTENT = Content(payload_bytes=4096, token_count=16, token_ids_bytes=64, layer_count=4)


def test_token_ids_come_with_a_checksum() -> None:
    assert content_bytes(1000, 0) == 1000
    assert content_bytes(1000, 8) == 1000 + 8 + 4


def test_what_has_a_content_has_each_of_its_fields() -> None:
    record = EntryRecord(Key(bytes(32)), Tier.DISK, SaveReason.COLD, 1, 2, CONTENT, (0, 4096))
    assert {name: getattr(record, name) for name in Content._fields} == CONTENT._asdict()
    attributes = {name for name in vars(HasContent) if not name.startswith("_")}
    assert attributes == set(Content._fields)


def test_alike_entries_share_a_content() -> None:
    said = list(contents_of(3, (7, 7, 7), [5, 5, 5], 0, 0))
    assert said == [Content(7, 5)] * 3
    assert len(set(map(id, said))) == 1
    assert shared(*CONTENT) == CONTENT
    assert shared(*CONTENT) is shared(*CONTENT)
    assert list(contents_of(0, [], [], 0, 0)) == []


@pytest.mark.parametrize("last", [Content(9, 5, 8, 0), Content(7, 6, 8, 0), Content(7, 5, 8, 1)])
def test_columns_are_what_is_said_of_each(last: Content) -> None:
    contents = [Content(7, 5, 8), Content(7, 5, 8), last]
    columns = list(columns_of(contents))
    assert columns == [tuple(getattr(each, name) for each in contents) for name in Content._fields]
    assert list(contents_of(3, *columns)) == contents


def test_a_packed_content_is_unpacked() -> None:
    """Where it lies in a stream or an engine, there are token ids or not."""
    assert unpack_content(pack_content(CONTENT), CONTENT.token_ids_bytes) == CONTENT
    assert unpack_content(pack_content(CONTENT)) == CONTENT._replace(token_ids_bytes=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"payload_bytes": 0},
        {"payload_bytes": 2**40 + 4},
        {"layer_count": 3},
        {"layer_count": 2**16},
        {"token_ids_bytes": 3},
        {"token_ids_bytes": 2**22 + 4},
    ],
)
def test_what_no_entry_can_be_is_refused(fields: dict[str, int]) -> None:
    impossible = CONTENT._replace(**fields)
    with pytest.raises(InvalidSize):
        unpack_content(pack_content(impossible), impossible.token_ids_bytes)
