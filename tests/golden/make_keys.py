"""Write keys.json, the vectors that every implementation of the keys has to reproduce.

It uses nothing of the package, only hashlib, struct and the formulas in the docstring of
proto/keys.py. Run it by hand after a change of the format, which changes all keys.
"""

import hashlib
import json
import struct
from pathlib import Path

WEIGHTS = hashlib.sha256(b"some model").digest()
CONTEXT = hashlib.sha256(b"some context").digest()
LORA_A = hashlib.sha256(b"adapter a").digest()
LORA_B = hashlib.sha256(b"adapter b").digest()


def sha256(data):
    return hashlib.sha256(data).digest()


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def i32(*numbers):
    return struct.pack(f"<{len(numbers)}i", *numbers)


def i64(number):
    return struct.pack("<q", number)


# The scaled integers are given explicitly: 1.0 is 2^32, 0.75 is 3 * 2^30, and -0.5 is -2^31.
# 3 * 2^-33 lies half-way between 1 and 2 steps, and ties round to even.
NAMESPACES = {
    "plain": {
        "fingerprint": WEIGHTS,
        "quantisation": b"f16",
        "adapters": [],
        "effective": WEIGHTS,
    },
    "no quantisation": {
        "fingerprint": WEIGHTS,
        "quantisation": b"",
        "adapters": [],
        "effective": WEIGHTS,
    },
    "eight bytes of quantisation": {
        "fingerprint": WEIGHTS,
        "quantisation": b"q4_K_M\xc3\xa9",
        "adapters": [],
        "effective": WEIGHTS,
    },
    "one adapter": {
        "fingerprint": WEIGHTS,
        "quantisation": b"f16",
        "adapters": [(LORA_A, 1.0)],
        "effective": sha256(WEIGHTS + LORA_A + i64(2**32)),
    },
    "two adapters": {
        "fingerprint": WEIGHTS,
        "quantisation": b"f16",
        "adapters": [(LORA_A, 0.75), (LORA_B, -0.5)],
        "effective": sha256(
            WEIGHTS + b"".join(sorted([LORA_A + i64(3 * 2**30), LORA_B + i64(-(2**31))]))
        ),
    },
    "a scale between two steps": {
        "fingerprint": WEIGHTS,
        "quantisation": b"f16",
        "adapters": [(LORA_A, 3 * 2.0**-33)],
        "effective": sha256(WEIGHTS + LORA_A + i64(2)),
    },
    "salt": {
        "fingerprint": WEIGHTS,
        "quantisation": b"f16",
        "adapters": [],
        "salt": b"tenant 7",
        "effective": sha256(b"prefixd/salt/v1\0" + u32(8) + b"tenant 7" + WEIGHTS),
    },
    "shard": {
        "fingerprint": WEIGHTS,
        "quantisation": b"f16",
        "adapters": [],
        "shard": b"tp1/4",
        "effective": sha256(b"prefixd/shard/v1\0" + u32(5) + b"tp1/4" + WEIGHTS),
    },
    "everything": {
        "fingerprint": WEIGHTS,
        "quantisation": b"q8_0",
        "adapters": [(LORA_B, 1.0)],
        "salt": b"ab",
        "shard": b"c",
        "effective": sha256(
            b"prefixd/shard/v1\0"
            + u32(1)
            + b"c"
            + sha256(b"prefixd/salt/v1\0" + u32(2) + b"ab" + sha256(WEIGHTS + LORA_B + i64(2**32)))
        ),
    },
}

TOKENS = {
    "none": [],
    "zero": [0],
    "one": [1],
    "ends of the range": [0, 1, 255, 256, 65535, 65536, 2**31 - 1],
    "eleven": [(n * 7919 + 13) % 151_936 for n in range(11)],
    "hundred": [(n * 7919 + 13) % 151_936 for n in range(100)],
}
BLOCK_TOKENS = (1, 4, 16)


def preamble(namespace):
    return namespace["effective"] + namespace["quantisation"].ljust(8, b"\0") + CONTEXT


def chain(namespace, tokens, block_tokens):
    """Keys of the whole blocks, and the key of the padded rest (None: there is no rest)."""
    parent = sha256(preamble(namespace))
    keys = []
    whole, rest = divmod(len(tokens), block_tokens)
    for index in range(whole):
        block = tokens[index * block_tokens : (index + 1) * block_tokens]
        parent = sha256(parent + u32(index) + i32(*block))
        keys.append(parent)
    if not rest:
        return keys, None
    block = tokens[whole * block_tokens :] + [-1] * (block_tokens - rest)
    return keys, sha256(parent + u32(whole) + i32(*block))


def with_extras(key, extras):
    """A key combined with (position, digest) pairs, if there are any."""
    if not extras:
        return key
    packed = b"".join(u32(position) + digest for position, digest in sorted(extras))
    return sha256(b"prefixd/extras/v1\0" + key + packed)


def chain_with_extras(namespace, tokens, block_tokens, extras):
    """Keys of all blocks; the last one is padded if it is incomplete."""
    parent = sha256(preamble(namespace))
    keys = []
    for index, start in enumerate(range(0, len(tokens), block_tokens)):
        block = tokens[start : start + block_tokens]
        block += [-1] * (block_tokens - len(block))
        own = [(p - start, d) for p, d in extras if start <= p < start + block_tokens]
        parent = sha256(with_extras(parent, own) + u32(index) + i32(*block))
        keys.append(parent)
    return keys


def context(*fields):
    """The hash of sorted (name, type, value) triples."""
    encoded = b"".join(
        u32(len(name)) + name + kind + u32(len(value)) + value for name, kind, value in fields
    )
    return sha256(b"prefixd/context/v1\0" + encoded).hex()


CONTEXTS = [
    {"params": {}, "hash": context()},
    {
        "params": {"rope_theta": 500000.0, "n_ctx": 8192, "flash": True, "yarn": None},
        "hash": context(
            (b"flash", b"b", b"\x01"),
            (b"n_ctx", b"i", b"8192"),
            (b"rope_theta", b"i", b"500000"),
            (b"yarn", b"n", b""),
        ),
    },
    {
        "params": {"type_k": "f16", "rope_scale": 0.25, "é": "ü", "z": -1},
        "hash": context(
            (b"rope_scale", b"f", struct.pack("<d", 0.25)),
            (b"type_k", b"s", b"f16"),
            (b"z", b"i", b"-1"),
            (b"\xc3\xa9", b"s", b"\xc3\xbc"),
        ),
    },
]


PICTURE, VOICE = sha256(b"picture"), sha256(b"voice")
EXTRAS = {
    "a picture in the first block": [(0, PICTURE)],
    "the same one token later": [(1, PICTURE)],
    "another picture": [(0, VOICE)],
    "a picture in a later block": [(5, PICTURE)],
    "two in one block": [(5, VOICE), (4, PICTURE)],
    "two at one position": [(4, VOICE), (4, PICTURE)],
    "in the incomplete block": [(9, PICTURE)],
    "in three blocks": [(10, PICTURE), (0, VOICE), (7, PICTURE)],
}


def extras_vectors():
    tokens = TOKENS["eleven"]
    for name in ("plain", "everything"):
        namespace = NAMESPACES[name]
        for what, extras in EXTRAS.items():
            plain = sha256(preamble(namespace) + u32(*tokens))
            yield {
                "namespace": name,
                "what": what,
                "tokens": tokens,
                "block_tokens": 4,
                "extras": [[position, digest.hex()] for position, digest in extras],
                "keys": [k.hex() for k in chain_with_extras(namespace, tokens, 4, extras)],
                "prefix": with_extras(plain, extras).hex(),
            }


def vectors():
    cases = []
    for name, namespace in NAMESPACES.items():
        for tokens in TOKENS.values():
            chains = []
            for block_tokens in BLOCK_TOKENS if len(tokens) < 50 else BLOCK_TOKENS[-1:]:
                keys, partial = chain(namespace, tokens, block_tokens)
                chains.append(
                    {
                        "block_tokens": block_tokens,
                        "keys": [key.hex() for key in keys],
                        "partial": partial and partial.hex(),
                    }
                )
            prefix = sha256(preamble(namespace) + u32(*tokens)).hex()
            cases.append({"namespace": name, "tokens": tokens, "prefix": prefix, "chains": chains})
    namespaces = {
        name: {
            "fingerprint": namespace["fingerprint"].hex(),
            "quantisation": namespace["quantisation"].hex(),
            "context_params": CONTEXT.hex(),
            "adapters": [[adapter.hex(), scale] for adapter, scale in namespace["adapters"]],
            "salt": namespace.get("salt", b"").hex(),
            "shard": namespace.get("shard", b"").hex(),
            "effective_fingerprint": namespace["effective"].hex(),
        }
        for name, namespace in NAMESPACES.items()
    }
    return {
        "namespaces": namespaces,
        "contexts": CONTEXTS,
        "cases": cases,
        "extras": list(extras_vectors()),
    }


def text():
    """The vectors as JSON, one case a line."""
    sections = []
    for name, content in vectors().items():
        if isinstance(content, dict):
            lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
            brackets = "{}"
        else:
            lines = [f"  {json.dumps(value)}" for value in content]
            brackets = "[]"
        body = ",\n".join(lines)
        sections.append(f"{json.dumps(name)}: {brackets[0]}\n{body}\n{brackets[1]}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    Path(__file__).with_name("keys.json").write_text(text())
