"""The save gates: the original numbers at their edges, and what holds for any knobs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.policy import SavePolicy
from prefixd.proto.errors import ConfigError, InvalidSize

DEFAULT = SavePolicy()
counts = st.integers(0, 100_000)


@st.composite
def policies(draw: st.DrawFn) -> SavePolicy:
    least, cold_min, cold_max = sorted(draw(st.tuples(*[st.integers(0, 50_000)] * 3)))
    return SavePolicy(
        min_tokens=least,
        cold_min_tokens=cold_min,
        cold_max_tokens=cold_max,
        continued_interval_tokens=draw(st.integers(1, 5_000)),
        boundary_trim_tokens=draw(st.integers(0, 3_000)),
        boundary_align_tokens=draw(st.integers(1, 5_000)),
    )


def test_the_defaults_are_the_original_ones() -> None:
    assert (DEFAULT.min_tokens, DEFAULT.cold_min_tokens, DEFAULT.cold_max_tokens) == (
        512,
        512,
        30_000,
    )
    assert DEFAULT.continued_interval_tokens == DEFAULT.boundary_align_tokens == 2_048
    assert (DEFAULT.boundary_trim_tokens, DEFAULT.session_resume_wait_ms) == (32, 500)


# ---- the trimmed boundary


@pytest.mark.parametrize(
    ("token_count", "saved_tokens"),
    [
        (0, 0),
        (31, 0),
        (32, 0),
        (600, 0),
        (2_079, 0),
        (2_080, 2_048),
        (4_127, 2_048),
        (4_128, 4_096),
    ],
)
def test_boundaries_with_the_defaults(token_count: int, saved_tokens: int) -> None:
    assert DEFAULT.trim_boundary(token_count) == saved_tokens


def test_a_boundary_below_the_minimum_is_none() -> None:
    fine = SavePolicy(boundary_trim_tokens=0, boundary_align_tokens=100)
    assert fine.trim_boundary(599) == 0
    assert fine.trim_boundary(600) == 600


def test_without_trim_and_alignment_the_whole_prompt_is_saved() -> None:
    whole = SavePolicy(min_tokens=1, boundary_trim_tokens=0, boundary_align_tokens=1)
    assert [whole.trim_boundary(n) for n in (0, 1, 2, 777)] == [0, 1, 2, 777]


@given(policies(), counts)
def test_a_boundary_is_aligned_trimmed_and_worth_it(policy: SavePolicy, token_count: int) -> None:
    saved_tokens = policy.trim_boundary(token_count)
    assert saved_tokens % policy.boundary_align_tokens == 0
    if saved_tokens:
        assert policy.min_tokens <= saved_tokens
        assert saved_tokens <= token_count - policy.boundary_trim_tokens
        # No later boundary would have done.
        assert (
            saved_tokens + policy.boundary_align_tokens > token_count - policy.boundary_trim_tokens
        )


@given(policies(), counts, counts)
def test_a_longer_prompt_never_saves_less(policy: SavePolicy, one: int, other: int) -> None:
    shorter, longer = sorted((one, other))
    assert policy.trim_boundary(shorter) <= policy.trim_boundary(longer)


@given(policies(), counts, st.integers(0, 5_000))
def test_the_next_turn_looks_where_this_one_saved(
    policy: SavePolicy, token_count: int, appended: int
) -> None:
    # The walk of a prompt that extends this one starts at the last multiple of the stride.
    saved_tokens = policy.trim_boundary(token_count)
    stride = policy.boundary_align_tokens
    boundaries = range(0, token_count + appended + 1, stride)
    assert saved_tokens in boundaries


# ---- cold


@pytest.mark.parametrize(
    ("prompt_tokens", "split"),
    [
        (400, None),
        (511, None),
        (600, None),  # long enough, but no whole stride
        (2_079, None),
        (2_080, (2_048, 32)),
        (4_500, (4_096, 404)),
        (30_000, (28_672, 1_328)),
        (30_001, None),
    ],
)
def test_cold_saves_with_the_defaults(prompt_tokens: int, split: tuple[int, int] | None) -> None:
    assert DEFAULT.cold_save_split(prompt_tokens) == split


@given(policies(), counts)
def test_a_split_is_the_whole_prompt_cut_at_its_boundary(
    policy: SavePolicy, prompt_tokens: int
) -> None:
    split = policy.cold_save_split(prompt_tokens)
    gated = policy.cold_min_tokens <= prompt_tokens <= policy.cold_max_tokens
    assert (split is not None) == (gated and policy.trim_boundary(prompt_tokens) > 0)
    if split is not None:
        saved_tokens, rest_tokens = split
        assert saved_tokens == policy.trim_boundary(prompt_tokens)
        assert saved_tokens + rest_tokens == prompt_tokens
        assert rest_tokens >= policy.boundary_trim_tokens


# ---- continued and finish


@pytest.mark.parametrize(
    ("tokens_now", "tokens_at_last_save", "due"),
    [
        (3_048, 2_048, False),
        (4_095, 2_048, False),
        (4_096, 2_048, True),
        (9_000, 2_048, True),
        (2_048, 0, True),
        (400, 0, False),
        (1_000, 4_000, False),  # the context was cut since
    ],
)
def test_continued_saves_with_the_defaults(
    tokens_now: int, tokens_at_last_save: int, due: bool
) -> None:
    assert DEFAULT.should_continued_save(tokens_now, tokens_at_last_save) is due


def test_a_short_generation_is_not_continued_however_small_the_interval() -> None:
    policy = SavePolicy(continued_interval_tokens=100)
    assert not policy.should_continued_save(511, 0)
    assert policy.should_continued_save(512, 0)


@given(policies(), counts, counts, st.integers(0, 1_000))
def test_a_save_that_is_due_stays_due(
    policy: SavePolicy, tokens_now: int, tokens_at_last_save: int, more: int
) -> None:
    if policy.should_continued_save(tokens_now, tokens_at_last_save):
        assert policy.should_continued_save(tokens_now + more, tokens_at_last_save)
        assert not policy.should_continued_save(tokens_now, tokens_now)
    if policy.should_finish_save(tokens_now):
        assert policy.should_finish_save(tokens_now + more)


@given(policies(), st.integers(1, 20_000))
def test_a_generation_is_saved_once_an_interval(policy: SavePolicy, new_tokens: int) -> None:
    start = policy.min_tokens
    saves, last = 0, start
    step = max(1, policy.continued_interval_tokens // 7)
    for now in range(start, start + new_tokens + 1, step):
        if policy.should_continued_save(now, last):
            saves, last = saves + 1, now
    assert saves <= new_tokens // policy.continued_interval_tokens
    assert now - last < policy.continued_interval_tokens


@pytest.mark.parametrize(("tokens_now", "worth"), [(0, False), (511, False), (512, True)])
def test_finish_saves_with_the_defaults(tokens_now: int, worth: bool) -> None:
    assert DEFAULT.should_finish_save(tokens_now) is worth


# ---- what is refused


@pytest.mark.parametrize(
    "knobs",
    [
        {"min_tokens": -1, "cold_min_tokens": 512},
        {"cold_min_tokens": 511},
        {"cold_max_tokens": 511},
        {"continued_interval_tokens": 0},
        {"boundary_trim_tokens": -1},
        {"boundary_align_tokens": 0},
        {"session_resume_wait_ms": -1},
        {"session_resume_wait_ms": 10**9},
    ],
    ids=str,
)
def test_knobs_out_of_range(knobs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(knobs))):
        SavePolicy(**knobs)


def test_every_wrong_knob_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        SavePolicy(
            min_tokens=-1,
            cold_min_tokens=-2,
            cold_max_tokens=-3,
            continued_interval_tokens=0,
            boundary_trim_tokens=-1,
            boundary_align_tokens=0,
            session_resume_wait_ms=-1,
        )
    for name in SavePolicy.__dataclass_fields__:
        assert name in str(refusal.value)


def test_a_negative_number_of_tokens() -> None:
    for call in (
        lambda: DEFAULT.trim_boundary(-1),
        lambda: DEFAULT.cold_save_split(-1),
        lambda: DEFAULT.should_continued_save(-1, 0),
        lambda: DEFAULT.should_continued_save(0, -1),
        lambda: DEFAULT.should_finish_save(-1),
    ):
        with pytest.raises(InvalidSize):
            call()
