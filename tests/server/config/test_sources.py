"""Reading the options of a two-level model, with a small model."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from prefixd.proto.errors import ConfigError
from prefixd.server.config.sources import (
    Given,
    Kind,
    Program,
    parser,
    read,
    refuse,
    sections,
    template,
)

PROGRAM = Program("toy", "1.2", "A toy.", {"--loud": "sound.level"}, {"TOY_LEVEL": "sound.level"})


class Sound(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    level_db: Annotated[int, Kind("DB", lambda value: f"{value}dB")] = Field(3, alias="level")
    """How loud it is."""
    mute: bool = False
    """Is it silent? 100% of the time."""
    wave: Literal["sine", "saw"] = "sine"
    """What it sounds like, in a sentence that is long enough to be broken into more than one line
    of a comment in a file."""
    voices: int = 2
    """How many."""
    device: str
    """Where it comes out."""


class Toy(BaseModel):
    sound: Sound = Field(description="What is heard.")


def test_options_know_how_they_are_shown() -> None:
    ((name, about, options),) = sections(Toy)
    assert (name, about) == ("sound", "What is heard.")
    assert [(o.path, o.kind.metavar, o.default) for o in options] == [
        ("sound.level", "DB", "3dB"),
        ("sound.mute", "BOOL", "false"),
        ("sound.wave", "sine|saw", "sine"),
        ("sound.voices", "N", "2"),
        ("sound.device", "TEXT", "auto"),
    ]


def test_the_template_is_toml_and_says_everything() -> None:
    text = template(Toy, "Title.\n\nMore.")
    assert tomllib.loads(text) == {
        "sound": {"level": "3dB", "mute": False, "wave": "sine", "voices": 2, "device": "auto"}
    }
    assert text.startswith("# Title.\n#\n# More.\n\n# What is heard.\n[sound]\n\n# How loud it is.")
    assert "# How loud it is. (DB)\nlevel =" in text
    assert "of a\n# comment in a file. (sine|saw)\nwave =" in text


def test_values_keep_where_they_came_from(tmp_path: Path) -> None:
    file = tmp_path / "toy.toml"
    file.write_text("[sound]\nvoices = 5\nlevel = 1\nmute = true\n")
    env = {"TOY_LEVEL": "7", "TOY_SOUND__MUTE": "no", "TOY_SOUND__A__B": "x", "OTHER__X": "y"}
    found = read(Toy, PROGRAM, ["--config", str(file), "--loud", "9"], env)
    assert found.problems == []
    assert found.given == {
        "sound.voices": Given(5, str(file)),
        "sound.mute": Given("no", "TOY_SOUND__MUTE"),
        "sound.a__b": Given("x", "TOY_SOUND__A__B"),
        "sound.level": Given("9", "--loud"),
    }


def test_an_empty_variable_is_none_where_clients_treat_it_so() -> None:
    assert read(Toy, PROGRAM, [], {"TOY_LEVEL": ""}).given == {}


def test_unknown_flags_are_kept_with_their_values() -> None:
    found = read(Toy, PROGRAM, ["--a.b", "1", "--c.d=2", "--e.f", "--sound.mute"], {})
    assert found.given == {
        "a.b": Given("1", "--a.b"),
        "c.d": Given("2", "--c.d"),
        "e.f": Given("", "--e.f"),
        "sound.mute": Given("true", "--sound.mute"),
    }
    assert found.problems == []


def test_help_is_for_reading(capsys: pytest.CaptureFixture[str]) -> None:
    parser(Toy, PROGRAM).print_help()
    shown = " ".join(capsys.readouterr().out.split())
    # Python 3.13 names the value once.
    assert re.search(r"--sound\.level( DB)?, --loud DB How loud it is\. \[3dB\]", shown)
    assert "--sound.mute BOOL Is it silent? 100% of the time. [false]" in shown
    assert "[$TOY_CONFIG]" in shown


def test_refusals_count() -> None:
    with pytest.raises(ConfigError, match=r"^one thing is wrong with the configuration:\n  a$"):
        refuse(["a"])
    with pytest.raises(ConfigError, match=r"^2 things are wrong with the configuration:\n  a\n  b"):
        refuse(["a", "b"])
