"""What hit tokens are worth: time to first token, GPU hours and money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_HOURS_PER_MONTH = 730.0


@dataclass(frozen=True, slots=True)
class Prices:
    """What prefill costs. `prefill_tokens_per_s` is what one replica computes, which has `gpus`
    GPUs; `gpu_hour` is the price of one for an hour, in any currency (None: not known).

    Raises ValueError for numbers that are not above 0.
    """

    prefill_tokens_per_s: float
    gpu_hour: float | None = None
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.prefill_tokens_per_s < float("inf"):
            raise ValueError("prefill tokens per second must be above 0, got "
                             f"{self.prefill_tokens_per_s}")  # fmt: skip
        if self.gpu_hour is not None and not 0 < self.gpu_hour < float("inf"):
            raise ValueError(f"the price of a GPU hour must be above 0, got {self.gpu_hour}")
        if self.gpus < 1:
            raise ValueError(f"a replica has at least one GPU, got {self.gpus}")

    def worth(self, hit_tokens: int, requests: int, duration_s: float) -> dict[str, Any]:
        """What a cache that hits so many tokens of a trace saves.

        `ttft_saved_s` is the mean over all requests, without their waiting for each other;
        `gpu_hours_saved` and `money_saved` are over the trace, and `money_saved_per_month` is the
        same traffic for 730 hours (None without a duration).
        """
        seconds = hit_tokens / self.prefill_tokens_per_s
        gpu_hours = seconds * self.gpus / 3600
        money = None if self.gpu_hour is None else gpu_hours * self.gpu_hour
        monthly = None
        if money is not None and duration_s > 0:
            monthly = money * _HOURS_PER_MONTH * 3600 / duration_s
        return {
            "ttft_saved_s": seconds / requests if requests else 0.0,
            "gpu_hours_saved": gpu_hours,
            "money_saved": money,
            "money_saved_per_month": monthly,
        }
