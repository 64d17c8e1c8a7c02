"""For every test: examples that are the same at each run, on a machine of any speed."""

from __future__ import annotations

from hypothesis import settings

# No deadline: an example that takes long says something of the machine, not of the code.
settings.register_profile("prefixd", deadline=None, derandomize=True, database=None)
settings.load_profile("prefixd")
