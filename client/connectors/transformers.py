"""Hugging Face transformers: saves and loads the contents of a `DynamicCache` in blocks.

    from prefixd.client import Client
    from prefixd.connectors.transformers import load_cache, namespace_of, save_cache

    client, namespace = Client(), namespace_of(model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = load_cache(client, namespace, model.config, ids)
    out = model.generate(ids, past_key_values=found.cache, max_new_tokens=100)
    save_cache(client, namespace, out, found.cache)

The keys and values of a block of tokens are saved directly from the tensors of the layers, and
restored directly into them, head by head. If a layer does not hold every token (sliding windows,
recurrent states), the whole state is kept: that of exactly the tokens that were saved, for a
conversation that goes on. Other layers (static, quantised ones) are refused by their names.

A namespace is that of the model as it is: make another one after adapters were switched or weights
changed. It watches the model's passes, so that nothing is saved that its ids do not say: images and
what follows them, masked tokens, embeddings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from ...proto.errors import CallerError
from ...proto.keys import Key, Namespace, prefix_keys
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from .. import Client
from ..identity import StateIdentity
from ..ranks import check_shard
from ..results import SaveOutcome
from ..saves import SaveItem
from . import device_copies, transformers_states
from .engine import Engine, UnsupportedEngine
from .transformers_identity import (
    ENGINE,
    Passes,
    first_of,
    identity_of,
    layer_devices,
    media_tokens,
    rope_limit,
    stamp,
)

__all__ = ["Loaded", "ModelNamespace", "identity_of", "load_cache", "namespace_of", "save_cache"]

DEFAULT_BLOCK_TOKENS: Final = 256
_LAYOUT_LABEL: Final = b"prefixd/transformers/layout/v1\0"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A cache with the state of the first `token_count` tokens; 0 if nothing was found."""

    cache: Any
    token_count: int


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ModelNamespace(Namespace):
    """The namespace of a model, made by `namespace_of`. Equal ones share keys, also those of other
    processes."""

    identity: StateIdentity
    config: Any
    dtype: Any
    passes: Passes
    #: Of the model when the namespace was made.
    stamp: Any
    model: ReferenceType[Any]
    #: The clients that have announced it.
    told: WeakSet[Client]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root != self.identity.namespace().root:
            raise CallerError("a namespace with other parts is of no model: use namespace_of")

    def announce(self, client: Client) -> None:
        """Say what its keys depend on, once for each client."""
        if client not in self.told:
            self.told.add(client)
            client.announce(self.identity)

    def check(self) -> None:
        """Raise CallerError if the model has changed."""
        model = self.model()
        if model is not None and stamp(model) != self.stamp:
            raise CallerError(
                "adapters, weights, device or kernels have changed since namespace_of: make "
                "another one"
            )


#: The passes of each model that has a namespace.
_passes: Final[WeakKeyDictionary[Any, Passes]] = WeakKeyDictionary()


def namespace_of(
    model: Any, *, fingerprint: bytes | None = None, salt: bytes | str = b""
) -> ModelNamespace:
    """The namespace of a model as it is now: its weights, active adapters, configuration, number
    type and kernels; see `identity_of`.

    `fingerprint`: 32 bytes that identify the weights without adapters; None: the SHA-256 of all
    tensors, which takes a second or two per GiB the first time on a host, then a 20th of it.
    `salt` keeps tenants apart. The model's passes are watched from now on, so make the namespace
    before a cache is filled. Raises UnsupportedEngine.
    """
    identity = identity_of(model, fingerprint=fingerprint, salt=salt)
    made = identity.namespace()
    if model not in _passes:
        _passes[model] = Passes(model)
    return ModelNamespace(
        made.fingerprint,
        made.quantisation,
        made.context_params,
        made.adapters,
        made.salt,
        made.shard,
        identity=identity,
        config=model.config,
        dtype=model.dtype,
        passes=_passes[model],
        stamp=stamp(model),
        model=ref(model),
        told=WeakSet(),
    )


def load_cache(
    client: Client,
    namespace: Namespace,
    config: Any,
    tokens: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> Loaded:
    """A `DynamicCache` with what is cached of `tokens`, except the last one, which the model has to
    evaluate.

    `tokens`: the ids of one prompt, as a sequence, or as a tokeniser gives them (a tensor or list
    of one row). `dtype`, `device`: those of the model; None: of the namespace's model, else as in
    the configuration, on the CPU. Raises UnsupportedEngine for layers that this connector does not
    know, CallerError for several prompts or a namespace whose model has changed.
    """
    torch, utils = _modules()
    devices: dict[int, Any] = {}
    cache = utils.DynamicCache(config=config)
    layers = _layers(utils, cache)
    ids = _ids(tokens)
    text = config.get_text_config()
    if isinstance(namespace, ModelNamespace):
        namespace.check()
        namespace.announce(client)
        namespace.passes.loaded(cache, namespace.stamp)
        dtype = dtype or namespace.dtype
        model = namespace.model()
        devices = layer_devices(model) if device is None and model is not None else {}
        device = device or getattr(model, "device", None)
    dtype = dtype or text.dtype or torch.float32
    limit = _named(config, ids)
    if limit is None:
        return Loaded(cache, 0)
    ids = ids[: min(limit, len(ids) - 1)] if ids else ids
    places = [devices.get(number, device or "cpu") for number, _ in _held_layers(cache)]
    spread = len(set(map(str, places))) > 1
    place = places[0] if places else "cpu"
    if _is_whole(utils, layers):
        if spread:
            raise UnsupportedEngine(
                "prefixd can't keep whole states of a model that is spread over several devices"
            )
        return Loaded(cache, _load_whole(client, namespace, torch, ids, layers, place))
    target = None if spread else torch.device(place)
    for layout in _layouts(config, len(layers)):
        pairs, token_count = _load(
            client, namespace, torch, ids, layout, dtype, target, block_tokens
        )
        if not token_count:
            continue
        for layer, pair, its_place in zip(layers, pairs, places, strict=True):
            keys, values = (each[:, :, :token_count].to(its_place) for each in pair)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return Loaded(cache, token_count)
    return Loaded(cache, 0)


def _load(
    client: Client,
    namespace: Namespace,
    torch: Any,
    ids: list[int],
    layout: Layout,
    dtype: Any,
    device: Any,
    block_tokens: int,
) -> tuple[list[tuple[Any, Any]], int]:
    """The keys and values of each layer for the cached blocks, and their number of tokens. They are
    on the device, if it is one that copies pass to through pinned memory, else on the CPU."""
    chain = client.chain(_with_layout(namespace, layout, dtype), ids, block_tokens)
    with client.longest_run(chain, prompt_tokens=len(ids)) as hit:
        if not hit:
            return [], 0
        through = device_copies.reaches(device)
        where = {"device": device} if through else {}
        count = len(hit) * block_tokens
        pairs = [
            (
                torch.empty((1, shape.key_heads, count, shape.key_width), dtype=dtype, **where),
                torch.empty((1, shape.value_heads, count, shape.value_width), dtype=dtype, **where),
            )
            for shape in layout
        ]
        if through:
            size_bytes = _block_bytes(pairs, block_tokens)

            def place(blocks: range, staged: Any) -> None:
                for ours, theirs in _same(pairs, blocks, staged, block_tokens):
                    ours.copy_(theirs)

            run = device_copies.restore(torch, hit, size_bytes, device, place)
            return pairs, run * block_tokens
        buffers = [_block(pairs, index, block_tokens) for index in range(len(hit))]
        return pairs, hit.restore_into(buffers).run * block_tokens


def save_cache(
    client: Client,
    namespace: Namespace,
    tokens: Any,
    cache: Any,
    *,
    tier: Tier = Tier.RAM,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> Future[list[SaveOutcome]]:
    """Save the complete blocks of `tokens` that `cache` holds and the daemon does not, in another
    thread. Do not change the tensors in place until it is done; a cache that grows makes new ones.

    Of a `ModelNamespace`, only blocks that their ids name are saved: none from the first image on,
    and none that were evaluated with a mask or positions of their own. Raises UnsupportedEngine for
    layers that this connector does not know, CallerError for a batch, for a namespace whose model
    has changed, and for a cache that the model was not seen to fill.
    """
    torch, utils = _modules()
    layers = _layers(utils, cache)
    ids = _ids(tokens)
    held = _held(layers)
    if held and any(_batch(layer) != 1 for layer in layers):
        raise CallerError("a cache of several prompts can't be saved: split the batch")
    named: int | None = held
    if isinstance(namespace, ModelNamespace):
        namespace.announce(client)
    if held and isinstance(namespace, ModelNamespace):
        named = _named_of(namespace, ids, cache, held)
    if not held or not named:
        return _nothing()
    if _is_whole(utils, layers):
        if min(named, len(ids)) < held:
            return _nothing()
        return _save_whole(client, namespace, ids[:held], layers, tier)
    layout = tuple(
        LayerShape(*(size for each in (layer.keys, layer.values) for size in each.shape[1::2]))
        for layer in layers
    )
    if isinstance(namespace, ModelNamespace) and layout not in _layouts(
        namespace.config, len(layers)
    ):
        raise UnsupportedEngine(
            f"prefixd can't load keys and values of the shapes {layout[0]}: the configuration does "
            f"not say them"
        )
    namespace = _with_layout(namespace, layout, layers[0].keys.dtype)
    chain = client.chain(namespace, ids[: min(held, named)], block_tokens)
    keys = list(chain.complete_keys)
    start = client.leading_run(keys, counted=False)
    if start == len(keys):
        return _nothing()
    pairs = [(layer.keys.detach(), layer.values.detach()) for layer in layers]
    devices = {getattr(tensor, "device", None) for pair in pairs for tensor in pair}
    device = devices.pop()
    if not devices and device_copies.reaches(device):
        size_bytes = _block_bytes(pairs, block_tokens)

        def gather(blocks: range, staged: Any) -> None:
            shifted = range(blocks.start + start, blocks.stop + start)
            for ours, theirs in _same(pairs, shifted, staged, block_tokens):
                theirs.copy_(ours)

        made = device_copies.bring(torch, len(keys) - start, size_bytes, device, gather)
        return client.save_made_async(
            keys[start:],
            lambda: (
                [
                    SaveItem(keys[start + number], payload, block_tokens)
                    for number, payload in zip(blocks, payloads, strict=True)
                ]
                for blocks, payloads in made()
            ),
            payload_bytes=(len(keys) - start) * size_bytes,
            tier=tier,
            reason=SaveReason.FINISH,
            ancestors=keys[:start],
        )
    items = [
        SaveItem(keys[index], _block(pairs, index, block_tokens), block_tokens)
        for index in range(start, len(keys))
    ]
    return client.save_many_async(
        items, tier=tier, reason=SaveReason.FINISH, ancestors=keys[:start]
    )


# ---- whole states


def _is_whole(utils: Any, layers: Sequence[Any]) -> bool:
    """Whether a layer does not hold every token."""
    return any(type(layer) is not utils.DynamicLayer for layer in layers)


def _held(layers: Sequence[Any]) -> int:
    """How many tokens the layers hold; none if they don't agree, in the middle of a pass."""
    counts = {int(each.get_seq_length()) for each in layers if hasattr(each, "get_seq_length")}
    return counts.pop() if len(counts) == 1 else 0


def _batch(layer: Any) -> int:
    """How many prompts a layer holds; 1 for one that holds nothing."""
    states = getattr(layer, "conv_states", None) or {}
    found = [getattr(layer, "keys", None), *(states.values() if isinstance(states, dict) else ())]
    return next((int(each.shape[0]) for each in found if each is not None), 1)


def _whole_keys(
    namespace: Namespace, ids: list[int], layers: Sequence[Any], lengths: list[int]
) -> list[Key]:
    return prefix_keys(
        _with_words(namespace, repr(transformers_states.kinds(layers))), ids, lengths
    )


def _load_whole(
    client: Client,
    namespace: Namespace,
    torch: Any,
    ids: list[int],
    layers: Sequence[Any],
    device: Any,
) -> int:
    """Fill the layers with the longest state of a prefix. Returns its number of tokens."""
    lengths = list(range(max(1, len(ids) - MAX_BATCH_KEYS + 1), len(ids) + 1))
    if not lengths:
        return 0
    keys = _whole_keys(namespace, ids, layers, lengths)[::-1]
    with client.claim(keys, mode=ClaimMode.FIRST, prompt_tokens=len(ids)) as hit:
        if not hit:
            return 0
        payload = bytearray(hit.entries[0].payload_bytes)
        length = lengths[::-1][hit.positions[0]]
        if not hit.restore_into([payload]):
            return 0
    return length if transformers_states.unpack(torch, payload, layers, device) else 0


def _save_whole(
    client: Client, namespace: Namespace, ids: list[int], layers: Sequence[Any], tier: Tier
) -> Future[list[SaveOutcome]]:
    key = _whole_keys(namespace, ids, layers, [len(ids)])[0]
    if client.exists_one(key, counted=False):
        return _nothing()
    items = [SaveItem(key, transformers_states.pack(layers), len(ids))]
    return client.save_many_async(items, tier=tier, reason=SaveReason.FINISH)


def _nothing() -> Future[list[SaveOutcome]]:
    done: Future[list[SaveOutcome]] = Future()
    done.set_result([])
    return done


# ---- which tokens


def _ids(tokens: Any) -> list[int]:
    """The ids of one prompt: a sequence, a tensor, an array, a list of one list, or a tokeniser's
    result. Raises CallerError for several prompts."""
    if isinstance(tokens, Mapping) or hasattr(tokens, "input_ids"):
        tokens = tokens["input_ids"]
    plain = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if plain and isinstance(plain[0], Sequence):
        if len(plain) > 1:
            raise CallerError(f"these are the ids of {len(plain)} prompts: take them one by one")
        plain = list(plain[0])
    return plain


def _named(config: Any, ids: list[int]) -> int | None:
    """How many tokens of a prompt can be in keys; None: nothing of it, because the state of its
    first tokens depends on its length."""
    limit = rope_limit(config)
    if limit is not None and len(ids) >= limit:
        return None
    first = first_of(media_tokens(config), ids)
    return len(ids) if first is None else first


def _named_of(namespace: ModelNamespace, ids: list[int], cache: Any, held: int) -> int | None:
    """How many tokens of a cache can be in keys."""
    namespace.check()
    filled = namespace.passes.filled(cache)
    if filled.stamp != namespace.stamp:
        raise CallerError(
            "the cache was filled with other adapters or weights than the namespace's"
        )
    named = _named(namespace.config, ids[:held])
    if named is None or filled.named is None:
        return named
    return min(named, filled.named)


# ---- the shapes of keys and values


class LayerShape(NamedTuple):
    """Heads and widths of the keys and values of a layer."""

    key_heads: int
    key_width: int
    value_heads: int
    value_width: int


Layout = tuple[LayerShape, ...]


def _layouts(config: Any, layers: int) -> list[Layout]:
    """The layouts that a configuration may mean. Which one a model has, its cache shows; the keys
    say it, so that another one is never found."""
    text = config.get_text_config()
    each = list(getattr(text, "per_layer_config", None) or ())
    if len(each) != layers:
        each = [text] * layers
    made: list[Layout] = []
    for kind in zip(*map(_shapes, each), strict=True):
        layout = tuple(shape for shape in kind)
        if layout not in made:
            made.append(layout)
    return made


def _shapes(config: Any) -> Iterator[LayerShape]:
    """The shapes that a layer may have, the likeliest first."""
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name in ("num_key_value_heads", "num_kv_heads"):
        grouped: int = getattr(config, name, None) or heads
        yield LayerShape(grouped, width, grouped, width)
    yield LayerShape(heads, width, heads, width)
    # One head of keys and values for all.
    yield LayerShape(1, width, 1, width)
    # Latent attention, as its layers give keys and values to the cache.
    key_width = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    yield LayerShape(heads, key_width, heads, getattr(config, "v_head_dim", 0))
    # The same, kept as the latent itself.
    latent: int = getattr(config, "kv_lora_rank", 0) or 0
    rope: int = getattr(config, "qk_rope_head_dim", 0) or 0
    yield LayerShape(1, latent, 1, rope)


def _with_layout(namespace: Namespace, layout: Layout, dtype: Any) -> Namespace:
    return _with_words(namespace, repr((tuple(map(tuple, layout)), str(dtype))))


def _with_words(namespace: Namespace, words: str) -> Namespace:
    """The namespace of entries of this form."""
    if not isinstance(namespace, ModelNamespace):
        check_shard(namespace)  # a model says itself whether it is split
    digest = hashlib.sha256(_LAYOUT_LABEL + words.encode()).digest()
    shard = namespace.shard
    return Namespace(
        namespace.fingerprint,
        namespace.quantisation,
        namespace.context_params,
        namespace.adapters,
        namespace.salt,
        digest + (shard if isinstance(shard, bytes) else shard.encode()),
    )


def _block(pairs: Sequence[tuple[Any, Any]], index: int, block_tokens: int) -> list[Any]:
    """The pieces of one block: for each layer its keys, then its values."""
    part = slice(index * block_tokens, (index + 1) * block_tokens)
    return [tensor[:, :, part].cpu() for pair in pairs for tensor in pair]


def _block_bytes(pairs: Sequence[tuple[Any, Any]], block_tokens: int) -> int:
    """The payload of one block: that of `_block`."""
    return sum(
        tensor.shape[1] * block_tokens * tensor.shape[3] * tensor.element_size()
        for pair in pairs
        for tensor in pair
    )


def _same(
    pairs: Sequence[tuple[Any, Any]], blocks: range, staged: Any, block_tokens: int
) -> Iterator[tuple[Any, Any]]:
    """For each tensor of `pairs` the part that holds these blocks, and the same part of their
    payloads `staged`, of shape (blocks, bytes): two views of shape (heads, blocks, tokens, width).
    """
    at = 0
    for tensor in (each for pair in pairs for each in pair):
        _, heads, _, width = tensor.shape
        part = tensor[0, :, blocks.start * block_tokens : blocks.stop * block_tokens]
        size_bytes = heads * block_tokens * width * tensor.element_size()
        payload = staged[:, at : at + size_bytes].view(tensor.dtype)
        at += size_bytes
        yield (
            part.unflatten(1, (len(blocks), block_tokens)),
            payload.unflatten(1, (heads, block_tokens, width)).transpose(0, 1),
        )


# ---- the engine


def _layers(utils: Any, cache: Any) -> list[Any]:
    """The layers that hold something. Raises UnsupportedEngine, by name."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise UnsupportedEngine(f"prefixd can't keep a {type(cache).__name__}")
    held = [layer for _, layer in _held_layers(cache)]
    for layer in held:
        name = type(layer).__name__
        if name not in transformers_states.LAYERS or type(layer) is not getattr(utils, name, None):
            raise UnsupportedEngine(f"prefixd can't keep a {name}")
    if held and all(type(layer).__name__ == "LinearAttentionLayer" for layer in held):
        raise UnsupportedEngine(
            "prefixd can't keep a cache of nothing but LinearAttentionLayer: it does not say how "
            "many tokens it holds"
        )
    return held


def _held_layers(cache: Any) -> list[tuple[int, Any]]:
    """The layers that hold something, with their numbers."""
    return [
        (number, layer)
        for number, layer in enumerate(cache.layers)
        if type(layer).__name__ != "DummyLayer"
    ]


def _modules() -> tuple[Any, Any]:
    names = ["DynamicCache", "DynamicLayer.lazy_initialization", "DynamicLayer.get_seq_length"]
    utils = ENGINE.require("transformers.cache_utils", names)
    ENGINE.check_call(utils.DynamicLayer.lazy_initialization, "self", "keys", "values")
    torch = Engine("torch", "torch", "2.13").require("torch", ["empty"])
    return torch, utils
