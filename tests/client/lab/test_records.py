"""Records of other formats: which field is read, which records are refused, with which message."""

import json
from pathlib import Path

import pytest

from prefixd.client.lab.convert import Converter
from prefixd.client.lab.records import (
    DIALOGUE_FIELDS,
    TEXT_FIELDS,
    TOKEN_FIELDS,
    ConvertOptions,
    prompts,
    time_ms,
)
from prefixd.client.lab.trace import TraceError

OPTIONS = ConvertOptions(block_tokens=4, bytes_per_token=1)


def test_the_first_known_field_decides() -> None:
    """A record may have its prompt in several forms; ids are preferred to text."""
    order = ["hash_ids", *TOKEN_FIELDS, "messages", *DIALOGUE_FIELDS, "turns", *TEXT_FIELDS]
    message = {"role": "user", "content": "hi"}
    dialogue = [message, {"role": "assistant", "content": "hello"}]
    values: dict[str, object] = {
        "hash_ids": [1],
        "messages": [message],
        "turns": ["hi"],
        **{name: [1] for name in TOKEN_FIELDS},
        **dict.fromkeys(DIALOGUE_FIELDS, dialogue),
        **dict.fromkeys(TEXT_FIELDS, "hi"),
    }
    record = {name: values[name] for name in reversed(order)}
    for name in order:
        assert prompts(record, OPTIONS)[0] == name
        del record[name]


def test_token_ids_in_a_batch_of_one() -> None:
    _, (prompt,) = prompts({"input_ids": [[7, 8, 9]]}, OPTIONS)
    assert (prompt.input_length, len(prompt.data), prompt.block_bytes) == (3, 12, 16)


def test_output_lengths() -> None:
    for field, value, expected in (
        ("output_tokens", 12, 12),
        ("output_tokens", [5, 6, 7], 3),
        ("completion", "six by", 6),
        ("max_tokens", 3.0, 3),
        ("max_tokens", None, 0),
    ):
        _, (prompt,) = prompts({"prompt": "x", field: value}, OPTIONS)
        assert prompt.output_length == expected, (field, value)


def test_times_without_a_zone_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"ts": "2024-01-01 00:00:00"}
    utc = time_ms({"ts": "2024-01-01T00:00:00Z"}, OPTIONS)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert time_ms(record, OPTIONS) == utc == 1_704_067_200_000
    assert time_ms({"prompt": "x"}, OPTIONS) is None


def test_text_that_is_no_unicode_is_bytes_all_the_same() -> None:
    record = json.loads('{"prompt": "a\\ud800b"}')  # half of a surrogate pair
    _, (prompt,) = prompts(record, OPTIONS)
    assert prompt.data.startswith(b"a")
    assert prompt.input_length == 5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nope", "the line is not JSON"),
        ("7", "the record is not a JSON object"),
        ("{}", "the record has no prompt: none of the known fields is in it"),
        ('{"prompt": 7}', "the record has no prompt"),
        ('{"prompt": ["a"]}', "prompt is not a list of token ids"),
        ('{"token_ids": "abc"}', "token_ids is not a list of token ids"),
        ('{"token_ids": [1, true]}', "token_ids is not a list of token ids"),
        ('{"token_ids": [1, 4294967296]}', "token_ids has a token id beyond 32 bits"),
        ('{"hash_ids": 7}', "hash_ids is not a list of integers or texts"),
        ('{"hash_ids": [1.5]}', "hash_ids is not a list of integers or texts"),
        ('{"messages": []}', "messages is not a list of messages"),
        ('{"messages": ["hi"]}', "messages has something in it that is no message"),
        ('{"conversations": [{"from": "human"}]}', "no message of conversations is answered"),
        ('{"turns": []}', "turns is not a list of texts"),
        ('{"turns": [1]}', "turns is not a list of texts"),
        ('{"prompt": "x", "max_tokens": -1}', "max_tokens is not a number of tokens: -1"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens is not a number of tokens: true"),
        ('{"hash_ids": [1], "input_length": 0.5}', "input_length is not a number of tokens: 0.5"),
        ('{"prompt": "x", "ts": "soon"}', "ts is no time: 'soon'"),
        ('{"prompt": "x", "ts": NaN}', "ts is no time: NaN"),
        ('{"prompt": "x", "ts": [1]}', "ts is no time: [1]"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    with pytest.raises(TraceError) as caught:
        list(Converter(path))
    assert str(caught.value).startswith(f"{path}:2: {problem}")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"block_tokens": 0}, "at least one token"),
        ({"block_tokens": 10, "source_block_tokens": 4}, "cannot be made of blocks of 4"),
        ({"source_block_tokens": 0}, "cannot be made of blocks of 0"),
        ({"bytes_per_token": 0.5}, "bytes per token"),
        ({"bytes_per_token": float("nan")}, "bytes per token"),
        ({"requests_per_s": 0}, "above 0"),
        ({"time_unit": "h"}, "the time unit is s, ms or us, not 'h'"),
        ({"dialogues_in_flight": 0}, "at least one dialogue"),
    ],
)
def test_bad_options(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ConvertOptions(**options)  # type: ignore[arg-type]
