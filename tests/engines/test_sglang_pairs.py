"""The keys of SGLang's backend against what is in SGLang's own host pools: the keys and values that
transformers computes from the same checkpoint. `make engines-sglang` runs this file."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.connectors.sglang import identity_of
from tests.engines.pairs import check_pairs
from tests.engines.sglang_hicache import arguments, host_pool, storage_config, without_torchvision

pytest.importorskip("sglang")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("default")

LAYERS, HEADS, WIDTH = 2, 4, 64
TOKENS = [1, *range(3, 66)]
#: For each layout, where the dimensions (keys or values, layer, page, token, head, width) go.
ORDER = {
    "layer_first": (0, 1, 2, 3, 4, 5),
    "page_first": (0, 2, 3, 1, 4, 5),
    "page_first_direct": (0, 2, 1, 3, 4, 5),
    "page_head": (0, 2, 4, 3, 1, 5),
}
KINDS = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
#: Arguments of SGLang's server, and `tp_rank`.
CHANGES: list[tuple[str, Any]] = [
    ("model_path", "b"),
    ("model_path", "copy of a"),
    ("dtype", "float16"),
    ("kv_cache_dtype", "fp8_e4m3"),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("json_model_override_args", json.dumps({"rope_theta": 5e4})),
    ("hicache_mem_layout", "page_first"),
    ("hicache_mem_layout", "page_head"),
    ("page_size", 32),
    ("tp_rank", 1),
    # Without effect.
    ("random_seed", 3),
    ("port", 9),
    ("schedule_policy", "fcfs"),
    ("max_running_requests", 7),
    ("chunked_prefill_size", 512),
    ("log_level", "debug"),
    ("served_model_name", "other"),
    ("context_length", 1_024),
]
POOL = 70


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    without_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=WIDTH,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    shutil.copytree(folder / "a", folder / "copy of a")
    return folder


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def filled_pool(folder: Path, made: dict[str, Any], ranks: int, rank: int) -> Any:
    """SGLang's host pool with the pages of `TOKENS`."""
    from transformers import AutoConfig, DynamicCache, LlamaForCausalLM

    path = folder / made["model_path"]
    config = AutoConfig.from_pretrained(path)
    for name, value in json.loads(made.get("json_model_override_args", "{}")).items():
        config.rope_parameters = {**config.rope_parameters, name: value}
    dtype = getattr(torch, made.get("dtype", "bfloat16"))
    model = LlamaForCausalLM.from_pretrained(path, config=config, dtype=dtype).eval()
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(torch.tensor([TOKENS]), past_key_values=cache)
    heads = HEADS // ranks
    size, layout = made["page_size"], made["hicache_mem_layout"]
    state = torch.stack(
        [
            torch.stack([getattr(layer, kind)[0].transpose(0, 1) for layer in cache.layers])
            for kind in ("keys", "values")
        ]
    )[:, :, :, rank * heads : (rank + 1) * heads]
    kind = KINDS.get(made.get("kv_cache_dtype", "auto"))
    # As the device's pool gives it to the host's: both kinds of 8-bit floats are bytes.
    state = state if kind is None else state.to(getattr(torch, kind)).view(torch.uint8)
    pages = len(TOKENS) // size
    pool = host_pool(layout, pages=pages, page_tokens=size, layers=LAYERS, heads=heads)
    state = state.reshape(2, LAYERS, pages, size, heads, WIDTH).permute(ORDER[layout])
    pool.dtype = state.dtype
    pool.kv_buffer = state.reshape(pool.kv_buffer.shape).contiguous()
    return pool


def first_page(pool: Any) -> bytes:
    """The bytes that the backend takes of it, and how they are cut."""
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
    pieces = zip(pointers, sizes, strict=True)
    return b"".join(ctypes.string_at(address, size) for address, size in pieces)


def test_equal_keys_are_equal_states_of_random_pairs(models: Path) -> None:
    choose = random.Random(1)
    seen = []
    for _ in range(POOL):
        made = {"model_path": "a", "page_size": 16, "hicache_mem_layout": "layer_first"}
        made |= dict(choose.sample(CHANGES, choose.randrange(4)))
        ranks, rank = (2, 1) if made.pop("tp_rank", 0) else (1, 0)
        pool = filled_pool(models, made, ranks, rank)
        given = arguments(**{**made, "model_path": str(models / made["model_path"])})
        config = storage_config(tp_size=ranks, tp_rank=rank, model_name="m")
        key = identity_of(config, {}, pool, arguments=given).digest
        seen.append((key, (made["page_size"], made["hicache_mem_layout"], first_page(pool))))
    check_pairs(seen)
