"""Models that the tests make themselves: random weights, real shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, VOCABULARY, CONTEXT = 4, 256, 8, 512, 8192


def write_gguf(path: Path) -> None:
    """A llama of 4 layers with a vocabulary of bytes, about 10 MB."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    pieces = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(256)]
    pieces += [f"\N{LOWER ONE EIGHTH BLOCK}w{n}".encode() for n in range(VOCABULARY - len(pieces))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (VOCABULARY - 259)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    random = np.random.default_rng(7)

    def add(name: str, *shape: int) -> None:
        data = random.normal(0, 0.08, shape).astype(np.float32)
        writer.add_tensor(name, data)

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, np.float32))

    add("token_embd.weight", VOCABULARY, WIDTH)
    add("output.weight", VOCABULARY, WIDTH)
    ones("output_norm.weight")
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        ones(f"{block}.attn_norm.weight")
        ones(f"{block}.ffn_norm.weight")
        add(f"{block}.attn_q.weight", WIDTH, WIDTH)
        add(f"{block}.attn_k.weight", WIDTH // 2, WIDTH)
        add(f"{block}.attn_v.weight", WIDTH // 2, WIDTH)
        add(f"{block}.attn_output.weight", WIDTH, WIDTH)
        add(f"{block}.ffn_gate.weight", 2 * WIDTH, WIDTH)
        add(f"{block}.ffn_up.weight", 2 * WIDTH, WIDTH)
        add(f"{block}.ffn_down.weight", WIDTH, 2 * WIDTH)
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
