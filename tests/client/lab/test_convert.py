"""Request files of other formats: each is read, and shared prefixes stay shared."""

import gzip
import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prefixd.client.lab.convert import Converter
from prefixd.client.lab.request_parts import ConvertOptions
from prefixd.client.lab.trace import Request, TraceError

Record = dict[str, object]
SMALL = ConvertOptions(block_tokens=4, bytes_per_token=1, dialogues_in_flight=1)
IDS = ConvertOptions(source_block_tokens=4)


def converted(
    tmp_path: Path, records: Sequence[object], options: ConvertOptions = SMALL
) -> list[Request]:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(Converter(path, options))


def chain(kind: bytes, blocks: Sequence[bytes]) -> bytes:
    """The documented formula, written independently."""
    parent = kind
    for block in blocks:
        parent = sha256(parent + block).digest()
    return parent


@pytest.mark.parametrize(
    "field",
    ["prompt_token_ids", "token_ids", "input_ids", "input_tokens", "prompt_ids", "prompt"],
)
def test_token_ids_of_every_spelling(tmp_path: Path, field: str) -> None:
    records = [
        {field: [1, 2, 3, 4, 5, 6], "output_tokens": [9, 9]},
        {field: [1, 2, 3, 4, 5, 6, 7, 8, 9], "output_len": 7},
        {field: [1, 2, 3, 4], "max_tokens": 16.0},
        {field: [2, 2, 3, 4, 5, 6]},
        {field: []},
    ]
    assert converted(tmp_path, records) == [
        Request(0, 6, 2, (0, 1)),
        Request(1000, 9, 7, (0, 2, 3)),
        Request(2000, 4, 16, (0,)),
        Request(3000, 6, 0, (4, 5)),  # the same second block after another first one
        Request(4000, 0, 0, ()),
    ]


@given(st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=8))
def test_ids_agree_exactly_as_far_as_tokens_do(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("convert")
    requests = converted(folder, [{"token_ids": prompt} for prompt in prompts])
    names: dict[tuple[int, ...], int] = {}
    for prompt, request in zip(prompts, requests, strict=True):
        cuts = [*range(4, len(prompt), 4), len(prompt)] if prompt else []
        assert len(request.hash_ids) == len(cuts)
        for cut, block in zip(cuts, request.hash_ids, strict=True):
            assert names.setdefault(tuple(prompt[:cut]), block) == block
    assert sorted(names.values()) == list(range(len(names)))


def test_text_is_cut_by_bytes_not_characters(tmp_path: Path) -> None:
    options = ConvertOptions(block_tokens=2, bytes_per_token=2)
    requests = converted(tmp_path, [{"prompt": "abcdéf"}, {"prompt": "abcdé"}], options)
    # abcd | é f (3 bytes), then abcd | é (2 bytes)
    assert [r.hash_ids for r in requests] == [(0, 1), (0, 2)]
    assert [r.input_length for r in requests] == [4, 3]


@pytest.mark.parametrize("field", ["prompt", "text", "text_input", "input_text", "input"])
def test_text_of_every_spelling(tmp_path: Path, field: str) -> None:
    (request,) = converted(tmp_path, [{field: "hello world", "completion": "yes."}])
    assert request == Request(0, 11, 4, (0, 1, 2))


def test_messages_are_one_request_and_a_trailing_answer_is_its_output(tmp_path: Path) -> None:
    system = {"role": "system", "content": "be brief"}
    first: list[Record] = [system, {"role": "user", "content": "hi"}]
    answered = [*first, {"role": "assistant", "content": "hello"}]
    longer = [*answered, {"role": "user", "content": "why?"}]
    requests = converted(
        tmp_path,
        [
            {"messages": first, "max_tokens": 99},
            {"messages": answered},
            {"custom_id": "1", "body": {"messages": longer, "max_completion_tokens": 5}},
        ],
    )
    prompt = b"system\nbe brief\nuser\nhi\n"
    assert [r.input_length for r in requests] == [
        len(prompt),
        len(prompt),
        len(prompt + b"assistant\nhello\nuser\nwhy?\n"),
    ]
    assert [r.output_length for r in requests] == [99, 5, 5]
    assert requests[0].hash_ids == requests[1].hash_ids
    whole = len(prompt) // 4
    assert requests[2].hash_ids[:whole] == requests[0].hash_ids[:whole]


def test_parts_tools_and_tool_calls_belong_to_the_prompt(tmp_path: Path) -> None:
    def ids(**record: object) -> tuple[int, ...]:
        (request,) = converted(tmp_path, [record])
        return request.hash_ids

    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "a.png"}]
    plain = ids(messages=[{"role": "user", "content": "look"}])
    with_image = ids(messages=[{"role": "user", "content": parts}])
    with_tools = ids(messages=[{"role": "user", "content": "look"}], tools=[{"name": "f"}])
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    with_call = ids(messages=[call, {"role": "tool", "content": "42"}])
    assert len(plain) < len(with_tools) < len(with_image)
    assert len(with_call) > len(ids(messages=[{"role": "assistant"}, {"role": "tool"}]))


@pytest.mark.parametrize(
    ("field", "speaker", "says"),
    [("conversations", "from", "value"), ("conversation", "role", "content")],
)
def test_dialogues_are_a_request_for_every_answered_message(
    tmp_path: Path, field: str, speaker: str, says: str
) -> None:
    who = ("human", "gpt") if speaker == "from" else ("user", "assistant")
    texts = ["question 1", "answer", "question 2", "answer!!", "never answered"]
    dialogue = [{speaker: who[i % 2], says: text} for i, text in enumerate(texts)]
    requests = converted(tmp_path, [{"id": "x", field: dialogue}])
    assert [r.output_length for r in requests] == [6, 8]
    first, second = requests
    assert first.input_length == len(f"{who[0]}\nquestion 1\n")
    assert second.hash_ids[: first.input_length // 4] == first.hash_ids[: first.input_length // 4]
    once = ConvertOptions(block_tokens=4, bytes_per_token=1, first_turn_only=True)
    assert converted(tmp_path, [{field: dialogue}], once) == [first]


def test_turns_grow(tmp_path: Path) -> None:
    requests = converted(tmp_path, [{"question_id": 81, "turns": ["one two", "three"]}])
    assert [r.input_length for r in requests] == [13, 24]
    assert requests[1].hash_ids[:3] == requests[0].hash_ids[:3]


def test_dialogues_take_turns(tmp_path: Path) -> None:
    def dialogue(name: str, answers: int) -> Record:
        messages = [
            {"from": who, "value": name} for _ in range(answers) for who in ("human", "gpt")
        ]
        return {"conversations": messages}

    records = [dialogue("a" * 4, 3), dialogue("b" * 4, 1), dialogue("c" * 4, 2)]
    alone = converted(tmp_path, records)
    options = ConvertOptions(block_tokens=4, bytes_per_token=1, dialogues_in_flight=2)
    together = converted(tmp_path, records, options)
    assert [r.input_length for r in alone] == [11, 31, 51, 11, 11, 31]
    assert [r.input_length for r in together] == [11, 11, 31, 11, 51, 31]  # a b a c a c
    assert [r.timestamp_ms for r in together] == [0, 1000, 2000, 3000, 4000, 5000]


def test_hash_ids_integers_and_texts(tmp_path: Path) -> None:
    mooncake = {"timestamp": 250, "input_length": 7, "output_length": 3, "hash_ids": [70, 71]}
    later = {"timestamp": 900, "input_length": 8, "output_length": 3, "hash_ids": [70, 99]}
    assert converted(tmp_path, [mooncake, later]) == [
        Request(0, 7, 3, (0, 1)),
        Request(650, 8, 3, (0, 2)),
    ]
    texts = [{"hash_ids": ["9f3a", "01bc"]}, {"hash_ids": ["9f3a", 77.0]}]
    assert [r.hash_ids for r in converted(tmp_path, texts, IDS)] == [(0, 1), (0, 2)]
    assert [r.input_length for r in converted(tmp_path, texts, IDS)] == [8, 8]


def test_bailian_has_small_blocks_and_seconds(tmp_path: Path) -> None:
    base = {"parent_chat_id": -1, "input_length": 70, "output_length": 9}
    records = [
        {"chat_id": 1, "timestamp": 61.5, "hash_ids": [1, 2, 3, 4, 5], **base},
        {"chat_id": 2, "timestamp": 62.75, "hash_ids": [1, 2, 3, 9, 5], **base},
    ]
    options = ConvertOptions(block_tokens=32)
    assert converted(tmp_path, records, options) == [
        Request(0, 70, 9, (0, 1, 2)),
        Request(1250, 70, 9, (0, 3, 4)),
    ]
    with pytest.raises(TraceError, match=r"blocks of 24 tokens .* cannot be made of blocks of 16"):
        converted(tmp_path, records, ConvertOptions(block_tokens=24))


def test_block_ids_follow_the_documented_formula(tmp_path: Path) -> None:
    """Two blocks have the same id if and only if their chained hashes are equal."""
    texts = ["abcdefgh", "abcdEFGH", "abcd", "xxxxefgh"]
    requests = converted(tmp_path, [{"prompt": text} for text in texts])
    digests: dict[bytes, int] = {}
    for text, request in zip(texts, requests, strict=True):
        blocks = [text[i : i + 4].encode() for i in range(0, len(text), 4)]
        for count, block in enumerate(request.hash_ids, 1):
            assert digests.setdefault(chain(b"text", blocks[:count]), block) == block
    assert len(set(digests.values())) == len(digests)


def test_tokens_and_text_are_never_the_same_block(tmp_path: Path) -> None:
    tokens = [int.from_bytes(b"abcd", "little")] * 4
    a, b = converted(tmp_path, [{"token_ids": tokens}, {"prompt": "abcd" * 4}])
    assert set(a.hash_ids).isdisjoint(b.hash_ids)


@pytest.mark.parametrize(
    ("field", "values", "unit", "expected"),
    [
        ("timestamp", [10.5, 11.0], None, [0, 500]),
        ("ts", [1, 3], None, [0, 2000]),
        ("arrival_time", [1000, 3000], "us", [0, 2]),
        ("timestamp_ms", [1000, 3000], None, [0, 2000]),
        ("created", ["2023-11-16 18:17:03.980", "2023-11-16 18:17:04.480"], None, [0, 500]),
        ("created", ["2024-05-01T00:00:00+02:00", "2024-04-30T22:00:01Z"], None, [0, 1000]),
    ],
)
def test_times(
    tmp_path: Path, field: str, values: list[object], unit: str | None, expected: list[int]
) -> None:
    options = ConvertOptions(time_unit=unit)
    requests = converted(tmp_path, [{"prompt": "x", field: value} for value in values], options)
    assert [r.timestamp_ms for r in requests] == expected


def test_requests_without_a_time_arrive_evenly(tmp_path: Path) -> None:
    options = ConvertOptions(requests_per_s=3)
    requests = converted(tmp_path, [{"prompt": "x"}] * 4, options)
    assert [r.timestamp_ms for r in requests] == [0, 333, 666, 1000]


def test_requests_are_sorted_by_time_and_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    times = (5, 9, 4, 9, 3, 10)
    path.write_text(
        "".join(f'{{"prompt": "x", "output_len": {i}, "ts": {t}}}\n' for i, t in enumerate(times))
    )
    converter = Converter(path)
    found = [(r.timestamp_ms, r.output_length) for r in converter]
    assert found == [(0, 4), (1000, 2), (2000, 0), (6000, 1), (6000, 3), (7000, 5)]
    assert any("2 of 6 requests have an earlier time" in each for each in converter.assumptions())


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_a_json_array(tmp_path: Path, indent: int | None, compress: object) -> None:
    assert callable(compress)
    path = tmp_path / "in"
    texts = [f"{'é' * (i % 700)} {i}" for i in range(3000)]
    records = [{"conversations": [{"value": t}, {"from": "gpt", "value": "k"}]} for t in texts]
    data = json.dumps(records, indent=indent, ensure_ascii=False).encode()
    assert len(data) > 2_000_000
    path.write_bytes(compress(data))
    requests = list(Converter(path, ConvertOptions(bytes_per_token=1, dialogues_in_flight=1)))
    assert [r.input_length for r in requests] == [len(f"\n{t}\n".encode()) for t in texts]


def test_counts_of_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\nnope\n{"prompt": "y"}\n{"token_ids": [1]}\n{"a": 1}\n')
    converter = Converter(path, skip_bad=True)
    for _ in range(2):
        requests = list(converter)
        assert len(requests) == converter.requests == 3
        assert converter.bad == 2
        assert converter.formats == {"text": 2, "token-ids": 1}
        assert len({block for request in requests for block in request.hash_ids}) == 3
    assert converter.consumed_bytes == converter.total_bytes == path.stat().st_size
    assert converter.warnings()[0].startswith(f"2 bad records skipped; the first: {path}:2: ")
    assert len(list(Converter(path, SMALL, limit=1))) == 1
    assert list(Converter(path, limit=0)) == []
    with pytest.raises(ValueError, match="must not be negative"):
        Converter(path, limit=-1)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no request in it"),
        ("[]", "no request in it"),
        ('[{"prompt": "x"},\n{"prompt" "y"}]', ":2: the array is not JSON (Expecting ':'"),
        ('[{"prompt": "x"},\n{"prompt": "y"}\n', ":3: the array is not JSON (Expecting value"),
        ('[{"prompt": "x"},\n\n7]', ":3: record 2: the record is not a JSON object"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_arrays_and_empty_files(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        list(Converter(path))
    assert problem in str(caught.value)


def test_an_array_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(b'[{"prompt": "\xff"}]')
    with pytest.raises(TraceError, match=r"the array is not UTF-8 text"):
        list(Converter(path))


def test_what_came_before_the_damage_is_kept_on_request(tmp_path: Path) -> None:
    path = tmp_path / "in.gz"
    lines = "".join(f'{{"prompt": "{i * 7919 % 1000003}"}}\n' for i in range(40_000))
    data = gzip.compress(lines.encode())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceError, match=r":\d+: the compressed data is cut short"):
        list(Converter(path))
    converter = Converter(path, skip_bad=True)
    assert len(list(converter)) > 1000
    assert converter.bad == 1
