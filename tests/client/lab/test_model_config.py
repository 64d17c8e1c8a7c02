"""The KV state of models, from their config.json; numbers by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.lab.model_config import kv_size

LLAMA_3_8B = {
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def size_of(tmp_path: Path, config: dict[str, Any], dtype: float | None = None) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return kv_size(path, dtype)


@pytest.mark.parametrize(
    ("config", "per_token", "window", "fixed"),
    [
        (LLAMA_3_8B, 131_072, 0, 0),
        ({**LLAMA_3_8B, "num_key_value_heads": None}, 524_288, 0, 0),
        (DEEPSEEK_V3, 61 * 576 * 2, 0, 0),
        ({**LLAMA_3_8B, "sliding_window": 4096}, 131_072, 131_072, 0),
        ({**LLAMA_3_8B, "sliding_window": 4096, "use_sliding_window": False}, 131_072, 0, 0),
        ({**LLAMA_3_8B, "sliding_window": 1024, "sliding_window_pattern": 6}, 131_072,
         27 * 4096, 0),
        ({**LLAMA_3_8B, "sliding_window": 128, "head_dim": 64,
          "layer_types": ["sliding_attention", "full_attention"] * 16}, 65_536, 32_768, 0),
        ({**LLAMA_3_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8},
         32_768, 0, 24),
        ({**LLAMA_3_8B, "full_attention_interval": 4}, 32_768, 0, 24),
        ({**LLAMA_3_8B, "attn_layer_period": 8, "attn_layer_offset": 4}, 16_384, 0, 28),
        ({**LLAMA_3_8B, "hybrid_override_pattern": "M-M*-M*"}, 8_192, 0, 3),
        ({"text_config": LLAMA_3_8B, "vision_config": {}}, 131_072, 0, 0),
    ],
)  # fmt: skip
def test_sizes(
    tmp_path: Path, config: dict[str, Any], per_token: int, window: int, fixed: int
) -> None:
    size = size_of(tmp_path, config)
    assert (size.bytes_per_token, size.window_bytes_per_token, size.fixed_layers) == (
        per_token, window, fixed,
    )  # fmt: skip
    assert size_of(tmp_path, config, 1).bytes_per_token == per_token // 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "config.json: is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "num_hidden_layers is missing"),
        (json.dumps({**LLAMA_3_8B, "num_hidden_layers": "32"}), "num_hidden_layers is no number"),
        (json.dumps({**LLAMA_3_8B, "torch_dtype": "int3"}), "torch_dtype 'int3' is not known"),
    ],
)
def test_a_bad_config_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        kv_size(path)
    with pytest.raises(ValueError, match="cannot be opened"):
        kv_size(tmp_path / "absent")
