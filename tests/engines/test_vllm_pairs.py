"""The keys of vLLM's tier against vLLM's own configuration objects, made from its arguments as a
server makes them. vLLM computes nothing without a GPU: what its bytes are is computed by
transformers from the same checkpoint, and put down as vLLM's description says.
`make engines-vllm` runs this file."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.client.connectors.vllm import identity_of
from tests.engines.pairs import check_pairs

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("default")

LAYERS, HEADS, WIDTH = 2, 2, 16
TOKENS = [1, *range(3, 66)]
KINDS = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
#: Arguments of `vllm serve`, and `connector`, what is in `kv_connector_extra_config`.
CHANGES: list[tuple[str, Any]] = [
    ("model", "b"),
    ("dtype", "float16"),
    ("dtype", "bfloat16"),
    ("kv_cache_dtype", "fp8_e4m3"),
    ("kv_cache_dtype", "fp8_e5m2"),
    ("hf_overrides", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    ("block_size", 32),
    ("max_model_len", 1_024),
    ("connector", {"blocks_per_chunk": 2}),
    ("tensor_parallel_size", 2),
    # Without effect.
    ("seed", 3),
    ("max_num_seqs", 7),
    ("served_model_name", "other"),
    ("gpu_memory_utilization", 0.5),
    ("enable_chunked_prefill", False),
    ("max_num_batched_tokens", 4_096),
    ("disable_log_stats", True),
    ("kv_events_config", {"enable_kv_cache_events": True, "publisher": "null"}),
]
POOL = 70


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            max_position_embeddings=2_048,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module", autouse=True)
def platform() -> Any:
    """vLLM's platform for CPUs: it can't infer one from a build for GPUs."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.platforms, "_current_platform", CpuPlatform())
        yield


def described(folder: Path, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """vLLM's configuration, and the description of it that vLLM gives to its tiers."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    arguments = {"model": "a", "dtype": "float32", **arguments}
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": arguments.pop("connector", {}),
    }
    if arguments.get("tensor_parallel_size", 1) > 1:
        arguments["distributed_executor_backend"] = "mp"
    made = EngineArgs(
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_transfer_config=transfer,
        **{**arguments, "model": str(folder / arguments["model"])},
    ).create_engine_config()
    ranks = made.parallel_config.tensor_parallel_size
    group = KVCacheGroupSpec(
        [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)],
        FullAttentionSpec(
            block_size=made.cache_config.block_size,
            num_kv_heads=HEADS // ranks,
            head_size=WIDTH,
            dtype=made.model_config.dtype,
        ),
    )
    cache = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group])
    return made, build_offloading_config(made, cache)


def key(arguments: dict[str, Any], config: Any, chunk_bytes: int) -> bytes:
    """As the tier makes it. The fingerprint names what the page asks for."""
    from vllm.v1.kv_offload.file_mapper import FileMapper

    named = [str(arguments.get(each)) for each in ("model", "hf_overrides", "dtype")]
    of = SimpleNamespace(config=config)
    blocks = config.cache.blocks_per_chunk
    mapper = FileMapper.from_offloading_spec("", of, blocks, parallel_agnostic=True)  # type: ignore[arg-type]
    options = {"fingerprint": "; ".join(named)}
    return identity_of(of, mapper.get_run_config(), mapper.rank, chunk_bytes, options).digest


def state(made: Any, config: Any) -> tuple[Any, ...]:
    """The bytes of the first chunk."""
    from transformers import DynamicCache, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        made.model_config.model, config=made.model_config.hf_config, dtype=made.model_config.dtype
    ).eval()
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([TOKENS]), past_key_values=cache)
    count = config.groups[0].tokens_per_block * config.cache.blocks_per_chunk
    kind = KINDS.get(made.cache_config.cache_dtype)
    pieces = []
    for layer in cache.layers:
        for each in (layer.keys, layer.values):
            values = each[0, :, :count].transpose(0, 1).contiguous()
            values = values if kind is None else values.to(getattr(torch, kind))
            pieces.append(values.view(torch.uint8).numpy().tobytes())
    # vLLM says itself whether the ranks of one chunk are as one rank's.
    ranks = None if config.parallel.is_parallelism_agnostic else config.parallel.tp_size
    tokens_of_blocks = config.groups[0].tokens_per_block
    return b"".join(pieces), ranks, tokens_of_blocks


def test_equal_keys_are_equal_states_of_random_pairs(models: Path) -> None:
    choose = random.Random(1)
    seen = []
    for _ in range(POOL):
        arguments = dict(choose.sample(CHANGES, choose.randrange(4)))
        made, config = described(models, arguments)
        found = state(made, config)
        seen.append((key(arguments, config, len(found[0])), found))
    check_pairs(seen)


def test_8_bit_caches_hide_the_number_type_of_the_model(models: Path) -> None:
    """Why the page asks for `--dtype` in the fingerprint."""
    changes = [{"dtype": each, "kv_cache_dtype": "fp8_e4m3"} for each in ("float16", "bfloat16")]
    (one, config), (other, same) = (described(models, each) for each in changes)
    assert (config.model, config.cache) == (same.model, same.cache)
    assert state(one, config) != state(other, same)
    assert key(changes[0], config, 64) != key(changes[1], same, 64)
