"""What is known of llama-server's slots, which of them a prompt gets, when one is saved, and when a
restore is worth it. Pure.

A save stops every slot of the server while it runs and writes the whole context, so it is lazy: a
slot is saved after a request if much of it is new, when it was idle for a while, when another
conversation takes it, and at the end. llama-server saves no slot that is generating, so an answer
is never saved before its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...proto.vocabulary import SaveReason
from ..policy import SavePolicy
from .slot_file import Tokens, common_tokens

#: A prompt goes on in a slot if it keeps at least this share of what is in there. Otherwise the
#: slot's content is more use to its own conversation.
_KEPT_SHARE: Final = 0.5
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


def no_tokens() -> Tokens:
    return np.zeros(0, "<i4")


@dataclass(eq=False)
class Slot:
    """One slot. The tokens that the server generated are known only after a save."""

    number: int
    #: What is known to be in it, from the first token on.
    tokens: Tokens = field(default_factory=no_tokens)
    #: How many tokens the server said were in it when it was last idle; None: it was not asked.
    counted_tokens: int | None = None
    #: Tokens in it, generated ones included, as far as they can be known.
    length: int = 0
    #: Of these, how many the cache was given, or gave.
    saved: int = 0
    #: The tokens of the last request's prompt.
    prompt: int = 0
    #: Whose content it is.
    salt: bytes = b""
    #: How many of its tokens came from a file, since it was last erased. Of a sliding window the
    #: file has the last ones only, and a server with --swa-full believes that it has all of them.
    restored: int = 0
    #: It may hold what is not this model's own state of its tokens: it is neither used nor saved
    #: before it was erased.
    tainted: bool = False
    #: A request has it, or is about to.
    busy: bool = False
    #: When it was last used, in requests.
    used: int = 0

    def forget(self) -> None:
        """Nothing is known to be in it."""
        self.tokens, self.counted_tokens, self.length = no_tokens(), None, 0
        self.saved = self.prompt = 0
        self.salt = b""

    def was_erased(self) -> None:
        """It is empty."""
        self.forget()
        self.restored, self.tainted = 0, False

    def taint(self) -> None:
        """Something that is not understood may be in it."""
        self.forget()
        self.tainted = True

    def holds(self, tokens: Tokens, salt: bytes = b"") -> int:
        """How many of these tokens it has, from the first on."""
        return common_tokens(self.tokens, tokens) if salt == self.salt else 0

    def took(self, tokens: Tokens, salt: bytes, *, kept: int) -> None:
        """A request with this prompt begins; of what was in the slot, `kept` tokens stay."""
        self.saved = min(self.saved, kept)
        self.tokens, self.prompt, self.length = tokens, len(tokens), len(tokens)
        self.salt, self.counted_tokens = salt, None

    def was_restored(self, tokens: Tokens, salt: bytes) -> None:
        """It holds exactly these tokens, from the cache."""
        self.tokens, self.counted_tokens, self.salt = tokens, None, salt
        self.length = self.saved = self.restored = len(tokens)
        self.tainted = False

    def was_saved(self, tokens: Tokens) -> None:
        """It holds exactly these tokens, and the cache has them."""
        self.tokens = tokens
        self.length = self.saved = len(tokens)

    def agrees(self, counted_tokens: int) -> bool:
        """Whether the server's number of tokens can be that of what is known to be in the slot.
        If not, the server was restarted, or another client used the slot."""
        if counted_tokens < len(self.tokens):
            return False
        if self.counted_tokens is not None and counted_tokens != self.counted_tokens:
            return False
        self.counted_tokens = counted_tokens
        return True


def choose(slots: Sequence[Slot], tokens: Tokens, salt: bytes = b"") -> Slot | None:
    """The slot for a prompt: the one that goes on with the most tokens of it, else an empty one,
    else the one that was not used for longest. None: all are busy."""
    free = [slot for slot in slots if not slot.busy]
    if not free:
        return None

    def rank(slot: Slot) -> tuple[int, bool, int]:
        held = slot.holds(tokens, salt)
        goes_on = held if held > _KEPT_SHARE * len(slot.tokens) else 0
        return goes_on, not slot.length, -slot.used

    return max(free, key=rank)


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
