"""Traces: which lines are read, which are refused with which message, what is counted."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.client.lab.trace import (
    Request,
    TraceColumns,
    TraceError,
    TraceReader,
    TraceSummary,
    _Parser,
    write_trace,
)
from tests.support.lengths import times

GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}'


GOOD_REQUEST = Request(5, 700, 3, (1, 2))


def shared_trace() -> Path:
    folder = os.environ.get("PREFIXD_TRACES") or Path(__file__).parents[4] / "shared" / "traces"
    path = Path(folder) / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip("needs conversation_trace.jsonl (set PREFIXD_TRACES to its folder)")
    return path


def written(tmp_path: Path, *lines: str, name: str = "t.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_fields_as_written(tmp_path: Path) -> None:
    assert list(TraceReader(written(tmp_path, GOOD))) == [GOOD_REQUEST]


def test_the_conversation_trace_reads_and_writes_back_byte_for_byte(tmp_path: Path) -> None:
    path = shared_trace()
    reader = TraceReader(path)
    requests = list(reader)
    assert reader.requests == len(requests) == 12_031
    assert sum(len(r.hash_ids) for r in requests) == 288_500
    assert len({i for r in requests for i in r.hash_ids}) == 182_790
    assert sum(r.input_length for r in requests) == 144_793_823
    assert (reader.bad, reader.length_mismatches) == (0, 0)
    assert reader.consumed_bytes == reader.total_bytes == path.stat().st_size
    assert write_trace(tmp_path / "copy.jsonl", requests) == 12_031
    assert (tmp_path / "copy.jsonl").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.jsonl.zst"])
def test_written_files_read_back_and_are_the_same_each_time(tmp_path: Path, name: str) -> None:
    requests = [Request(i, 512 * i, 1, tuple(range(i))) for i in range(50)]
    assert write_trace(tmp_path / name, requests) == 50
    once = (tmp_path / name).read_bytes()
    assert list(TraceReader(tmp_path / name)) == requests
    write_trace(tmp_path / name, requests)
    assert (tmp_path / name).read_bytes() == once


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compression_is_seen_by_content_and_may_have_several_members(
    tmp_path: Path, compress: object
) -> None:
    assert callable(compress)
    path = tmp_path / "no-suffix"
    path.write_bytes(compress(f"{GOOD}\n".encode()) + compress(f"{GOOD}\n".encode()))
    assert list(TraceReader(path)) == [GOOD_REQUEST] * 2


@given(
    st.lists(
        st.builds(
            lambda *fields: Request(*fields),  # not whose they are, by which ids are apart
            st.integers(0, 10**9 - 1),
            st.integers(0, 2**63 - 1),
            st.integers(0, 2**63 - 1),
            st.lists(st.integers()).map(tuple),
        ),
        min_size=1,
    )
)
def test_any_request_comes_back(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Request]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    requests.sort(key=lambda request: request.timestamp_ms)
    write_trace(path, requests, 512)
    assert list(TraceReader(path)) == requests


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    feed(gzip.compress(GOOD.encode()))
    reader = TraceReader("-")
    assert list(reader) == [GOOD_REQUEST]
    assert reader.total_bytes is None
    feed(b"{")
    with pytest.raises(TraceError, match=r"^standard input:1: the line is not JSON"):
        list(TraceReader("-"))


def test_standard_output(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    write_trace("-", [GOOD_REQUEST])
    assert capfdbinary.readouterr().out == GOOD.encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "the line is not JSON (Expecting value at column 1)"),
        (GOOD[:-1], "the line is not JSON (Expecting ',' delimiter at column 77)"),
        ("[1, 2]", "the line is not a JSON object"),
        ("null", "the line is not a JSON object"),
        ("[" * 100_000, "the line is not usable JSON"),
        (GOOD.replace("5", "9" * 5000, 1), "the line is not usable JSON"),
        (GOOD.replace('"timestamp"', '"time"'), "timestamp is missing"),
        (GOOD.replace('"input_length"', '"input"'), "input_length is missing"),
        (GOOD.replace('"output_length"', '"output"'), "output_length is missing"),
        (GOOD.replace('"hash_ids"', '"ids"'), "hash_ids is missing"),
        (GOOD.replace(" 5", " -5"), "timestamp is negative: -5"),
        (GOOD.replace(" 5", " -0.25"), "timestamp is negative: -0.25"),
        (GOOD.replace(" 5", " NaN"), "timestamp is not a number of milliseconds: NaN"),
        (GOOD.replace(" 5", " Infinity"), "timestamp is not a number of milliseconds: Infinity"),
        (GOOD.replace(" 5", " 1e300"), "timestamp is too large: 1e+300"),
        (GOOD.replace(" 5", ' "5"'), 'timestamp is not a number of milliseconds: "5"'),
        (GOOD.replace(" 5", " true"), "timestamp is not a number of milliseconds: true"),
        (GOOD.replace("700", "-700"), "input_length is negative: -700"),
        (GOOD.replace("700", "700.0"), "input_length is not an integer: 700.0"),
        (GOOD.replace("700", "true"), "input_length is not an integer: true"),
        (GOOD.replace("700", "null"), "input_length is not an integer: null"),
        (GOOD.replace("700", str(2**63)), f"input_length is too large: {2**63}"),
        (GOOD.replace(" 3", " -3"), "output_length is negative: -3"),
        (GOOD.replace("[1, 2]", "7"), "hash_ids is not a list"),
        (GOOD.replace("[1, 2]", "null"), "hash_ids is not a list"),
        (GOOD.replace("[1, 2]", "[1, 2.0]"), "hash_ids[1] is not an integer: 2.0"),
        (GOOD.replace("[1, 2]", '["1"]'), 'hash_ids[0] is not an integer: "1"'),
        (GOOD.replace("[1, 2]", "[1, true]"), "hash_ids[1] is not an integer: true"),
        (GOOD.replace("[1, 2]", "[[1]]"), "hash_ids[0] is not an integer: [1]"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = written(tmp_path, GOOD, GOOD, line, GOOD)
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert str(caught.value).startswith(f"{path}:3: {problem}")
    reader = TraceReader(path, skip_bad=True)
    assert len(list(reader)) == 3
    assert reader.bad == 1
    assert str(reader.first_bad) == str(caught.value)
    assert reader.warnings() == [f"1 bad line skipped; the first: {caught.value}"]


class _SlowParser(_Parser):
    def _is_plain(self, record: dict[str, Any]) -> bool:
        del record
        return False


_NUMBERS = [
    *("0", "1", "7", "-1", "-0", "01", "1.0", "1e2", "1e400", "true", "null", "NaN", "Infinity"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "9007199254740993.0"),
    *('"1"', '"\\ud800"', "[1]", "{}"),
]


@pytest.mark.parametrize("sized", [False, True])
@given(data=st.data())
def test_the_fast_reader_of_lines_reads_what_the_other_reads(sized: bool, data: Any) -> None:
    """Line after line with both, where the fast one leaves to the other what it does not take."""
    number = st.sampled_from(_NUMBERS)
    block_size = st.sampled_from(
        ["", ', "block_size": 1', ', "block_size": true', ', "label": "x"']
    )
    both = _Parser(), _SlowParser()
    if sized:
        first = (GOOD[:-1] + ', "block_size": 1}').encode()
        assert both[0].parse(first) == both[1].parse(first)
    for _ in range(data.draw(st.integers(1, 4))):
        at, prompt, output = (data.draw(number) for _ in range(3))
        ids = ", ".join(data.draw(st.lists(number, max_size=3)))
        line = (
            f'{{"timestamp": {at}, "input_length": {prompt}, "output_length": {output}, '
            f'"hash_ids": [{ids}]{data.draw(block_size)}}}\n'
        ).encode()
        found = []
        for parser in both:
            try:
                found.append(repr(parser.parse(line)))
            except ValueError as error:
                found.append(f"{type(error)} {error}")
        assert found[0] == found[1], line
        assert both[0].block_tokens == both[1].block_tokens


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\xff\xfe{}\n")
    with pytest.raises(TraceError, match=r":2: the line is not UTF-8 text$"):
        list(TraceReader(path))


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    for skip_bad in (False, True):
        with pytest.raises(TraceError, match=r"t\.jsonl: no request in it$"):
            list(TraceReader(path, skip_bad=skip_bad))


def test_a_file_of_bad_lines_only(tmp_path: Path) -> None:
    path = written(tmp_path, "x", "y")
    with pytest.raises(TraceError, match=r"no request in it, all lines are bad; .*:1: the line"):
        list(TraceReader(path, skip_bad=True))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent: cannot be opened: no such file"):
        list(TraceReader(tmp_path / "absent"))
    with pytest.raises(TraceError, match="cannot be opened: is a directory"):
        list(TraceReader(tmp_path, skip_bad=True))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_data_that_is_cut_short(tmp_path: Path, compress: object) -> None:
    assert callable(compress)
    lines = [GOOD.replace("3,", f"{i * 7919 % 10007},") for i in range(20_000)]
    whole = compress("\n".join(lines).encode())
    path = tmp_path / "t.jsonl.x"
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(TraceError, match=r":\d+: the compressed data is cut short$") as caught:
        list(TraceReader(path))
    assert caught.value.line_number > 1
    reader = TraceReader(path, skip_bad=True)
    assert len(list(reader)) == caught.value.line_number - 1
    assert reader.bad == 1


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_data_that_is_damaged(tmp_path: Path, compress: object) -> None:
    assert callable(compress)
    data = bytearray(compress("".join(f"{i * 7919}," for i in range(5000)).encode()))
    data[12:400] = b"\xff" * 388
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r":1: damaged (gzip|zstd) data"):
        list(TraceReader(path))


def test_zstd_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.zst"
    write_trace(path, [GOOD_REQUEST])
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match="pip install zstandard"):
        list(TraceReader(path))
    with pytest.raises(TraceError, match="pip install zstandard"):
        write_trace(path, [GOOD_REQUEST])


def test_what_is_legal(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "\ufeff" + GOOD.replace("[1, 2]", "[]").replace("700", "0"),
        "",
        GOOD.replace(" 5", " 5.5"),
        GOOD.replace(" 5", " 6").replace("[1, 2]", "[-1, 1]").replace("}", ', "session": "a"}'),
    )
    reader = TraceReader(path)
    assert [(r.timestamp_ms, r.hash_ids) for r in reader] == [(5, ()), (5.5, (1, 2)), (6, (-1, 1))]
    assert reader.warnings() == []


def test_lengths_that_disagree_with_the_ids_are_counted_and_told_once(tmp_path: Path) -> None:
    lengths = [0, 512, 513, 1024, 1025]  # two ids: 513 to 1024 tokens agree
    path = written(tmp_path, *(GOOD.replace("700", str(length)) for length in lengths))
    with pytest.raises(TraceError, match=r"line 5 has at least 513 tokens .* line 2 at most"):
        list(TraceReader(path))
    reader = TraceReader(path, block_tokens=512)
    assert len(list(reader)) == 5
    assert reader.length_mismatches == 3
    assert len(reader.warnings()) == 1
    assert "in 3 of 5 requests, first in line 1" in reader.warnings()[0]
    reader = TraceReader(path, block_tokens=256)
    list(reader)
    assert reader.length_mismatches == 4


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD, "bad")
    assert len(list(TraceReader(path, limit=2))) == 2
    assert list(TraceReader(path, limit=0)) == []
    with pytest.raises(ValueError, match="must not be negative"):
        TraceReader(path, limit=-1)
    with pytest.raises(ValueError, match="at least one token"):
        TraceReader(path, block_tokens=0)


def test_reading_again_counts_again(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "bad", GOOD.replace("700", "1"))
    reader = TraceReader(path, skip_bad=True, block_tokens=512)
    for _ in range(2):
        assert len(list(reader)) == reader.requests == 2
        assert (reader.bad, reader.length_mismatches) == (1, 1)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """2 MB of text in a small file are read with less memory than that."""
    path = tmp_path / "t.gz"
    request = Request(1, 512 * 500, 1, tuple(range(250)) * 2)
    write_trace(path, [request] * 1_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in TraceReader(path)) == 1_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 << 19


def test_a_line_without_end_is_bad_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.client.lab.trace_file.MAX_LINE_BYTES", 1000)
    path = written(tmp_path, "x" * 2500, GOOD, "y" * 999, "z" * 1000)
    with pytest.raises(TraceError, match=":1: the line is too long"):
        list(TraceReader(path))
    reader = TraceReader(path, skip_bad=True)
    assert list(reader) == [GOOD_REQUEST]
    assert reader.bad == 3


def test_a_trace_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(TraceError("a.jsonl", 7, "no JSON")))
    assert (error.path, error.line_number, error.problem) == ("a.jsonl", 7, "no JSON")
    assert str(error) == "a.jsonl:7: no JSON"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written: no such file"):
        write_trace(tmp_path / "absent" / "t.jsonl", [GOOD_REQUEST])


#: (blocks, prompt tokens)
RUNS = [((7, 7, -3), 100), ((), 5), ((2**80, 7), 0), ((7, -3, 9), 1000)]


def requests(runs: list[tuple[tuple[int, ...], int]]) -> list[Request]:
    return [Request(0, length, 1, ids) for ids, length in runs]


def test_ids_are_renumbered_by_first_appearance() -> None:
    trace = TraceColumns.load(requests(RUNS))
    assert list(trace) == [([0, 0, 1], 100), ([], 5), ([2, 0], 0), ([0, 1, 3], 1000)]
    assert (len(trace), trace.blocks, trace.unique_blocks) == (4, 8, 4)


@given(st.lists(st.lists(st.integers(-1, 6), max_size=6), max_size=12), st.integers(0, 30))
@settings(deadline=None, max_examples=times(100, 1_000))
def test_ids_that_are_numbers_already_keep_them(tails: list[list[int]], dense: int) -> None:
    """Whenever a trace stops to number its blocks by first appearance, or if it always does."""
    runs = [((*range(n % 3), *range(n, n + 2)), 7) for n in range(0, dense, 2)]
    runs += [(tuple(tail), 7) for tail in tails]
    numbers: dict[int, int] = {}
    wanted = [[numbers.setdefault(i, len(numbers)) for i in ids] for ids, _ in runs]
    trace = TraceColumns.load(requests(runs))
    assert [blocks for blocks, _ in trace] == wanted
    assert trace.unique_blocks == len(numbers)


@pytest.mark.parametrize(
    ("runs", "collisions"),
    [
        ([(0, 1, 2), (0, 1, 3), (4,), (4, 5)], 0),
        ([(0, 1), (1, 0)], 1),
        ([(0, 1), (5, 1)], 1),
        ([(0, 0)], 1),
        ([(7, 8), (7, 7)], 1),
        ([(3, 3, 4)], 1),
        ([(0, 1), (0, 2, 1)], 1),
    ],
)
def test_blocks_that_do_not_stand_for_prefixes(
    runs: list[tuple[int, ...]], collisions: int
) -> None:
    assert TraceColumns.load(requests([(ids, 7) for ids in runs])).collisions == collisions


def test_a_block_size_that_comes_late_is_compared_with_the_one_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.client.lab.trace._HEAD_REQUESTS", 1)
    line = '{"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]'
    path = tmp_path / "t.jsonl"
    path.write_text(line + "}\n" + line + ', "block_size": 64}\n')
    with pytest.raises(TraceError, match=r"2: block_size is 64, and .* blocks of 512 tokens"):
        list(TraceReader(path))
    path.write_text(line + ', "tenant_id": "a"}\n')
    with pytest.raises(TraceError, match=r"tenant_id separates caches.*trace convert"):
        list(TraceReader(path))


def test_rows_belong_to_the_caller() -> None:
    trace = TraceColumns.load(requests(RUNS))
    for blocks, _length in trace:
        blocks.clear()
    assert [len(blocks) for blocks, _length in trace] == [3, 0, 2, 3]


def test_summary() -> None:
    trace = TraceColumns.load(requests(RUNS))
    # The first two blocks of the last request were seen before, at 400 tokens a block.
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
    columns = (trace.references, trace.ends, trace.lengths)
    assert [column.itemsize * len(column) for column in columns] == [4 * 80, 8 * 40, 8 * 40]
