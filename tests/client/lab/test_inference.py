"""What the numbers of a trace say about its blocks and its times."""

import random

import pytest

from prefixd.client.lab.inference import BlockSize, epoch_unit, time_unit


@pytest.mark.parametrize("tokens", [1, 16, 64, 100, 512])
def test_any_block_size_is_found_exactly(tokens: int) -> None:
    rng = random.Random(tokens)
    size = BlockSize()
    for line in range(300):
        length = rng.randint(1, 60 * tokens)
        size.add(length, -(-length // tokens), f"line {line}")
        assert size.low <= tokens <= size.high
    assert size.resolve(None) == (tokens, "by the lengths of the prompts")
    assert size.resolve(tokens)[0] == tokens
    with pytest.raises(ValueError, match=f"contradicts the trace: its blocks have {tokens} tokens"):
        size.resolve(tokens + 1)


def test_what_is_assumed_is_said() -> None:
    assert BlockSize().resolve(None) == (512, "assumed: the trace does not say (--block-tokens)")
    size = BlockSize()
    size.add(40, 3, "line 1")  # 14 to 19
    tokens, why = size.resolve(None)
    assert (tokens, why.startswith("assumed: 14 to 19 tokens")) == (16, True)
    assert size.resolve(None, 18) == (18, "as the records say")


def test_an_id_more_than_the_blocks_is_understood() -> None:
    size = BlockSize()
    size.add(1024, 3, "line 1")  # the third block is empty
    size.add(1536, 3, "line 2")
    assert size.resolve(None)[0] == 512
    size.add(100, 3, "line 3")
    with pytest.raises(ValueError, match="line 2 has at least 512 tokens a block, line 3 at most"):
        size.resolve(None)
    assert size.resolve(16)[0] == 16


@pytest.mark.parametrize(
    ("first", "unit"),
    [
        (0, None),
        (86_400_000, None),
        (1_767_225_600, "s"),
        (1_767_225_600_123, "ms"),
        (1_767_225_600_123_456, "us"),
        (1_767_225_600_123_456_789, "ns"),
    ],
)
def test_times_since_1970(first: float, unit: str | None) -> None:
    assert epoch_unit(first) == unit


@pytest.mark.parametrize(
    ("times", "usual", "unit"),
    [
        ([0, 60_000], None, "ms"),
        ([0, 2, 4], None, "s"),
        ([0, 250.5], None, "s"),
        ([0, 2, 4], "ms", "ms"),
        ([i * 0.17 for i in range(1000)], "ms", "s"),  # 6,000 requests a second, or 6
        ([i * 1.7 for i in range(1000)], "ms", "ms"),
    ],
)
def test_the_unit_of_times_that_count_from_the_beginning(
    times: list[float], usual: str | None, unit: str
) -> None:
    assert time_unit(times, None, usual)[0] == unit
    assert time_unit(times, "us", usual) == ("us", "as --time-unit says")
