"""Options and files that people write: every mistake is reported as an error."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefixd.client.lab.convert import Converter
from prefixd.client.lab.trace import TraceReader
from prefixd.client.lab.trace_file import TraceError
from prefixd.proto.endpoints import normalize_address
from prefixd.proto.errors import ConfigError, PrefixdError
from prefixd.proto.units import parse_bytes, parse_duration_ns
from prefixd.server.config.loading import load_config
from prefixd.server.config.options import Config
from prefixd.server.config.sources import sections

from .messages import damaged

FUZZ = settings.get_profile("fuzz")
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (ROOT / "deploy/prefixd.toml").read_text()
#: The lines of the configuration template, uncommented.
LINES = [line.removeprefix("# ") for line in TEMPLATE.splitlines() if "=" in line or "[" in line]
NAMES = [option.path for _, _, options in sections(Config) for option in options]

_words = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "1", "8GiB", "1e9", "1h30m", "auto", "true", "nan", "\0", "[", '"']
    ),
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=8),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


# ---- configuration


@FUZZ
@given(st.lists(st.tuples(st.sampled_from(NAMES), _words), max_size=6))
@example([("server.address", "unix:/\0")])
def test_any_flags_and_variables_are_taken_or_refused(given_: list[tuple[str, str]]) -> None:
    flags = [f"--{name}={word}" for name, word in given_]
    _loaded(flags, {})
    variables = {
        f"PREFIXD_{name.upper().replace('.', '__')}": word
        for name, word in given_
        if "\0" not in word
    }
    _loaded([], variables)


def _loaded(flags: list[str], variables: dict[str, str]) -> None:
    with suppress(ConfigError):
        assert isinstance(load_config(flags, variables), Config)


@FUZZ
@given(st.data())
def test_any_words_on_the_command_line_are_taken_or_refused(draw: st.DataObject) -> None:
    words = draw.draw(
        st.lists(st.one_of(_words, st.sampled_from(["--", "-x", "--ram", "--config"])))
    )
    _loaded([word for word in words if word not in ("-h", "--help")], {})


@FUZZ
@given(st.data())
def test_any_file_is_taken_or_refused(directory: Path, draw: st.DataObject) -> None:
    lines = draw.draw(st.lists(st.sampled_from(LINES), max_size=12))
    values = draw.draw(st.lists(st.tuples(st.sampled_from(NAMES), _words), max_size=4))
    lines += [f"{name} = {word}" for name, word in values]
    raw = draw.draw(damaged("\n".join(lines).encode(errors="surrogatepass")))
    path = directory / "prefixd.toml"
    path.write_bytes(raw)
    _loaded([f"--config={path}"], {})


@FUZZ
@given(_words)
def test_sizes_durations_and_addresses_are_taken_or_refused(text: str) -> None:
    for parse in (parse_bytes, parse_duration_ns, normalize_address):
        with suppress(ValueError, PrefixdError):
            parse(text)


# ---- traces

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=6,
)
_FIELDS = [
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "prompt",
    "token_ids",
    "messages",
    "text",
]
_records = st.dictionaries(
    st.sampled_from(_FIELDS),
    st.one_of(_json, st.integers(0, 2000), st.lists(st.integers(0, 9), max_size=5)),
    max_size=6,
)


@FUZZ
@given(
    st.data(),
    st.lists(st.one_of(_records, _json), max_size=4),
    st.sampled_from(["", ".gz", ".zst"]),
)
def test_any_trace_is_read_or_refused(
    directory: Path, draw: st.DataObject, records: list[object], ending: str
) -> None:
    raw = draw.draw(damaged("\n".join(json.dumps(record) for record in records).encode()))
    path = directory / f"trace.jsonl{ending}"
    path.write_bytes(raw)
    for skip_bad in (False, True):
        for reader in (TraceReader(path, skip_bad=skip_bad), Converter(path, skip_bad=skip_bad)):
            with suppress(TraceError):
                assert all(request.input_length >= 0 for request in reader)
