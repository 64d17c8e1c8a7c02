"""A `Llama` and its context, as the cache needs them: which tokens are in it, and their state.

A token counts as `verified` if it was evaluated as text, with the adapters that are applied now.
`Llama.input_ids` alone does not say that: handlers of images evaluate embeddings and leave the ids
of an earlier prompt at their positions, and adapters can be switched between two evaluations. So
`eval` and `reset` of this one `Llama` are wrapped.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from ..identity import StateIdentity
from .engine import UnsupportedEngine
from .llama_cpp_identity import ENGINE, check_causal, identity_of, low_level, watch

#: The number of the spare sequence. Sequence 0 is the one that is evaluated.
_SPARE: Final = 1


class LlamaContext:
    """The context of a `Llama`, as the cache needs it."""

    def __init__(
        self, llama: Any, *, fingerprint: bytes | None = None, salt: bytes | str = b""
    ) -> None:
        """`fingerprint` and `salt`: as for `PrefixdCache.of`. Raises UnsupportedEngine."""
        self._lib = lib = low_level()
        self._llama = llama
        self._fingerprint, self._salt = fingerprint, salt
        try:
            self._ctx = llama._ctx.ctx
            model = llama._model.model
            _ = (llama.n_tokens, llama.input_ids, llama.context_params, llama.model_params)
            _ = (llama._requires_eval, llama.metadata, llama.kv_overrides)
        except AttributeError as problem:
            raise ENGINE.unsupported(str(problem)) from None
        if getattr(llama, "draft_model", None) is not None:
            raise UnsupportedEngine(
                "prefixd keeps no scores, and a draft_model needs those of all tokens: make the "
                "Llama without draft_model"
            )
        if llama._logits_all:
            raise UnsupportedEngine("prefixd keeps no scores: make the Llama without logits_all")
        check_causal(llama, lib)
        self._memory = lib.llama_get_memory(self._ctx)
        params = llama.context_params
        recurrent = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        windows = lib.llama_model_n_swa(model) > 0 and not params.swa_full
        #: Whether the end of a sequence can be forgotten: not that of a recurrent state, nor where
        #: the tokens before a sliding window are gone.
        self.can_be_cut: Final = not recurrent and not windows
        #: Whether blocks can be copied to another sequence, and from there out of the context.
        self.has_spare_sequence: Final = bool(
            self.can_be_cut and params.kv_unified and lib.llama_n_seq_max(self._ctx) > _SPARE
        )
        #: The ids of what was evaluated as text. What is in the context already is not known.
        self._evaluated: list[int] = []
        #: The versions of what is applied, at the last evaluation and at the last question for it.
        self._evaluated_with = self._applied_version = self._version()
        self._wrap_evaluation()

    def identity(self) -> StateIdentity:
        """What the state depends on now: the model, its adapters, all parameters that change it."""
        entries = "blocks" if self.has_spare_sequence else "whole states"
        return identity_of(
            self._llama, self._lib, fingerprint=self._fingerprint, salt=self._salt, entries=entries
        )

    def adapters_changed(self) -> bool:
        """Whether other adapters are applied than at the last call. What was evaluated with others
        is no longer verified then."""
        self._notice_adapters()
        known, self._applied_version = self._applied_version, self._evaluated_with
        return known != self._applied_version

    def _version(self) -> int:
        applied = watch.applied_to(self._ctx)
        return applied.version if applied is not None else 0

    def _notice_adapters(self) -> None:
        version = self._version()
        if version != self._evaluated_with:
            self._evaluated_with = version
            self._evaluated = []

    def _wrap_evaluation(self) -> None:
        # The methods are looked up in the class at each call, so that others can replace them.
        llama, kind = self._llama, type(self._llama)

        def eval(tokens: Sequence[int]) -> None:
            start = llama.n_tokens
            self._notice_adapters()
            try:
                kind.eval(llama, tokens)
            finally:
                if start <= len(self._evaluated):
                    self._evaluated[start:] = tokens[: llama.n_tokens - start]

        def reset() -> None:
            self._evaluated = []
            kind.reset(llama)

        llama.eval, llama.reset = eval, reset

    def watch_generation(self, during: Callable[[int], None], after: Callable[[], None]) -> None:
        """Have every `Llama.generate` call `during` after each token that it gives to its reader,
        with the number of those tokens, and `after` at its end, also if its reader leaves early.
        The context has the state of everything before the latest token then."""
        llama, kind = self._llama, type(self._llama)

        def generate(*args: Any, **options: Any) -> Generator[int, Sequence[int] | None, None]:
            inner: Generator[int, Sequence[int] | None, None]
            inner = kind.generate(llama, *args, **options)
            given: Sequence[int] | None = None
            try:
                for count in itertools.count(1):
                    try:
                        token = inner.send(given)
                    except StopIteration:
                        return
                    given = yield token
                    during(count)
            finally:
                inner.close()
                after()

        llama.generate = generate

    # ---- tokens

    def tokens(self) -> list[int]:
        """The ids at the evaluated positions, verified or not."""
        llama = self._llama
        return [int(token) for token in llama.input_ids[: llama.n_tokens]]

    def verified(self) -> int:
        """How many of them, from the first on, are verified."""
        return common(self._evaluated, self.tokens())

    def can_sample(self) -> bool:
        """Whether the scores of the last token are those of an evaluation."""
        return not self._llama._requires_eval

    def evaluate(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens behind those that are in the context."""
        self._llama.eval(list(tokens))

    def forget(self) -> None:
        """Empty the context."""
        self._llama.reset()
        self.cut(0)

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Declare these tokens evaluated, after exactly their state was loaded."""
        llama = self._llama
        llama.input_ids[: len(tokens)] = tokens
        llama.n_tokens = len(tokens)
        self._evaluated = list(tokens)
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


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens the two have in common at the beginning."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))


def _pointer(data: bytearray) -> Any:
    return (ctypes.c_uint8 * len(data)).from_buffer(data)
