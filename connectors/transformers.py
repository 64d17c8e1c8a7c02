"""Hugging Face transformers: saves and loads the contents of a `DynamicCache` in blocks.

    from prefixd.client import Client
    from prefixd.connectors.transformers import load_cache, namespace_of, save_cache

    client, namespace = Client(), namespace_of(model)
    found = load_cache(client, namespace, model.config, ids)      # ids: a list of token ids
    out = model(torch.tensor([ids[found.token_count:]]), past_key_values=found.cache)
    save_cache(client, namespace, ids, found.cache)

The keys and values of a block of tokens are saved directly from the tensors of the layers, and
restored directly into them, head by head. Layers that do not hold one key and one value for each
token (sliding windows, recurrent states, quantised ones) are refused by their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from ..client.buffers import flat_bytes
from ..client.client import Client
from ..client.results import SaveOutcome
from ..client.saves import SaveItem
from ..proto.errors import CallerError
from ..proto.keys import Namespace, context_hash
from ..proto.vocabulary import SaveReason, Tier
from .engine import Engine, UnsupportedEngine

__all__ = ["Loaded", "load_cache", "namespace_of", "save_cache"]

ENGINE: Final = Engine("transformers", "transformers", "5.23.0")
DEFAULT_BLOCK_TOKENS: Final = 256
#: Fields of a configuration that do not change the state.
_WITHOUT_EFFECT: Final = ("_name_or_path", "use_cache", "pad_token_id", "id2label", "label2id")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A cache with the state of the first `token_count` tokens; 0 if nothing was found."""

    cache: Any
    token_count: int


def namespace_of(
    model: Any, *, fingerprint: bytes | None = None, salt: bytes | str = b""
) -> Namespace:
    """The namespace of a model: its weights, configuration, number type and attention kernels.

    `fingerprint`: 32 bytes that identify the weights; None: SHA-256 of all of them, which takes
    about a second per GiB. `salt` keeps tenants apart.
    """
    if fingerprint is None:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            if tensor.numel():
                digest.update(flat_bytes(tensor.detach().cpu().contiguous()).tobytes())
        fingerprint = digest.digest()
    config = model.config.to_dict()
    for name in _WITHOUT_EFFECT:
        config.pop(name, None)
    fields = {
        "engine": f"transformers {ENGINE.version}",
        "config": json.dumps(config, sort_keys=True, default=str),
        "dtype": str(model.dtype),
        "attention": str(getattr(model.config, "_attn_implementation", None)),
    }
    return Namespace(fingerprint, "hf", context_hash(fields), salt=salt)


def load_cache(
    client: Client,
    namespace: Namespace,
    config: Any,
    tokens: Sequence[int],
    *,
    dtype: Any = None,
    device: Any = "cpu",
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> Loaded:
    """A `DynamicCache` with what is cached of `tokens`, except the last one, which the model has to
    evaluate. `dtype`: that of the model; None: as in its configuration.

    Raises UnsupportedEngine for layers that this connector does not know.
    """
    torch, utils = _modules()
    cache = utils.DynamicCache(config=config)
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = cache.layers
    if len(layers) != text.num_hidden_layers:
        raise ENGINE.unsupported("its cache has not a layer each")
    _check_layers(utils, layers)
    chain = client.chain(namespace, list(tokens)[:-1], block_tokens)
    with client.longest_run(chain) as hit:
        if not hit:
            return Loaded(cache, 0)
        shape = (1, heads, len(hit) * block_tokens, width)
        dtype = dtype or text.dtype or torch.float32
        pairs = [(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) for _ in layers]
        buffers = [_block(pairs, index, block_tokens) for index in range(len(hit))]
        run = hit.restore_into(buffers).run
    if not run:
        return Loaded(cache, 0)
    token_count = run * block_tokens
    for layer, pair in zip(layers, pairs, strict=True):
        keys, values = (each[:, :, :token_count].to(device) for each in pair)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return Loaded(cache, token_count)


def save_cache(
    client: Client,
    namespace: Namespace,
    tokens: Sequence[int],
    cache: Any,
    *,
    tier: Tier = Tier.RAM,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> Future[list[SaveOutcome]]:
    """Save the complete blocks of `tokens` that `cache` holds and the daemon does not, in another
    thread. Do not change the tensors in place until it is done; a cache that grows makes new ones.

    Raises UnsupportedEngine for layers that this connector does not know, CallerError for a batch.
    """
    _, utils = _modules()
    _check_layers(utils, cache.layers)
    held = min(layer.get_seq_length() for layer in cache.layers)
    if held and cache.layers[0].keys.shape[0] != 1:
        raise CallerError("a cache of several prompts can't be saved: split the batch")
    chain = client.chain(namespace, list(tokens)[:held], block_tokens)
    keys = list(chain.complete_keys)
    start = client.leading_run(keys)
    pairs = [(layer.keys, layer.values) for layer in cache.layers] if start < len(keys) else []
    items = [
        SaveItem(keys[index], _block(pairs, index, block_tokens), block_tokens)
        for index in range(start, len(keys))
    ]
    return client.save_many_async(
        items, tier=tier, reason=SaveReason.FINISH, ancestors=keys[:start]
    )


def _block(pairs: Sequence[tuple[Any, Any]], index: int, block_tokens: int) -> list[Any]:
    """The pieces of one block: for each layer its keys, then its values."""
    part = slice(index * block_tokens, (index + 1) * block_tokens)
    return [tensor.detach()[:, :, part].cpu() for pair in pairs for tensor in pair]


def _check_layers(utils: Any, layers: Sequence[Any]) -> None:
    for layer in layers:
        if type(layer) is not utils.DynamicLayer:
            raise UnsupportedEngine(
                f"prefixd keeps one key and one value for each token: it can't keep a "
                f"{type(layer).__name__}"
            )


def _modules() -> tuple[Any, Any]:
    names = ["DynamicCache", "DynamicLayer.lazy_initialization", "DynamicLayer.get_seq_length"]
    utils = ENGINE.require("transformers.cache_utils", names)
    ENGINE.check_call(utils.DynamicLayer.lazy_initialization, "self", "keys", "values")
    torch = Engine("torch", "torch", "2.13").require("torch", ["empty"])
    return torch, utils
