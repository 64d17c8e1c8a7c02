"""The files that the documents show as examples are taken by the daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prefixd.server.api.access import Tokens
from prefixd.server.config.loading import load_config

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "deploy/README.md"]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def samples(language: str) -> list[object]:
    """Each block of this language, by its document and number."""
    found = []
    for document in DOCUMENTS:
        blocks = [text for kind, text in _BLOCK.findall(document.read_text()) if kind == language]
        for number, text in enumerate(blocks, 1):
            found.append(pytest.param(text, id=f"{document.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("text", samples("tokens"))
def test_a_file_with_tokens_is_taken(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    assert len(Tokens.from_file(file)) == len(text.splitlines())


@pytest.mark.parametrize("text", samples("toml"))
def test_a_configuration_is_taken(text: str, tmp_path: Path) -> None:
    """As far as that does not depend on the files and addresses that it names."""
    file = tmp_path / "prefixd.toml"
    file.write_text(text)
    load_config(["--config", str(file)], {})


def test_there_are_samples() -> None:
    assert samples("tokens")
    assert samples("toml")
