"""What is worth saving, and what is worth loading.

`SavePolicy` decides when an engine saves a state, and how much of it. Of the five save reasons it
gates the three that are a choice: `cold` (the trimmed prompt, right after its prefill),
`continued` (a generation crossed another interval) and `finish` (the request ended). It does not
gate `evict` and `shutdown`: the state would be lost. A prompt is saved up to a boundary, not to
its end. Its last tokens often change when the next turn is appended (the tokeniser merges across
the seam), so a few are trimmed, and what remains is rounded down to a stride, so that many prompts
share few entries. `longest_prefix` finds other lengths as well.

`MinBenefit` leaves out what takes longer to load than to compute. The caller gives the speed of the
prefill; the client measures the speed of loading, per tier, on what it restores.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..proto import limits
from ..proto.errors import ConfigError, InvalidSize
from ..proto.vocabulary import Tier
from .results import Entry

#: What a measurement still weighs after the next one: about the last ten restores count.
DECAY: Final = 0.9
#: One in this many hits that look too slow is loaded anyway, to measure again: the tier may have
#: recovered, and nothing else would show it.
RETRY_EVERY: Final = 32


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """The settings, and the decisions that follow from them alone.

    Raises `ConfigError` that names every setting out of range.
    """

    #: Nothing shorter is saved by choice: computing it again is cheaper.
    min_tokens: int = limits.DEFAULT_MIN_TOKENS
    #: Shorter and longer prompts have no cold save.
    cold_min_tokens: int = limits.DEFAULT_COLD_MIN_TOKENS
    cold_max_tokens: int = limits.DEFAULT_COLD_MAX_TOKENS
    #: New tokens after which a generation is saved again.
    continued_interval_tokens: int = limits.DEFAULT_CONTINUED_INTERVAL_TOKENS
    #: How much is cut off the end of a prompt before it is rounded down to a multiple of the
    #: alignment.
    boundary_trim_tokens: int = limits.DEFAULT_BOUNDARY_TRIM_TOKENS
    boundary_align_tokens: int = limits.DEFAULT_BOUNDARY_ALIGN_TOKENS
    #: How long `resume` waits for the last state of a session that is still being saved.
    session_resume_wait_ms: int = limits.DEFAULT_WAIT_MS

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
        if not 0 <= self.session_resume_wait_ms <= limits.MAX_WAIT_MS:
            problems.append(
                f"session_resume_wait_ms is in 0 ... {limits.MAX_WAIT_MS}, "
                f"not {self.session_resume_wait_ms}"
            )
        if problems:
            raise ConfigError("the save policy is wrong: " + "; ".join(problems))

    def trim_boundary(self, token_count: int) -> int:
        """How many of a prompt's first tokens to save, a multiple of the alignment.

        0 when the trimmed prompt has no whole stride, or the result is below `min_tokens`.
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
        if there is none. If it is above `tokens_now` (the context was cut), no save is due.
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


class LoadSpeeds:
    """Payload bytes per second of each tier, over its latest restores. Thread-safe.

    A ratio of exponentially weighted sums: each restore counts by its size, so that the fixed cost
    of a call does not make large hits look slow after many small ones.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Tier, tuple[float, float]] = {}

    def measured(self, tier: Tier, payload_bytes: int, seconds: float) -> None:
        """One restore took `seconds` for the bytes that it loaded from `tier`."""
        with self._lock:
            sum_bytes, sum_s = self._sums.get(tier, (0.0, 0.0))
            self._sums[tier] = (sum_bytes * DECAY + payload_bytes, sum_s * DECAY + seconds)

    def estimate_s(self, tier: Tier, payload_bytes: int) -> float:
        """How long loading `payload_bytes` takes; 0 before the first measurement."""
        with self._lock:
            sum_bytes, sum_s = self._sums.get(tier, (0.0, 0.0))
        return payload_bytes * sum_s / sum_bytes if sum_bytes else 0.0

    def snapshot(self) -> dict[str, float]:
        """Bytes per second of each tier that was measured."""
        with self._lock:
            return {
                tier.label: sum_bytes / sum_s
                for tier, (sum_bytes, sum_s) in self._sums.items()
                if sum_s > 0
            }


class MinBenefit:
    """Decides how much of a hit is worth loading."""

    def __init__(
        self, speeds: LoadSpeeds, prefill_tokens_per_s: float | None, min_benefit_ms: float = 0.0
    ) -> None:
        """`prefill_tokens_per_s` None: everything is worth it. `min_benefit_ms`: the time that
        loading has to save over computing. Raises InvalidSize for a setting out of range."""
        if prefill_tokens_per_s is not None and not prefill_tokens_per_s > 0:
            raise InvalidSize(f"a prefill speed is above 0 tokens/s, not {prefill_tokens_per_s}")
        if not min_benefit_ms >= 0:
            raise InvalidSize(f"a benefit is at least 0 ms, not {min_benefit_ms}")
        self._speeds = speeds
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._min_benefit_s = min_benefit_ms / 1e3
        self._lock = threading.Lock()
        self._skipped = 0

    @property
    def gates(self) -> bool:
        """Is there a prefill speed to compare with?"""
        return self._prefill_tokens_per_s is not None

    def prefill_ms(self, token_count: int) -> int | None:
        """How long the engine takes to compute so many tokens (0: not known how many), in whole
        milliseconds. None: not known."""
        if self._prefill_tokens_per_s is None or not token_count:
            return None
        return int(1e3 * token_count / self._prefill_tokens_per_s)

    def worth(self, entries: Sequence[Entry], token_counts: Sequence[int]) -> int:
        """How many of `entries`, from the first on, to load: as many as save the most time.

        All of them for every `RETRY_EVERY`-th hit that would be cut, and when a token count is 0:
        then the prefill time is not known.
        """
        if self._prefill_tokens_per_s is None or 0 in token_counts:
            return len(entries)
        best, best_s, saved_s = 0, self._min_benefit_s, 0.0
        for count, (entry, tokens) in enumerate(zip(entries, token_counts, strict=True), 1):
            saved_s += tokens / self._prefill_tokens_per_s
            saved_s -= self._speeds.estimate_s(entry.tier, entry.payload_bytes)
            if saved_s >= best_s:
                best, best_s = count, saved_s
        if best < len(entries):
            with self._lock:
                self._skipped += 1
                if self._skipped % RETRY_EVERY == 0:
                    return len(entries)
        return best
