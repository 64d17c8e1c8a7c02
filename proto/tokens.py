"""Token ids as bytes that are hashed.

A token id is in 0 ... 2^31 - 1, so that signed and unsigned integers agree, and so that -1, the
padding of a trailing incomplete block, is never a token.

Every function that takes tokens takes any sequence of ints. Buffers of 32-bit integers (`array`,
`memoryview`, numpy) are hashed without a copy. Token ids outside the range, floats and raw `bytes`
(which may be ids, or bytes of ids) raise `InvalidTokens`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from .errors import InvalidTokens
from .kernel import native

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Tokens: TypeAlias = Sequence[int] | Buffer

TOKEN_BYTES: Final = 4
MAX_TOKEN_ID: Final = 2**31 - 1
_LITTLE: Final = sys.byteorder == "little"
_NATIVE_INTS: Final = frozenset("bBhHiIlLqQnN")
_LITTLE_WORDS: Final = frozenset(("<i", "<I", "<l", "<L"))


def token_bytes(tokens: Tokens) -> bytes | memoryview:
    """The token ids as u32 little-endian bytes: a view if they have this form already, else a copy.

    Raises `InvalidTokens` unless they are a one-dimensional sequence of ints in 0 ... 2^31 - 1.
    30,000 tokens take 20 us as a view of 32-bit integers, for one scan, and 170 us as a list.
    """
    raw = raw_bytes(sliceable(tokens))
    # Copied first: a strided slice of a memoryview takes ten times as long. The top byte of a token
    # is ASCII unless its top bit is set.
    if not bytes(raw)[3::TOKEN_BYTES].isascii():
        raise InvalidTokens(f"token ids are in 0 ... {MAX_TOKEN_ID}, one of these is not")
    return raw


def raw_bytes(sequence: Sequence[int] | memoryview) -> bytes | memoryview:
    """`token_bytes` of what `sliceable` returned, in which the top bit of an id may be set."""
    if isinstance(sequence, memoryview) and _LITTLE and sequence.itemsize == TOKEN_BYTES:
        # `cast` takes native formats only, and no empty view.
        castable = sequence.contiguous and len(sequence.format) == 1 and len(sequence) > 0
        return sequence.cast("B") if castable else sequence.tobytes()
    if native and isinstance(sequence, list | tuple | memoryview):
        try:
            return native.token_words(sequence)
        except (TypeError, ValueError, OverflowError, BufferError, IndexError):
            pass  # what is wrong with them, or unusual, shows below
    items = sequence.tolist() if isinstance(sequence, memoryview) else sequence
    try:
        words = array("I", items)
    except (OverflowError, TypeError):
        raise InvalidTokens(
            f"token ids are ints in 0 ... {MAX_TOKEN_ID}, {_wrong(items)}"
        ) from None
    if not _LITTLE:
        words.byteswap()
    return words.tobytes()


def _wrong(items: Sequence[object]) -> str:
    """What of a sequence is no token id, for people."""
    if isinstance(items, str):
        return "this is text"
    for number, item in enumerate(items):
        try:
            array("I", [item])  # type: ignore[type-var]  # it is tried
        except (OverflowError, TypeError):
            shown = repr(item) if isinstance(item, str | int | float | None) else ""
            what = shown if 0 < len(shown) <= 40 else f"of type {type(item).__name__}"
            return f"number {number} is {what}"
    return f"not a {type(items).__name__}"


def sliceable(tokens: Tokens) -> Sequence[int] | memoryview:
    """A view of the integers in a buffer (its slices copy nothing), or the sequence as it is."""
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]  # what has no buffer is caught
    except TypeError:
        view = None
    if view is not None:
        if isinstance(tokens, bytes | bytearray | memoryview) and view.itemsize == 1:
            raise InvalidTokens("tokens are ints: give bytes of ids as memoryview(...).cast('I')")
        if view.ndim != 1:
            raise InvalidTokens(f"tokens are one sequence, not {view.ndim} dimensions of them")
        if view.format.lstrip("@") in _NATIVE_INTS or (_LITTLE and view.format in _LITTLE_WORDS):
            return view
    try:
        len(tokens)  # type: ignore[arg-type]
        tokens[:0]  # type: ignore[index]
    except (TypeError, LookupError):
        raise InvalidTokens(f"tokens are a sequence, not a {type(tokens).__name__}") from None
    return tokens  # type: ignore[return-value]
