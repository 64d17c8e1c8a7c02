"""What the KV state of llama-cpp-python depends on: every parameter, where it is read, and which
part of the namespace takes it.

Most of it is in the parameters that `Llama` keeps. What it does not keep is seen when it happens:
the low-level functions that load models and switch adapters report each call (`FileWatch`), through
ctypes' `errcheck`, which does not change them. A `Llama` that was made before this module was
imported, or whose files changed after it had loaded them, shares nothing beyond its process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...proto.keys import Adapter
from ..config_values import plain
from ..identity import Dimension, Part, StateIdentity, unrevealed
from ..weights import fingerprint_of_files, shards_of, weights_of
from .engine import Engine, UnsupportedEngine

ENGINE: Final = Engine("llama-cpp-python", "llama_cpp_python", "0.3.36")
#: Names in the low-level module. They are C functions, so their parameters can't be checked here.
_NEEDED: Final = (
    "llama_adapter_lora_init",
    "llama_context_default_params",
    "llama_get_memory",
    "llama_init_from_model",
    "llama_memory_clear",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_rm",
    "llama_model_has_encoder",
    "llama_model_is_diffusion",
    "llama_model_is_hybrid",
    "llama_model_is_recurrent",
    "llama_model_load_from_file",
    "llama_model_n_ctx_train",
    "llama_model_n_swa",
    "llama_n_ctx_seq",
    "llama_n_seq_max",
    "llama_set_adapter_cvec",
    "llama_set_adapters_lora",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
    "llama_supports_gpu_offload",
)

#: Why a parameter is not in the key.
NUMBERS_OF_THREADS: Final = "how the work is split; the greedy text is the same"
LENGTH: Final = "the length of the context; the regime of its position encoding is in the key"
OUTPUT: Final = "what is read out of the state, or how"
LOADING: Final = "how the bytes of the weights come into memory"
SAME_DEVICES: Final = "which one of equal devices"
SEQUENCES: Final = "how many sequences; the form of the entries is in the key"
NO_CONTENT: Final = "no number of the engine's; checked as a whole"


class FieldTable(NamedTuple):
    """Decisions about the fields of a structure: those in the key, by part, and why others are
    not. A field that is in neither is unknown: the engine is newer than this table."""

    parts: Mapping[str, Part]
    irrelevant: Mapping[str, str]


_CONTEXT = Part.CONTEXT
#: Of `llama_context_params`.
CONTEXT_PARAMS: Final = FieldTable(
    {
        "n_rs_seq": _CONTEXT,
        "ctx_type": _CONTEXT,
        "rope_scaling_type": _CONTEXT,
        "attention_type": _CONTEXT,
        "flash_attn_type": _CONTEXT,
        "rope_freq_base": _CONTEXT,
        "rope_freq_scale": _CONTEXT,
        "yarn_ext_factor": _CONTEXT,
        "yarn_attn_factor": _CONTEXT,
        "yarn_beta_fast": _CONTEXT,
        "yarn_beta_slow": _CONTEXT,
        "yarn_orig_ctx": _CONTEXT,
        "swa_full": _CONTEXT,
        "type_k": Part.QUANTISATION,
        "type_v": Part.QUANTISATION,
        # In the key of an engine that can offload to other devices.
        "offload_kqv": _CONTEXT,
        "op_offload": _CONTEXT,
        # Pointers: a context that has one is not shared.
        "cb_eval": _CONTEXT,
        "ctx_other": _CONTEXT,
    },
    {
        "n_ctx": LENGTH,
        "n_batch": NUMBERS_OF_THREADS,
        "n_ubatch": NUMBERS_OF_THREADS,
        "n_threads": NUMBERS_OF_THREADS,
        "n_threads_batch": NUMBERS_OF_THREADS,
        "n_seq_max": SEQUENCES,
        "kv_unified": SEQUENCES,
        "n_outputs_max": OUTPUT,
        "n_outputs_max_per_seq": OUTPUT,
        "pooling_type": OUTPUT,
        "embeddings": OUTPUT,
        "no_perf": OUTPUT,
        "samplers": OUTPUT,
        "n_samplers": OUTPUT,
        "defrag_thold": "where the cells lie in memory; entries are in the order of the tokens",
        "cb_eval_user_data": NO_CONTENT,
        "abort_callback": "whether an evaluation ends; a token counts when it has ended well",
        "abort_callback_data": NO_CONTENT,
    },
)
#: Of `llama_model_params`.
MODEL_PARAMS: Final = FieldTable(
    {
        # In the key of an engine that can offload to other devices.
        "n_gpu_layers": _CONTEXT,
        "split_mode": _CONTEXT,
        "tensor_split": _CONTEXT,
        "use_extra_bufts": _CONTEXT,
        "load_mtp": _CONTEXT,
        "kv_overrides": Part.FINGERPRINT,
        # Pointers: a model that has one is not shared.
        "devices": _CONTEXT,
        "tensor_buft_overrides": _CONTEXT,
    },
    {
        "load_mode": LOADING,
        "lazy_mode": LOADING,
        "check_tensors": LOADING,
        "no_host": LOADING,
        "no_alloc": "a model without memory evaluates nothing",
        "vocab_only": "a model without weights evaluates nothing",
        "main_gpu": SAME_DEVICES,
        "progress_callback": LOADING,
        "progress_callback_user_data": NO_CONTENT,
    },
)
_DEVICES: Final = frozenset(
    ("offload_kqv", "op_offload", "n_gpu_layers", "split_mode", "tensor_split")
)
_POINTERS: Final = frozenset(("cb_eval", "ctx_other", "devices", "tensor_buft_overrides"))
_NON_CAUSAL: Final = 1


def low_level() -> Any:
    """`llama_cpp.llama_cpp`, watched from now on. Raises UnsupportedEngine."""
    lib = ENGINE.require("llama_cpp.llama_cpp", _NEEDED)
    watch.install(lib)
    return lib


# ---- what Llama does not keep


class FileStamp(NamedTuple):
    """A file as it was when the engine read it."""

    path: Path
    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        stat = path.stat()
        return cls(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(slots=True)
class Applied:
    """What is applied to a context. `version` counts the changes."""

    adapters: tuple[tuple[int, float], ...] = ()
    #: SHA-256 of a control vector and its layers.
    control_vector: bytes | None = None
    version: int = 0


@dataclass(slots=True)
class FileWatch:
    """Which files models and adapters came from, and what is applied to contexts, by address."""

    models: dict[int, tuple[FileStamp, ...]] = field(default_factory=dict)
    adapters: dict[int, FileStamp | None] = field(default_factory=dict)
    contexts: dict[int, Applied] = field(default_factory=dict)

    def install(self, lib: Any) -> None:
        """Watch the calls of the low-level module. The functions remain the same objects, so it
        does not matter under which name a caller has them."""
        for name, note in (
            ("llama_model_load_from_file", self._model_loaded),
            ("llama_init_from_model", self._context_made),
            ("llama_adapter_lora_init", self._adapter_loaded),
            ("llama_set_adapters_lora", self._adapters_set),
            ("llama_set_adapter_cvec", self._control_vector_set),
        ):
            function = getattr(lib, name)
            # The tests' twins are plain functions, which take any attribute.
            if not isinstance(getattr(function, "errcheck", None), _Note):
                function.errcheck = _Note(note)

    def applied_to(self, context: Any) -> Applied | None:
        """What is applied to a context; None: it was made before it could be watched."""
        return self.contexts.get(_address(context))

    def _model_loaded(self, model: Any, path: bytes, _params: Any) -> None:
        if model:
            files = shards_of(Path(os.fsdecode(path)))
            self.models[_address(model)] = tuple(map(FileStamp.of, files))

    def _context_made(self, context: Any, _model: Any, _params: Any) -> None:
        if context:
            self.contexts[_address(context)] = Applied()

    def _adapter_loaded(self, adapter: Any, _model: Any, path: bytes) -> None:
        if adapter:
            self.adapters[_address(adapter)] = FileStamp.of(Path(os.fsdecode(path)))

    def _adapters_set(self, _: Any, context: Any, adapters: Any, count: Any, scales: Any) -> None:
        made = self.contexts.get(_address(context))
        if made is not None:
            numbers = range(_number(count))
            pairs = ((_address(adapters[n]), float(scales[n])) for n in numbers)
            made.adapters = tuple(sorted(pairs))
            made.version += 1

    def _control_vector_set(
        self, _: Any, context: Any, data: Any, length: Any, *layers: Any
    ) -> None:
        made = self.contexts.get(_address(context))
        if made is not None:
            made.control_vector = None
            if data:
                raw = ctypes.string_at(data, 4 * _number(length))
                where = repr(tuple(map(_number, layers))).encode()
                made.control_vector = sha256(where + b"\0" + raw).digest()
            made.version += 1


class _Note:
    """An `errcheck`: reports result and arguments, and returns the result as it is."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note

    def __call__(self, result: Any, _function: Any, arguments: tuple[Any, ...]) -> Any:
        self._note(result, *arguments)
        return result


watch: Final = FileWatch()


def _address(pointer: Any) -> int:
    if isinstance(pointer, int):
        return pointer
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _number(value: Any) -> int:
    return int(getattr(value, "value", value))


# ---- the identity


def identity_of(
    llama: Any, lib: Any, *, fingerprint: bytes | None, salt: bytes | str, entries: str
) -> StateIdentity:
    """The identity of what `llama` computes now. `fingerprint`: 32 bytes that identify the weights,
    from the user; None: the SHA-256 of the model's files. `entries`: their form."""
    offloads = bool(lib.llama_supports_gpu_offload())
    dimensions = [
        _weights(llama, fingerprint),
        Dimension(
            "kv_overrides", plain(llama.kv_overrides), "Llama(kv_overrides=)", Part.FINGERPRINT
        ),
        _library(lib),
        Dimension("entries", entries, "the context's sequences", _CONTEXT),
        _regime(llama, lib),
    ]
    windows = lib.llama_model_n_swa(llama._model.model) > 0
    for table, params, kind in (
        (CONTEXT_PARAMS, llama.context_params, "context_params"),
        (MODEL_PARAMS, llama.model_params, "model_params"),
    ):
        for name, part in table.parts.items():
            source = f"{kind}.{name}"
            value = getattr(params, name, None)
            if name == "kv_overrides":
                continue
            if name in _POINTERS:
                dimensions.append(_pointer(name, value, source))
                continue
            if name in _DEVICES and not offloads:
                value, source = None, f"{source}, without another device"
            if name == "swa_full" and not windows:
                value, source = None, f"{source}, without sliding windows"
            if name == "tensor_split" and value is not None:
                value = plain(llama.tensor_split)
            dimensions.append(Dimension(name, value, source, part))
        dimensions += [
            unrevealed(name, f"a field of {kind} that prefixd does not know", _CONTEXT)
            for name, *_ in params._fields_
            if name not in table.parts and name not in table.irrelevant
        ]
    dimensions += _applied(llama)
    dimensions.append(Dimension("salt", salt, "salt=", Part.SALT))
    return StateIdentity(f"llama-cpp-python {ENGINE.version}", tuple(dimensions))


def check_causal(llama: Any, lib: Any) -> None:
    """Raise UnsupportedEngine if the state of a token can depend on later tokens."""
    model = llama._model.model
    if lib.llama_model_has_encoder(model):
        raise UnsupportedEngine("prefixd can't keep the state of a model with an encoder")
    if lib.llama_model_is_diffusion(model):
        raise UnsupportedEngine("prefixd can't keep the state of a diffusion model")
    if llama.context_params.attention_type == _NON_CAUSAL:
        raise UnsupportedEngine("prefixd can't keep a state of attention that is not causal")


def _weights(llama: Any, fingerprint: bytes | None) -> Dimension:
    if fingerprint is not None:
        return Dimension("weights", fingerprint, "fingerprint=", Part.FINGERPRINT)
    loaded = watch.models.get(_address(llama._model.model))
    if loaded is None:
        help = "import prefixd.connectors.llama_cpp before the Llama is made, or give fingerprint="
        return unrevealed("weights", help)
    found = weights_of(llama.model_path)
    if found is None or _now(found.files) != loaded:
        return unrevealed("weights", "the model's files are no longer those that were loaded")
    return Dimension("weights", found.digest, found.source, Part.FINGERPRINT)


def _now(paths: Iterable[Path]) -> tuple[FileStamp, ...] | None:
    try:
        return tuple(map(FileStamp.of, paths))
    except OSError:
        return None


def _library(lib: Any) -> Dimension:
    """The version names the library unless another one takes its place."""
    digest = None
    if os.environ.get("LLAMA_CPP_LIB_PATH"):
        digest = fingerprint_of_files([lib._lib._name])
    return Dimension("library", digest, "LLAMA_CPP_LIB_PATH", Part.FINGERPRINT)


def _regime(llama: Any, lib: Any) -> Dimension:
    """LongRoPE has two sets of factors. Which one is used depends on the length of the context."""
    metadata, overrides = llama.metadata, llama.kv_overrides or {}
    architecture = metadata.get("general.architecture", "")
    name = f"{architecture}.rope.scaling.original_context_length"
    trained = lib.llama_model_n_ctx_train(llama._model.model)
    original = int(overrides.get(name, metadata.get(name, trained)))
    return Dimension(
        "rope regime",
        "long" if lib.llama_n_ctx_seq(llama._ctx.ctx) > original else "short",
        "n_ctx, against the model's original context",
        _CONTEXT,
    )


def _pointer(name: str, value: Any, source: str) -> Dimension:
    if value:
        return unrevealed(name, f"{source} is set, and prefixd can't read it", _CONTEXT)
    return Dimension(name, None, source, _CONTEXT)


def _applied(llama: Any) -> list[Dimension]:
    """The adapters and the control vector that are applied to the context."""
    applied = watch.applied_to(llama._ctx.ctx)
    if applied is None:
        help = "import prefixd.connectors.llama_cpp before the Llama is made"
        return [unrevealed("adapters", help, Part.ADAPTERS)]
    adapters: list[Adapter] = []
    for address, scale in applied.adapters:
        state = watch.adapters.get(address)
        if state is None or _now([state.path]) != (state,):
            help = "an adapter's file is no longer the one that was loaded"
            return [unrevealed("adapters", help, Part.ADAPTERS)]
        adapters.append(Adapter(fingerprint_of_files([state.path]), scale))
    return [
        Dimension("adapters", tuple(adapters), "llama_set_adapters_lora", Part.ADAPTERS),
        Dimension("control vector", applied.control_vector, "llama_set_adapter_cvec", _CONTEXT),
    ]
