"""The keys of LMCache's adapter: LMCache's own keys of chunks, made by its own hasher, against the
bytes of the chunks, which transformers computes. `make engines-lmcache` runs this file."""

from __future__ import annotations

import random
from typing import Any

import pytest

from prefixd.client.connectors.lmcache import Keys, identity_of
from tests.engines.pairs import check_pairs

pytest.importorskip("lmcache")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("default")

LAYERS, HEADS, WIDTH = 2, 2, 16
TOKENS = [1, *range(3, 66)]
CHANGES: list[tuple[str, Any]] = [
    ("weights", "b"),
    ("weights", "float16"),
    ("rank", 1),
    ("group", 1),
    ("chunk_tokens", 32),
    ("first_token", 2),
    ("last_token", 2),
    ("hash_algorithm", "builtin"),
    # Names: other keys for the same bytes.
    ("model_name", "other"),
    ("cache_salt", "tenant"),
    ("fields", {"chunk layout": 2}),
    # Without effect.
    ("tier", "shm"),
    ("deadline_ms", 9),
    ("address", "10.0.0.1:7070"),
    ("max_pending_saves", 7),
]
POOL = 70


def made_of(options: dict[str, Any]) -> tuple[bytes, bytes]:
    """The key of the second chunk, and its bytes. `rank` is of two, `group` one of two layers."""
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.multiprocess.token_hasher import TokenHasher
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    weights, size = options.get("weights", "a"), options.get("chunk_tokens", 16)
    tokens = [options.get("first_token", 1), *TOKENS[1:-1], options.get("last_token", 5)]
    torch.manual_seed(weights == "b")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
    )
    model = LlamaForCausalLM(config).eval()
    model = model.half() if weights == "float16" else model
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(torch.tensor([tokens]), past_key_values=cache)
    rank, group = options.get("rank", 0), options.get("group", 0)
    layer = cache.layers[group]
    chunk = [each[0, rank, size : 2 * size].contiguous() for each in (layer.keys, layer.values)]
    hasher = TokenHasher(size, options.get("hash_algorithm", "blake3"))
    found = ObjectKey(
        chunk_hash=hasher.compute_chunk_hashes(tokens)[1],
        model_name=options.get("model_name", "m"),
        kv_rank=rank,
        object_group_id=group,
        cache_salt=options.get("cache_salt", ""),
    )
    identity = identity_of({"fingerprint": weights, **options})
    (key,) = Keys({"identity": identity.digest}).of([found])
    return bytes(key), b"".join(each.view(torch.uint8).numpy().tobytes() for each in chunk)


def test_equal_keys_are_equal_states_of_random_pairs() -> None:
    choose = random.Random(1)
    check_pairs([made_of(dict(choose.sample(CHANGES, choose.randrange(4)))) for _ in range(POOL)])
