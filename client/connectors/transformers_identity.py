"""What the KV state of a model of transformers depends on, and where it is read.

The weights are those in memory: whatever was loaded, merged, quantised or edited, equal tensors are
equal keys. Adapters (peft) are those that are active, by their tensors and scalings, not by name.
Every field of the configuration is in the key unless `WITHOUT_EFFECT` says why not.

A cache does not say what its tokens were evaluated with, so a hook sees each pass of the model. The
ids alone do not say it if a pass had an image, embeddings, a mask or positions of its own, or other
adapters. The state is named by its ids up to there, and not further.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from ...proto.errors import CallerError
from ...proto.keys import Adapter
from ..buffers import flat_bytes
from ..config_values import plain
from ..identity import Dimension, Part, StateIdentity, unrevealed
from ..ranks import rank_here
from ..weights import digest_of_contents
from .engine import Engine, UnsupportedEngine

logger = logging.getLogger("prefixd.client.connectors")

ENGINE: Final = Engine("transformers", "transformers", "5.18 to 5.24")

_NAMES: Final = "names and ids, which are in the keys themselves"
_OUTPUT: Final = "what is given back beside the state"
_TRAINING: Final = "used in training, or to make new weights"
#: Fields of a configuration that do not change the state, and why.
WITHOUT_EFFECT: Final[Mapping[str, str]] = {
    "_name_or_path": _NAMES,
    "architectures": _NAMES,
    "bos_token_id": _NAMES,
    "decoder_start_token_id": _NAMES,
    "eos_token_id": _NAMES,
    "finetuning_task": _NAMES,
    "forced_bos_token_id": _NAMES,
    "forced_eos_token_id": _NAMES,
    "id2label": _NAMES,
    "label2id": _NAMES,
    "pad_token_id": _NAMES,
    "prefix": _NAMES,
    "sep_token_id": _NAMES,
    "tokenizer_class": _NAMES,
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "output_router_logits": _OUTPUT,
    "problem_type": _OUTPUT,
    "return_dict": _OUTPUT,
    "use_cache": _OUTPUT,
    "attention_dropout": _TRAINING,
    "classifier_dropout": _TRAINING,
    "initializer_range": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    # The number type of the weights and that of the model are dimensions of their own.
    "dtype": "the type of each tensor is in its digest",
    "torch_dtype": "the type of each tensor is in its digest",
    "transformers_version": "that which is installed is in the key",
}
#: RoPE whose factors depend on nothing but the configuration.
_FIXED_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
#: RoPE whose factors change where a pass reaches beyond the original length.
_CHANGING_ROPE: Final = frozenset({"dynamic", "longrope"})
_MEDIA: Final = ("image", "video", "audio", "vision", "speech")
#: Arguments of a pass that say nothing beyond the ids, or what is given back.
_ARGUMENTS_WITHOUT_EFFECT: Final = frozenset(
    {
        *("input_ids", "attention_mask", "position_ids", "past_key_values", "cache"),
        *("cache_position", "use_cache", "labels", "logits_to_keep", "num_logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    }
)
#: Arguments that take effect at the ids that stand for media, and behind.
_MEDIA_ARGUMENTS: Final = frozenset(
    {
        *("pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw"),
        *("video_grid_thw", "second_per_grid_ts", "input_features", "feature_attention_mask"),
        *("token_type_ids", "mm_token_type_ids"),
    }
)


def identity_of(
    model: Any, *, fingerprint: bytes | None = None, salt: bytes | str = b""
) -> StateIdentity:
    """The identity of what a model computes now, with its weights and active adapters.

    `fingerprint`: 32 bytes that identify the weights without adapters; None: the SHA-256 of all
    tensors, which takes a second or two per GiB the first time on a host, then a 20th of it.
    Raises UnsupportedEngine for a model whose state can't be kept, by name.
    """
    config = model.config
    _check(model, config)
    layers = list(_tuner_layers(model))
    if fingerprint is None:
        weights = digest_of_contents(_tensors(model, layers))
        source = "SHA-256 of the tensors in memory"
    else:
        weights, source = fingerprint, "fingerprint="
    adapters, applied = _adapters(layers)
    dimensions = (
        Dimension("weights", weights, source, Part.FINGERPRINT),
        Dimension("code", _code(model), "the model's class", Part.FINGERPRINT),
        Dimension("torch", Engine("torch", "torch", "").version, "the package", Part.FINGERPRINT),
        Dimension("dtype", str(model.dtype), "model.dtype", Part.QUANTISATION),
        Dimension("device", _device(model), "model.device", Part.CONTEXT),
        Dimension("config", plain(_fields(config)), "model.config", Part.CONTEXT),
        Dimension("kernels", plain(_kernels(config)), "model.config, torch", Part.CONTEXT),
        Dimension("rope limit", rope_limit(config), "config.rope_parameters", Part.CONTEXT),
        Dimension("adapters", adapters, "the active ones of peft", Part.ADAPTERS),
        Dimension("applied adapters", plain(applied), "the layers of peft", Part.CONTEXT),
        _training(model),
        _rank(model, fingerprint),
        Dimension("salt", salt, "salt=", Part.SALT),
    )
    return StateIdentity(f"transformers {ENGINE.version}", dimensions)


def bare(model: Any) -> Any:
    """The model inside torch.compile and peft."""
    model = getattr(model, "_orig_mod", model)
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


def _check(model: Any, config: Any) -> None:
    name = type(bare(model)).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedEngine(f"prefixd can't keep the state of {name}: it has an encoder")
    for each in getattr(model, "peft_config", {}).values():
        if getattr(each, "is_prompt_learning", False):
            raise UnsupportedEngine(
                f"prefixd can't keep the state of a {type(each).__name__}: its tokens have no ids"
            )


def _training(model: Any) -> Dimension:
    if getattr(model, "training", False):
        return unrevealed("training", "dropout makes the state random; model.eval() ends it")
    return Dimension("training", False, "model.training", Part.FINGERPRINT)


def _rank(model: Any, fingerprint: bytes | None) -> Dimension:
    """The rank of a process that may hold a part of the model only. Its part has other weights, but
    a `fingerprint` is that of the whole."""
    here = rank_here()
    if here is None:
        return Dimension("rank", None, "one process", Part.SHARD)
    if fingerprint is None and getattr(bare(model), "tp_size", None) in (None, 1):
        return Dimension("rank", None, "the tensors are those of this rank", Part.SHARD)
    return Dimension("rank", f"{here.rank}/{here.size}", here.source, Part.SHARD)


# ---- weights and adapters


def _tensors(model: Any, layers: Sequence[tuple[str, Any]]) -> list[tuple[str, Callable[[], Any]]]:
    """The tensors by a name that says their type and shape, without those of adapters. A model in
    peft has the names of the model itself."""
    adapters = tuple(
        f"{name}.{kind}." for name, layer in layers for kind in layer.adapter_layer_names
    )
    tensors = dict(model.state_dict())
    # Tables that are made from the configuration, in the number type that they were cast to.
    buffers = getattr(model, "named_buffers", dict)
    tensors |= {name: tensor for name, tensor in dict(buffers()).items() if name not in tensors}
    changing = rope_limit(model.config) is not None
    made: list[tuple[str, Callable[[], Any]]] = []
    for name, tensor in sorted(tensors.items()):
        # Tables of changing RoPE are those of the last pass.
        if name.startswith(adapters) or (changing and "inv_freq" in name):
            continue
        name = _plain_name(name)
        if not hasattr(tensor, "numel"):
            made.append((f"{name} {plain(tensor)!r}", lambda: None))
            continue
        if getattr(tensor, "is_meta", False):
            raise UnsupportedEngine(
                f"prefixd can't see the weights of {type(bare(model)).__name__} ({name} is a meta "
                f"tensor, as of an offloaded model): give fingerprint="
            )
        read = partial(_bytes, tensor) if tensor.numel() else lambda: None
        made.append((f"{name} {tensor.dtype} {tuple(tensor.shape)}", read))
    return made


def _tuner_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The layers into which peft has put adapters, and their names."""
    named_modules = getattr(model, "named_modules", None)
    for name, module in named_modules() if named_modules is not None else ():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters"):
            yield name, module


def _active(layer: Any) -> list[str]:
    """The names of the active adapters, in the order in which they are applied."""
    if layer.disable_adapters:
        return []
    merged = getattr(layer, "merged_adapters", ())
    return [each for each in layer.active_adapters if each not in merged]


def _adapters(layers: list[tuple[str, Any]]) -> tuple[tuple[Adapter, ...], dict[str, Any]]:
    """The active adapters by content, and in which order which layers apply them."""
    digests: dict[str, list[bytes | memoryview]] = {}
    order: dict[str, list[str]] = {}
    for name, layer in layers:
        for adapter in _active(layer):
            parts = digests.setdefault(adapter, [])
            parts.append(f"{type(layer).__name__} {_plain_name(name)}".encode())
            parts += _parts_of(layer, adapter)
            order.setdefault(adapter, []).append(_plain_name(name))
    made = {
        adapter: Adapter(
            hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
        )
        for adapter, parts in digests.items()
    }
    # Sums depend on their order in the last bits.
    applied = [made[adapter].sha256.hex() for adapter in order]
    return tuple(made.values()), {"order": applied if len(applied) > 1 else []}


def _plain_name(name: str) -> str:
    name = name.removeprefix("_orig_mod.").removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _parts_of(layer: Any, adapter: str) -> Iterator[bytes | memoryview]:
    """Everything of one adapter in one layer: its tensors, ranks, scalings and flags."""
    for kind in layer.adapter_layer_names:
        held: Any = getattr(layer, kind, None)
        if hasattr(held, "keys") and adapter in held.keys():  # noqa: SIM118  # a ModuleDict
            for name, tensor in _tensors_of(held[adapter]):
                yield f"{kind} {name} {tensor.dtype} {tuple(tensor.shape)}".encode()
                if tensor.numel():
                    yield _bytes(tensor)
    for kind, held in sorted(vars(layer).items()):
        if isinstance(held, dict) and not kind.startswith("_") and adapter in held:
            yield f"{kind} {_plain_or_type(held[adapter])}".encode()


def _tensors_of(held: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(held, "state_dict"):
        return sorted(held.state_dict().items())
    return [("", held)]


def _plain_or_type(value: Any) -> str:
    if isinstance(value, bool | int | float | str | None | tuple | list):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _bytes(tensor: Any) -> memoryview:
    return cast("memoryview", flat_bytes(tensor.detach().cpu().contiguous()))


def stamp(model: Any) -> Any:
    """What changes when adapters are switched, scaled, merged or edited, when weights are edited in
    place (except through `.data`), and when the model moves to another kind of device, whose
    kernels compute other numbers. Cheap."""
    model = bare(model)
    layers = tuple(
        (
            name,
            tuple(_active(layer)),
            tuple(getattr(layer, "merged_adapters", ())),
            repr(getattr(layer, "scaling", None)),
        )
        for name, layer in _tuner_layers(model)
    )
    parameters = getattr(model, "parameters", None)
    tensors = tuple(map(_version, parameters())) if parameters is not None else ()
    kernels = repr(_kernels(model.config))
    return layers, tensors, kernels, getattr(model, "training", False)


def _version(tensor: Any) -> tuple[str, str, int]:
    kind = str(tensor.dtype), str(getattr(getattr(tensor, "device", None), "type", ""))
    try:
        return *kind, int(tensor._version)
    except RuntimeError:  # a tensor of inference mode does not count
        return *kind, -1


# ---- configuration


def _fields(config: Any) -> dict[str, Any]:
    return _stripped(config.to_dict())


def _stripped(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without the fields that have no effect, also those of a configuration inside."""
    return {
        name: _stripped(value) if isinstance(value, Mapping) and name.endswith("_config") else value
        for name, value in fields.items()
        if name not in WITHOUT_EFFECT
    }


def _kernels(config: Any) -> dict[str, str]:
    """What computes attention and experts, of each part of the model, and with which precision."""
    made: dict[str, str] = {}
    parts = {"": config}
    for name in getattr(config, "sub_configs", ()):
        parts[name] = getattr(config, name, None)
    for name, part in parts.items():
        for kind in ("_attn_implementation", "_experts_implementation"):
            made[f"{name}{kind}"] = str(getattr(part, kind, None))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_float32_matmul_precision"):
        made["matmul"] = torch.get_float32_matmul_precision()
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                made[f"autocast {device}"] = str(torch.get_autocast_dtype(device))
    return made


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    """The parameters of each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(text, name, None)
        if isinstance(found, Mapping):
            nested = [each for each in found.values() if isinstance(each, Mapping)]
            yield from nested or [found]


def rope_limit(config: Any) -> int | None:
    """The number of tokens from which on the factors of RoPE depend on the pass; None: never.

    Up to there every pass uses the same ones. Raises UnsupportedEngine for RoPE of another type.
    """
    text = config.get_text_config()
    limit: int | None = None
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", parameters.get("type", "default")) or "default"
        if kind in _FIXED_ROPE:
            continue
        if kind not in _CHANGING_ROPE:
            raise UnsupportedEngine(
                f"prefixd does not know RoPE of the type {kind!r}: its factors may depend on the "
                f"length of the pass"
            )
        original = (
            parameters.get("original_max_position_embeddings")
            or getattr(text, "original_max_position_embeddings", None)
            or text.max_position_embeddings
        )
        limit = min(limit or original, original)
    return limit


def media_tokens(config: Any) -> frozenset[int]:
    """The ids that stand for images, video and audio. Raises UnsupportedEngine for a model that
    takes them and does not say its ids."""
    text = config.get_text_config()
    fields = config.to_dict()
    found = {
        value
        for name, value in fields.items()
        if type(value) is int
        and name.endswith(("token_id", "token_index"))
        and any(word in name for word in _MEDIA)
    }
    if text is not config and not found:
        raise UnsupportedEngine(
            f"prefixd can't keep the state of {type(config).__name__}: it does not say which ids "
            f"stand for images or sounds"
        )
    return frozenset(found)


def _code(model: Any) -> str:
    """The class computes the state. Code of a repository has its commit in the module's name."""
    kind = type(bare(model))
    return f"{kind.__module__}.{kind.__qualname__}"


def layer_devices(model: Any) -> dict[int, Any]:
    """Where each layer computes, by its number. Empty for a model that doesn't number its layers.

    accelerate keeps the weights of an offloaded layer elsewhere, and says where it computes.
    """
    made: dict[int, Any] = {}
    for _, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        if type(number) is not int:
            continue
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is None:
            device = next((each.device for each in module.parameters()), None)
        if device is not None:
            made[number] = device
    return made


def _device(model: Any) -> str:
    """The types of the devices that compute."""
    kinds = {str(getattr(device, "type", device)) for device in layer_devices(model).values()}
    kinds = kinds or {str(getattr(getattr(model, "device", None), "type", "cpu"))}
    return ", ".join(sorted(kinds))


# ---- passes


@dataclass(slots=True)
class FilledCache:
    """What is known of a cache. `stamp`: of the model when it was filled."""

    stamp: Any
    #: How many tokens of it are named by their ids; None: all.
    named: int | None = None

    def ends_at(self, tokens: int) -> None:
        """From this token on the ids do not say everything."""
        self.named = tokens if self.named is None else min(self.named, tokens)


class Passes:
    """The passes of one model, and how they filled each cache."""

    def __init__(self, model: Any) -> None:
        self._caches: WeakKeyDictionary[Any, FilledCache] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._media = media_tokens(model.config)
        #: peft calls the model inside without its hooks, and `generate` of it with them.
        for each in {id(owner): owner for owner in (model, bare(model))}.values():
            each.register_forward_pre_hook(self._before, with_kwargs=True)

    def loaded(self, cache: Any, state: Any) -> None:
        """A cache was filled by prefixd for a model in this state."""
        with self._lock:
            self._caches[cache] = FilledCache(state)

    def filled(self, cache: Any) -> FilledCache:
        """How a cache was filled. Raises CallerError if no pass was seen."""
        with self._lock:
            found = self._caches.get(cache)
        if found is None:
            raise CallerError(
                "this model has not filled the cache since namespace_of: make the namespace first, "
                "and call the model itself, not a part of it"
            )
        return found

    def _before(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        cache = options.get("past_key_values", options.get("cache"))
        if cache is None or not hasattr(cache, "get_seq_length"):
            return
        try:
            self._note(model, args, options, cache)
        except Exception:
            # A pass must never fail because of the cache.
            logger.exception("a pass was not understood; its cache is not saved")
            with self._lock:
                self._caches[cache] = FilledCache(None, 0)

    def _note(self, model: Any, args: tuple[Any, ...], options: dict[str, Any], cache: Any) -> None:
        ids = options.get("input_ids", args[0] if args else None)
        held = int(cache.get_seq_length())
        with self._lock:
            filled = self._caches.get(cache)
            if filled is None:
                filled = self._caches[cache] = FilledCache(stamp(model))
                if held:
                    filled.ends_at(0)
            elif not held:
                filled.stamp, filled.named = stamp(model), None
            elif (ids is None or ids.shape[-1] > 1) and stamp(model) != filled.stamp:
                filled.ends_at(held)
        end = self._named_in_pass(ids, args, options, held)
        if end is not None:
            filled.ends_at(held + end)

    def _named_in_pass(
        self, ids: Any, args: tuple[Any, ...], options: dict[str, Any], held: int
    ) -> int | None:
        """How many tokens of a pass are named by their ids; None: all."""
        given = {
            name for name, value in options.items() if value is not None and value is not False
        }
        unknown = given - _ARGUMENTS_WITHOUT_EFFECT
        if ids is None or ids.ndim != 2 or len(args) > 1 or unknown - _MEDIA_ARGUMENTS:
            return 0
        count = ids.shape[1]
        if held and count == 1 and not unknown:
            return None  # a generated token: its mask and position continue those of the prompt
        mask, positions = options.get("attention_mask"), options.get("position_ids")
        if mask is not None and not _is_plain_mask(mask):
            return 0
        if positions is not None and not _are_plain_positions(positions, held, count):
            return 0
        return first_of(self._media, ids[0].tolist()) if unknown or self._media else None


def first_of(some: frozenset[int], ids: Iterable[int]) -> int | None:
    """Where the first of `some` is among `ids`."""
    return next((index for index, token in enumerate(ids) if token in some), None)


def _is_plain_mask(mask: Any) -> bool:
    """Whether a mask hides nothing."""
    return bool(getattr(mask, "ndim", 0) == 2 and mask.all())


def _are_plain_positions(positions: Any, held: int, count: int) -> bool:
    """Whether the positions are those of the tokens; there may be several rows of them."""
    rows = positions.reshape(-1, positions.shape[-1])
    first = rows[:, :1]
    return bool(
        rows.shape[-1] == count
        and (first == held).all()
        and (rows[:, 1:] - rows[:, :-1] == 1).all()
    )
