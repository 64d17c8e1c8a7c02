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
#: Bunches on their way to the device: the client has four threads for restores.
_RESTORE_SLOTS: Final = 4
#: One is brought here while the other is saved.
_SAVE_SLOTS: Final = 2


class _Slot:
    """Room for a bunch of blocks in pinned memory, and as much on the device."""

    def __init__(self, torch: Any, device: Any, blocks: int, block_bytes: int) -> None:
        shape = (blocks, block_bytes)
        self.pinned: Final = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self.staged: Final = torch.empty(shape, dtype=torch.uint8, device=device)
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

    `place(blocks, staged)`: puts a bunch where it belongs. `staged` holds its bytes on the device,
    of shape (blocks, block_bytes); use it in the current stream only, and not later. What is placed
    is there for what the current stream does next.
    """
    bunches = _bunches(len(hit), block_bytes)
    stream = torch.cuda.current_stream(device)
    slots: list[_Slot] = []
    waiting: deque[_Sent] = deque()
    arrived = 0

    def send() -> bool:
        """Send the oldest bunch on. False: not all of it was restored."""
        nonlocal arrived
        slot, blocks, restoring = waiting.popleft()
        good = blocks[: restoring.result().run]
        if good:
            staged = slot.staged[: len(good)]
            staged.copy_(slot.pinned[: len(good)], non_blocking=True)
            place(good, staged)
            slot.copied.record(stream)
            arrived += len(good)
        return len(good) == len(blocks)

    try:
        for number, blocks in enumerate(bunches):
            if len(slots) < _RESTORE_SLOTS:
                slot = _Slot(torch, device, len(blocks), block_bytes)
                slots.append(slot)
            else:
                if not send():
                    return arrived
                slot = slots[number % _RESTORE_SLOTS]
                slot.copied.synchronize()
            rooms = list(slot.pinned[: len(blocks)])
            waiting.append(_Sent(slot, blocks, hit.restore_async(rooms, indices=blocks)))
        while waiting and send():
            pass
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
        before: tuple[_Slot, range] | None = None
        for number, blocks in enumerate(_bunches(count, block_bytes)):
            with torch.cuda.stream(stream):
                if len(slots) < _SAVE_SLOTS:
                    slots.append(_Slot(torch, device, len(blocks), block_bytes))
                slot = slots[number % _SAVE_SLOTS]
                staged = slot.staged[: len(blocks)]
                gather(blocks, staged)
                slot.pinned[: len(blocks)].copy_(staged, non_blocking=True)
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
