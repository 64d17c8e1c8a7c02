"""Freed large blocks are reused without new pages from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, threading
from prefixd.server.runtime.process_memory import keep_large_blocks
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


GIVEN_BACK = """
import sys
from pathlib import Path
from prefixd.server.runtime.process_memory import (
    free_heap_bytes,
    give_back_free_heap,
    keep_large_blocks,
)
if not keep_large_blocks() or not free_heap_bytes():
    sys.exit(77)

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident_bytes()
blocks = [bytearray(b"x") * 2**20 for _ in range(100)]
del blocks[::2]
assert free_heap_bytes() >= 40 * 2**20
kept = resident_bytes() - before
give_back_free_heap()
given_back = kept - (resident_bytes() - before)
assert kept > 90 * 2**20, kept
assert given_back > 45 * 2**20, given_back
assert all(block == b"x" * 2**20 for block in blocks)
"""


def test_what_is_free_can_be_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("this C library does not say what is free")
    assert done.returncode == 0, done.stderr
