"""vLLM's KV events as its subscribers declare them (0.33), and an indexer of the simplest kind.
Where vLLM is installed, `tests/engines/test_vllm_events.py` decodes with its own classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="msgspec is not installed (prefixd[kv-events])")


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):  # type: ignore[misc, name-defined]
    """The base of them."""


class BlockStored(KVCacheEvent):
    """Blocks that are there."""

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
    """Blocks that are not."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """None is there."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):  # type: ignore[misc, name-defined]
    """A message."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Indexer:
    """Knows a block by its hash only behind the one before it, as Dynamo's tree does."""

    def __init__(self) -> None:
        #: the token ids of each
        self.known: dict[int, list[int]] = {}
        self.removed: set[int] = set()

    def apply(self, events: Iterable[Any]) -> None:
        """The events of a message. They never name a block twice, nor one that is not there."""
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    parent = event.parent_block_hash
                    assert parent is None or parent in self.known, "behind nothing"
                    for place, block in enumerate(event.block_hashes):
                        assert block not in self.known, "told twice"
                        size = event.block_size
                        self.known[block] = event.token_ids[place * size : (place + 1) * size]
                case "BlockRemoved":
                    for block in event.block_hashes:
                        del self.known[block]
                        self.removed.add(block)
                case "AllBlocksCleared":
                    self.known.clear()
