"""A prompt with a picture: the tokens are the same for every picture, so its digest is in the keys.

Needs a running daemon: `prefixd`. Its address may be given as an argument.
"""

from __future__ import annotations

import hashlib
import sys

from prefixd.client import Client, Extra, Namespace, SaveItem, Tier, context_hash

BLOCK_TOKENS, BLOCK_BYTES = 64, 4096
#: What the tokenizer puts in the place of a picture.
PICTURE_TOKENS = [151_655] * 256


def run(client: Client, namespace: Namespace, tokens: list[int], extras: list[Extra]) -> int:
    """Returns how many blocks were computed."""
    chain = client.chain(namespace, tokens, BLOCK_TOKENS, extras=extras)
    with client.longest_run(chain) as hit:
        start = hit.restore_into([bytearray(BLOCK_BYTES) for _ in hit]).run
    keys = list(chain.complete_keys)
    items = [SaveItem(key, bytes(BLOCK_BYTES), BLOCK_TOKENS) for key in keys[start:]]
    client.save_many(items, tier=Tier.RAM, ancestors=keys[:start])
    return len(items)


def main(address: str | None) -> None:
    weights = hashlib.sha256(b"the weights of a model with a vision tower").digest()
    namespace = Namespace(weights, "f16", context_hash({"rope": 10_000}))
    system, question = list(range(512)), list(range(5_000, 5_256))
    tokens = system + PICTURE_TOKENS + question
    cat, dog = (
        Extra(len(system), hashlib.sha256(b"image" + pixels).digest())
        for pixels in (b"cat", b"dog")
    )
    with Client(address) as client:
        client.wait_connected()
        print("computed blocks:", run(client, namespace, tokens, [cat]))
        print("the same again:", run(client, namespace, tokens, [cat]))
        print("another picture:", run(client, namespace, tokens, [dog]))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
