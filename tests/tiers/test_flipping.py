"""Flipped bits in every file of the disk store, stopped and running."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from flipping import Flipping


@pytest.mark.parametrize("seed", range(3))
def test_flips_cost_what_they_hit_and_never_show(tmp_path: Path, seed: int) -> None:
    counts = Flipping(tmp_path / "tier", random.Random(seed)).run(80)
    assert counts["read"] > 300
    assert counts["starts"] >= 5
