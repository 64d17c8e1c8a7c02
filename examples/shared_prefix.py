"""Two prompts that begin alike, and an "engine" that counts what it computes.

Needs a running daemon: `prefixd`. Its address may be given as an argument.
"""

from __future__ import annotations

import hashlib
import sys

from prefixd.client import Client, Namespace, SaveItem, Tier, context_hash

BLOCK_TOKENS, BLOCK_BYTES = 64, 4096


def prefill(tokens: list[int]) -> bytes:
    """The state of one block: here, a digest of its tokens."""
    return hashlib.sha256(repr(tokens).encode()).digest() * (BLOCK_BYTES // 32)


def run(client: Client, namespace: Namespace, tokens: list[int]) -> int:
    """Returns how many blocks were computed."""
    chain = client.chain(namespace, tokens, BLOCK_TOKENS)
    with client.longest_run(chain) as hit:
        buffers = [bytearray(BLOCK_BYTES) for _ in hit]
        start = hit.restore_into(buffers).run
    keys = list(chain.complete_keys)
    blocks = [tokens[n * BLOCK_TOKENS : (n + 1) * BLOCK_TOKENS] for n in range(start, len(keys))]
    items = [
        SaveItem(key, prefill(block), BLOCK_TOKENS)
        for key, block in zip(keys[start:], blocks, strict=True)
    ]
    client.save_many(items, tier=Tier.RAM, ancestors=keys[:start])
    return len(items)


def main(address: str | None) -> None:
    weights = hashlib.sha256(b"the weights of a model").digest()
    namespace = Namespace(weights, "f16", context_hash({"rope": 10_000}))
    system, question = list(range(1_024)), list(range(5_000, 5_512))
    with Client(address) as client:
        client.wait_connected()
        print("computed blocks:", run(client, namespace, system + question))
        print("the same again:", run(client, namespace, system + question))
        print("another question:", run(client, namespace, system + question[::-1]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
