"""Engines' configurations name the connectors `prefixd.connectors`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import prefixd

NAMES = ("llama_cpp", "lmcache", "plugins", "sglang", "transformers", "vllm")


@pytest.mark.parametrize("name", NAMES)
def test_both_names_are_one_module(name: str) -> None:
    short = import_module(f"prefixd.connectors.{name}")
    assert short is import_module(f"prefixd.client.connectors.{name}")


def test_every_connector_has_its_short_name() -> None:
    package = Path(prefixd.__file__ or "").parent
    there = {path.stem for path in (package / "connectors").glob("*.py")}
    assert there == {"__init__", *NAMES}
