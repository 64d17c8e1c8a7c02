"""Entry points that engines call in each of their processes at start, where prefixd is installed.

They change nothing in an engine that does not use prefixd: they open no connection, start no thread
and raise nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

logger = logging.getLogger("prefixd.client.connectors")


def register_vllm() -> None:
    """Register the tier, so that `{"type": "prefixd", ...}` needs no `module_path`."""
    try:
        factory: Any = import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
        known: dict[str, object] = getattr(factory, "_registry", {})
        if "prefixd" not in known:
            factory.register_tier("prefixd", "prefixd.client.connectors.vllm", "PrefixdTier")
    except Exception as problem:
        # No vLLM, or another version. The connector reports that when it is used.
        logger.debug("no tier of the name prefixd: %s", problem)


def register_sglang() -> None:
    """Log a version of SGLang that the connector was not made for, before the first request, and
    have SGLang tell of weights that are updated in place. There is nothing to register: SGLang
    names its backends by module and class."""
    from .sglang import ENGINE, watch_updates

    if not ENGINE.is_tested:
        logger.info(
            "prefixd's connector was made for SGLang %s; this is %s", ENGINE.tested, ENGINE.version
        )
    try:
        watch_updates()
    except Exception as problem:
        logger.warning("updates of weights in place will not be noticed: %s", problem)
