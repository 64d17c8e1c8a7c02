"""The size of a token's KV state, from a model's config.json as Hugging Face has it.

- **Attention** keeps a key and a value per layer, KV head and head dimension.
- **Multi-head latent attention** (DeepSeek-V2 and later, Kimi-K2) keeps one compressed vector per
  layer, `kv_lora_rank + qk_rope_head_dim` numbers, and no values.
- **Sliding windows** keep the same per token, but only the last `sliding_window` tokens of a
  prompt: the state of a long prompt in these layers has a fixed size.
- **Linear attention and Mamba layers** keep a state of a fixed size, whatever the prompt's length.
  It is not in the number per token; an engine stores it once for each prefix that it keeps.

Blocks of a prefix cache hold the tokens of all layers that attend, those with windows, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

#: Bytes of a number, by `torch_dtype`.
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0, "fp8": 1.0}
_ATTENTION = frozenset({"full_attention", "attention", "full", "global", "hybrid"})
_WINDOWS = frozenset({"sliding_attention", "chunked_attention", "local_attention", "sliding"})


@dataclass(frozen=True, slots=True)
class KvSize:
    """A token's KV state, all layers and shards together.

    `window_bytes_per_token` is the part of layers with a window of `window_tokens`; `fixed_layers`
    have a state that does not grow with the prompt, which is not in the number. `how` says what was
    added up.
    """

    bytes_per_token: int
    window_bytes_per_token: int
    window_tokens: int
    fixed_layers: int
    how: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def kv_size(path: Path | str, dtype_bytes: float | None = None) -> KvSize:
    """The KV state of the model of a config.json. `dtype_bytes`: of a number in the cache (None:
    of the model's own).

    Raises ValueError that names the file and the field.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"{path}: cannot be opened: {why}") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: is not a JSON object")
    text = config.get("text_config", config)  # of models that also see
    if not isinstance(text, dict):
        raise ValueError(f"{path}: text_config is not a JSON object")
    try:
        return _size({**config, **text}, dtype_bytes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _size(config: Mapping[str, Any], dtype_bytes: float | None) -> KvSize:
    layers = _number(config, "num_hidden_layers", "n_layer", "num_layers")
    if dtype_bytes is None:
        name = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        name = name.removeprefix("torch.")
        if name not in _BYTES:
            raise ValueError(f"torch_dtype {name!r} is not known; say how many bytes a number has")
        dtype_bytes = _BYTES[name]
    full, window, fixed = _layers(config, layers)
    window_tokens = 0
    if window:
        window_tokens = _number(config, "sliding_window", "attention_chunk_size")
    if config.get("kv_lora_rank"):
        rank, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        numbers = rank + rope
        kind = f"{rank} + {rope} numbers of latent attention"
    else:
        heads = _number(config, "num_attention_heads", "n_head")
        kv_heads = heads
        if config.get("num_key_value_heads") is not None:
            kv_heads = _number(config, "num_key_value_heads")
        elif config.get("multi_query"):
            kv_heads = 1
        if config.get("head_dim") is not None:
            head_dim = _number(config, "head_dim")
        else:
            head_dim = _number(config, "hidden_size", "n_embd") // heads
        numbers = 2 * kv_heads * head_dim
        kind = f"keys and values of {kv_heads} heads of {head_dim}"
    parts = [f"{full} layers"] if full else []
    parts += [f"{window} layers with windows of {window_tokens:,} tokens"] if window else []
    how = f"{' and '.join(parts) or 'no layer'}: {kind}, {dtype_bytes:g} bytes each"
    if fixed:
        how += f"; {fixed} layers whose state has a fixed size are not in it"
    return KvSize(
        round((full + window) * numbers * dtype_bytes),
        round(window * numbers * dtype_bytes),
        window_tokens,
        fixed,
        how,
    )


def _layers(config: Mapping[str, Any], layers: int) -> tuple[int, int, int]:
    """Layers that attend to everything, to a window, and those with a state of a fixed size."""
    types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(types, list) and types:
        names = [str(name) for name in types]
        full = sum(name in _ATTENTION for name in names)
        window = sum(name in _WINDOWS for name in names)
        return full, window, len(names) - full - window
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: M is Mamba, * attention, - a plain MLP
        return pattern.count("*"), 0, pattern.count("M")
    if config.get("attn_layer_period"):  # Jamba
        period, offset = _number(config, "attn_layer_period"), config.get("attn_layer_offset", 0)
        full = sum(layer % period == offset for layer in range(layers))
        return full, 0, layers - full
    if config.get("full_attention_interval"):  # Qwen3-Next
        full = layers // _number(config, "full_attention_interval")
        return full, 0, layers - full
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        pattern_length = config.get("sliding_window_pattern")
        if isinstance(pattern_length, int) and pattern_length > 1:  # Gemma 3: every n-th is full
            full = layers // pattern_length
            return full, layers - full, 0
        if "max_window_layers" in config:  # Qwen2: the first ones are full
            full = min(layers, _number(config, "max_window_layers"))
            return full, layers - full, 0
        if config.get("model_type") == "gemma2":  # every second
            return layers - (layers + 1) // 2, (layers + 1) // 2, 0
        return 0, layers, 0
    return layers, 0, 0


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is no number above 0: {json.dumps(value)[:40]}")
            return value
    raise ValueError(f"{names[0]} is missing")
