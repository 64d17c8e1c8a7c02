"""Models that the tests make themselves: random weights, real shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 4, 256, 8, 512, 8192


class Gguf:
    """A writer of a model with a vocabulary of bytes, and with random tensors."""

    def __init__(
        self, path: Path, architecture: str, seed: int, layers: int = LAYERS, **options: Any
    ) -> None:
        import gguf

        self.writer = writer = gguf.GGUFWriter(path, architecture, **options)
        self._random = np.random.default_rng(seed)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(layers)
        pieces = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
        pieces += [
            f"\N{LOWER ONE EIGHTH BLOCK}w{n}".encode() for n in range(VOCABULARY - len(pieces))
        ]
        kinds = [2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - 259)
        writer.add_vocab_size(VOCABULARY)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * VOCABULARY)
        writer.add_token_types(kinds)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    def random(self, name: str, *shape: int) -> None:
        self.writer.add_tensor(name, self._random.normal(0, 0.08, shape).astype(np.float32))

    def ones(self, name: str, width: int = WIDTH, value: float = 1.0) -> None:
        self.writer.add_tensor(name, np.full(width, value, np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_gguf(
    path: Path,
    *,
    seed: int = 7,
    long_rope: int = 0,
    shards_of: int = 0,
    layers: int = LAYERS,
    feed_forward: int = 2 * WIDTH,
) -> None:
    """A llama of 0.6 million parameters a layer, of 4 bytes each. `long_rope`: the original context
    of a LongRoPE. `shards_of`: tensors a shard; the first has none. `feed_forward`: the width of
    those layers."""
    split = {"split_max_tensors": shards_of, "small_first_shard": True} if shards_of else {}
    made = Gguf(path, "llama", seed, layers, **split)
    writer = made.writer
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if long_rope:
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(long_rope)
        made.ones("rope_factors_long.weight", WIDTH // HEADS // 2, 4.0)
        made.ones("rope_factors_short.weight", WIDTH // HEADS // 2)
    made.random("token_embd.weight", VOCABULARY, WIDTH)
    made.random("output.weight", VOCABULARY, WIDTH)
    made.ones("output_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}"
        made.ones(f"{block}.attn_norm.weight")
        made.ones(f"{block}.ffn_norm.weight")
        made.random(f"{block}.attn_q.weight", WIDTH, WIDTH)
        made.random(f"{block}.attn_k.weight", WIDTH // 2, WIDTH)
        made.random(f"{block}.attn_v.weight", WIDTH // 2, WIDTH)
        made.random(f"{block}.attn_output.weight", WIDTH, WIDTH)
        made.random(f"{block}.ffn_gate.weight", feed_forward, WIDTH)
        made.random(f"{block}.ffn_up.weight", feed_forward, WIDTH)
        made.random(f"{block}.ffn_down.weight", WIDTH, feed_forward)
    made.close()


def write_mamba(path: Path) -> None:
    """A model whose state can only be forgotten as a whole."""
    inner, state, rank = 2 * WIDTH, 16, 16
    made = Gguf(path, "mamba", 3)
    writer = made.writer
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    made.ones("output_norm.weight")
    made.random("token_embd.weight", VOCABULARY, WIDTH)
    made.random("output.weight", VOCABULARY, WIDTH)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        made.ones(f"{block}.attn_norm.weight")
        made.random(f"{block}.ssm_in.weight", 2 * inner, WIDTH)
        made.random(f"{block}.ssm_conv1d.weight", inner, 4)
        made.random(f"{block}.ssm_conv1d.bias", inner)
        made.random(f"{block}.ssm_x.weight", rank + 2 * state, inner)
        made.random(f"{block}.ssm_dt.weight", inner, rank)
        made.random(f"{block}.ssm_dt.bias", inner)
        writer.add_tensor(f"{block}.ssm_a", np.full((inner, state), -1.0, np.float32))
        made.random(f"{block}.ssm_d", inner)
        made.random(f"{block}.ssm_out.weight", WIDTH, inner)
    made.close()


def write_gemma(path: Path, *, window: int = 512, layers: int = LAYERS) -> None:
    """A model with sliding windows in all of its layers but every sixth."""
    heads, width = 4, 64
    made = Gguf(path, "gemma3", 5, layers)
    writer = made.writer
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_sliding_window(window)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    made.random("token_embd.weight", VOCABULARY, WIDTH)
    made.ones("output_norm.weight")
    for layer in range(layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            made.ones(f"{block}.{name}.weight")
        made.ones(f"{block}.attn_q_norm.weight", width)
        made.ones(f"{block}.attn_k_norm.weight", width)
        made.random(f"{block}.attn_q.weight", heads * width, WIDTH)
        made.random(f"{block}.attn_k.weight", heads // 2 * width, WIDTH)
        made.random(f"{block}.attn_v.weight", heads // 2 * width, WIDTH)
        made.random(f"{block}.attn_output.weight", WIDTH, heads * width)
        made.random(f"{block}.ffn_gate.weight", 2 * WIDTH, WIDTH)
        made.random(f"{block}.ffn_up.weight", 2 * WIDTH, WIDTH)
        made.random(f"{block}.ffn_down.weight", WIDTH, 2 * WIDTH)
    made.close()


def write_hybrid(path: Path) -> None:
    """A model with attention in every other layer, and short convolutions in the others."""
    kv_heads = [HEADS // 2 if layer % 2 else 0 for layer in range(LAYERS)]
    made = Gguf(path, "lfm2", 4)
    writer = made.writer
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_shortconv_l_cache(3)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    made.random("token_embd.weight", VOCABULARY, WIDTH)
    made.random("output.weight", VOCABULARY, WIDTH)
    made.ones("token_embd_norm.weight")
    for layer, kv in enumerate(kv_heads):
        block = f"blk.{layer}"
        made.ones(f"{block}.attn_norm.weight")
        made.ones(f"{block}.ffn_norm.weight")
        made.random(f"{block}.ffn_gate.weight", 2 * WIDTH, WIDTH)
        made.random(f"{block}.ffn_up.weight", 2 * WIDTH, WIDTH)
        made.random(f"{block}.ffn_down.weight", WIDTH, 2 * WIDTH)
        if kv:
            made.ones(f"{block}.attn_q_norm.weight", WIDTH // HEADS)
            made.ones(f"{block}.attn_k_norm.weight", WIDTH // HEADS)
            made.random(f"{block}.attn_q.weight", WIDTH, WIDTH)
            made.random(f"{block}.attn_k.weight", WIDTH // 2, WIDTH)
            made.random(f"{block}.attn_v.weight", WIDTH // 2, WIDTH)
            made.random(f"{block}.attn_output.weight", WIDTH, WIDTH)
        else:
            made.random(f"{block}.shortconv.conv.weight", WIDTH, 3)
            made.random(f"{block}.shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
            made.random(f"{block}.shortconv.out_proj.weight", WIDTH, WIDTH)
    made.close()


def write_lora(path: Path, seed: int, rank: int = 4) -> None:
    """An adapter of the llama."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    random = np.random.default_rng(seed)
    for layer in range(LAYERS):
        for name, size in (("attn_q", WIDTH), ("attn_k", WIDTH // 2), ("attn_v", WIDTH // 2)):
            weight = f"blk.{layer}.{name}.weight"
            for half, shape in (("lora_a", (rank, WIDTH)), ("lora_b", (size, rank))):
                data = random.normal(0, 0.2, shape).astype(np.float32)
                writer.add_tensor(f"{weight}.{half}", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_transformer(**changes: Any) -> Any:
    """A random llama of transformers, with the same weights every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=CONTEXT,
        **changes,
    )
    return LlamaForCausalLM(config).eval()
