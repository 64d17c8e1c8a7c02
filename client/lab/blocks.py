"""What stands for the blocks of a trace in a live replay: their keys and their bytes.

A trace has ids, not tokens, and an id stands for its block and everything before it, which is
what the key of a block in a chain does. So the key of a block is

    SHA-256( root || u64le(id) )

where `root` is the prefix key of no tokens of a namespace that only replays have (its
fingerprint is the SHA-256 of "prefixd/replay/v1"), and that differs for another block size, in
bytes or tokens, or another salt: replays that would disagree on the bytes of a block never
meet. The payload of a block is a fixed function of its id and its size (`BlockPayloads`).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ...proto.errors import CallerError
from ...proto.keys import Key, Namespace, context_hash
from ...proto.limits import MAX_PAYLOAD_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Few: to make them takes most of the time of a small payload.
TILE_BYTES: Final = 512
_LABEL: Final = b"prefixd/replay/v1"
_SEED: Final = struct.Struct("<QQ")
_U64: Final = struct.Struct("<Q")
_MAX_ID: Final = 2**64 - 1


def replay_namespace(block_bytes: int, block_tokens: int, salt: str = "") -> Namespace:
    """What the keys of a replay with these blocks are scoped by."""
    return Namespace(
        fingerprint=hashlib.sha256(_LABEL).digest(),
        quantisation=b"",
        context_params=context_hash({"block_bytes": block_bytes, "block_tokens": block_tokens}),
        salt=salt,
    )


def keys_of_ids(root: Key, ids: Sequence[int]) -> list[Key]:
    """The keys of blocks with these ids. Raises CallerError for an id outside 0 ... 2^64 - 1."""
    prefix = hashlib.sha256(root)
    keys: list[Key] = []
    try:
        for block_id in ids:
            digest = prefix.copy()
            digest.update(_U64.pack(block_id))
            keys.append(Key(digest.digest()))
    except struct.error:
        raise CallerError(f"a block id is in 0 ... {_MAX_ID}, not {block_id}") from None
    return keys


class BlockPayloads:
    """The bytes of blocks: `block_bytes` each, cheap to make and to compare, hard to mix up.

    The first tile of 512 bytes is SHAKE-128 of the id and the block's size, so that no two
    blocks agree anywhere, nor do blocks of two sizes. The others repeat it, with their own
    number as u32le in place of their first 4 bytes, so that no tile can stand for another of
    the same block. Swapped, shifted, stale or cut bytes are therefore all found.
    """

    def __init__(self, block_bytes: int) -> None:
        if not 1 <= block_bytes <= MAX_PAYLOAD_BYTES:
            raise CallerError(f"a block has 1 ... {MAX_PAYLOAD_BYTES} bytes, not {block_bytes}")
        self.block_bytes = block_bytes
        self._tiles = -(-block_bytes // TILE_BYTES)
        numbers = array("I", range(1, self._tiles))
        if sys.byteorder == "big":
            numbers.byteswap()
        #: the first bytes of the numbers of all tiles behind the first, their second bytes, ...
        self._columns = [numbers.tobytes()[byte::4] for byte in range(4)]

    def payload(self, block_id: int) -> bytearray:
        """The bytes of a block; the caller's own."""
        seed = _LABEL + _SEED.pack(block_id, self.block_bytes)
        payload = bytearray(hashlib.shake_128(seed).digest(TILE_BYTES)) * self._tiles
        if self._tiles > 1:
            for byte, column in enumerate(self._columns):
                payload[TILE_BYTES + byte :: TILE_BYTES] = column
        del payload[self.block_bytes :]
        return payload

    def matches(self, block_id: int, data: Buffer) -> bool:
        """Are these exactly the bytes of that block? `data` is any contiguous buffer."""
        # A bytearray compares itself with any buffer by memcmp; a memoryview on the left would
        # compare item by item.
        return self.payload(block_id) == data
