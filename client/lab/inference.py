"""What a trace does not say but its numbers show: the size of its blocks, the unit of its times.

**Block size.** A prompt of L tokens in n blocks of B tokens, of which the last may be partial, has
(n - 1) * B < L <= n * B. So all prompts together leave

    max ceil(L / n) <= B <= min ceil(L / (n - 1)) - 1

which is a single number for most traces after a few dozen requests. (Some tracers add an id for the
block that the answer begins. Where no size is possible, one with (n - 1) * B <= L is taken.)

**Unit of times.** Numbers from 10^9 on are seconds, milliseconds, microseconds or nanoseconds since
1970, told apart by their size. Smaller ones count from the beginning of the trace: they have the
unit of the format or, where that has none, milliseconds if they are whole and the mean gap between
two requests is 100 or more, else seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.limits import DEFAULT_BLOCK_TOKENS

#: The smallest time since 1970 in each unit: of 1973, and in seconds of 2001, because traces that
#: count milliseconds from their beginning can reach smaller ones.
_EPOCHS = ((1e17, "ns"), (1e14, "us"), (1e11, "ms"), (1e9, "s"))
#: The largest, of 2128, in seconds.
_EPOCH_ENDS_S = 5e9
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_MEAN_GAP_MS = 100
_NO_LIMIT = 1 << 62


@dataclass(slots=True)
class BlockSize:
    """The block sizes that all prompts so far allow. `option` is how its option is called."""

    option: str = "--block-tokens"
    low: int = 1
    high: int = _NO_LIMIT
    #: The upper limit if prompts may have an id more than they have blocks.
    loose_high: int = _NO_LIMIT
    #: The prompts that set the limits, as "file:line".
    low_at: str = ""
    high_at: str = ""

    def add(self, tokens: int, blocks: int, where: object = "") -> None:
        """A prompt of that many tokens and blocks. `where` is shown in messages."""
        if not blocks or not tokens:
            return
        low = -(-tokens // blocks)
        if low > self.low:
            self.low, self.low_at = low, str(where)
        if blocks > 1:
            high = -(-tokens // (blocks - 1)) - 1
            if high < self.high:
                self.high, self.high_at = high, str(where)
            self.loose_high = min(self.loose_high, tokens // (blocks - 1))

    @property
    def shown(self) -> str:
        """What the lengths say, as the end of a sentence."""
        if self.low == self.high:
            return f"{self.low} tokens by the lengths of the prompts"
        if self.high == _NO_LIMIT:
            return f"at least {self.low} tokens by the lengths of the prompts ({self.low_at})"
        return (
            f"{self.low} to {self.high} tokens by the lengths of the prompts "
            f"({self.low_at} and {self.high_at})"
        )

    def resolve(self, option: int | None, stated: int | None = None) -> tuple[int, str]:
        """The block size, and how it is known, as a clause.

        `option` is what the user said, `stated` what the records say. Raises ValueError if these,
        or the lengths, contradict each other.
        """
        consistent = self.low <= self.high
        if stated is not None:
            if option is not None and option != stated:
                raise ValueError(
                    f"{self.option} {option} contradicts the records, which say {stated} tokens"
                )
            return stated, "as the records say"
        if option is not None:
            if consistent and not self.low <= option <= self.high:
                raise ValueError(f"{self.option} {option} contradicts the trace: its blocks have "
                                 f"{self.shown}")  # fmt: skip
            return option, f"as {self.option} says"
        if not consistent and self.low <= self.loose_high:
            self.high = self.loose_high
        elif not consistent:
            raise ValueError(
                f"input_length and the number of ids fit no size of blocks: {self.low_at} has at "
                f"least {self.low} tokens a block, {self.high_at} at most {self.high}; mend or "
                f"leave out these, or name the size with {self.option}"
            )
        if self.low == self.high:
            return self.low, "by the lengths of the prompts"
        if self.low <= DEFAULT_BLOCK_TOKENS <= self.high:
            chosen = DEFAULT_BLOCK_TOKENS
        else:
            power = 1 << (self.low - 1).bit_length()
            chosen = power if power <= self.high else self.low
        if self.low == 1 and self.high == _NO_LIMIT:
            return chosen, f"assumed: the trace does not say ({self.option})"
        return chosen, f"assumed: {self.shown} ({self.option})"


def epoch_unit(at: float) -> str | None:
    """The unit of a time since 1970; None if it counts from the beginning of the trace."""
    unit = next((unit for least, unit in _EPOCHS if at >= least), None)
    return unit if unit is None or at < _EPOCH_ENDS_S * _PER_SECOND[unit] else None


def time_unit(times: Sequence[float], option: str | None, usual: str | None) -> tuple[str, str]:
    """The unit of times, and how it is known, as a clause. `usual` is the format's.

    Raises ValueError if the option contradicts the times.
    """
    first, last = min(times), max(times)
    epoch, last_epoch = epoch_unit(first), epoch_unit(last)
    # Times from the beginning in ms reach the first of 2001 in seconds after 12 days.
    if last_epoch != epoch and option is None and not (epoch is None and last_epoch == "s"):
        kinds = [f"a time since 1970 in {unit}" if unit else "none since 1970"
                 for unit in (epoch, last_epoch)]  # fmt: skip
        raise ValueError(f"the times are of two kinds: {first:.15g} is {kinds[0]}, and "
                         f"{last:.15g} {kinds[1]}; mend them, or name the unit of all with "
                         "--time-unit")  # fmt: skip
    if epoch is not None:
        if option not in (None, epoch):
            raise ValueError(
                f"--time-unit {option} contradicts the times: {first:.15g} is a time since "
                f"1970 in {epoch}"
            )
        return epoch, "since 1970, by their size"
    if option is not None:
        return option, "as --time-unit says"
    gap = (last - first) / max(len(times) - 1, 1)
    whole = all(at == int(at) for at in times)
    if usual == "ms" and not whole and len(times) > 100 and gap < 1:
        return "s", "by their spans: in ms, more than 1,000 requests would come each second"
    if usual is not None:
        return usual, "as usual in this format"
    if whole and gap >= _MEAN_GAP_MS:
        return "ms", f"assumed from the mean gap of {gap:,.0f} (--time-unit)"
    return "s", f"assumed from the mean gap of {gap:,.3g} (--time-unit)"
