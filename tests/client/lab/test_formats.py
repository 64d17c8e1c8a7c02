"""Every format of the table, and every file of the field that was tried: its right value, or a
refusal that says what to do."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard

from prefixd.client.lab.analyze import analyze
from prefixd.client.lab.convert import Converter
from prefixd.client.lab.formats import FORMATS, Format, readable
from prefixd.client.lab.request_parts import ConvertOptions
from prefixd.client.lab.trace import TraceError, TraceReader, write_trace
from prefixd.client.lab.trace_file import input_files
from tests.support.daemon import temporary_directories

FILES = Path(__file__).parents[3].parent / "shared" / "faults" / "lab"
EXAMPLES = [pytest.param(row, id=row.name) for row in readable()]


def figures(converter: Converter) -> tuple[int, int, float]:
    """Prompt tokens, hit tokens of a cache without limits, and the seconds from the first request
    to the last."""
    requests = list(converter)
    found = analyze(requests, block_tokens=converter.block_tokens)
    return found.prompt_tokens, found.infinite_hit_tokens, found.duration_ms / 1000


def written(tmp_path: Path, text: str, name: str = "in.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


#: Prompt tokens, hit tokens and seconds of the examples in the table.
RIGHT_OF_EXAMPLES = {
    "dynamo-request-trace": (318, 128, 0.1),
    "dynamo-agentic": (320, 128, 0.005),
    "lmcache-lookups": (1400, 512, 1.0),
    "weka": (446, 128, 4.5),
    "vllm-kv-events": (64, 16, 5.0),
    "bailian": (101, 32, 14.386),
    "mooncake": (2400, 1024, 2.7),
    "kvcache-simulator": (318, 128, 1.0),
    "dynamo-mooncake": (2100, 1024, 0.0125),
    "block-ids": (2048, 512, 3.0),
    "token-ids": (6, 0, 1.0),
    "aiperf": (9, 0, 1.0),
    "litellm": (16, 0, 4.0),
    "anthropic": (10, 0, 1.0),
    "openai-chat": (14, 0, 1.0),
    "openai-responses": (10, 0, 1.0),
    "wildchat": (4, 0, 17.0),
    "lmsys": (4, 0, 1.0),
    "sharegpt": (6, 0, 1.0),
    "turns": (20, 5, 2.0),
    "envelope": (4, 0, 1.0),
    "text": (9, 0, 1.0),
}


def test_every_format_has_an_example_and_its_right_values() -> None:
    assert {row.name for row in readable()} == set(RIGHT_OF_EXAMPLES)
    assert {row.name for row in FORMATS if row.read} == set(RIGHT_OF_EXAMPLES)
    assert all(row.refusal for row in FORMATS if row.read is None)


@pytest.mark.parametrize("row", EXAMPLES)
def test_the_example_of_a_format(tmp_path: Path, row: Format) -> None:
    converter = Converter(written(tmp_path, row.example + "\n"))
    assert figures(converter) == RIGHT_OF_EXAMPLES[row.name]
    assert set(converter.formats) == {row.name}
    output = tmp_path / "out.jsonl"
    write_trace(output, converter, converter.block_tokens)
    assert list(TraceReader(output)) == list(converter)


@pytest.mark.parametrize("row", EXAMPLES)
def test_other_commands_name_the_format_and_the_command_that_reads_it(
    tmp_path: Path, row: Format
) -> None:
    path = written(tmp_path, row.example + "\n")
    if row.name == "mooncake":
        assert len(list(TraceReader(path))) == 2
        return
    with pytest.raises(TraceError) as caught:
        list(TraceReader(path))
    assert f"format {row.name}" in str(caught.value)
    assert f"`prefixctl trace convert {path} -o trace.jsonl`" in str(caught.value)


#: Files of the field -> prompt tokens, hit tokens, seconds.
RIGHT: dict[str, tuple[int, int, float]] = {
    "agentic_mooncake.jsonl": (320, 128, 0.005),
    "aiperf_messages.jsonl": (2008, 512, 60.0),
    "aiperf_text_input.jsonl": (2901, 1024, 0.1),
    "anthropic.jsonl": (3004, 0, 1.0),
    "array.json": (2048, 1024, 0.005),
    "b.jsonl.bz2": (2048, 1024, 0.005),
    "b.jsonl.xz": (2048, 1024, 0.005),
    "bailian.jsonl": (1742, 1033, 3615.136),
    "bom_crlf.jsonl": (2048, 1024, 0.005),
    "dynamo_mooncake_alias.jsonl": (2100, 1024, 0.0125),
    "dynamo_request_trace.jsonl": (318, 128, 0.1),
    "dynamo_request_trace.jsonl.gz": (318, 128, 0.1),
    "epoch_ms.jsonl": (2048, 1024, 1.0),
    "float_ids.jsonl": (1024, 0, 0.0),
    "float_lengths.jsonl": (1024, 0, 0.0),
    "iso_timestamp.jsonl": (1024, 0, 0.0),
    "kvcache_simulator.jsonl": (574, 320, 2.0),
    "litellm.jsonl": (1504, 0, 0.0),
    "lmcache_lookup_hashes.jsonl": (2200, 1280, 2.0),
    "lmsys.jsonl": (1002, 0, 0.0),
    "no_output_length.jsonl": (1024, 0, 0.0),
    "no_timestamp.jsonl": (1024, 0, 0.0),
    "null_output.jsonl": (1024, 0, 0.0),
    "openai_batch.jsonl": (1004, 0, 0.0),
    "openai_image.jsonl": (2054, 0, 1.0),
    "pretty.json": (2048, 1024, 0.005),
    "pretty_objects.jsonl": (2048, 1024, 0.005),
    "prompt_list.jsonl": (2048, 0, 1.0),
    "string_ids.jsonl": (2048, 1024, 0.001),
    "string_numbers.jsonl": (1024, 0, 0.0),
    "two_members.jsonl.gz": (2048, 1024, 0.005),
    "two_models.jsonl": (4104, 0, 1.0),
    "u64_ids.jsonl": (2560, 1536, 0.001),
    "unsorted.jsonl": (3072, 1024, 8.0),
    "vllm_custom.jsonl": (2501, 1024, 1.0),
    "weka.jsonl": (764, 256, 5.1),
    "wildchat.jsonl": (2009, 512, 0.0),
}
REFUSED = {
    "aiperf_no_hash.jsonl": "not what their prompts share",
    "azure.csv": "Azure's trace of lengths",
    "burstgpt.csv": "BurstGPT",
    "copilot2026.jsonl": "not what their prompts share",
    "empty.jsonl": "no request in it",
    "lfs_pointer.jsonl": "`git lfs pull` gets it",
    "libcachesim.csv": "no prefix in it",
    "oneline.json": ":1: record 3: conversations",
    "sharegpt.json": ":1: record 2: conversations",
    "truncated_tail.jsonl": ":3: the line is not JSON",
    "utf16.jsonl": "iconv -f UTF-16 -t UTF-8",
}


@pytest.mark.skipif(not FILES.is_dir(), reason=f"needs {FILES}")
@pytest.mark.parametrize("name", [*RIGHT, *REFUSED])
def test_files_of_the_field(name: str) -> None:
    if name in RIGHT:
        assert figures(Converter(FILES / name)) == RIGHT[name]
    else:
        with pytest.raises(TraceError) as caught:
            list(Converter(FILES / name))
        assert REFUSED[name] in str(caught.value)


@pytest.mark.skipif(not FILES.is_dir(), reason=f"needs {FILES}")
@pytest.mark.parametrize("path", sorted(FILES.glob("*.*")), ids=lambda path: path.name)
def test_other_commands_are_right_about_them_or_refuse(path: Path) -> None:
    reader = TraceReader(path)
    try:
        found = analyze(list(reader), block_tokens=reader.block_tokens)
    except TraceError:
        return
    assert (found.prompt_tokens, found.infinite_hit_tokens, found.duration_ms / 1000) == RIGHT[
        path.name
    ]


@pytest.mark.skipif(not FILES.is_dir(), reason=f"needs {FILES}")
def test_every_file_of_the_field_has_its_right_value() -> None:
    names = {path.name for path in FILES.iterdir()} - {"RIGHT.md"}
    assert names == {*RIGHT, *REFUSED}


LINES = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 2


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress, lzma.compress,
                                      bz2.compress])  # fmt: skip
def test_compressed_files(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "in"
    path.write_bytes(compress(LINES.encode()) + compress(LINES.encode()))
    assert len(list(Converter(path))) == len(list(TraceReader(path))) == 4
    path.write_bytes(compress(LINES.encode()) + b"garbage")
    for reader in (Converter(path), TraceReader(path)):
        with pytest.raises(TraceError, match=r"damaged|gzip"):
            list(reader)
    whole = compress(LINES.encode() * 1000)
    path.write_bytes(whole[:-8])
    for reader in (Converter(path), TraceReader(path)):
        with pytest.raises(TraceError, match=r"cut short|end-of-stream|damaged|CRC"):
            list(reader)


def test_folders_and_globs_and_several_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json", "sub/c.jsonl.gz", "sub/.hidden.jsonl", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        data = LINES.encode()
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    inside = [str(tmp_path / name) for name in ("a.jsonl", "b.json", "sub/c.jsonl.gz")]
    assert input_files([str(tmp_path)]) == inside
    assert input_files([str(tmp_path / "?.js*"), "-"]) == [*inside[:2], "-"]
    assert len(list(Converter([tmp_path]))) == 6
    (tmp_path / "empty").mkdir()
    for names, problem in (
        ([tmp_path / "empty"], "no file in it ends in .jsonl"),
        ([tmp_path / "*.parquet"], "no file matches it"),
        ([tmp_path / "a.jsonl", tmp_path], "the file is named twice"),
        ([tmp_path / "sub" / ".." / "a.jsonl", tmp_path], "a.jsonl is the same"),
        ([tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"], "a.jsonl is the same"),
    ):
        with pytest.raises(TraceError, match=problem):
            Converter(names)


def test_ids_that_collide_are_told_and_can_be_kept_apart(tmp_path: Path) -> None:
    one = {"timestamp": 0, "input_length": 1536, "output_length": 1, "hash_ids": [0, 1, 2]}
    two = {**one, "hash_ids": [0, 2, 1]}
    a = written(tmp_path, json.dumps(one) + "\n", "a.jsonl")
    b = written(tmp_path, json.dumps(two) + "\n", "b.jsonl")
    together = Converter([a, b])
    assert figures(together)[1] == 512
    assert any("--separate-ids keeps" in each for each in together.assumptions())
    apart = Converter([a, b], ConvertOptions(separate_ids=True))
    assert figures(apart)[1] == 0
    assert not any("--separate-ids" in each for each in apart.assumptions())


def test_a_missing_time_is_said(tmp_path: Path) -> None:
    for line, problem in (
        ('{"prompt": "x", "ts": 1}\n{"prompt": "y"}\n', ":2: the record has no time, and .*:1 has"),
        ('{"hash_ids": [1]}\n{"prompt": "y"}\n', ":2: the record has tokens or text, and .*:1 has"),
        ('{"hash_ids": [1], "block_size": 16}\n{"hash_ids": [1], "block_size": 32}\n',
         ":2: the record has blocks of 32 tokens, and .*:1 has blocks of 16"),
        ('{"prompt": "x", "ts": 1}\n{"prompt": "y", "ts": "2024-01-01"}\n',
         ":2: the record has a time with a unit or a date, and"),
    ):  # fmt: skip
        with pytest.raises(TraceError, match=problem):
            list(Converter(written(tmp_path, line)))


@pytest.mark.parametrize(
    ("line", "options", "problem"),
    [
        (json.dumps({"timestamp": 1, "input_length": 521, "hash_ids": list(range(33))}),
         {"source_block_tokens": 512},
         "--source-block-tokens 512 contradicts the trace: its blocks have 16 tokens"),
        ('{"hash_ids": [1], "block_size": 16}', {"source_block_tokens": 32},
         "--source-block-tokens 32 contradicts the record, which has blocks of 16 tokens"),
        ('{"prompt": "x", "ts": 1767225600123}', {"time_unit": "s"},
         "--time-unit s contradicts the times: 1767225600123 is a time since 1970 in ms"),
        ('{"prompt": "x", "timestamp_ms": 5}', {"time_unit": "s"}, "--time-unit s contradicts"),
    ],
)  # fmt: skip
def test_an_option_that_contradicts_the_file(
    tmp_path: Path, line: str, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(TraceError, match=problem):
        list(Converter(written(tmp_path, line), ConvertOptions(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (b"PAR1....", "Parquet"),
        (b"\x80\x04\x95", "pickle"),
        (b"PK\x03\x04", "zip"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"prompt,tokens\nx,3\n", "a table, such as CSV"),
    ],
)
def test_files_that_are_no_json(tmp_path: Path, head: bytes, problem: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(head)
    for reader in (Converter(path), TraceReader(path)):
        with pytest.raises(TraceError, match=problem):
            list(reader)


def test_events_of_blocks_as_vllm_sends_them(tmp_path: Path) -> None:
    """A long prompt stored in two parts, its decoding, and another prompt that branches off."""
    events = [
        [100.0, [["BlockStored", [1, 2], None, [], 16]], 0],
        [100.1, [["BlockStored", [3, 4], 2, [], 16], ["BlockRemoved", [9]]], 0],
        [100.2, [["BlockStored", [5], 4, [], 16]], 0],
        [103.0, [["BlockStored", [7], 2, [], 16], ["AllBlocksCleared"]], 0],
    ]
    converter = Converter(written(tmp_path, "".join(json.dumps(e) + "\n" for e in events)))
    assert [r.input_length for r in converter] == [80, 48]
    assert figures(converter) == (128, 32, 3.0)
    assert any("lower bound" in each for each in converter.assumptions())


def test_the_page_on_traces_shows_every_format() -> None:
    page = (Path(__file__).parents[3] / "docs" / "lab.md").read_text()
    for row in readable():
        about = row.about[0].upper() + row.about[1:]
        assert f"### {row.name}\n\n{about}.\n\n```jsonl\n{row.example}\n```" in page


MOONCAKE = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
CHAT = {"messages": [{"role": "user", "content": "x" * 4096}]}


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([{**MOONCAKE, "hash_ids": [1.0, 2.0**53]}], r"hash_ids\[1\] is the float"),
        ([{**MOONCAKE, "timestamp": 17e8}, {**MOONCAKE, "timestamp": 17e11}],
         "a time since 1970 in s, and 1700000000000 a time since 1970 in ms"),
        ([MOONCAKE, {**MOONCAKE, "timestamp": 17e11}],
         "0 is none since 1970, and 1700000000000 a time since 1970 in ms"),
        ([{**MOONCAKE, "timestamp": float("nan")}], "timestamp is no time"),
        ([{**MOONCAKE, "input_length": -1}], "input_length is not a number of tokens: -1"),
        ([{**MOONCAKE, "input_length": 10**30}], "input_length is not a number of tokens"),
        ([{**MOONCAKE, "block_size": 0}], "block_size is 0"),
        ([MOONCAKE, CHAT], "the record has tokens or text, and"),
        ([{"block_hashes": [True], "block_size": 16}], "no block hash in it: true"),
        ([{"block_hashes": [1], "parent_block_hash": [2], "block_size": 16}],
         r"parent_block_hash is no block hash: \[2\]"),
        ([{"block_hashes": [1], "block_size": 16}, {"block_hashes": [2], "block_size": 32}],
         "the record has blocks of 32 tokens"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(
    tmp_path: Path, records: list[dict[str, object]], problem: str
) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    with pytest.raises(TraceError, match=problem):
        list(Converter(written(tmp_path, text)))


@pytest.mark.parametrize(
    ("records", "right", "said"),
    [
        # Numbers as text of which `datetime.fromisoformat` would take one for a time of 1712.
        ([{"prompt": "x", "ts": "1712010112345"}, {"prompt": "x", "ts": "1713990112345"}],
         (2, 1, 1_980_000.0), "times in ms since 1970"),
        ([{"prompt": "x", "date": "20260101"}, {"prompt": "x", "date": "20260102"}],
         (2, 1, 86_400.0), ""),
        # Monotonic nanoseconds after a year without a restart are not milliseconds of 3023.
        ([{"prompt": "x", "ts": 33_000_000_000_000}, {"prompt": "x", "ts": 33_000_000_000_500}],
         (2, 1, 0.5), "assumed from the mean gap"),
        # Anthropic counts cached tokens apart.
        ([{**CHAT, "usage": {"input_tokens": 24, "cache_read_input_tokens": 1000}}] * 2,
         (2048, 1024, 1.0), ""),
        # A sound counts as a medium, not as the text of its base64.
        ([{"messages": [{"role": "user", "content": [
            {"type": "input_audio", "input_audio": {"data": "A" * 100_000}}]}]}],
         (1026, 0, 0.0), "1 images and other media count as 1,024 tokens each"),
        # The stated length is that of both prompts.
        ([{"prompt": ["x" * 400, "y" * 400], "prompt_tokens": 200}], (200, 0, 1.0), ""),
        # More tokens of text a token than blocks are cut by.
        ([{"prompt": "x" * 4096, "prompt_tokens": 512}] * 2, (1024, 512, 1.0),
         "look too large: convert again with --text-bytes-per-token 8.00"),
        ([{"hash_ids": [1, 2]}], (1024, 0, 0.0), "1 of 1 requests have no input length"),
        ([{"requests": [{"t": "2026-01-01T00:00:00", "in": 16, "hash_ids": [1]},
                        {"t": "2026-01-01T00:00:09", "in": 16, "hash_ids": [1]}],
           "block_size": 16}], (32, 16, 9.0), ""),
        # Dense traffic without output lengths is in milliseconds all the same.
        ([{"timestamp": 0, "input_length": 16, "hash_ids": [1]},
          {"timestamp": 20, "input_length": 16, "hash_ids": [1]}], (32, 16, 0.02), "times in ms"),
    ],
)  # fmt: skip
def test_what_would_be_silently_wrong(
    tmp_path: Path, records: list[dict[str, object]], right: tuple[int, int, float], said: str
) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    converter = Converter(written(tmp_path, text))
    assert figures(converter) == right
    assert said in "; ".join(converter.assumptions())


#: What a field of a record may hold instead of what it should.
ODD = [
    *(None, True, 0, -1, 1.5, 1e300, float("nan"), float("-inf"), 10**30, "", "12", "\ud800"),
    *([], [[]], [1], [None], [{}], {}, {"type": [[]]}, [{"role": 1, "content": [1, None]}]),
    "2024-01-01",
]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A directory for a file that is written thousands of times."""
    with temporary_directories() as (_, directory):
        yield directory


@pytest.mark.parametrize("row", EXAMPLES)
def test_any_value_in_any_place_is_read_or_refused(in_memory: Path, row: Format) -> None:
    """No other exception."""
    path = in_memory / "in.jsonl"
    lines = row.example.splitlines()
    for number, line in enumerate(lines):
        for place in _places(json.loads(line)):
            for value in ODD:
                record = json.loads(line)
                holder = record
                for step in place[:-1]:
                    holder = holder[step]
                holder[place[-1]] = value
                lines_now = [*lines]
                lines_now[number] = json.dumps(record)
                path.write_text("\n".join(lines_now))
                for reader in (Converter(path), TraceReader(path)):
                    with suppress(TraceError):
                        list(reader)


def _places(value: object) -> list[tuple[object, ...]]:
    items: list[tuple[object, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [(key, *inner) for key, each in items for inner in [(), *_places(each)]]


def test_a_record_may_be_nested_deeply(tmp_path: Path) -> None:
    for depth in range(300, 2400, 100):
        inner = '{"body": ' * depth + '{"prompt": "x"}' + "}" * depth
        with suppress(TraceError):
            assert len(list(Converter(written(tmp_path, inner)))) == 1
