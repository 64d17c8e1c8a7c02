"""Recovers the disk tier in a directory and exits. `losses.py` records this process.

python -m tests.power.recover DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from .losses import recovered

if __name__ == "__main__":
    recovered(Path(sys.argv[1]))
