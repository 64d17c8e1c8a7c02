"""Packed traces: what goes in comes out, renumbered, and can be mapped elsewhere."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.client.lab.columns import TraceColumns, TraceSummary
from prefixd.client.lab.trace import Request

#: (blocks, prompt tokens)
RUNS = [((7, 7, -3), 100), ((), 5), ((2**80, 7), 0), ((7, -3, 9), 1000)]


def requests(runs: list[tuple[tuple[int, ...], int]]) -> list[Request]:
    return [Request(0, length, 1, ids) for ids, length in runs]


def test_ids_are_renumbered_by_first_appearance() -> None:
    trace = TraceColumns.load(requests(RUNS))
    assert list(trace) == [([0, 0, 1], 100), ([], 5), ([2, 0], 0), ([0, 1, 3], 1000)]
    assert (len(trace), trace.blocks, trace.unique_blocks) == (4, 8, 4)


def test_rows_belong_to_the_caller() -> None:
    trace = TraceColumns.load(requests(RUNS))
    for blocks, _length in trace:
        blocks.clear()
    assert [len(blocks) for blocks, _length in trace] == [3, 0, 2, 3]


def test_summary() -> None:
    trace = TraceColumns.load(requests(RUNS))
    # Of the last request the first two blocks were seen before; at 400 tokens a block.
    assert trace.summary(400) == TraceSummary(4, 8, 4, 1105, 800)
    assert trace.summary(600) == TraceSummary(4, 8, 4, 1105, 1000)
    assert trace.summary(400).to_json() == {
        "requests": 4,
        "blocks": 8,
        "unique_blocks": 4,
        "prompt_tokens": 1105,
        "infinite_hit_tokens": 800,
        "infinite_hit_rate": 800 / 1105,
    }


def test_a_repeat_within_a_request_is_no_hit_of_an_unlimited_cache() -> None:
    trace = TraceColumns.load(requests([((1, 1, 1), 300)]))
    assert trace.summary(100).infinite_hit_tokens == 0


@given(
    st.lists(
        st.tuples(st.lists(st.integers(-(2**70), 2**70)).map(tuple), st.integers(0, 2**63 - 1)),
        max_size=20,
    )
)
@settings(deadline=None)
def test_saved_columns_map_back(runs: list[tuple[tuple[int, ...], int]]) -> None:
    trace = TraceColumns.load(requests(runs))
    with TemporaryDirectory() as folder:
        trace.save(Path(folder))
        mapped = TraceColumns.map(Path(folder))
    assert list(mapped) == list(trace)
    assert mapped.summary(512) == trace.summary(512)


def test_four_bytes_a_block_and_sixteen_a_request() -> None:
    trace = TraceColumns.load(requests(RUNS * 10))
    columns = (trace._blocks, trace._ends, trace._lengths)
    assert [column.itemsize * len(column) for column in columns] == [4 * 80, 8 * 40, 8 * 40]
