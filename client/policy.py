"""When an engine saves a state, and how much of it: the gates of prefix entries.

Of the five save reasons three are gated here, because they are a choice: `cold` (the trimmed
prompt, right after its prefill), `continued` (a generation crossed another interval) and
`finish` (the request ended). `evict` and `shutdown` are not: the state would be lost.

A prompt is saved up to a boundary, not to its end. Its last tokens often change when the next
turn is appended (the tokeniser merges across the seam), so a few are trimmed, and what remains
is rounded down to the stride in which `longest_prefix` looks for entries.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.errors import ConfigError, InvalidSize
from ..proto.limits import (
    DEFAULT_BOUNDARY_ALIGN_TOKENS,
    DEFAULT_BOUNDARY_TRIM_TOKENS,
    DEFAULT_COLD_MAX_TOKENS,
    DEFAULT_COLD_MIN_TOKENS,
    DEFAULT_CONTINUED_INTERVAL_TOKENS,
    DEFAULT_MIN_TOKENS,
    DEFAULT_WAIT_MS,
    MAX_WAIT_MS,
)


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """The knobs, and the decisions that follow from them alone.

    Everything is in tokens unless it says otherwise. Raises `ConfigError` naming every knob that
    is out of range.
    """

    #: Nothing shorter is ever saved: computing it again is cheaper.
    min_tokens: int = DEFAULT_MIN_TOKENS
    #: A prompt outside cold_min ... cold_max has no cold save.
    cold_min_tokens: int = DEFAULT_COLD_MIN_TOKENS
    cold_max_tokens: int = DEFAULT_COLD_MAX_TOKENS
    #: A generation is saved again after this many new tokens.
    continued_interval_tokens: int = DEFAULT_CONTINUED_INTERVAL_TOKENS
    #: Cut off the end of a prompt before it is rounded down to a multiple of the alignment,
    #: which is also the stride of the search for the longest cached prefix.
    boundary_trim_tokens: int = DEFAULT_BOUNDARY_TRIM_TOKENS
    boundary_align_tokens: int = DEFAULT_BOUNDARY_ALIGN_TOKENS
    #: How long resuming a session waits for its last state while that is still being saved.
    session_resume_wait_ms: int = DEFAULT_WAIT_MS

    def __post_init__(self) -> None:
        problems = [
            f"{name} is at least {least}, not {value}"
            for name, value, least in (
                ("min_tokens", self.min_tokens, 0),
                ("continued_interval_tokens", self.continued_interval_tokens, 1),
                ("boundary_trim_tokens", self.boundary_trim_tokens, 0),
                ("boundary_align_tokens", self.boundary_align_tokens, 1),
            )
            if value < least
        ]
        if self.cold_min_tokens < self.min_tokens:
            problems.append(
                f"cold_min_tokens ({self.cold_min_tokens}) is below min_tokens ({self.min_tokens})"
            )
        if self.cold_max_tokens < self.cold_min_tokens:
            problems.append(
                f"cold_max_tokens ({self.cold_max_tokens}) is below "
                f"cold_min_tokens ({self.cold_min_tokens})"
            )
        if not 0 <= self.session_resume_wait_ms <= MAX_WAIT_MS:
            problems.append(
                f"session_resume_wait_ms is in 0 ... {MAX_WAIT_MS}, "
                f"not {self.session_resume_wait_ms}"
            )
        if problems:
            raise ConfigError("the save policy is wrong: " + "; ".join(problems))

    def trim_boundary(self, token_count: int) -> int:
        """How many of a prompt's first tokens to save, a multiple of the alignment; 0: none.

        None when the trimmed prompt has no whole stride, or the result is below `min_tokens`.
        """
        _check_count(token_count)
        trimmed_tokens = max(0, token_count - self.boundary_trim_tokens)
        boundary_tokens = trimmed_tokens - trimmed_tokens % self.boundary_align_tokens
        return boundary_tokens if boundary_tokens >= self.min_tokens else 0

    def cold_save_split(self, prompt_tokens: int) -> tuple[int, int] | None:
        """Where to cut the prefill of a prompt: (tokens to compute and save, tokens after them).

        The two add up to the prompt. None: compute it in one go, there is no cold save.
        """
        _check_count(prompt_tokens)
        if not self.cold_min_tokens <= prompt_tokens <= self.cold_max_tokens:
            return None
        saved_tokens = self.trim_boundary(prompt_tokens)
        return (saved_tokens, prompt_tokens - saved_tokens) if saved_tokens else None

    def should_continued_save(self, tokens_now: int, tokens_at_last_save: int) -> bool:
        """Is a running generation of `tokens_now` tokens (prompt included) due to be saved?

        `tokens_at_last_save` is the length of its last save, or of what it was restored from; 0
        if there is none. It may be above `tokens_now` (the context was cut): then it is not due.
        """
        _check_count(tokens_now)
        _check_count(tokens_at_last_save)
        new_tokens = tokens_now - tokens_at_last_save
        return new_tokens >= self.continued_interval_tokens and tokens_now >= self.min_tokens

    def should_finish_save(self, tokens_now: int) -> bool:
        """Is a request that ended with `tokens_now` tokens (prompt and answer) worth a save?"""
        _check_count(tokens_now)
        return tokens_now >= self.min_tokens


def _check_count(tokens: int) -> None:
    if tokens < 0:
        raise InvalidSize(f"a number of tokens is not negative, this is {tokens}")
