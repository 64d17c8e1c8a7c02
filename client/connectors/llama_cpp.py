"""llama-cpp-python: a cache for `Llama.set_cache`.

    from llama_cpp import Llama
    from prefixd.client import Client
    from prefixd.connectors.llama_cpp import PrefixdCache, block_sequences

    with block_sequences():
        llama = Llama("model.gguf", n_ctx=8192)
    llama.set_cache(PrefixdCache.of(llama, Client()))

With a spare sequence (`block_sequences`) a prompt is kept in blocks, and a prompt that diverges
reuses the blocks before. Without one, with a recurrent model, or where the tokens before a sliding
window are not kept (`swa_full=False`), whole states are kept: that of a prompt, and that of the
prompt with its completion. A recurrent state can't go back by a token, so the state of a prompt is
that before its last token, which the cache evaluates itself.

What is found is loaded into the context at once, and the engine is told that there is no state to
load (KeyError). It then finds the prompt in its context and evaluates the rest. Scores are not
kept: after a load the last token is evaluated again.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from typing import Any, Final, NoReturn

from ...proto.keys import Key, Namespace, prefix_key, prefix_keys
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from .. import Client
from ..hits import Hit
from ..identity import StateIdentity
from ..saves import SaveItem
from .engine import UnsupportedEngine
from .llama_cpp_identity import ENGINE, check_causal, identity_of, low_level, watch

__all__ = ["PrefixdCache", "attach_to_server", "block_sequences"]

logger = logging.getLogger("prefixd.client.connectors")

DEFAULT_BLOCK_TOKENS: Final = 256
#: The number of the spare sequence. Sequence 0 is the one that is evaluated.
_SPARE: Final = 1

# From here on the engine's calls are watched. Without the engine, the first use says what is wrong.
with suppress(UnsupportedEngine):
    low_level()


class PrefixdCache:
    """What `Llama.set_cache` takes. For one `Llama`; like it, used by one thread at a time."""

    def __init__(
        self,
        context: LlamaContext,
        client: Client,
        *,
        tier: Tier = Tier.RAM,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        """`context`: see `of`. The caller keeps the client."""
        self._context = context
        self._client = client
        self._tier = tier
        self._block_tokens = block_tokens
        self._identify()
        #: The prompt of the last lookup. The next save is that of its completion.
        self._prompt: list[int] = []
        #: Whether the completion of that prompt is still to be saved.
        self._unsaved = False
        #: How many tokens of prompt and completion were saved, or loaded.
        self._saved = 0

    @classmethod
    def of(
        cls,
        llama: Any,
        client: Client,
        *,
        fingerprint: bytes | None = None,
        salt: bytes | str = b"",
        **options: Any,
    ) -> PrefixdCache:
        """A cache for this `llama_cpp.Llama`. `fingerprint`: 32 bytes that identify the weights;
        None: the SHA-256 of the model's files, which takes about a second per GiB, once on a host.
        `salt` keeps tenants apart. `options`: those of the constructor. Raises UnsupportedEngine.
        """
        context = LlamaContext(llama, fingerprint=fingerprint, salt=salt)
        cache = cls(context, client, **options)
        client.announce(cache.identity)
        context.watch_generation(cache._save_growing, cache._save_completion)
        return cache

    @property
    def identity(self) -> StateIdentity:
        """What the keys of this cache say, as of its last use."""
        return self._identity

    def _identify(self) -> None:
        self._identity = self._context.identity()
        self._namespace: Namespace = self._identity.namespace()

    def _notice_changes(self) -> None:
        """Take other keys if other adapters are applied than at the last use."""
        if self._context.adapters_changed():
            self._identify()
            self._client.announce(self._identity)

    # ---- what llama-cpp-python calls

    @property
    def cache_size(self) -> int:
        """Always 0: this process keeps nothing, and the daemon's entries are not only its own."""
        return 0

    def __contains__(self, tokens: Sequence[int]) -> bool:
        tokens = list(tokens)
        try:
            self._notice_changes()
            if self._context.has_spare_sequence:
                return self._client.leading_run(self._blocks(tokens)[0], counted=False) > 0
            return any(self._client.exists(self._prefixes(tokens)[0], counted=False))
        except Exception:
            logger.exception("looking into the cache failed; nothing is there")
            return False

    def __getitem__(self, tokens: Sequence[int]) -> NoReturn:
        """Load what is cached of this prompt into the context. Always raises KeyError: the engine
        finds by itself what is in the context."""
        self._prompt, self._unsaved, self._saved = list(tokens), True, 0
        try:
            self._notice_changes()
            if self._all_verified():
                if self._context.has_spare_sequence:
                    self._load_blocks(self._prompt)
                else:
                    self._load_state(self._prompt)
        except Exception:
            # A request must never fail because of the cache.
            logger.exception("loading from the cache failed; the prompt is evaluated")
            self._context.forget()
        raise KeyError("what is cached was loaded into the context")

    def __setitem__(self, tokens: Sequence[int], _state: object) -> None:
        """Save the state of the context, which is that of these tokens. `_state` is ignored: it
        contains the scores as well."""
        known = self._context.tokens()
        if known == list(tokens[: len(known)]):
            self._save_completion()

    def _all_verified(self) -> bool:
        """Whether every token in the context is verified. False: a handler of images has just
        evaluated this prompt; nothing may be loaded over it. For any other prompt, what is not
        verified is forgotten: the engine would reuse it by its ids."""
        verified, known = self._context.verified(), self._context.tokens()
        if verified == len(known):
            return True
        if known == self._prompt:
            return False
        if self._context.can_be_cut:
            self._context.cut(verified)
            self._context.set_tokens(known[:verified])
        else:
            self._context.forget()
        return True

    def _save_growing(self, generated: int) -> None:
        """Save the prompt right behind its prefill, and what has grown since by another interval.
        The context has all but the last of so many generated tokens."""
        policy, length = self._client.policy, len(self._prompt) + generated - 1
        if not self._unsaved:
            return  # nobody has looked for this prompt
        if generated == 1:
            cold = policy.cold_save_split(length)
            if cold is not None and cold[0] > self._saved:
                # A state is of all its tokens; of blocks those behind the boundary come later.
                end = cold[0] if self._context.has_spare_sequence else length
                self._save(SaveReason.COLD, end)
        elif policy.should_continued_save(length, self._saved or len(self._prompt)):
            self._save(SaveReason.CONTINUED, length)

    def _save_completion(self) -> None:
        """Save the prompt of the last lookup and what was generated, as far as it is verified."""
        if self._unsaved:
            self._unsaved = False
            self._save(SaveReason.FINISH)

    def _save(self, reason: SaveReason, token_count: int | None = None) -> None:
        """Save the first `token_count` tokens of the context, which is evaluated further for
        another reason than FINISH."""
        try:
            if self._context.adapters_changed():
                self._identify()  # while it was generated: then nothing is verified
            known, verified = self._context.tokens(), self._context.verified()
            kept = verified if token_count is None else min(verified, token_count)
            worth = kept and self._client.policy.should_finish_save(kept)
            if not worth or self._client.would_drop():
                return
            if self._context.has_spare_sequence:
                self._save_blocks(known[:kept], reason)
            elif kept == len(known):
                self._save_states(known, reason)
            else:
                return
            self._saved = kept
        except Exception:
            logger.exception("saving to the cache failed")

    # ---- blocks

    def _blocks(self, tokens: list[int]) -> tuple[list[Key], list[int]]:
        """The keys of the blocks, including an incomplete last one, and the end of each."""
        chain = self._client.chain(
            self._namespace, tokens, self._block_tokens, include_partial=True
        )
        return list(chain), list(itertools.accumulate(chain.token_counts))

    def _load_blocks(self, tokens: list[int]) -> None:
        # Tokens that are in the context already need not be loaded.
        present = common(self._context.tokens(), tokens)
        keys, ends = self._blocks(tokens)
        found = self._client.leading_run(keys, prompt_tokens=len(tokens))
        if not found or ends[found - 1] <= present:
            return
        start = present // self._block_tokens
        with self._client.longest_run(keys[:found], counted=False) as hit:
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
        self._saved = good

    def _save_blocks(self, tokens: list[int], reason: SaveReason) -> None:
        """Save the complete blocks of prompt and completion, and the incomplete last block of the
        prompt alone, which the next request with this prompt looks for."""
        keys, ends = self._blocks(tokens[: len(tokens) - len(tokens) % self._block_tokens])
        self._save_from(self._client.leading_run(keys, counted=False), keys, ends, reason)
        prompt = self._prompt
        if len(prompt) % self._block_tokens and tokens[: len(prompt)] == prompt:
            keys, ends = self._blocks(prompt)
            if not self._client.exists_one(keys[-1], counted=False):
                self._save_from(len(keys) - 1, keys, ends, reason)

    def _save_from(self, start: int, keys: list[Key], ends: list[int], reason: SaveReason) -> None:
        """Save the blocks from `start` on."""
        firsts = [0, *ends[:-1]]
        items = [
            SaveItem(keys[index], self._context.block(first, ends[index]), ends[index] - first)
            for index, first in enumerate(firsts[: len(keys)])
            if index >= start
        ]
        if items:
            self._client.save_many_async(
                items, tier=self._tier, reason=reason, ancestors=keys[:start]
            )

    # ---- whole states

    def _prefixes(self, tokens: list[int]) -> tuple[list[Key], list[int]]:
        """The keys of as many prefixes as one call takes, longest first, and their lengths."""
        # The engine evaluates the last token in any case, and a recurrent state can't forget it.
        longest = len(tokens) if self._context.can_be_cut else len(tokens) - 1
        lengths = list(range(max(1, longest - MAX_BATCH_KEYS + 1), longest + 1))
        return prefix_keys(self._namespace, tokens, lengths)[::-1], lengths[::-1]

    def _load_state(self, tokens: list[int]) -> None:
        context, known = self._context, self._context.tokens()
        present = common(known, tokens)
        if not context.can_be_cut:
            if known == tokens and context.can_sample():
                return
            if present < len(known) or present == len(tokens):
                present = 0  # the engine can't go back to it
        keys, lengths = self._prefixes(tokens)
        with self._client.claim(keys, mode=ClaimMode.FIRST, prompt_tokens=len(tokens)) as hit:
            length = lengths[hit.positions[0]] if hit else 0
            data = _whole(hit) if length > present else None
        if data is not None:
            if context.load_state(data, length):
                context.set_tokens(tokens[:length])
                present = self._saved = length
            else:
                context.set_tokens([])
                present = 0
        if not context.can_be_cut:
            self._evaluate_to_the_last(tokens, present)

    def _evaluate_to_the_last(self, tokens: list[int], present: int) -> None:
        """Evaluate all but the last token, and save the states that can't be made later: at the
        trimmed boundary, where another prompt may go on, and that of the last one, which is found
        for this prompt again."""
        context, policy, last = self._context, self._client.policy, len(tokens) - 1
        if present >= last:
            return
        if not present:
            context.forget()
        if not policy.should_finish_save(last) or self._client.would_drop():
            return
        cold = policy.cold_save_split(len(tokens))
        at = present
        for stop in [cold[0]] if cold and cold[0] < last else []:
            if stop > at:
                at = self._evaluate_and_save(tokens, at, stop)
        self._saved = self._evaluate_and_save(tokens, at, last)

    def _evaluate_and_save(self, tokens: list[int], at: int, stop: int) -> int:
        """Returns `stop`."""
        context, key = self._context, prefix_key(self._namespace, tokens[:stop])
        context.evaluate(tokens[at:stop])
        if context.verified() == stop and not self._client.exists_one(key, counted=False):
            self._save_state(key, context.state(), stop, SaveReason.COLD)
        return stop

    def _save_states(self, tokens: list[int], reason: SaveReason) -> None:
        """Save the state of prompt and completion, and that of the prompt alone, which the next
        request with this prompt looks for."""
        prompt = len(self._prompt)
        whole = self._context.state()
        if (
            self._context.can_be_cut
            and self._saved < prompt < len(tokens)
            and tokens[:prompt] == self._prompt
            and self._client.policy.should_finish_save(prompt)
        ):
            key = prefix_key(self._namespace, self._prompt)
            if not self._client.exists_one(key, counted=False):
                self._context.cut(prompt)
                self._save_state(key, self._context.state(), prompt, reason)
                if not self._context.load_state(whole, len(tokens)):
                    self._context.set_tokens([])
        key = prefix_key(self._namespace, tokens)
        if not self._client.exists_one(key, counted=False):
            self._save_state(key, whole, len(tokens), reason)

    def _save_state(self, key: Key, data: bytearray, token_count: int, reason: SaveReason) -> None:
        self._client.save_async(key, data, tier=self._tier, reason=reason, token_count=token_count)


def _whole(hit: Hit) -> bytearray | None:
    """The payload of a hit with one entry. None: it could not be restored."""
    data = bytearray(hit.entries[0].payload_bytes)
    return data if hit.restore_into([data]) else None


# ---- the context


class LlamaContext:
    """A `Llama` and its context, as the cache needs them: which tokens are in it, and their state.

    A token counts as `verified` if it was evaluated as text, with the adapters that are applied
    now. `Llama.input_ids` alone does not say that: handlers of images evaluate embeddings and leave
    the ids of an earlier prompt at their positions, and adapters can be switched between two
    evaluations. So `eval` and `reset` of this one `Llama` are wrapped.
    """

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


# ---- the engine


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
