"""llama-cpp-python: a cache for `Llama.set_cache`.

    from prefixd.client import Client
    from prefixd.connectors.llama_cpp import PrefixdCache, block_sequences

    with block_sequences():
        llama = Llama("model.gguf", n_ctx=8192)
    llama.set_cache(PrefixdCache.of(llama, Client()))

With a spare sequence (`block_sequences`) a prompt is kept in blocks, and a prompt that diverges
reuses the blocks before. Without one, or with a recurrent model or sliding windows, whole states
are kept: that of a prompt, and that of the prompt with its completion.

What is found is loaded into the context at once, and the engine is told that there is no state to
load (KeyError). It then finds the prompt in its context and evaluates the rest. Scores are not
kept: after a load the last token is evaluated again.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NoReturn

from ..client.client import Client
from ..client.hits import Hit
from ..client.saves import SaveItem
from ..proto.keys import Adapter, Key, Namespace, context_hash, prefix_key, prefix_keys
from ..proto.limits import MAX_BATCH_KEYS
from ..proto.vocabulary import ClaimMode, SaveReason, Tier
from .engine import Engine, UnsupportedEngine

__all__ = ["PrefixdCache", "attach_to_server", "block_sequences"]

logger = logging.getLogger("prefixd.connectors")

ENGINE: Final = Engine("llama-cpp-python", "llama_cpp_python", "0.3.36")
#: Names in the low-level module. They are C functions, so their parameters can't be checked here.
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
#: Fields of the context's parameters that do not change its state.
_WITHOUT_EFFECT: Final = {
    *("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_ctx"),
    *("no_perf", "offload_kqv", "op_offload"),
}
#: The number of the spare sequence. Sequence 0 is the one that is evaluated.
_SPARE: Final = 1
DEFAULT_BLOCK_TOKENS: Final = 256


class PrefixdCache:
    """What `Llama.set_cache` takes. For one `Llama`; like it, used by one thread at a time."""

    def __init__(
        self,
        context: LlamaContext,
        namespace: Namespace,
        client: Client,
        *,
        tier: Tier = Tier.RAM,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        """`namespace`: of this model in this context; see `of`. The caller keeps the client."""
        self._context = context
        self._namespace = namespace
        self._client = client
        self._tier = tier
        self._block_tokens = block_tokens
        #: The prompt of the last lookup. The next save is that of its completion.
        self._prompt: list[int] = []

    @classmethod
    def of(
        cls, llama: Any, client: Client, *, fingerprint: bytes | None = None, **options: Any
    ) -> PrefixdCache:
        """A cache for this `llama_cpp.Llama`. `fingerprint`: 32 bytes that identify the weights;
        None: the SHA-256 of the model file, which takes about a second per GiB, once in a process.
        `options`: those of the constructor. Raises UnsupportedEngine."""
        context = LlamaContext(llama)
        return cls(context, context.namespace(fingerprint), client, **options)

    # ---- what llama-cpp-python calls

    @property
    def cache_size(self) -> int:
        """Always 0: this process keeps nothing, and the daemon's entries are not only its own."""
        return 0

    def __contains__(self, tokens: Sequence[int]) -> bool:
        tokens = list(tokens)
        try:
            if self._context.has_spare_sequence:
                return self._client.leading_run(self._blocks(tokens)[0]) > 0
            return any(self._client.exists(self._prefixes(tokens)[0]))
        except Exception:
            logger.exception("looking into the cache failed; nothing is there")
            return False

    def __getitem__(self, tokens: Sequence[int]) -> NoReturn:
        """Load what is cached of this prompt into the context. Always raises KeyError: the engine
        finds by itself what is in the context."""
        self._prompt = list(tokens)
        try:
            if self._context.has_spare_sequence:
                self._load_blocks(self._prompt)
            else:
                self._load_state(self._prompt)
        except Exception:
            # A request must never fail because of the cache.
            logger.exception("loading from the cache failed; the prompt is evaluated")
            self._context.cut(0)
            self._context.set_tokens([])
        raise KeyError("what is cached was loaded into the context")

    def __setitem__(self, tokens: Sequence[int], _state: object) -> None:
        """Save the state of the context, which is that of these tokens. `_state` is ignored: it
        contains the scores as well."""
        try:
            known = self._context.tokens()
            if known != list(tokens[: len(known)]):
                return
            if self._context.has_spare_sequence:
                self._save_blocks(known)
            else:
                self._save_states(known)
        except Exception:
            logger.exception("saving to the cache failed")

    # ---- blocks

    def _blocks(self, tokens: list[int]) -> tuple[list[Key], list[int]]:
        """The keys of the blocks, including an incomplete last one, and the end of each."""
        chain = self._client.chain(
            self._namespace, tokens, self._block_tokens, include_partial=True
        )
        return list(chain), list(accumulate(chain.token_counts))

    def _load_blocks(self, tokens: list[int]) -> None:
        # Tokens that are in the context already need not be loaded.
        present = _common(self._context.tokens(), tokens)
        keys, ends = self._blocks(tokens)
        found = self._client.leading_run(keys)
        if not found or ends[found - 1] <= present:
            return
        start = present // self._block_tokens
        with self._client.longest_run(keys[:found]) as hit:
            missing = range(start, len(hit))
            buffers = [bytearray(hit.entries[index].payload_bytes) for index in missing]
            run = hit.restore_into(buffers, indices=missing).run
        if not run:
            return
        good = start * self._block_tokens
        self._context.cut(good)
        for data, end in zip(buffers[:run], ends[start:], strict=False):
            if not self._context.load_block(data, good, end):
                self._context.cut(good)
                break
            good = end
        self._context.set_tokens(tokens[:good])

    def _save_blocks(self, tokens: list[int]) -> None:
        """Save the complete blocks of prompt and completion, and the incomplete last block of the
        prompt alone, which the next request with this prompt looks for."""
        if self._client.would_drop():
            return
        keys, ends = self._blocks(tokens[: len(tokens) - len(tokens) % self._block_tokens])
        self._save_from(self._client.leading_run(keys), keys, ends)
        prompt = self._prompt
        if len(prompt) % self._block_tokens and tokens[: len(prompt)] == prompt:
            keys, ends = self._blocks(prompt)
            if not self._client.exists_one(keys[-1]):
                self._save_from(len(keys) - 1, keys, ends)

    def _save_from(self, start: int, keys: list[Key], ends: list[int]) -> None:
        """Save the blocks from `start` on."""
        firsts = [0, *ends[:-1]]
        items = [
            SaveItem(keys[index], self._context.block(first, ends[index]), ends[index] - first)
            for index, first in enumerate(firsts[: len(keys)])
            if index >= start
        ]
        if items:
            self._client.save_many_async(
                items, tier=self._tier, reason=SaveReason.FINISH, ancestors=keys[:start]
            )

    # ---- whole states

    def _prefixes(self, tokens: list[int]) -> tuple[list[Key], list[int]]:
        """The keys of as many prefixes as one call takes, longest first, and their lengths."""
        # The engine evaluates the last token in any case, and a recurrent state can't forget it.
        longest = len(tokens) if self._context.can_be_cut else len(tokens) - 1
        lengths = list(range(max(1, longest - MAX_BATCH_KEYS + 1), longest + 1))
        return prefix_keys(self._namespace, tokens, lengths)[::-1], lengths[::-1]

    def _load_state(self, tokens: list[int]) -> None:
        present = _common(self._context.tokens(), tokens)
        keys, lengths = self._prefixes(tokens)
        with self._client.claim(keys, mode=ClaimMode.FIRST) as hit:
            length = lengths[hit.positions[0]] if hit else 0
            if length <= present:
                return
            data = _whole(hit)
        if data is None:
            return
        loaded = self._context.load_state(data, length)
        self._context.set_tokens(tokens[:length] if loaded else [])

    def _save_states(self, tokens: list[int]) -> None:
        """Save the state of prompt and completion, and that of the prompt alone, which the next
        request with this prompt looks for."""
        prompt = len(self._prompt)
        if self._client.would_drop() or not tokens:
            return
        whole = self._context.state()
        if (
            self._context.can_be_cut
            and 0 < prompt < len(tokens)
            and tokens[:prompt] == self._prompt
        ):
            key = prefix_key(self._namespace, self._prompt)
            if not self._client.exists_one(key):
                self._context.cut(prompt)
                self._save_state(key, self._context.state(), prompt)
                if not self._context.load_state(whole, len(tokens)):
                    self._context.set_tokens([])
        key = prefix_key(self._namespace, tokens)
        if not self._client.exists_one(key):
            self._save_state(key, whole, len(tokens))

    def _save_state(self, key: Key, data: bytearray, token_count: int) -> None:
        self._client.save_async(
            key, data, tier=self._tier, reason=SaveReason.FINISH, token_count=token_count
        )


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens the two have in common at the beginning."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))


def _whole(hit: Hit) -> bytearray | None:
    """The payload of a hit with one entry. None: it could not be restored."""
    data = bytearray(hit.entries[0].payload_bytes)
    return data if hit.restore_into([data]) else None


# ---- the engine


def low_level() -> Any:
    """`llama_cpp.llama_cpp`. Raises UnsupportedEngine."""
    return ENGINE.require("llama_cpp.llama_cpp", _NEEDED)


@contextmanager
def block_sequences() -> Iterator[None]:
    """A `Llama` made in this context has a spare sequence; `Llama` has no parameter for that."""
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
    """Give every model that llama-cpp-python's server loads from now on `make_cache(llama)`.

    Switches off the server's default `logits_all`, so requests for `logprobs` are refused."""
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
    """The context of a `Llama`, as the cache needs it."""

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
        #: Whether the end of a sequence can be forgotten; not possible with a recurrent state.
        self.can_be_cut: Final = not recurrent and not windows
        params = llama.context_params
        #: Whether blocks can be copied to another sequence, and from there out of the context.
        self.has_spare_sequence: Final = bool(
            self.can_be_cut and params.kv_unified and lib.llama_n_seq_max(self._ctx) > _SPARE
        )

    def namespace(self, fingerprint: bytes | None) -> Namespace:
        """A namespace of the model, its adapter, and all parameters that change its state."""
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
        """The evaluated tokens."""
        llama = self._llama
        return [int(token) for token in llama.input_ids[: llama.n_tokens]]

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Declare these tokens evaluated, after exactly their state was loaded."""
        llama = self._llama
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)
        llama._requires_eval = True

    def cut(self, token_count: int) -> None:
        """Forget everything behind the first `token_count` tokens."""
        # A recurrent state can only be forgotten as a whole.
        start = token_count if token_count and self.can_be_cut else -1
        self._lib.llama_memory_seq_rm(self._memory, 0, start, -1)

    # ---- states

    def block(self, first: int, last: int) -> bytearray:
        """The state of the tokens from `first` up to, but not including, `last`."""
        lib, memory = self._lib, self._memory
        lib.llama_memory_seq_rm(memory, _SPARE, -1, -1)
        lib.llama_memory_seq_cp(memory, 0, _SPARE, first, last)
        try:
            return self._get(_SPARE)
        finally:
            lib.llama_memory_seq_rm(memory, _SPARE, -1, -1)

    def load_block(self, data: bytearray, first: int, last: int) -> bool:
        """Put a block back behind the first `first` tokens. False: `data` is no such state."""
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
        """The whole state."""
        return self._get(0)

    def load_state(self, data: bytearray, token_count: int) -> bool:
        """Replace the whole state. False: `data` is no such state; the context is empty then."""
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
    """The digest of a file, computed once in a process as long as the file does not change."""
    stat = Path(path).stat()
    known = (str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns)
    if known not in _sha256s:
        with Path(path).open("rb") as file:
            _sha256s[known] = hashlib.file_digest(file, "sha256").digest()
    return _sha256s[known]
