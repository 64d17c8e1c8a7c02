"""Whether this process is one of several ranks of a model.

Ranks of a tensor- or pipeline-parallel model hold different bytes for the same tokens, of the same
size. A namespace that does not say which rank it is of would give one rank the bytes of another: a
checksum finds nothing wrong with them. Data-parallel ranks look the same from here and may share.
Only the caller knows, so a namespace without a shard is refused, not guessed at: a missing word
costs a sentence, and a wrong guess costs wrong texts.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Final, NamedTuple

from ..proto.errors import InvalidNamespace
from ..proto.keys import Namespace, check_namespace

#: What launchers tell the processes that they start: torchrun and its like, Open MPI.
_VARIABLES: Final = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


class Rank(NamedTuple):
    """`rank` of `size` processes. `source`: what says so."""

    rank: str
    size: int
    source: str


def rank_here() -> Rank | None:
    """The rank of this process, if it is one of several. Imports nothing: a process that did not
    import torch is no rank of torch's."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            size = int(distributed.get_world_size())
            if size < 2:
                return None
            return Rank(str(distributed.get_rank()), size, "torch.distributed")
    except Exception:
        pass  # another version of torch, or a group that is being taken down
    return _launched(os.getpid())


@cache
def _launched(_process: int) -> Rank | None:
    """What the launcher told this process. Read once: every search asks."""
    for size_variable, rank_variable in _VARIABLES:
        text = os.environ.get(size_variable, "")
        rank = os.environ.get(rank_variable, "")
        if rank and text.isascii() and text.isdecimal() and int(text[:9]) > 1:
            return Rank(rank, int(text[:9]), f"${size_variable} and ${rank_variable}")
    return None


def check_shard(namespace: Namespace) -> None:
    """Raises InvalidNamespace for what is none, and for one without a shard if this process is one
    of several ranks."""
    if check_namespace(namespace).shard:
        return
    here = rank_here()
    if here is not None:
        raise InvalidNamespace(
            f"this process is rank {here.rank[:20]} of {here.size} ({here.source}), and its "
            f"namespace has no shard: Namespace(shard='tp {here.rank[:20]}/{here.size}') if each "
            "rank holds a part of the state, shard='whole' if every rank holds all of it"
        )
