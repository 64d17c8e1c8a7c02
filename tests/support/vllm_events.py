"""vLLM's KV events as its subscribers declare them (0.33), and a minimal indexer. Where vLLM is
installed, `tests/engines/test_vllm_events.py` decodes the events with vLLM's own classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed (prefixd[kv-events])")


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):  # type: ignore[misc, name-defined]
    """The base class of the events."""


class BlockStored(KVCacheEvent):
    """Blocks that were stored."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVCacheEvent):
    """Blocks that were removed."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """All blocks were removed."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # type: ignore[misc, name-defined]
    """One message with events."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Indexer:
    """Indexes blocks by hash, and accepts a block only after its parent, as Dynamo's tree does."""

    def __init__(self) -> None:
        #: Token ids by block hash.
        self.known: dict[int, list[int]] = {}
        self.removed: set[int] = set()

    def apply(self, events: Iterable[Any]) -> None:
        """Apply the events of a message. Fails if one stores a known block, or removes or follows
        an unknown one."""
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.known, "the parent is unknown"
                    for place, block in enumerate(event.block_hashes):
                        assert block not in self.known, "stored twice"
                        size = event.block_size
                        self.known[block] = event.token_ids[place * size : (place + 1) * size]
                case "BlockRemoved":
                    for block in event.block_hashes:
                        del self.known[block]
                        self.removed.add(block)
                case "AllBlocksCleared":
                    self.known.clear()
