"""The daemon."""

from __future__ import annotations

import os

# gRPC's core writes a line to stderr for each TLS handshake that fails, which anybody can cause. It
# reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
