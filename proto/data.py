"""The data socket, over which clients on other hosts move payloads: frames of `DataRequest` and
`DataResponse`, and the bytes that some of them announce.

The contract is in prefixd.proto; a frame is the local socket's: a message behind its length in
bytes as u32 little-endian. Payloads are in no message: they go from the arena's mapping into the
socket, and from the socket into the memory where they are wanted.

Where the daemon has TLS on TCP, all of it is in TLS 1.3, and the token goes with `attach`.
"""

from __future__ import annotations

import struct
from typing import Final

from google.protobuf.message import DecodeError

from . import prefixd_pb2 as pb
from .errors import InvalidSize, MalformedMessage
from .limits import CHUNK_BYTES
from .limits import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES

#: In front of each message: its length in bytes.
HEAD: Final = struct.Struct("<I")
#: Behind each payload of a save: its CRC32C.
CRC: Final = struct.Struct("<I")
#: Before its session is proved a connection takes no longer message.
MAX_ATTACH_BYTES: Final = 1024
#: A longer request waits until there is room for it.
MAX_SMALL_REQUEST_BYTES: Final = 16 * 2**10
#: What a range is cut into: between two parts the claim is looked at, and a failure can be told.
PART_BYTES: Final = CHUNK_BYTES
#: What the kernel may hold of a connection in each direction, beside what it adds itself.
SOCKET_BYTES: Final = 2 * 2**20


def frame(message: pb.DataRequest | pb.DataResponse) -> bytes:
    """A message as it goes through the socket. Raises InvalidSize for one that is too large."""
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise InvalidSize(f"a message of {len(data)} bytes, {MAX_MESSAGE_BYTES} is the most")
    return HEAD.pack(len(data)) + data


def response_of(data: bytes) -> pb.DataResponse:
    """Raises MalformedMessage."""
    try:
        return pb.DataResponse.FromString(data)
    except DecodeError as problem:
        raise MalformedMessage(f"{len(data)} bytes that are no response: {problem}") from None
