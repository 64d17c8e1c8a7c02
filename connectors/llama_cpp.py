"""llama-cpp-python: a cache for `Llama.set_cache`.

    from prefixd.client import Client
    from prefixd.connectors.llama_cpp import PrefixdCache, block_sequences

    with block_sequences():
        llama = Llama("model.gguf", n_ctx=8192)
    llama.set_cache(PrefixdCache.of(llama, Client()))

With a spare sequence (`block_sequences`) a prompt is kept in blocks, and one that diverges reuses
those before. Without it, or with a recurrent model or sliding windows, whole states are kept: that
of a prompt, and that of the prompt with its completion.

What is found is loaded into the context right away, and the engine is told that there is no state
to load (KeyError): it then finds the prompt in its context, and evaluates what is missing. Scores
are not kept: after a load the last token is evaluated again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NoReturn, Protocol

from ..client.client import Client
from ..client.hits import Hit
from ..client.saves import SaveItem
from ..proto.keys import Key, Namespace, prefix_key, prefix_keys
from ..proto.limits import MAX_BATCH_KEYS
from ..proto.vocabulary import ClaimMode, SaveReason, Tier
from .llama_cpp_context import LlamaContext, attach_to_server, block_sequences

__all__ = ["PrefixdCache", "attach_to_server", "block_sequences"]

logger = logging.getLogger("prefixd.connectors")

DEFAULT_BLOCK_TOKENS: Final = 256


class Context(Protocol):
    """One model's context, as the cache sees it. Sequence 0 is the one that is evaluated."""

    @property
    def has_spare_sequence(self) -> bool:
        """Can blocks be copied to another sequence, and from there out of the context?"""

    @property
    def can_be_cut(self) -> bool:
        """Can the end of a sequence be forgotten? Not a recurrent state's."""

    def tokens(self) -> list[int]:
        """Those that are evaluated."""

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """These are evaluated now: the state of exactly these was loaded."""

    def cut(self, token_count: int) -> None:
        """Forget what is behind the first `token_count` tokens."""

    def block(self, first: int, last: int) -> bytearray:
        """The state of the tokens `first` up to before `last`."""

    def load_block(self, data: bytearray, first: int, last: int) -> bool:
        """Put it back behind the `first` tokens. False: it is no such state."""

    def state(self) -> bytearray:
        """The whole state."""

    def load_state(self, data: bytearray, token_count: int) -> bool:
        """Put it back in the place of what is there. False: it is no such state; then nothing is
        there."""


class PrefixdCache:
    """What `Llama.set_cache` takes. For one `Llama`, and used like it: by one thread at a time."""

    def __init__(
        self,
        context: Context,
        namespace: Namespace,
        client: Client,
        *,
        tier: Tier = Tier.RAM,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        """`namespace`: of this model in this context; see `of`. The client stays the caller's."""
        self._context = context
        self._namespace = namespace
        self._client = client
        self._tier = tier
        self._block_tokens = block_tokens
        #: The prompt that was asked for last: its completion is what is saved next.
        self._prompt: list[int] = []

    @classmethod
    def of(
        cls, llama: Any, client: Client, *, fingerprint: bytes | None = None, **options: Any
    ) -> PrefixdCache:
        """For this `llama_cpp.Llama`. `fingerprint`: 32 bytes that identify the weights; None: the
        SHA-256 of the model file, which takes a second for each GiB or so, once a process.
        `options` are those of the constructor. Raises UnsupportedEngine."""
        context = LlamaContext(llama)
        return cls(context, context.namespace(fingerprint), client, **options)

    # ---- what llama-cpp-python calls

    @property
    def cache_size(self) -> int:
        """Of this process: nothing. What the daemon has is not only this engine's."""
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
        """Load what there is of this prompt into the context. Raises KeyError, always: what is in
        the context the engine finds by itself."""
        self._prompt = list(tokens)
        try:
            if self._context.has_spare_sequence:
                self._load_blocks(self._prompt)
            else:
                self._load_state(self._prompt)
        except Exception:
            # Never the reason why a request fails.
            logger.exception("loading from the cache failed; the prompt is evaluated")
            self._context.cut(0)
            self._context.set_tokens([])
        raise KeyError("what is cached was loaded into the context")

    def __setitem__(self, tokens: Sequence[int], _state: object) -> None:
        """Save the state of the context, which is that of these tokens; `_state` is not looked
        at: it holds the scores as well."""
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
        """The keys of the blocks, the incomplete last one included, and where each ends."""
        chain = self._client.chain(
            self._namespace, tokens, self._block_tokens, include_partial=True
        )
        return list(chain), list(accumulate(chain.token_counts))

    def _load_blocks(self, tokens: list[int]) -> None:
        # What is there stays; only what is behind it is worth anything.
        here = _common(self._context.tokens(), tokens)
        keys, ends = self._blocks(tokens)
        found = self._client.leading_run(keys)
        if not found or ends[found - 1] <= here:
            return
        start = here // self._block_tokens
        with self._client.longest_run(keys[:found]) as hit:
            wanted = range(start, len(hit))
            buffers = [bytearray(hit.entries[index].payload_bytes) for index in wanted]
            run = hit.restore_into(buffers, indices=wanted).run
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
        """The whole blocks of everything; and what is behind those of the prompt, for the same
        prompt does not know its answer."""
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
        """The blocks from `start` on."""
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
        """The keys of all prefixes that one call takes, longest first, and their lengths."""
        # The last token is evaluated in any case, and a recurrent state can't forget it.
        longest = len(tokens) if self._context.can_be_cut else len(tokens) - 1
        lengths = list(range(max(1, longest - MAX_BATCH_KEYS + 1), longest + 1))
        return prefix_keys(self._namespace, tokens, lengths)[::-1], lengths[::-1]

    def _load_state(self, tokens: list[int]) -> None:
        here = _common(self._context.tokens(), tokens)
        keys, lengths = self._prefixes(tokens)
        with self._client.claim(keys, mode=ClaimMode.FIRST) as hit:
            length = lengths[hit.positions[0]] if hit else 0
            if length <= here:
                return
            data = _whole(hit)
        if data is None:
            return
        loaded = self._context.load_state(data, length)
        self._context.set_tokens(tokens[:length] if loaded else [])

    def _save_states(self, tokens: list[int]) -> None:
        """Of everything, and of the prompt alone: the same prompt does not know its answer."""
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
    """How many tokens both begin with."""
    for index, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return index
    return min(len(some), len(others))


def _whole(hit: Hit) -> bytearray | None:
    """The payload of a hit of one entry."""
    data = bytearray(hit.entries[0].payload_bytes)
    return data if hit.restore_into([data]) else None
