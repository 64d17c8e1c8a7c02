"""The part of the client that asks about single keys, and the calls that a future stands for;
`client.Client` inherits it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TYPE_CHECKING, Final

from ..proto.errors import CallerError, InvalidSize
from ..proto.keys import Key, check_key
from ..proto.limits import KEY_BYTES
from ..proto.vocabulary import ClaimMode, DeleteStatus, MissReason
from .hits import Hit, Reader
from .key_restores import KeyRestorer
from .results import Found, RestoreResult, restore_result
from .search import BlockChain, Searcher, checked_keys
from .thread_pool import CallQueue
from .wire.deadline import Deadline
from .wire.transport import Transport

if TYPE_CHECKING:
    from .buffers import Payload

#: Threads for claims and restores that a future stands for, and how many of those may wait.
CALL_THREADS: Final = 4
MAX_PENDING_CALLS: Final = 1024

_NO_KEY: Final = Key(bytes(32))


class KeyCalls(ABC):
    """Looking, touching and deleting by key; claims and restores as futures."""

    deadline_ms: int
    _transport: Transport
    _searcher: Searcher
    _reader: Reader
    _key_restorer: KeyRestorer
    _calls: CallQueue

    @abstractmethod
    def _check_usable(self) -> None:
        """Raises CallerError if the client can't be used (any more)."""

    @abstractmethod
    def _begin(self, deadline_ms: int | None, wait_ms: int = 0) -> Deadline:
        """Every call begins here: may it, and until when."""

    # ---- what is there

    @property
    def in_place(self) -> bool:
        """Can keys be looked up at this moment without asking the daemon, or waiting at all?"""
        return self._transport.peek(()) is not None

    def probe(
        self, keys: Sequence[Key], *, wait_ms: int = 0, deadline_ms: int | None = None
    ) -> list[Found]:
        """What is known of each key; nothing of any of them when the daemon can't be asked.

        Pins nothing, renews nothing, moves nothing in an eviction order. One rpc; on the daemon's
        host none without `wait_ms`, and then what is on its way counts as absent: only the daemon
        knows of it. Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        checked = checked_keys(keys)
        return self._searcher.probe(checked, wait_ms, deadline)

    def exists(
        self,
        keys: Sequence[Key],
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
    ) -> list[bool]:
        """Which of `keys` are published; none of them when the daemon can't be asked.

        Moves nothing, like `probe`, and says nothing else. On the daemon's host without any
        rpc. `in_place_only`: never waits for anything; where that is not possible (see
        `in_place`), nothing is there. Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms)
        checked = checked_keys(keys)
        found = self._transport.peek(checked)
        if found is not None:
            return found
        if in_place_only:
            self._open_later()
            return [False] * len(checked)
        return self._searcher.exist(checked, deadline)

    def exists_one(
        self, key: Key, *, in_place_only: bool = False, deadline_ms: int | None = None
    ) -> bool:
        """Is this key published? As `exists`, at a fraction of its cost."""
        self._check_usable()
        if type(key) is not bytes or len(key) != KEY_BYTES:
            key = check_key(key)
        found = self._transport.peek_one(key)
        if found is None:
            (found,) = self.exists((key,), in_place_only=in_place_only, deadline_ms=deadline_ms)
        return found

    def leading_run(
        self,
        keys: BlockChain | Sequence[Key],
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
    ) -> int:
        """How many of `keys` from the first on are published: what `longest_run` would find,
        without its entries. `in_place_only` as in `exists`. Raises InvalidKey."""
        deadline = self._begin(deadline_ms)
        wanted = keys.complete_keys if isinstance(keys, BlockChain) else checked_keys(keys)
        if in_place_only and not self.in_place:
            self._open_later()
            return 0
        return self._searcher.leading_run(wanted, deadline)

    def _open_later(self) -> None:
        """Have another thread do what the next look in place needs, unless one is at it."""
        if not self._calls.pending[0]:
            deadline = Deadline(self.deadline_ms)
            self._calls.submit(lambda: self._searcher.exist((_NO_KEY,), deadline), list)

    # ---- its bytes

    def restore_keys(
        self,
        keys: BlockChain | Sequence[Key],
        buffers: Sequence[Payload],
        *,
        mode: ClaimMode = ClaimMode.RUN,
        deadline_ms: int | None = None,
    ) -> RestoreResult:
        """Copy what is there of `keys` into `buffers`, one for each key, or for the first ones:
        those of a chain up to the first that is missing, with `ClaimMode.ANY` each for itself.

        What `longest_run` or `claim`, `Hit.restore_into` and `release` do one after the other, for
        who knows how long the payloads are and wants to hold nothing: over the data socket it is
        one trip. The result is that of a restore; a key that is not there is a miss, too. Raises
        InvalidKey, InvalidSize for more buffers than keys, CallerError for another mode.
        """
        self._begin(deadline_ms)
        if not isinstance(mode, ClaimMode) or mode is ClaimMode.FIRST:
            raise CallerError(f"a restore of keys is of mode RUN or ANY, not {mode!r}")
        counts: list[int | None] | None = None
        wanted: Sequence[Key]
        if isinstance(keys, BlockChain):
            wanted = keys.complete_keys[: len(buffers)]
            counts = [keys.block_tokens] * len(wanted)
        else:
            wanted = checked_keys(keys[: len(buffers)])
        if len(buffers) > len(wanted):
            raise InvalidSize(f"{len(buffers)} buffers for {len(wanted)} keys")
        return self._key_restorer.restore(
            wanted, counts, mode, buffers, self._countdown(deadline_ms)
        )

    # ---- what becomes of it

    def touch(self, keys: Sequence[Key]) -> None:
        """These entries were used, of a chain root first, in a way that the daemon can't see: one
        access each, told with the next heartbeat or save. Raises InvalidKey."""
        self._check_usable()
        checked = checked_keys(keys)
        if checked:
            self._transport.touch(checked[::-1])

    def delete(self, keys: Sequence[Key], *, deadline_ms: int | None = None) -> list[DeleteStatus]:
        """Drop entries that are not needed any more. Returns what became of each key.

        An entry that is being read or saved stays, and its status says so. A client that knows
        a key may delete its entry, as it may read it. Later blocks of a chain stay, and can't be
        reached: name them as well. One rpc for 4,096 keys. Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms)
        return self._searcher.delete(checked_keys(keys), deadline)

    # ---- futures

    def claim_async(
        self,
        keys: Sequence[Key],
        *,
        mode: ClaimMode = ClaimMode.ANY,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Future[Hit]:
        """`claim` by another thread. Never blocks.

        The deadline counts from now. Beyond a thousand that wait, and when the client is closed,
        the hit is empty (`MissReason.DROPPED`). Whoever takes the hit has to release it. Raises
        InvalidKey, at once.
        """
        self._begin(deadline_ms, wait_ms)
        if not isinstance(mode, ClaimMode):
            raise CallerError(f"a mode is one of ClaimMode, not {mode!r}")
        checked = checked_keys(keys)
        left_ms = self._countdown(deadline_ms)
        return self._calls.submit(
            lambda: self._searcher.search(
                checked, None, mode, wait_ms, Deadline(left_ms() + wait_ms)
            ),
            lambda: Hit(self._reader, miss=MissReason.DROPPED),
        )

    def restore_async(
        self,
        hit: Hit,
        buffers: Sequence[Payload],
        *,
        indices: Sequence[int] | None = None,
        deadline_ms: int | None = None,
    ) -> Future[RestoreResult]:
        """`Hit.restore_into` by another thread. Never blocks. Don't touch the buffers, or release
        the hit, until it is done; deadline and bounds are those of `claim_async`."""
        self._check_usable()
        wanted = range(len(buffers)) if indices is None else indices
        left_ms = self._countdown(deadline_ms)
        dropped = [MissReason.DROPPED] * len(wanted)
        return self._calls.submit(
            lambda: hit.restore_into(buffers, indices=indices, deadline_ms=left_ms()),
            lambda: restore_result((), (), dropped),
        )

    def _countdown(self, deadline_ms: int | None) -> Callable[[], int]:
        """How many milliseconds are left, whenever that is asked."""
        within_ms = self.deadline_ms if deadline_ms is None else deadline_ms
        since_s = monotonic()
        return lambda: within_ms - round((monotonic() - since_s) * 1e3)
