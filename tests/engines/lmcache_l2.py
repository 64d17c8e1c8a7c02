"""Runs `lmcache bench l2` within this process, as its command line does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")


@dataclass(frozen=True)
class Benched:
    """The report of one run."""

    #: The exit status; 0 only if every byte was right.
    status: int
    text: str
    #: The median of a round, in ms: `Store`, `Lookup`, `Load`.
    p50_ms: dict[str, float]
    #: Keys that were stored, found, loaded in the measured rounds.
    successes: dict[str, int]


def plugin(address: str, tier: str) -> dict[str, Any]:
    """The adapter's specification."""
    return {
        "type": "plugin",
        "module_path": "prefixd.client.connectors.lmcache",
        "class_name": "PrefixdL2Adapter",
        "adapter_params": {"address": address, "tier": tier, "fingerprint": "test"},
    }


def bench_l2(
    spec: dict[str, Any], *, rounds: int = 15, keys: int = 32, data_kib: int = 1024
) -> Benched:
    """Run with `--no-skip-verify`, so that every byte is verified, and with hits only.

    The store must be fresh: a used store already has the keys.
    """
    from lmcache.cli.main import main

    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [
            *("lmcache", "bench", "l2", "--l2-adapter", json.dumps(spec), "--no-skip-verify"),
            *("--rounds", str(rounds), "--warmup-rounds", "2", "--num-keys", str(keys)),
            *("--lookup-max-hit-rate", "1.0", "--data-size-kb", str(data_kib)),
            *("--format", "json", "--output", str(report)),
        ]
        output, status = io.StringIO(), 0
        with (
            mock.patch.object(sys, "argv", command),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
        ):
            try:
                main()
            except SystemExit as end:
                status = int(end.code or 0)
        metrics = json.loads(report.read_text())["metrics"] if report.exists() else {}
    found = {each["operation"]: each for each in metrics.values() if "operation" in each}
    return Benched(
        status,
        output.getvalue(),
        {name: _one(each, "p50") for name, each in found.items()},
        {name: int(_one(each, "success")) for name, each in found.items()},
    )


def _one(section: dict[str, Any], word: str) -> float:
    (value,) = (value for name, value in section.items() if word in name)
    return float(value)
