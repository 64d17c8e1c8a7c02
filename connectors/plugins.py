"""What engines call at their start, in every process of theirs, where prefixd is installed.

They change nothing in an engine that does not use prefixd: they open no connection, start no thread
and raise nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

logger = logging.getLogger("prefixd.connectors")


def register_vllm() -> None:
    """`{"type": "prefixd", ...}` names the tier, without a `module_path`."""
    try:
        factory: Any = import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
        known: dict[str, object] = getattr(factory, "_registry", {})
        if "prefixd" not in known:
            factory.register_tier("prefixd", "prefixd.connectors.vllm", "PrefixdTier")
    except Exception as problem:
        # Not there, or another vLLM: the connector says so when it is asked for.
        logger.debug("no tier of the name prefixd: %s", problem)


def register_sglang() -> None:
    """SGLang names its backends by module and class: there is nothing to register. Says at start
    what would come as a surprise with the first request."""
    from .sglang import ENGINE

    if ENGINE.version not in ("unknown", ENGINE.tested):
        logger.info(
            "prefixd's connector was made for SGLang %s; this is %s", ENGINE.tested, ENGINE.version
        )
