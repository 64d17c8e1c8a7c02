"""Blocks of tokens between the cache and an accelerator's memory, through pinned memory.

    restore   arena -> (copied and checked by threads of the client) -> pinned -> device -> layers
    save      layers -> device -> pinned -> (copied by the client's saver) -> staging memory

A copy between a device and memory that is not pinned holds up its caller until it is done, and is
slow: to an H200 6 GB/s, from it 1.3 GB/s into new memory, where pinned memory has 54 GB/s both
ways. A whole prompt in pinned memory would take longer to allocate than to copy. So there are a few
slots, and each bunch of blocks passes through one while others are on their way.

Written for PyTorch's CUDA, which ROCm follows. `torch` is always the caller's module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

from ..hits import Hit
from ..results import RestoreResult

#: Bytes that are copied at once. A copy of 5 MiB reaches the speed of a long one; a restore from 16
#: MiB on takes two threads.
_BUNCH_BYTES: Final = 64 * 2**20
#: Bytes that wait on the device until they are placed at once: a call for each tensor of a bunch
#: took a third of the time of a restore.
_PLACED_BYTES: Final = 512 * 2**20
#: Bunches on their way to the device: the client has four threads for restores.
_RESTORE_SLOTS: Final = 4
#: One is brought here while the other is saved.
_SAVE_SLOTS: Final = 2


class _Slot:
    """Pinned memory for a bunch of blocks."""

    def __init__(self, torch: Any, blocks: int, block_bytes: int) -> None:
        self.pinned: Final = torch.empty((blocks, block_bytes), dtype=torch.uint8, pin_memory=True)
        #: When the last copy of it is done.
        self.copied: Final = torch.cuda.Event()


class _Sent(NamedTuple):
    """A bunch that is being restored."""

    slot: _Slot
    blocks: range
    restore: Future[RestoreResult]


def reaches(device: Any) -> bool:
    """Whether copies to this device, a `torch.device`, go through pinned memory."""
    return getattr(device, "type", None) == "cuda"


def restore(
    torch: Any, hit: Hit, block_bytes: int, device: Any, place: Callable[[range, Any], None]
) -> int:
    """Bring the blocks of a hit to the device, each `block_bytes` long. Returns how many arrived,
    from the first on.

    `place(blocks, staged)`: puts blocks where they belong. `staged` holds their bytes on the
    device, of shape (blocks, block_bytes); use it in the current stream only, and not later. What
    is placed is there for what the current stream does next.
    """
    stream = torch.cuda.current_stream(device)
    bunches = _bunches(len(hit), block_bytes)
    together = max(1, _PLACED_BYTES // max(1, len(bunches[0]) * block_bytes)) * len(bunches[0])
    staged = torch.empty((min(together, len(hit)), block_bytes), dtype=torch.uint8, device=device)
    slots: list[_Slot] = []
    waiting: deque[_Sent] = deque()
    placed = arrived = 0

    def send() -> bool:
        """Send the oldest bunch on. False: not all of it was restored."""
        nonlocal arrived
        slot, blocks, restoring = waiting.popleft()
        good = restoring.result().run
        if arrived - placed == len(staged):
            put()
        at = arrived - placed
        staged[at : at + good].copy_(slot.pinned[:good], non_blocking=True)
        slot.copied.record(stream)
        arrived += good
        return good == len(blocks)

    def put() -> None:
        nonlocal placed
        if arrived > placed:
            place(range(placed, arrived), staged[: arrived - placed])
        placed = arrived

    try:
        for number, blocks in enumerate(bunches):
            if len(slots) < _RESTORE_SLOTS:
                slot = _Slot(torch, len(blocks), block_bytes)
                slots.append(slot)
            elif send():
                slot = slots[number % _RESTORE_SLOTS]
                slot.copied.synchronize()
            else:
                break
            rooms = list(slot.pinned[: len(blocks)])
            waiting.append(_Sent(slot, blocks, hit.restore_async(rooms, indices=blocks)))
        else:
            while waiting and send():
                pass
        put()
        return arrived
    finally:
        # The client may still write into them.
        wait([each.restore for each in waiting if not each.restore.cancel()])


def bring(
    torch: Any,
    count: int,
    block_bytes: int,
    device: Any,
    gather: Callable[[range, Any], None],
) -> Callable[[], Iterator[tuple[range, Sequence[Any]]]]:
    """Blocks 0 to `count` from the device, made when they are asked for: numbers and payloads, in
    bunches. A payload stays as it is until the next bunch is asked for.

    Call it in the stream that fills the blocks. `gather(blocks, staged)`: copies blocks into
    `staged` on the device, of shape (blocks, block_bytes). It is called by the thread that asks, in
    a stream of its own, after what the stream of this call does until now.
    """
    filled = torch.cuda.Event()
    filled.record(torch.cuda.current_stream(device))

    def bunches() -> Iterator[tuple[range, Sequence[Any]]]:
        stream = torch.cuda.Stream(device)
        stream.wait_event(filled)
        slots: list[_Slot] = []
        staged: Any = None
        before: tuple[_Slot, range] | None = None
        for number, blocks in enumerate(_bunches(count, block_bytes)):
            with torch.cuda.stream(stream):
                if len(slots) < _SAVE_SLOTS:
                    slots.append(_Slot(torch, len(blocks), block_bytes))
                slot = slots[number % _SAVE_SLOTS]
                if staged is None:
                    staged = torch.empty(
                        (len(blocks), block_bytes), dtype=torch.uint8, device=device
                    )
                gather(blocks, staged[: len(blocks)])
                slot.pinned[: len(blocks)].copy_(staged[: len(blocks)], non_blocking=True)
                slot.copied.record(stream)
            if before is not None:
                yield _taken(*before)
            before = slot, blocks
        if before is not None:
            yield _taken(*before)

    return bunches


def _taken(slot: _Slot, blocks: range) -> tuple[range, Sequence[Any]]:
    slot.copied.synchronize()
    return blocks, list(slot.pinned[: len(blocks)])


def _bunches(count: int, block_bytes: int) -> list[range]:
    size = max(1, _BUNCH_BYTES // max(1, block_bytes))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]
