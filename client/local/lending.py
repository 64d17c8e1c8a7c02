"""Saves whose payloads the daemon copies out of this process, which lends them for the call."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...proto import prefixd_pb2 as pb
from ...proto.limits import LENT_TOKEN_BYTES, MAX_LENT_PIECES
from ...proto.payload import FlatBytes, Pieces, address_of, addresses_of
from ..wire.deadline import Deadline
from ..wire.messages import results_of
from .calls import LocalCalls

#: Less lies in the cache, mostly, and is copied twice through staging memory in less time than the
#: kernel takes to find the pages (48 payloads of 2 or 5 MiB: 0.7 of the time; of 192 KiB: 1.2).
LEND_BYTES = 32 * 2**20


def can_lend(payloads: Sequence[FlatBytes]) -> bool:
    """May they be, and is it worth it?"""
    if sum(map(len, payloads)) < LEND_BYTES:
        return False
    return sum(len(p.views) if isinstance(p, Pieces) else 1 for p in payloads) <= MAX_LENT_PIECES


def save(
    calls: LocalCalls,
    opening: pb.SaveStagedRequest,
    payloads: Sequence[FlatBytes],
    deadline: Deadline,
) -> list[pb.SaveResult]:
    """Save `payloads` from where they lie. `opening` says what they are.

    Raises PrefixdError: UnreadableMemory, LimitReached if they have to be saved in another way;
    OSError: there is no line to the daemon, and nothing was asked.
    """
    request = pb.SaveLentRequest(token=os.urandom(LENT_TOKEN_BYTES))
    if opening.HasField("reserved"):
        request.reserved.CopyFrom(opening.reserved)
    else:
        request.header.CopyFrom(opening.header)
    views: list[memoryview] = []
    for payload in payloads:
        of_it = payload.views if isinstance(payload, Pieces) else [payload]
        views += of_it
        request.pieces.append(len(of_it))
    request.lengths_bytes.extend(map(len, views))
    token = bytearray(request.token)
    with addresses_of(views) as addresses, address_of(token) as token_address:
        request.addresses.extend(addresses)
        request.token_address = token_address
        try:
            with calls.line(deadline.left_s()) as line:
                line.send(pb.LocalRequest(save_lent=request), deadline.left_s())
                return list(results_of(line.receive(deadline.left_s()).save_lent))
        finally:
            # From here on the memory is the caller's again: what the daemon still copies, it will
            # not publish.
            token[:] = bytes(len(token))
