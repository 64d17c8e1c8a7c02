"""The analysis of a trace, held against a slow count of the same things."""

import json
import os
from collections import Counter
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.lab.analyze import analyze
from prefixd.client.lab.trace import Request, TraceReader
from prefixd.client.lab.workloads import generate

requests_strategy = st.lists(
    st.builds(
        Request,
        st.integers(0, 500),
        st.integers(0, 30),
        st.integers(0, 5),
        st.lists(st.integers(0, 6), max_size=5).map(tuple),
    ),
    max_size=20,
)


@given(requests_strategy)
def test_counts_equal_a_slow_count(requests: list[Request]) -> None:
    references = [block for r in requests for block in r.hash_ids]
    counts = Counter(references)
    sharing = Counter(block for r in requests for block in set(r.hash_ids))
    hits = []
    for number, request in enumerate(requests):
        known = {block for r in requests[:number] for block in r.hash_ids}
        run = 0
        while run < len(request.hash_ids) and request.hash_ids[run] in known:
            run += 1
        hits.append(run)
    hit_tokens = [min(h * 4, r.input_length) for h, r in zip(hits, requests, strict=True)]
    distances = []
    for position, block in enumerate(references):
        if block in references[:position]:
            last = max(i for i in range(position) if references[i] == block)
            distances.append(position - last - 1)

    analysis = analyze(requests, block_tokens=4)
    assert analysis.requests == len(requests)
    assert analysis.blocks == len(references)
    assert analysis.unique_blocks == len(counts)
    assert analysis.shared_blocks == sum(count > 1 for count in sharing.values())
    assert analysis.shared_blocks + analysis.single_use_blocks == analysis.unique_blocks
    assert analysis.reused_references == len(references) - len(counts) == len(distances)
    assert analysis.prefix_hit_blocks == sum(hits)
    assert analysis.infinite_hit_tokens == sum(hit_tokens)
    assert analysis.prompt_tokens == sum(r.input_length for r in requests)
    assert analysis.requests_without_shared_prefix == hits.count(0)
    assert analysis.shared_prefix_tokens.total == sum(hit_tokens)
    assert analysis.reuse_distance_blocks.total == sum(distances)
    assert analysis.reuse_distance_blocks.max == max(distances, default=0)
    assert analysis.hottest_block_references == max(counts.values(), default=0)
    assert analysis.session_depth.count == len(requests)
    same = takewhile(
        lambda ids: len(set(ids)) == 1, zip(*(r.hash_ids for r in requests), strict=False)
    )
    assert analysis.common_prefix_blocks == (len(list(same)) if len(requests) > 1 else 0)
    json.dumps(analysis.to_json(), allow_nan=False)


def test_reuse_time_is_between_two_uses_and_never_negative() -> None:
    times = [100, 700, 650, 60_650]
    requests = [Request(t, 4, 1, (1,)) for t in times]
    analysis = analyze(requests, block_tokens=4)
    assert analysis.reuse_time_ms.total == 600 + 0 + 60_000
    assert analysis.duration_ms == 60_550
    assert analysis.to_json()["reuse"]["within_1_minute_share"] == 1.0


def test_popularity() -> None:
    requests = [Request(0, 4, 1, (7,))] * 90 + [Request(0, 4, 1, (i,)) for i in range(100, 110)]
    analysis = analyze(requests, block_tokens=4)
    assert analysis.hottest_block_references == 90
    assert analysis.top_1_percent_reference_share == 0.9  # 1 of 11 blocks, rounded up
    assert analysis.top_10_percent_reference_share == 0.91  # 2 of 11


def prompt(*ids: int) -> Request:
    return Request(0, 4 * len(ids), 1, ids)


def depths(*requests: Request) -> list[int]:
    """The depth of each request, from how the distribution grows."""
    totals = [
        analyze(requests[:n], block_tokens=4).session_depth.total for n in range(len(requests) + 1)
    ]
    return [b - a for a, b in pairwise(totals)]


def test_session_depth_counts_the_requests_gone_on_from() -> None:
    assert depths(prompt(1, 2), prompt(1, 2, 3), prompt(1, 2, 3, 4), prompt(9)) == [1, 2, 3, 1]
    assert depths(prompt(1, 2), prompt(1, 2), prompt(1, 2, 3)) == [1, 1, 2]  # a retry is no turn
    assert depths(prompt(1), prompt(1, 2), prompt(1, 3)) == [1, 2, 2]  # asked again, differently


def test_the_partial_last_block_does_not_belong_to_a_turn() -> None:
    first = Request(0, 10, 1, (1, 2, 30))  # 2 whole blocks and a half
    second = Request(0, 15, 1, (1, 2, 31, 32))
    assert depths(first, second, prompt(1, 2, 31, 33)) == [1, 2, 3]


def test_what_many_go_on_from_is_a_template() -> None:
    template = prompt(1, 2)
    sessions = [prompt(1, 2, 10 * n) for n in range(3, 9)]
    second_turns = [prompt(1, 2, 10 * n, 10 * n + 1) for n in range(3, 9)]
    analysis = analyze([template, *sessions, *second_turns], block_tokens=4)
    assert analysis.session_depth.total == 1 + 6 * 1 + 6 * 2
    assert analysis.first_turn_requests == 7


def test_generated_sessions_are_found() -> None:
    depth = analyze(generate("multi-turn", requests=2000, seed=1)).session_depth
    assert depth.quantile(0.9) > 10
    assert analyze(generate("batch", requests=2000, seed=1)).session_depth.max <= 2


def test_the_conversation_trace() -> None:
    folder = os.environ.get("PREFIXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces"
    path = Path(folder) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("needs conversation_trace.jsonl (set PREFIXD_TRACES to its folder)")
    analysis = analyze(TraceReader(path))
    assert analysis.infinite_hit_tokens == 54_098_411
    assert analysis.unique_blocks == 182_790
    assert analysis.infinite_hit_rate == pytest.approx(0.3736, abs=5e-5)
