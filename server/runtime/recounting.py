"""Recounts the state while everything goes on."""

from __future__ import annotations

import structlog

from ..core.state import MetaState
from .slices import Slices

log = structlog.get_logger("prefixd.recounting")


async def recount(state: MetaState) -> tuple[list[str], int]:
    """What does not add up, in sentences, and how many there are in all: of very many only the
    first are told. Never raises: a recount that fails is a problem, too."""
    with state.recount() as counting:
        try:
            await Slices().through(counting.steps())
        except Exception as problem:
            log.critical("recount_failed", exc_info=problem)
            return [*counting.problems, f"the recount failed: {problem!r}"], counting.found + 1
    return counting.problems, counting.found
