"""The functions of the native kernel (`proto/native/module.c`).

Buffers are contiguous. Every function checks all arguments before a byte moves, and raises
TypeError, ValueError, BufferError or OSError. None of them keeps a buffer after it returns.
Copies and checksums of 256 KiB and more, in one call, run without the GIL.
"""

from collections.abc import Sequence
from typing import Final, Literal

from typing_extensions import Buffer

#: Of the module that was built; see `proto/kernel.py`.
ABI: Final[int]

def flat(buffers: Sequence[object], writable: bool, /) -> bool:
    """Are all of them memoryviews of flat unsigned bytes, none of them empty, and writable if that
    is asked for?"""

def crc32c(data: Buffer, crc: int = 0, /) -> int:
    """The CRC32C of `data`, continuing `crc`."""

def copy(target: Buffer | Sequence[Buffer], source: Buffer | Sequence[Buffer], /) -> None:
    """Copy. Either side may be a list or a tuple of buffers. Raises ValueError if
    the sizes differ."""

def copy_crc32c(
    target: Buffer | Sequence[Buffer], source: Buffer | Sequence[Buffer], crc: int = 0, /
) -> int:
    """`copy`, and return the CRC32C of what was stored, continuing `crc`."""

def gather(
    memory: Buffer,
    starts: Sequence[int],
    limits_bytes: Sequence[int],
    sources: Sequence[Buffer | Sequence[Buffer]],
    around: bool,
    /,
) -> list[int]:
    """Copy each source, a buffer or a list of buffers, to `memory[start:]`; it is at most `limit`
    long. `around`: past the processor's cache, if it can, as nobody reads the bytes soon. Returns
    the CRC32C of each. Raises OSError if a source is longer than its limit, or does
    not fit into the memory."""

def restore(
    rows: bytes,
    targets: Sequence[Buffer | Sequence[Buffer]],
    check: Sequence[bool],
    memory: Buffer,
    /,
) -> list[int]:
    """Fill each target, a buffer or a list of buffers, from the extent in `memory` of its row; see
    `find_rows`. Returns the positions of those with `check` whose CRC32C is not that of their row.
    Raises OSError if a target is longer than its extent, or an extent lies beyond the memory."""

def read_rows(
    rows: bytes,
    targets: Sequence[Buffer | Sequence[Buffer]],
    check: Sequence[bool],
    fd: int,
    most_bytes: int,
    /,
) -> tuple[int, list[int]]:
    """`restore` from a file, in this order, as far as its page cache has the bytes, and no further
    than `most_bytes` and the rest of one target. Never waits for the device. Returns how many
    targets were filled, and the positions of those whose CRC32C is wrong. The next one may be
    filled in part."""

def token_words(tokens: Sequence[int] | Buffer, /) -> bytes:
    """Token ids as 32-bit integers: those of a list, a tuple, or a buffer of integers of any size.
    Raises ValueError for one that is not in 0 ... 2^31 - 1, TypeError for what is no integer."""

def chain_keys(parent: Buffer, index: int, tokens: Buffer, block_tokens: int, /) -> list[bytes]:
    """The keys of the complete blocks of `tokens`, 32-bit little-endian integers. Raises ValueError
    for one that is not in 0 ... 2^31 - 1, and for an index that does not fit."""

def digests(head: Buffer, ids: Sequence[Buffer], /) -> list[bytes]:
    """SHA-256(head || id) of each. A head has at most 63 bytes."""

def find(
    index: Buffer,
    max_heads: int,
    rows: int,
    multiplier: bytes,
    keys: Sequence[bytes],
    stop_at: Literal[-1, 0, 1],
    /,
) -> list[tuple[int, bytes] | None]:
    """The number and the row of each key. `stop_at`: end with the first key that is there (1) or is
    not (0)."""

def find_rows(
    index: Buffer,
    max_heads: int,
    rows: int,
    multiplier: bytes,
    keys: Sequence[bytes],
    stop_at: Literal[-1, 0, 1],
    /,
) -> tuple[bytes, list[int] | None] | None:
    """The rows that `find` finds, packed: 96 bytes each, with the number of the row in place of its
    link. Beside them the positions of their keys; None: those of the first keys. None in place of
    both if a row has not exactly one extent."""

def tiers(
    index: Buffer,
    max_heads: int,
    rows: int,
    multiplier: bytes,
    keys: Sequence[bytes],
    stop_at: Literal[-1, 0, 1],
    /,
) -> bytes:
    """The tier of each key that `find` looks up, 0 if it is not there."""

def moved(
    index: Buffer, max_heads: int, rows: int, multiplier: bytes, packed: bytes, /
) -> list[int] | None:
    """The positions of those packed rows that have another generation now; None if the index is
    revoked. All loads before this call are ordered before its own."""

def put_rows(
    index: Buffer,
    multiplier: bytes,
    count: int,
    free_row: int,
    fresh_row: int,
    secured_row: int,
    shape: int,
    entries: Sequence[object],
    at: int,
    /,
) -> tuple[int, int, int]:
    """List entries, `proto.entry.Listed`, from position `at` on, in an index with `count` heads.
    Returns the position of the first that was not listed, as it replaces another, does not fit into
    one row, or there is none for it; and the numbers of the next free and the next fresh row."""

def delete_rows(
    index: Buffer,
    multiplier: bytes,
    count: int,
    free_row: int,
    fresh_row: int,
    secured_row: int,
    shape: int,
    keys: Sequence[bytes],
    at: int,
    /,
) -> tuple[int, int, int, int]:
    """Remove the rows of keys from position `at` on. Returns the position of the first that was not
    dealt with, as it has several rows; how many of the others were listed; the next free row, and
    the shape. Before anything is stored after this, readers find that the rows are gone."""

def note(
    ring: Buffer,
    last: Buffer,
    number: int,
    now_ns: int,
    session: int,
    what: int,
    entries: Sequence[object],
    left: Buffer | None,
    /,
) -> None:
    """Write a record of each entry (`server.core.entries.Entry`), the first one as record `number`,
    to the ring and the buckets of a journal, and mark its key in the Bloom filter `left`, if there
    is one. The number of buckets and that of the filter's bits are powers of two."""

def forms() -> tuple[list[str], list[str]]:
    """The forms of checksums and of hashes that run on this processor, best first."""

def form() -> tuple[str, str]:
    """The forms in use."""

def use(checksum: str, hash: str, /) -> None:
    """Use these forms, in this process. For tests."""
