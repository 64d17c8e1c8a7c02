"""When a slot is saved, and when a restore is worth it. Pure.

A save stops every slot of the server while it runs and writes the whole context, so it is lazy: a
slot is saved after a request if much of it is new, when it was idle for a while, when another
conversation takes it, and at the end. llama-server saves no slot that is generating, so an answer
is never saved before its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...proto.vocabulary import SaveReason
from ..policy import SavePolicy

#: A prompt that gains less is evaluated: the calls of a restore take about as long.
MIN_GAIN_TOKENS: Final = 32
#: With a draft model. Its own state is in no file: after a restore it drafts nothing for a while.
DRAFT_MIN_GAIN_TOKENS: Final = 2048
#: A slot that grew by this share since its last save is saved after the request.
GROWTH: Final = 0.25
#: What a measurement still weighs after the next one.
_DECAY: Final = 0.8
#: Restores that brought nothing, one after the other, before restores stop.
_STRIKES: Final = 3
#: Requests after which one restore is tried again.
_RETRY_AFTER: Final = 32


@dataclass(frozen=True, slots=True)
class SaveGates:
    """The gates of `SavePolicy` at the moments when a slot can be saved."""

    policy: SavePolicy

    def after_request(self, prompt: int, length: int, saved: int) -> SaveReason | None:
        """A request with a prompt of `prompt` tokens ended; the slot has `length` tokens, of which
        `saved` are in the cache. Why to save it now; None: not now."""
        if length <= saved or not self.policy.should_finish_save(length):
            return None
        if saved < self.policy.min_tokens:  # at most what other prompts begin with, too
            cold = self.policy.cold_save_split(prompt)
            return SaveReason.COLD if cold else SaveReason.FINISH
        if self.policy.should_continued_save(length, saved) or length - saved >= GROWTH * length:
            return SaveReason.CONTINUED
        return None

    def when_idle(self, length: int, saved: int) -> SaveReason | None:
        """The slot was not used for a while."""
        worth = length - saved >= MIN_GAIN_TOKENS and self.policy.should_finish_save(length)
        return SaveReason.FINISH if worth else None

    def when_replaced(self, length: int, saved: int, kept: int) -> SaveReason | None:
        """Another prompt takes the slot, and keeps only its first `kept` tokens."""
        lost = length - max(saved, kept)
        worth = lost >= MIN_GAIN_TOKENS and self.policy.should_finish_save(length)
        return SaveReason.EVICT if worth else None

    def stops(self, prompt: int, present: int, heads: list[int]) -> list[int]:
        """Where to stop the evaluation of a prompt to save a state that can't be cut later:
        `heads` are where later prompts may differ, `present` is what the slot has."""
        if not self.policy.should_finish_save(prompt - 1):
            return []
        cold = self.policy.cold_save_split(prompt)
        wanted = {*heads, prompt - 1} | ({cold[0]} if cold and not heads else set())
        stops: list[int] = []
        for stop in sorted(wanted):
            least = max(present, stops[-1] if stops else 0) + MIN_GAIN_TOKENS
            if least <= stop < prompt and stop >= self.policy.min_tokens:
                stops.append(stop)
        # The last token's place is where the same prompt goes on: it is always worth its save.
        if prompt - 1 > present and prompt - 1 not in stops and stops:
            stops[-1] = prompt - 1
        return stops


class Benefit:
    """Whether restores into one model are faster than its prefill. "A hit slower than prefill is no
    hit"."""

    def __init__(self, min_gain_tokens: int = MIN_GAIN_TOKENS) -> None:
        self.min_gain_tokens = min_gain_tokens
        self._prefill = (0.0, 0.0)
        self._restores = (0.0, 0.0)
        self._strikes = 0
        self._waited = 0

    @property
    def prefill_tokens_per_s(self) -> float:
        """As the server measured it; 0: not yet."""
        tokens, seconds = self._prefill
        return tokens / seconds if seconds else 0.0

    @property
    def restore_bytes_per_s(self) -> float:
        """From the cache into the slot; 0: not yet measured."""
        size_bytes, seconds = self._restores
        return size_bytes / seconds if seconds else 0.0

    @property
    def is_open(self) -> bool:
        """Restores bring nothing at the moment, and are not made."""
        return self._strikes >= _STRIKES

    def evaluated(self, tokens: int, seconds: float) -> None:
        """The server evaluated so many tokens of a prompt."""
        if tokens >= MIN_GAIN_TOKENS and seconds > 0:
            sum_tokens, sum_s = self._prefill
            self._prefill = sum_tokens * _DECAY + tokens, sum_s * _DECAY + seconds

    def restored(self, size_bytes: int, seconds: float) -> None:
        """A restore of so many bytes took this long, with everything."""
        sum_bytes, sum_s = self._restores
        self._restores = sum_bytes * _DECAY + size_bytes, sum_s * _DECAY + max(seconds, 1e-6)

    def reused(self, restored_tokens: int, cached_tokens: int) -> None:
        """After a restore of so many tokens, the server found these in its slot."""
        self._strikes = self._strikes + 1 if cached_tokens * 2 < restored_tokens else 0
        self._waited = 0

    def why_not(self, gain_tokens: int, size_bytes: int) -> str | None:
        """Why a restore is not worth it, in a few words that are counted; None: it is. Every
        so often one is tried nevertheless, to measure again."""
        if gain_tokens < self.min_gain_tokens:
            return "small gain"
        why = None
        if self.is_open:
            why = "restores brought nothing"
        elif self._restores[1] and self._prefill[0]:
            load_s = size_bytes / self.restore_bytes_per_s
            if load_s > gain_tokens / self.prefill_tokens_per_s:
                why = "slower than prefill"
        if why is None:
            return None
        self._waited += 1
        if self._waited < _RETRY_AFTER:
            return why
        self._waited = 0
        return None
