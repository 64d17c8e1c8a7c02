"""A fleet whose nodes and masters are hosts of their own. While they are killed and cut off, no
wrong bytes are served, and no call exceeds its limit. `bench_fleet.py --hosts` is the long form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.namespaces import Host, network, why_unavailable
from tests.support.redis_servers import needs_redis
from tests.support.warm import WARM

BENCH = Path(__file__).parents[2] / "bench/bench_fleet.py"
RUN = f"import runpy; runpy.run_path({str(BENCH)!r}, run_name='__main__')"
BLOCKS = 6
#: Each request goes to another node than the previous one, and begins with its prompt.
REQUESTS = 21

pytestmark = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable() or "-")


def reaches(here: Host, there: Host) -> bool:
    """Whether a connection to a closed port is refused: an unreachable host would not answer."""
    script = (
        f"import socket\ntry: socket.create_connection(('{there.address}', 9), 0.5)\n"
        "except ConnectionRefusedError: print('refused')\nexcept OSError: pass"
    )
    command = [*here.prefix, sys.executable, "-S", "-c", script]
    return bool(subprocess.run(command, capture_output=True, check=True).stdout)


def test_links_are_cut_and_mended() -> None:
    with network() as net:
        one, other, third = net.host(), net.host(), net.host(delay_ms=1, rate_mbit=100)
        assert reaches(one, other)
        assert reaches(one, third)
        one.cut_from(other)
        assert not reaches(one, other)
        assert reaches(one, third)
        one.mend_to(other)
        assert reaches(one, other)
        third.cut()
        assert not reaches(one, third)
        third.mend()
        assert reaches(one, third)


@needs_redis
@pytest.mark.parametrize("payloads", ["engine", "nodes"])
def test_a_fleet_in_trouble_serves_nothing_wrong(tmp_path: Path, payloads: str) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": number,
            "input_length": 512 * BLOCKS,
            "output_length": 1,
            "hash_ids": [*range(BLOCKS - 1), 1000 + number],
        }
        for number in range(REQUESTS)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run(
        [
            *(*WARM, "-c", RUN, "--hosts", "--trace", trace, "--payloads", payloads),
            *("--cut", "1", "--part", "1", "--kill-master", "1", "--kill-daemon", "1"),
            *("--slow-ms", "20", "--slow-mbit", "50", "--deadline-ms", "5000"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert not found["mismatches"]
    assert found["verified_bytes"]
    assert {"cut", "part", "kill_master", "kill_daemon"} <= found["faults"].keys()
    assert found["shared"]["fetched_entries"], "nothing was shared despite the faults"
