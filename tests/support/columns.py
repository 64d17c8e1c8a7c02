"""The items and parts of a save, converted to and from the columns of prefixd.proto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prefixd.proto import prefixd_pb2 as pb


@dataclass
class Item:
    """One key of a `SaveHeader`."""

    key: bytes = b""
    payload_bytes: int = 0
    token_count: int = 0
    layer_count: int = 0
    token_ids: bytes = b""


@dataclass
class StagedPart:
    """One part of a `SaveStagedRequest`."""

    item: int = 0
    staging_offset_bytes: int = 0
    length_bytes: int = 0
    last: bool = False
    payload_crc32c: int = 0


def columns(items: Iterable[Item]) -> dict[str, Any]:
    """The columns of a `SaveHeader` with these items."""
    items = list(items)
    return {
        "keys": [item.key for item in items],
        "payload_bytes": [item.payload_bytes for item in items],
        "token_counts": [item.token_count for item in items],
        "layer_counts": [item.layer_count for item in items],
        "token_ids": [item.token_ids for item in items],
    }


def items_of(header: pb.SaveHeader) -> list[Item]:
    """The items of a header. A column that is left out gives zeros or empty token ids."""
    none = [0] * len(header.keys)
    return [
        Item(*fields)
        for fields in zip(
            header.keys,
            header.payload_bytes,
            header.token_counts or none,
            header.layer_counts or none,
            header.token_ids or [b""] * len(none),
            strict=True,
        )
    ]


def staged(parts: Iterable[StagedPart]) -> dict[str, Any]:
    """The columns of a `SaveStagedRequest` with these parts."""
    parts = list(parts)
    return {
        "items": [part.item for part in parts],
        "staging_offset_bytes": [part.staging_offset_bytes for part in parts],
        "length_bytes": [part.length_bytes for part in parts],
        "last_parts": [part.last for part in parts],
        "payload_crc32c": [part.payload_crc32c for part in parts],
    }


def parts_of(request: pb.SaveStagedRequest) -> list[StagedPart]:
    """The parts of a request."""
    return [
        StagedPart(*fields)
        for fields in zip(
            request.items,
            request.staging_offset_bytes,
            request.length_bytes,
            request.last_parts,
            request.payload_crc32c,
            strict=True,
        )
    ]
