"""Large blocks that were freed are used again without asking the kernel for pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading
from prefixd.tiers.heap import keep_large_blocks
if not keep_large_blocks():
    sys.exit(77)

def use():
    blocks = [bytearray(2**20) for _ in range(100)]
    del blocks

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

use()
before = faults()
use()
worker = threading.Thread(target=use)
worker.start()
worker.join()
print(faults() - before)
"""


def test_freed_blocks_are_used_again_by_any_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    pages = 2 * 100 * 2**20 // 4096
    assert int(done.stdout) < pages // 50
