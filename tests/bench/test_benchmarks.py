"""Every benchmark runs. Its results mean nothing with so little work."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.warm import WARM

BENCHMARKS = Path(__file__).parent
SMALL = {
    "bench_connectors.py": "--rounds 1",
    "bench_checksums.py": "--mib 1 --large 1 --turns 1",
    "bench_client.py": "--rounds 1 --clients 1 --blocks 1",
    "bench_entries.py": "--few 48 --many 96 --repeats 1",
    "bench_index.py": "--entries 100 --rounds 1",
    "bench_lending.py": "--rounds 1 --clients 1 --most-kib 192 --ram 32MiB",
    "bench_order.py": "--entries 100",
    "bench_local.py": "--calls 2 --rounds 1 --entries 2 --entry-bytes 4096",
    "bench_recording.py": "--rounds 2",
    "bench_replay.py": "--requests 20 --repeats 1 --keys 100 --pinned 10 --capacities 50",
    "bench_restart.py": "--entries 100",
    "bench_stalls.py": "--entries 500",
    "bench_savers.py": "--staged 1 --socket 1 --grpc 1 --seconds 0.3",
    "bench_state.py": "--few 100 --many 200 --pinned 10 --repeats 1",
    "bench_watch.py": "--rounds 1",
    "bench_tracing.py": "--turns 1",
    "bench_small.py": "--blocks 2 --kib 64 --turns 1",
    "bench_tiers.py": "--entries 2 --repeats 1 --slabs 60000 --records 100 --puts 4",
}

#: Does what `python PATH ...` does, in a process that has the imports already.
RUN = f"""
import runpy, sys
sys.path[0] = {str(BENCHMARKS)!r}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

ALL = sorted(path.name for path in BENCHMARKS.glob("bench_*.py"))


@pytest.mark.parametrize("name", sorted(SMALL))
def test_each_benchmark_runs(name: str) -> None:
    done = subprocess.run(
        [*WARM, "-c", RUN, str(BENCHMARKS / name), *SMALL[name].split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout


@pytest.mark.parametrize("name", [name for name in ALL if name not in SMALL])
def test_each_long_benchmark_describes_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For benchmarks that take long: all their imports exist. Runs in this process."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out
