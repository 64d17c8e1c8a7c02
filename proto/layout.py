"""What a payload may look like, its layers, its token ids and its checksum.

What both sides check; how the daemon stores it is in `tiers/rows.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastcrc import crc32

from .errors import InvalidSize
from .keys import TOKEN_BYTES, Key, Namespace, block_key_of_bytes, prefix_key_of_bytes
from .limits import MAX_LAYERS, MAX_PAYLOAD_BYTES, MAX_TOKEN_IDS_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

# ---- checksum

#: CRC32C (Castagnoli, as in iSCSI) of any contiguous buffer, continuing the second argument. From
#: 16 KiB on another thread can run meanwhile. It multiplies without carries where the processor
#: can, which takes 0.6 of the time of the instruction that is made for CRC32C
#: (tests/bench/bench_checksums.py).
crc32c = crc32.iscsi

# ---- payload


def check_layout(payload_bytes: int, layer_count: int) -> None:
    """Raises `InvalidSize` unless a payload can have this size and this many equal layers."""
    if not 0 < payload_bytes <= MAX_PAYLOAD_BYTES:
        raise InvalidSize(f"a payload has 1 ... {MAX_PAYLOAD_BYTES} bytes, not {payload_bytes}")
    if not 0 <= layer_count <= MAX_LAYERS:
        raise InvalidSize(f"a payload has 0 ... {MAX_LAYERS} layers, not {layer_count}")
    if layer_count and payload_bytes % layer_count:
        raise InvalidSize(f"{payload_bytes} bytes are not {layer_count} equal layers")


def layer_slice(payload_bytes: int, layer_count: int, layer: int) -> slice:
    """Where layer `layer` lies in the payload. Raises `InvalidSize` if there is no such layer."""
    check_layout(payload_bytes, layer_count)
    if not 0 <= layer < layer_count:
        raise InvalidSize(f"there is no layer {layer} of {layer_count}")
    layer_bytes = payload_bytes // layer_count
    return slice(layer * layer_bytes, (layer + 1) * layer_bytes)


# ---- token ids


def check_token_ids(token_ids_bytes: int) -> None:
    """Raises `InvalidSize` unless a record may carry so many bytes of token ids."""
    if token_ids_bytes > MAX_TOKEN_IDS_BYTES or token_ids_bytes % TOKEN_BYTES:
        raise InvalidSize(
            f"token ids are at most {MAX_TOKEN_IDS_BYTES} bytes, {TOKEN_BYTES} each, "
            f"not {token_ids_bytes}"
        )


def verify_token_ids(
    namespace: Namespace,
    key: Key,
    token_ids: Buffer,
    parent: Key | None = None,
    index: int | None = None,
) -> bool:
    """Is `key` the key of these stored token ids?

    As a prefix entry of the namespace; with `index`, as that block of a chain after `parent`
    (None: the namespace's root, before block 0).
    """
    if index is None:
        return prefix_key_of_bytes(namespace, token_ids) == key
    return block_key_of_bytes(namespace.root if parent is None else parent, index, token_ids) == key
