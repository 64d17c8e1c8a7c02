"""Keys and payloads for the tests of the engines' connectors."""

from __future__ import annotations

import os

from prefixd.proto.keys import Key


def fresh_keys(count: int) -> list[Key]:
    return [Key(os.urandom(32)) for _ in range(count)]


def payload_of(key: Key, size_bytes: int) -> bytes:
    return (key * (size_bytes // len(key) + 1))[:size_bytes]
