"""Records of other formats: which field is read, which records are refused, with which message."""

import json
from pathlib import Path

import pytest

from prefixd.client.lab.convert import Converter
from prefixd.client.lab.formats import FileState, prompts
from prefixd.client.lab.request_parts import (
    SCOPE_FIELDS,
    TEXT_FIELDS,
    TOKEN_FIELDS,
    ConvertOptions,
    Prompt,
    moment,
    scope_of,
)
from prefixd.client.lab.trace import TraceError

OPTIONS = ConvertOptions(block_tokens=4, bytes_per_token=1)


def prompts_of(record: object) -> list[Prompt]:
    return prompts(record, FileState(OPTIONS))[1]


def test_the_first_known_field_decides() -> None:
    """A record may have its prompt in several forms; ids are preferred to text."""
    message = {"role": "user", "content": "hi"}
    dialogue = [message, {"role": "assistant", "content": "hello"}]
    values: dict[str, tuple[object, str]] = {
        "hash_ids": ([1], "block-ids"),
        **{name: ([1], "token-ids") for name in TOKEN_FIELDS},
        "messages": ([message], "openai-chat"),
        "conversation": (dialogue, "lmsys"),
        "conversations": (dialogue, "sharegpt"),
        "turns": (["hi"], "turns"),
        **dict.fromkeys(TEXT_FIELDS, ("hi", "text")),
    }
    record = {name: values[name][0] for name in reversed(values)}
    for name, (_, expected) in values.items():
        assert prompts(record, FileState(OPTIONS))[0].name == expected
        del record[name]


def test_token_ids_in_a_batch_of_one() -> None:
    (prompt,) = prompts_of({"input_ids": [[7, 8, 9]]})
    assert (prompt.input_length, len(prompt.data), prompt.block_bytes) == (3, 12, 16)


def test_output_lengths() -> None:
    for field, value, expected in (
        ("output_tokens", 12, 12),
        ("output_tokens", "12", 12),
        ("output_tokens", [5, 6, 7], 3),
        ("completion", "six by", 6),
        ("max_tokens", 3.0, 3),
        ("max_tokens", None, None),
        ("usage", {"completion_tokens": 7}, 7),
    ):
        (prompt,) = prompts_of({"prompt": "x", field: value})
        assert prompt.output_length == expected, (field, value)


def test_prompt_tokens_are_those_of_the_record() -> None:
    for given in ({"prompt_tokens": 9}, {"response": {"usage": {"prompt_tokens": 9}}}):
        (prompt,) = prompts_of({"messages": [{"role": "user", "content": "hello"}], **given})
        assert prompt.input_length == 9


@pytest.mark.parametrize("field", [name for names in SCOPE_FIELDS.values() for name in names])
def test_what_separates_caches(field: str) -> None:
    roots = {scope_of({"prompt": "x", field: value}).root(b"") for value in ("a", "b", 7, None)}
    assert len(roots) == 4


def test_times_without_a_zone_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"ts": "2024-01-01 00:00:00"}
    utc = moment({"ts": "2024-01-01T00:00:00Z"})
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert moment(record) == utc
    assert utc is not None
    assert utc.value == 1_704_067_200_000
    assert moment({"prompt": "x"}) is None


def test_text_that_is_no_unicode_is_bytes_all_the_same() -> None:
    record = json.loads('{"prompt": "a\\ud800b"}')  # half of a surrogate pair
    (prompt,) = prompts_of(record)
    assert prompt.data.startswith(b"a")
    assert prompt.input_length == 5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nope", "the line is not JSON"),
        ("7", "the record is not a JSON object"),
        ("{}", "the record has no prompt that is known (its fields: none)"),
        ('{"prompt": 7}', "prompt is no text and no list of token ids: 7"),
        ('{"prompt": ["a", 1]}', "prompt is not a list of token ids"),
        ('{"token_ids": "abc"}', "the record has no prompt that is known (its fields: token_ids)"),
        ('{"token_ids": [1, true]}', "token_ids is not a list of token ids"),
        ('{"token_ids": [1, 4294967296]}', "token_ids has a token id beyond 32 bits"),
        ('{"hash_ids": 7}', "hash_ids is not a list of block ids: 7"),
        ('{"hash_ids": [1.5]}', "hash_ids[0] is no block id, a whole number or a text: 1.5"),
        ('{"messages": []}', "messages is not a list of messages"),
        ('{"messages": ["hi"]}', "messages has something in it that is no message"),
        ('{"conversations": [{"from": "human"}]}', "no message of conversations is answered"),
        ('{"turns": []}', "turns is not a list of texts"),
        ('{"turns": [1]}', "turns is not a list of texts"),
        ('{"prompt": "x", "max_tokens": -1}', "max_tokens is not a number of tokens: -1"),
        ('{"prompt": "x", "max_tokens": true}', "max_tokens is not a number of tokens: true"),
        ('{"hash_ids": [1], "input_length": 0.5}', "input_length is not a number of tokens: 0.5"),
        ('{"prompt": "x", "ts": "soon"}', 'ts is no time: "soon"'),
        ('{"prompt": "x", "ts": NaN}', "ts is no time: NaN"),
        ('{"prompt": "x", "ts": [1]}', "ts is no time: [1]"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n" + line + "\n")
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
        ({"time_unit": "h"}, "the time unit is s, ms, us or ns, not 'h'"),
        ({"dialogues_in_flight": 0}, "at least one dialogue"),
    ],
)
def test_bad_options(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ConvertOptions(**options)  # type: ignore[arg-type]
