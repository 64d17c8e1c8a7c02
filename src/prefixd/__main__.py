"""`python -m prefixd`: the daemon."""

from __future__ import annotations

from .commands import prefixd

prefixd()
