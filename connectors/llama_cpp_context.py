"""The part of the llama-cpp-python connector that knows its functions."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Final

from ..proto.keys import Adapter, Namespace, context_hash
from .engine import Engine, UnsupportedEngine

logger = logging.getLogger("prefixd.connectors")

ENGINE: Final = Engine("llama-cpp-python", "llama_cpp_python", "0.3.36")
#: Of the low-level module. Their types are checked by use: they are C functions.
_NEEDED: Final = (
    "llama_context_default_params",
    "llama_get_memory",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_rm",
    "llama_model_is_hybrid",
    "llama_model_is_recurrent",
    "llama_model_n_swa",
    "llama_n_seq_max",
    "llama_state_seq_get_data",
    "llama_state_seq_get_size",
    "llama_state_seq_set_data",
)
#: Fields of the context's parameters that change nothing in its state.
_WITHOUT_EFFECT: Final = {
    *("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_ctx"),
    *("no_perf", "offload_kqv", "op_offload"),
}
_SPARE: Final = 1


def low_level() -> Any:
    """`llama_cpp.llama_cpp`. Raises UnsupportedEngine."""
    return ENGINE.require("llama_cpp.llama_cpp", _NEEDED)


@contextmanager
def block_sequences() -> Iterator[None]:
    """A `Llama` that is made within has a spare sequence, which `Llama` has no parameter for."""
    lib = low_level()
    default: Callable[[], Any] = lib.llama_context_default_params

    def with_a_spare() -> Any:
        params = default()
        params.n_seq_max = 2
        params.kv_unified = True
        return params

    lib.llama_context_default_params = with_a_spare
    try:
        yield
    finally:
        lib.llama_context_default_params = default


def attach_to_server(make_cache: Callable[[Any], Any]) -> None:
    """Every model that llama-cpp-python's server loads from now on gets `make_cache(llama)`.

    The server's default `logits_all` is switched off: requests for `logprobs` are refused."""
    server = ENGINE.require(
        "llama_cpp.server.model",
        ["LlamaProxy.load_llama_from_model_settings"],
    )
    load = server.LlamaProxy.load_llama_from_model_settings

    def load_with_cache(settings: Any) -> Any:
        if getattr(settings, "logits_all", False):
            logger.info("logits_all is off: prefixd keeps no scores, so there are no logprobs")
            settings = copy(settings)
            settings.logits_all = False
        with block_sequences():
            llama = load(settings)
        llama.set_cache(make_cache(llama))
        return llama

    server.LlamaProxy.load_llama_from_model_settings = staticmethod(load_with_cache)


class LlamaContext:
    """`llama_cpp.Context` of a `Llama`."""

    def __init__(self, llama: Any) -> None:
        """Raises UnsupportedEngine."""
        self._lib = lib = low_level()
        self._llama = llama
        try:
            self._ctx = llama._ctx.ctx
            model = llama._model.model
            _ = (llama.n_tokens, llama.input_ids, llama.context_params, llama._requires_eval)
        except AttributeError as problem:
            raise ENGINE.unsupported(str(problem)) from None
        if llama._logits_all:
            raise UnsupportedEngine("prefixd keeps no scores: make the Llama without logits_all")
        self._memory = lib.llama_get_memory(self._ctx)
        recurrent = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        windows = lib.llama_model_n_swa(model) > 0
        self.can_be_cut: Final = not recurrent and not windows
        params = llama.context_params
        self.has_spare_sequence: Final = bool(
            self.can_be_cut and params.kv_unified and lib.llama_n_seq_max(self._ctx) > _SPARE
        )

    def namespace(self, fingerprint: bytes | None) -> Namespace:
        """Of this model, its adapter and everything in its context that changes a state."""
        llama = self._llama
        params = llama.context_params
        fields: dict[str, Any] = {
            name: value
            for name, *_ in params._fields_
            if name not in _WITHOUT_EFFECT
            and isinstance(value := getattr(params, name), int | float)
        }
        fields["engine"] = f"llama.cpp {ENGINE.version}"
        fields["blocks"] = self.has_spare_sequence
        adapters: tuple[Adapter, ...] = ()
        if llama.lora_path:
            adapters = (Adapter(_file_sha256(llama.lora_path), llama.lora_scale),)
        weights = fingerprint or _file_sha256(llama.model_path)
        return Namespace(weights, "gguf", context_hash(fields), adapters)

    # ---- tokens

    def tokens(self) -> list[int]:
        llama = self._llama
        return [int(token) for token in llama.input_ids[: llama.n_tokens]]

    def set_tokens(self, tokens: Sequence[int]) -> None:
        llama = self._llama
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)
        llama._requires_eval = True

    def cut(self, token_count: int) -> None:
        # What is recurrent is only forgotten as a whole.
        start = token_count if token_count and self.can_be_cut else -1
        self._lib.llama_memory_seq_rm(self._memory, 0, start, -1)

    # ---- states

    def block(self, first: int, last: int) -> bytearray:
        lib, memory = self._lib, self._memory
        lib.llama_memory_seq_rm(memory, _SPARE, -1, -1)
        lib.llama_memory_seq_cp(memory, 0, _SPARE, first, last)
        try:
            return self._get(_SPARE)
        finally:
            lib.llama_memory_seq_rm(memory, _SPARE, -1, -1)

    def load_block(self, data: bytearray, first: int, last: int) -> bool:
        lib, memory = self._lib, self._memory
        try:
            if not self._set(data, _SPARE):
                return False
            if lib.llama_memory_seq_pos_max(memory, _SPARE) != last - 1:
                return False
            lib.llama_memory_seq_cp(memory, _SPARE, 0, first, last)
            return bool(lib.llama_memory_seq_pos_max(memory, 0) == last - 1)
        finally:
            lib.llama_memory_seq_rm(memory, _SPARE, -1, -1)

    def state(self) -> bytearray:
        return self._get(0)

    def load_state(self, data: bytearray, token_count: int) -> bool:
        lib, memory = self._lib, self._memory
        lib.llama_memory_seq_rm(memory, 0, -1, -1)
        if self._set(data, 0) and lib.llama_memory_seq_pos_max(memory, 0) == token_count - 1:
            return True
        lib.llama_memory_seq_rm(memory, 0, -1, -1)
        return False

    def _get(self, sequence: int) -> bytearray:
        lib = self._lib
        data = bytearray(lib.llama_state_seq_get_size(self._ctx, sequence))
        got = lib.llama_state_seq_get_data(self._ctx, _pointer(data), len(data), sequence)
        if not 0 < got <= len(data):
            raise RuntimeError(f"llama.cpp gave {got} bytes of a state of {len(data)}")
        return data[:got]

    def _set(self, data: bytearray, sequence: int) -> bool:
        taken = self._lib.llama_state_seq_set_data(self._ctx, _pointer(data), len(data), sequence)
        return bool(taken == len(data))


def _pointer(data: bytearray) -> Any:
    return (ctypes.c_uint8 * len(data)).from_buffer(data)


_sha256s: dict[tuple[str, int, int], bytes] = {}


def _file_sha256(path: str) -> bytes:
    """Of a file, once a process for as long as it does not change."""
    stat = Path(path).stat()
    known = (str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns)
    if known not in _sha256s:
        with Path(path).open("rb") as file:
            _sha256s[known] = hashlib.file_digest(file, "sha256").digest()
    return _sha256s[known]
