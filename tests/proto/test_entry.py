"""What an entry takes in its extents."""

from __future__ import annotations

from prefixd.proto.entry import content_bytes


def test_token_ids_come_with_a_checksum() -> None:
    assert content_bytes(1000, 0) == 1000
    assert content_bytes(1000, 8) == 1000 + 8 + 4
