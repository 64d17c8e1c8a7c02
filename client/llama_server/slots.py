"""What is known of llama-server's slots, and which of them a prompt gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from .slot_file import Tokens, common_tokens

#: A prompt goes on in a slot if it keeps at least this share of what is in there. Otherwise the
#: slot's content is more use to its own conversation.
_KEPT_SHARE: Final = 0.5


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

    @property
    def unsaved(self) -> int:
        return self.length - self.saved

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
