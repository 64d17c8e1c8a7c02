"""What is worth saving: the original numbers at their edges, and what holds for any settings. What
is worth loading: what is faster than computing."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.policy import RETRY_EVERY, LoadSpeeds, MinBenefit, SavePolicy
from prefixd.client.results import Entry
from prefixd.proto.entry import Content
from prefixd.proto.errors import ConfigError, InvalidSize
from prefixd.proto.keys import Key
from prefixd.proto.vocabulary import SaveReason, Tier

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
        # The next boundary is beyond the trimmed prompt.
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
        (600, None),  # long enough, but not one whole stride
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


# ---- what is worth loading


def entry(tier: Tier, payload_bytes: int) -> Entry:
    return Entry(Key(b"k" * 32), tier, Content(payload_bytes, 512), 0, 1, SaveReason.COLD)


def speeds(**bytes_per_s: float) -> LoadSpeeds:
    measured = LoadSpeeds()
    for name, speed in bytes_per_s.items():
        measured.measured(Tier[name.upper()], int(speed), 1.0)
    return measured


def test_nothing_is_known_before_a_measurement() -> None:
    assert LoadSpeeds().estimate_s(Tier.DISK, 10**12) == 0
    assert LoadSpeeds().snapshot() == {}


def test_speed_is_bytes_over_seconds_of_a_tier() -> None:
    measured = speeds(ram=1_000, disk=10)
    assert measured.estimate_s(Tier.RAM, 500) == pytest.approx(0.5)
    assert measured.estimate_s(Tier.DISK, 500) == pytest.approx(50)
    assert measured.estimate_s(Tier.SHM, 500) == 0
    assert measured.snapshot() == pytest.approx({"ram": 1_000, "disk": 10})


def test_large_restores_weigh_more_and_old_ones_fade() -> None:
    measured = LoadSpeeds()
    measured.measured(Tier.RAM, 1_000_000, 1.0)
    measured.measured(Tier.RAM, 10, 0.01)  # a small restore: mostly the fixed cost of the call
    assert measured.snapshot()["ram"] > 900_000
    for _ in range(60):
        measured.measured(Tier.RAM, 100, 1.0)
    assert measured.snapshot()["ram"] < 5_000


def test_without_a_prefill_speed_everything_is_worth_it() -> None:
    gate = MinBenefit(speeds(disk=1), None)
    assert gate.worth([entry(Tier.DISK, 10**9)], [1]) == 1


def test_a_hit_slower_than_its_prefill_is_no_hit() -> None:
    gate = MinBenefit(speeds(disk=1_000), prefill_tokens_per_s=100)
    assert gate.worth([entry(Tier.DISK, 900)], [100]) == 1  # 0.9 s against 1 s
    assert gate.worth([entry(Tier.DISK, 1_100)], [100]) == 0


def test_the_benefit_has_a_minimum() -> None:
    gate = MinBenefit(speeds(disk=1_000), prefill_tokens_per_s=100, min_benefit_ms=200)
    assert gate.worth([entry(Tier.DISK, 900)], [100]) == 0
    assert gate.worth([entry(Tier.DISK, 700)], [100]) == 1


def test_what_stands_for_an_unknown_number_of_tokens_is_loaded() -> None:
    gate = MinBenefit(speeds(disk=1), prefill_tokens_per_s=100, min_benefit_ms=200)
    assert gate.worth([entry(Tier.DISK, 1_100)], [0]) == 1
    assert gate.worth([entry(Tier.DISK, 1_100)] * 2, [100, 0]) == 2


def test_a_run_is_cut_where_most_time_is_saved() -> None:
    gate = MinBenefit(speeds(ram=10_000, disk=100), prefill_tokens_per_s=100)
    ram, disk = entry(Tier.RAM, 1_000), entry(Tier.DISK, 150)
    assert gate.worth([ram, ram, disk, disk], [100] * 4) == 2
    # The blocks after a slow one may make up for it.
    assert gate.worth([ram, disk, ram, ram], [100] * 4) == 4


def test_now_and_then_a_slow_hit_is_measured_again() -> None:
    gate = MinBenefit(speeds(disk=1), prefill_tokens_per_s=100)
    outcomes = [gate.worth([entry(Tier.DISK, 1_000)], [100]) for _ in range(2 * RETRY_EVERY)]
    assert outcomes.count(1) == 2
    assert outcomes[RETRY_EVERY - 1] == outcomes[2 * RETRY_EVERY - 1] == 1


@pytest.mark.parametrize(("speed", "benefit"), [(0, 0), (-1, 0), (float("nan"), 0), (10, -1)])
def test_settings_are_checked(speed: float, benefit: float) -> None:
    with pytest.raises(InvalidSize):
        MinBenefit(LoadSpeeds(), speed, benefit)
