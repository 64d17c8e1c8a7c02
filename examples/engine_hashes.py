"""Pages whose hashes an engine has already, saved from and restored into their pieces in its pool.

Needs a running daemon: `prefixd`. Its address may be given as an argument.
"""

from __future__ import annotations

import hashlib
import sys

from prefixd.client import Client, ForeignNamespace, SaveItem, Tier

LAYERS, PAGES, PIECE_BYTES = 4, 8, 1024


def main(address: str | None) -> None:
    # The keys and the values of each layer are separate memory, as in an engine's pool.
    pool = [bytearray(b"%c" % (65 + n) * PAGES * PIECE_BYTES) for n in range(2 * LAYERS)]

    def page(number: int) -> list[memoryview]:
        part = slice(number * PIECE_BYTES, (number + 1) * PIECE_BYTES)
        return [memoryview(piece)[part] for piece in pool]

    hashes = [hashlib.sha256(b"page %d" % number).hexdigest() for number in range(3)]
    namespace = ForeignNamespace("example", {"model": "m", "dtype": "bf16", "page": 64})
    keys = namespace.keys(hashes)
    with Client(address) as client:
        client.wait_connected()
        items = [SaveItem(key, page(number)) for number, key in enumerate(keys)]
        client.save_many(items, tier=Tier.RAM)
        print("pages there:", client.leading_run(keys))
        for piece in pool:
            piece[5 * PIECE_BYTES :] = bytes(3 * PIECE_BYTES)
        with client.claim(keys) as hit:
            result = hit.restore_into([page(number) for number in (5, 6, 7)])
        whole = all(piece[5 * PIECE_BYTES] == piece[0] for piece in pool)
        print("pages restored:", result.restored.count(True), "right:", whole)
        print("deleted:", *(status.name.lower() for status in client.delete(keys)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
