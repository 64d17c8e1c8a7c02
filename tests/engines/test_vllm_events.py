"""KV events, decoded with vLLM's own types. `make engines-vllm` runs this file."""

from __future__ import annotations

from typing import Any

import pytest

from prefixd.client import Cleared, Evicted, Published, SaveReason, Synced, Tier
from prefixd.proto.keys import Key
from tests.support.vllm_events import Indexer

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("zmq")
kv_events = pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")
# The engine's own warnings are not errors here.
pytestmark = pytest.mark.filterwarnings("default")

from prefixd.client.ctl.kv_events import _END, Blocks, encode  # noqa: E402  # needs msgspec and zmq


def key(number: int) -> Key:
    return Key(number.to_bytes(8, "big") + bytes(24))


def events() -> list[Any]:
    """The events of a chain of three blocks, whose last block is evicted."""
    chain = [
        Published(
            key(n), Tier.RAM, n, n, 5, 2, SaveReason.COLD, key(n - 1) if n > 1 else b"", "", ids(n)
        )
        for n in (1, 2, 3)
    ]
    return Blocks().translated([Cleared(""), *chain, Synced(3), Evicted(key(3), Tier.RAM, 4)])


def ids(number: int) -> bytes:
    return number.to_bytes(4, "little") * 2


def test_vllms_own_decoder_reads_them() -> None:
    payload = encode(events(), 2, 1.5)
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 2)
    cleared, stored, removed = batch.events
    assert isinstance(cleared, kv_events.AllBlocksCleared)
    assert isinstance(stored, kv_events.BlockStored)
    assert isinstance(removed, kv_events.BlockRemoved)
    assert stored.block_hashes == [1, 2, 3]
    assert (stored.parent_block_hash, stored.block_size) == (None, 2)
    assert stored.token_ids == [1, 1, 2, 2, 3, 3]
    assert (stored.medium, removed.medium) == (kv_events.MEDIUM_CPU, kv_events.MEDIUM_CPU)
    assert removed.block_hashes == [3]
    # vLLM encodes them to what was sent, without a field more or less.
    again = msgspec.msgpack.encode(batch)
    assert msgspec.msgpack.decode(again) == msgspec.msgpack.decode(payload)
    indexer = Indexer()
    indexer.apply(batch.events)
    assert indexer.known == {1: [1, 1], 2: [2, 2]}


def test_the_end_of_a_replay_is_that_of_vllm() -> None:
    assert kv_events.ZmqEventPublisher.END_SEQ == _END
