"""The Hypothesis profile: a few fixed examples of each test. With `PREFIXD_FUZZ_EXAMPLES` in the
environment, that many new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: Examples of each test in the suite.
FEW = 40

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile(
    "fuzz",
    deadline=None,
    derandomize="PREFIXD_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    print_blob=True,
    max_examples=int(os.environ.get("PREFIXD_FUZZ_EXAMPLES", FEW)),
    suppress_health_check=_SLOW,
)
