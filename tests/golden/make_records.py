"""Write record_*.bin, records whose every byte is put down here by hand.

Nothing here comes from the package, from msgpack or from a CRC library: struct, and a CRC32C
of eleven lines. Run it by hand after a change of the format, which gets a new version number
and new files beside these.
"""

import struct
from pathlib import Path

KEY = bytes(range(32))


def crc32c(data):
    """CRC-32C (Castagnoli), reflected, one bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def header(metadata, numbers):
    """The 48 bytes: `numbers` are (field, offset, struct format, value)."""
    raw = bytearray(48)
    raw[0:4] = b"PFXD"
    for _, offset, kind, value in numbers:
        struct.pack_into("<" + kind, raw, offset, value)
    struct.pack_into("<I", raw, 44, crc32c(bytes(raw[:44]) + metadata))
    return bytes(raw)


def numbers(metadata_bytes, token_count, payload_bytes, layer_count, flags=0, version=1):
    return [
        ("version", 4, "H", version),
        ("flags", 6, "H", flags),
        ("metadata_bytes", 8, "I", metadata_bytes),
        ("token_count", 12, "I", token_count),
        ("payload_bytes", 16, "Q", payload_bytes),
        ("generation", 24, "Q", 0x0102030405060708),
        ("created_ns", 32, "q", 1_700_000_000_123_456_789),
        ("reason", 40, "B", 3),
        ("tier", 41, "B", 2),
        ("layer_count", 42, "H", layer_count),
    ]


def record(metadata, payload, token_count, layer_count=0, flags=0, version=1):
    head = header(
        metadata, numbers(len(metadata), token_count, len(payload), layer_count, flags, version)
    )
    padding = bytes(-(len(head) + len(metadata)) % 64)
    return head + metadata + padding + payload + struct.pack("<I", crc32c(payload))


# msgpack: 0x8n map of n, 0xan text of n bytes, 0xc4 and 0xc5 bytes with a u8 or u16 of length.
KEY_FIELD = b"\xa3key\xc4\x20" + KEY
TOKEN_IDS = struct.pack("<5I", 1, 2, 3, 0x7FFFFFFF, 0xFFFFFFFF)
LONG_TOKEN_IDS = struct.pack("<64I", *range(100, 164))

RECORDS = {
    "record_plain": record(b"\x81" + KEY_FIELD, b"\x01", token_count=1),
    "record_layers": record(
        b"\x81" + KEY_FIELD, bytes(n * 7 % 256 for n in range(96)), token_count=512, layer_count=4
    ),
    "record_token_ids": record(
        b"\x82" + KEY_FIELD + b"\xa9token_ids\xc4\x14" + TOKEN_IDS, b"payload", token_count=4
    ),
    "record_long_token_ids": record(
        b"\x82" + KEY_FIELD + b"\xa9token_ids\xc5\x01\x00" + LONG_TOKEN_IDS,
        bytes(100),
        token_count=64,
    ),
    # Written by some later version that adds a name.
    "record_later_names": record(
        b"\x82" + b"\xa5extra\x93\x01\x02\x03" + KEY_FIELD, b"payload", token_count=2
    ),
    # What this version has to refuse, though every checksum is right.
    "refused_version": record(b"\x81" + KEY_FIELD, b"payload", token_count=2, version=2),
    "refused_flags": record(b"\x81" + KEY_FIELD, b"payload", token_count=2, flags=0x8000),
}

if __name__ == "__main__":
    for name, raw in RECORDS.items():
        Path(__file__).with_name(f"{name}.bin").write_bytes(raw)
