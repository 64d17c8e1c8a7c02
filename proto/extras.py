"""Extras: digests of what the token ids of a prompt do not say, at their positions.

An image, an audio clip or a prompt embedding stands in the prompt as tokens that are the same for
every picture. An adapter that a request chooses changes the state of every token. Their digests go
into the keys (`proto/keys.py` has the formulas): no key with an extra equals one without, or one
with other extras, or with the same extras at other positions.

A key contains the extras of its own block and of all blocks before it. So the extra of an image
belongs to the first of its tokens, and covers the ones that follow in later blocks, and that of an
adapter belongs to position 0. A digest that stands for different kinds of things has the kind in
its input: `sha256(b"image" + pixels)`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from .errors import InvalidExtras

if TYPE_CHECKING:
    #: In any order, several at one position if need be.
    Extras: TypeAlias = Iterable["Extra | tuple[int, bytes]"]

DIGEST_BYTES: Final = 32
_LABEL: Final = b"prefixd/extras/v1\0"
_EXTRA: Final = struct.Struct(f"<I{DIGEST_BYTES}s")


class Extra(NamedTuple):
    """`position`: the index of a token of the prompt. `digest`: 32 bytes."""

    position: int
    digest: bytes


def checked_extras(extras: Extras, token_count: int) -> list[Extra]:
    """The extras by position, and by digest at one position. Raises `InvalidExtras` for a position
    that no token has, and for what is no digest of 32 bytes."""
    checked: list[Extra] = []
    try:
        for position, digest in extras:
            if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
                raise InvalidExtras(f"the digest of an extra is {DIGEST_BYTES} bytes")
            checked.append(Extra(index(position), digest))
    except (TypeError, ValueError) as problem:
        if isinstance(problem, InvalidExtras):
            raise
        raise InvalidExtras(f"extras are pairs of position and digest: {problem}") from None
    checked.sort()
    if checked and not 0 <= checked[0].position <= checked[-1].position < token_count:
        raise InvalidExtras(
            f"positions of extras are in 0 ... {token_count - 1}, the tokens of this prompt"
        )
    return checked


def with_extras(key: bytes, extras: Sequence[Extra], start: int = 0) -> bytes:
    """`key` combined with extras that are sorted; `key` itself without any. Their positions count
    from `start`."""
    if not extras:
        return key
    packed = (_EXTRA.pack(position - start, digest) for position, digest in extras)
    return hashlib.sha256(b"".join((_LABEL, key, *packed))).digest()
