"""Look-ups of many clients become one trace: its order, its lengths, its files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from prefixd.client.lab.recorded import HOLD_S, LookupOrder, TraceFiles, piece_name
from prefixd.client.lab.trace import Request, TraceReader
from prefixd.client.lab.trace_file import STDIN
from prefixd.proto import prefixd_pb2 as pb

NOW_S = 1_700_000_000.0


def response(*lookups: tuple[float, int], **more: Any) -> pb.RecordResponse:
    """Look-ups of one block each: seconds after NOW_S, id."""
    return pb.RecordResponse(
        lookups=[
            pb.RecordedLookup(
                **{
                    "at_unix_ns": round((NOW_S + at_s) * 1e9),
                    "ids": [of],
                    "prompt_tokens": 16,
                    **more,
                }
            )
            for at_s, of in lookups
        ]
    )


def ids(order: LookupOrder, now_s: float | None = None) -> list[int]:
    return [request.hash_ids[0] for request, _ in order.ready(now_s)]


def test_look_ups_wait_for_earlier_ones_of_other_clients() -> None:
    order = LookupOrder()
    order.take(response((0.5, 1), (0.9, 3)), NOW_S + 1)
    order.take(response((0.7, 2)), NOW_S + 1.1)
    assert ids(order, NOW_S + 1.1) == []
    assert ids(order, NOW_S + 1.05 + HOLD_S) == [1], "2 may still have to wait, and 3 is after it"
    assert ids(order, NOW_S + 1.1 + HOLD_S) == [2, 3]
    order.take(response((5.0, 4)), NOW_S + 6)
    assert ids(order) == [4]


def test_a_late_look_up_and_a_wrong_clock_move_no_other_request() -> None:
    order = LookupOrder()
    order.take(response((1.0, 1)), NOW_S + 1)
    assert ids(order) == [1]
    hour_s = 3600.0
    order.take(response((0.2, 2), (hour_s, 3), (-hour_s, 4), (hour_s, 5)), NOW_S + 2)
    requests = [request for request, _ in order.ready()]
    assert [(r.hash_ids[0], r.timestamp_ms / 1000 - NOW_S) for r in requests] == [
        (4, 1.0),
        (2, 1.0),
        (3, 2.0),
        (5, 2.0),
    ]


def test_lengths_are_those_that_are_known() -> None:
    order = LookupOrder()
    order.take(response((0, 1), label="team"), NOW_S)
    order.take(response((1, 2), prompt_tokens=0, block_tokens=32, label="default"), NOW_S + 1)
    order.take(response((2, 3), prompt_tokens=0, hit_blocks=1), NOW_S + 2)
    found = list(order.ready())
    assert [(r.input_length, r.label, size) for r, size in found] == [
        (16, "team", None),
        (32, "", 32),
    ]
    assert (order.untold, order.hit_blocks) == (1, 0)
    told = LookupOrder(64)
    told.take(response((2, 3), prompt_tokens=0, hit_blocks=1), NOW_S + 2)
    assert [(r.input_length, size) for r, size in told.ready()] == [(64, 64)]
    assert (told.untold, told.hit_blocks) == (0, 1)


def request(number: int) -> Request:
    return Request(number, 16, 0, (number,))


def test_one_file_ends_when_it_is_full_and_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with TraceFiles(str(path), 300) as files:
        written = [files.write(request(n), 16) for n in range(9)]
        assert not path.exists()
    assert written == [True] * 3 + [False] * 6
    assert files.full
    assert [r.hash_ids for r in TraceReader(path)] == [(0,), (1,), (2,)]


def test_files_rotate_and_each_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFiles(str(path), 300, 2) as files:
        for number in range(11):
            assert files.write(request(number), 16)
    assert not files.full
    assert list(files.paths) == [piece_name(str(path), n) for n in (3, 4)]
    assert sorted(str(each) for each in tmp_path.iterdir()) == list(files.paths)
    assert [[r.hash_ids[0] for r in TraceReader(each)] for each in files.paths] == [
        [6, 7, 8],
        [9, 10],
    ]


def test_no_request_and_no_file_or_an_error_and_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFiles(str(path), 300):
        pass
    assert list(tmp_path.iterdir()) == []
    path.write_text("before")
    with suppress(KeyError), TraceFiles(str(path), 300) as files:
        files.write(request(1), None)
        raise KeyError
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_names_of_pieces() -> None:
    assert piece_name("a/b.c/trace.jsonl.gz", 3) == "a/b.c/trace.3.jsonl.gz"
    assert piece_name("trace", 1) == "trace.1"
    with pytest.raises(ValueError, match="standard output"):
        piece_name(STDIN, 1)
