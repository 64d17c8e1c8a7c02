"""With `PREFIXD_FUZZ_EXAMPLES` in the environment: so many new examples of everything, instead of
the same few each time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: What the suite has time for.
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
