"""The reading half of the client: finds entries, claims and restores them; `Client` inherits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from ..proto.errors import CallerError, ClientClosed, InvalidSize
from ..proto.keys import Key, Namespace, check_key
from ..proto.limits import DEFAULT_BLOCK_TOKENS, KEY_BYTES, MAX_WAIT_MS
from ..proto.vocabulary import ClaimMode, DeleteStatus, MissReason
from .arguments import checked_keys, instances, sequence, whole
from .chains import BlockChain, prefix_walk
from .context import CallContext
from .counters import Missing
from .hits import Hit, Reader
from .policy import SavePolicy
from .recording import Recorders
from .results import NOT_FOUND, Found, RestoreResult
from .search import Searcher
from .thread_pool import CallQueue
from .wire.deadline import Deadline
from .wire.transport import Transport

if TYPE_CHECKING:
    from ..proto.keys import Extras
    from ..proto.tokens import Tokens
    from .buffers import Payload

T = TypeVar("T")

#: Threads for claims and restores that a future stands for, and how many of those may wait.
CALL_THREADS: Final = 4
MAX_PENDING_CALLS: Final = 1024

_NO_KEY: Final = Key(bytes(32))
_ABSENT: Final = MissReason.ABSENT  # as an attribute of its enumeration it takes 0.1 us


class Lookups:
    """Finding, claiming and restoring entries, and what else needs only their keys."""

    deadline_ms: int
    policy: SavePolicy
    _closed: bool
    _context: CallContext
    _transport: Transport
    _searcher: Searcher
    _reader: Reader
    _calls: CallQueue
    _recorders: Recorders

    # ---- looking for state

    def longest_prefix(
        self,
        namespace: Namespace,
        tokens: Tokens,
        *,
        stride_tokens: int = 1,
        claim: bool = True,
        extras: Extras = (),
        wait_ms: int = 0,
        deadline_ms: int | None = None,
    ) -> Hit:
        """The longest prefix entry of `tokens`, claimed; empty (and false) if there is none, with
        the reason in `hit.miss`.

        It finds whatever was saved under `prefix_key(namespace, tokens[:n])`, n at most the length
        of `tokens`: all keys in one hash pass (0.4 us each), longest first, one rpc for 4,096 of
        them; on the daemon's host a miss takes none. Of prompts above 32,768 tokens, the last
        32,768 lengths and the multiples of 2,048 before them. `stride_tokens`: look only at its
        multiples and at the end of `tokens`, for engines that save nowhere else: a tenth of the
        time. From other nodes (`Client(shared_wait_ms=)`) come the end and the multiples of
        `policy.boundary_align_tokens`.

        `claim` False only looks: nothing is pinned, and no eviction order changes. `wait_ms`: how
        long to wait for a save in flight. `extras`: see `BlockChain`; a prefix has those of its own
        tokens.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        keys, counts = prefix_walk(namespace, tokens, stride_tokens, extras=extras)
        return self._longest(keys, counts, wait_ms, deadline, claim=claim)

    def resume(
        self,
        parent_key: Key,
        tokens: Tokens,
        wait_ms: int | None = None,
        *,
        namespace: Namespace,
        extras: Extras = (),
        deadline_ms: int | None = None,
    ) -> Hit:
        """The state that a conversation left off with, claimed; empty (and false) if there is none,
        with the reason in `hit.miss`.

        `parent_key` is the prefix entry of its last save, which may still be in flight: waits
        for it at most `wait_ms` (None: `policy.session_resume_wait_ms`), and takes the longest
        prefix of `tokens` if it does not come, all in one rpc. The parent is only used if its key
        is that of a prefix of `tokens`, of a length that `longest_prefix` looks at.
        """
        wait_ms = self.policy.session_resume_wait_ms if wait_ms is None else wait_ms
        deadline = self._begin(deadline_ms, wait_ms)
        parent_key = check_key(parent_key)
        keys, counts = prefix_walk(namespace, tokens, extras=extras)
        if parent_key in keys:
            place = keys.index(parent_key)
            keys.insert(0, keys.pop(place))
            counts.insert(0, counts.pop(place))
        return self._longest(keys, counts, wait_ms, deadline)

    def _longest(
        self,
        keys: Sequence[Key],
        counts: Sequence[int],
        wait_ms: int,
        deadline: Deadline,
        *,
        claim: bool = True,
    ) -> Hit:
        """The first of `keys` that is there."""
        stride_tokens = self.policy.boundary_align_tokens
        if self._recorders.active:
            self._recorders.looked_otherwise()
        return self._searcher.search(
            keys, counts, ClaimMode.FIRST, wait_ms, deadline, pin=claim, stride_tokens=stride_tokens
        )

    def chain(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
        *,
        include_partial: bool = False,
        extras: Extras = (),
    ) -> BlockChain:
        """The keys of `tokens` cut into blocks, root first. No rpc; see `BlockChain`."""
        return BlockChain(
            namespace, tokens, block_tokens, include_partial=include_partial, extras=extras
        )

    def longest_run(
        self,
        keys: BlockChain | Sequence[Key],
        *,
        claim: bool = True,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
        counted: bool = True,
    ) -> Hit:
        """The blocks of a chain up to the first missing one, claimed; empty (and false) when
        that is block 0. `hit.miss` says why the run ends; None: all blocks are there.

        One rpc for as many blocks as one call takes (4,096 unless the daemon says less). `claim`
        False only looks: on the daemon's host without any rpc, and hashing no more blocks than
        there are. Only the complete blocks of a `BlockChain` are looked for. `prompt_tokens`: what
        all `keys` stand for, for the tokens hit and missed that the daemon shows; a `BlockChain`
        knows, and keys without it count no tokens. `counted` as in `claim`.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        prompt_tokens = whole("prompt_tokens", prompt_tokens, 0)
        counts: list[int] | None = None
        run: Sequence[Key]
        if isinstance(keys, BlockChain):
            run = keys.complete_keys
            counts = [keys.block_tokens] * len(run)
        else:
            run = checked_keys(keys)
        hit = self._searcher.search(
            run,
            counts,
            ClaimMode.RUN,
            wait_ms,
            deadline,
            prompt_tokens,
            pin=claim,
            counted=counted,
        )
        if counted and self._recorders.active:
            self._recorders.looked(
                keys if isinstance(keys, BlockChain) else run, prompt_tokens, len(hit)
            )
        return hit

    def claim(
        self,
        keys: Sequence[Key],
        *,
        mode: ClaimMode = ClaimMode.ANY,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
        counted: bool = True,
    ) -> Hit:
        """Pin the entries of `keys` that `mode` selects; empty (and false) if there are none.

        A key that is named twice is there twice. One rpc for 4,096 keys. `prompt_tokens` as in
        `longest_run`. `counted` False: these keys were found before, by a look-up that was counted,
        so this is none. Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        prompt_tokens = whole("prompt_tokens", prompt_tokens, 0)
        return self._claim(
            checked_keys(keys), _checked(mode), wait_ms, deadline, prompt_tokens, counted=counted
        )

    def _claim(
        self,
        keys: Sequence[Key],
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
        prompt_tokens: int,
        *,
        counted: bool,
    ) -> Hit:
        hit = self._searcher.search(
            keys, None, mode, wait_ms, deadline, prompt_tokens, counted=counted
        )
        if counted and self._recorders.active and mode is not ClaimMode.FIRST:
            if len(keys) == 1:
                self._recorders.looked_otherwise()
            else:
                leading = sum(map(int.__eq__, hit.positions, range(len(keys))))
                self._recorders.looked(keys, prompt_tokens, leading)
        return hit

    # ---- what is there

    @property
    def in_place(self) -> bool:
        """Can keys be looked up at this moment without an rpc, and without waiting?"""
        return self._transport.peek(()) is not None

    def probe(
        self, keys: Sequence[Key], *, wait_ms: int = 0, deadline_ms: int | None = None
    ) -> list[Found]:
        """Look the keys up. When the daemon can't be reached, every key is reported as absent.

        Pins nothing, renews nothing, changes no eviction order. One rpc; on the daemon's host none
        without `wait_ms`, and then saves in flight count as absent: only the daemon knows of them.
        Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms, wait_ms)
        checked = checked_keys(keys)
        if not checked:
            return []
        return self._ask(
            lambda: self._transport.lookup(checked, wait_ms, deadline), [NOT_FOUND] * len(checked)
        )

    def exists(
        self,
        keys: Sequence[Key],
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
        counted: bool = True,
    ) -> list[bool]:
        """Which of `keys` are published; none of them when the daemon can't be reached.

        Pins nothing and changes no eviction order. It counts as a look-up (`prompt_tokens` as in
        `longest_run`), so restore what it finds with `counted=False`; with that here, it is none
        itself. On the daemon's host without any rpc. `in_place_only`: never waits for anything;
        where that is not possible (see `in_place`), reports every key as absent. Raises InvalidKey.
        """
        return self._exist(
            keys, in_place_only, deadline_ms, prompt_tokens, counted=counted, one=False
        )

    def _exist(
        self,
        keys: Sequence[Key],
        in_place_only: bool,
        deadline_ms: int | None,
        prompt_tokens: int,
        *,
        counted: bool,
        one: bool,
    ) -> list[bool]:
        """`one`: it is one block of a prompt, and the others are not known."""
        deadline = self._begin(deadline_ms)
        prompt_tokens = whole("prompt_tokens", prompt_tokens, 0)
        checked = checked_keys(keys)
        if not checked:
            return []
        gap = MissReason.ABSENT
        found = self._transport.peek(checked)
        if found is None:
            found = [0] * len(checked)
            if in_place_only:
                self._open_later()
                gap = MissReason.UNAVAILABLE
            else:
                try:
                    found = self._transport.exist(checked, deadline)
                except Exception as problem:
                    gap = self._context.failures.reason(problem)
        there = list(filter(None, found))
        missing = None
        first = len(found)
        if len(there) < len(found):
            first = found.index(0)
            missing = Missing(gap, 0, checked[first : first + 1])
        if counted:
            self._context.counters.looked(there, len(found), prompt_tokens, missing)
            if self._recorders.active and not one:
                self._recorders.looked(checked, prompt_tokens, first)
        return list(map(bool, found))

    def exists_one(
        self,
        key: Key,
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
        counted: bool = True,
    ) -> bool:
        """Is this key published? As `exists`, at a fraction of its cost."""
        self._check_usable()
        if prompt_tokens:
            prompt_tokens = whole("prompt_tokens", prompt_tokens, 0)
        if type(key) is not bytes or len(key) != KEY_BYTES:
            key = check_key(key)
        if counted and self._recorders.active:
            self._recorders.looked_otherwise()
        tier = self._transport.peek_one(key)
        if tier is None:
            (found,) = self._exist(
                (key,), in_place_only, deadline_ms, prompt_tokens, counted=counted, one=True
            )
            return found
        if counted and tier:
            if prompt_tokens:
                self._context.counters.looked((tier,), 1, prompt_tokens, None)
            else:
                self._context.counters.found_one(tier)
        elif counted:
            self._context.counters.miss(_ABSENT, prompt_tokens, (key,))
        return bool(tier)

    def leading_run(
        self,
        keys: BlockChain | Sequence[Key],
        *,
        in_place_only: bool = False,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
        counted: bool = True,
    ) -> int:
        """How many of `keys` from the first on are published: what `longest_run` would find,
        without its entries. Other parameters as in `exists`; it counts as a look-up, too. Raises
        InvalidKey."""
        deadline = self._begin(deadline_ms)
        prompt_tokens = whole("prompt_tokens", prompt_tokens, 0)
        run = keys.complete_keys if isinstance(keys, BlockChain) else checked_keys(keys)
        if isinstance(keys, BlockChain):
            prompt_tokens = keys.block_tokens * len(run)
        if not run:
            return 0
        gap = MissReason.ABSENT
        found: Sequence[int] = ()
        if in_place_only and not self.in_place:
            self._open_later()
            gap = MissReason.UNAVAILABLE
        else:
            try:
                found = self._transport.leading_run(run, deadline)
            except Exception as problem:
                gap = self._context.failures.reason(problem)
        length = len(found)
        if counted:
            missing = Missing(gap, 0, run[length : length + 1]) if length < len(run) else None
            self._context.counters.looked(found, len(run), prompt_tokens, missing)
            if self._recorders.active:
                self._recorders.looked(
                    keys if isinstance(keys, BlockChain) else run, prompt_tokens, length
                )
        return length

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        """`call()`, or `otherwise` and a counted failure when it raises."""
        try:
            return call()
        except Exception as problem:
            self._context.counters.failure(self._context.failures.reason(problem))
            return otherwise

    def _open_later(self) -> None:
        """Have another thread open what look-ups in place need, unless one is doing so."""
        if not self._calls.pending[0]:
            deadline = Deadline(self.deadline_ms)
            nothing: Sequence[int] = ()
            look = partial(self._transport.exist, (_NO_KEY,), deadline)
            self._calls.submit(lambda: self._ask(look, nothing), tuple)

    # ---- its bytes

    def restore_keys(
        self,
        keys: BlockChain | Sequence[Key],
        buffers: Sequence[Payload],
        *,
        mode: ClaimMode = ClaimMode.RUN,
        deadline_ms: int | None = None,
        counted: bool = True,
    ) -> RestoreResult:
        """Copy what is there of `keys` into `buffers`, one for each key, or for the first ones:
        the blocks of a chain up to the first missing one, with `ClaimMode.ANY` each by itself.

        It does what `longest_run` or `claim`, `Hit.restore_into` and `release` do, for callers that
        know the lengths of the payloads and want to hold nothing: over the data socket it is one
        trip. The result is that of a restore, in which an absent key is a miss too. `counted` as in
        `claim`. Raises
        InvalidKey, InvalidSize for more buffers than keys, CallerError for another mode.
        """
        self._begin(deadline_ms)
        if not isinstance(mode, ClaimMode) or mode is ClaimMode.FIRST:
            raise CallerError(f"a restore of keys is of mode RUN or ANY, not {mode!r}")
        sequence("buffers", buffers)
        counts: list[int] | None = None
        run: Sequence[Key]
        if isinstance(keys, BlockChain):
            run = keys.complete_keys[: len(buffers)]
            counts = [keys.block_tokens] * len(run)
        else:
            run = checked_keys(keys, len(buffers))
        if len(buffers) > len(run):
            raise InvalidSize(f"{len(buffers)} buffers for {len(run)} keys")
        left_ms = self._context.countdown(deadline_ms)
        result = self._searcher.restore(run, counts, mode, buffers, left_ms, counted=counted)
        if counted and self._recorders.active and mode is ClaimMode.RUN:
            self._recorders.looked(
                keys if isinstance(keys, BlockChain) else run, sum(counts or ()), result.run
            )
        return result

    def release_many(self, hits: Sequence[Hit], *, deadline_ms: int | None = None) -> list[bool]:
        """Release hits in one rpc; see `Hit.release`."""
        self._check_usable()
        return self._reader.release(instances("hits", hits, Hit), deadline_ms)

    # ---- use and deletion

    def touch(self, keys: Sequence[Key]) -> None:
        """Report that these entries, of a chain root first, were used in a way that the daemon
        can't see: one access each, sent with the next heartbeat or save. Raises InvalidKey."""
        self._check_usable()
        checked = checked_keys(keys)
        if checked:
            self._transport.touch(checked[::-1])

    def delete(self, keys: Sequence[Key], *, deadline_ms: int | None = None) -> list[DeleteStatus]:
        """Delete entries that are not needed any more. Returns what became of each key.

        An entry that is being read or saved stays, and its status says so. A client that knows
        a key may delete its entry, as it may read it. Later blocks of a chain stay, and can't be
        reached: name them as well. One rpc for 4,096 keys. Raises InvalidKey.
        """
        deadline = self._begin(deadline_ms)
        checked = checked_keys(keys)
        statuses: list[DeleteStatus] = []
        size = self._transport.max_batch_keys
        for start in range(0, len(checked), size):
            batch = checked[start : start + size]
            try:
                statuses += self._transport.delete(batch, deadline)
            except Exception as problem:
                self._context.failures.reason(problem)
                statuses += [DeleteStatus.FAILED] * len(batch)
        return statuses

    # ---- futures

    def claim_async(
        self,
        keys: Sequence[Key],
        *,
        mode: ClaimMode = ClaimMode.ANY,
        wait_ms: int = 0,
        deadline_ms: int | None = None,
        prompt_tokens: int = 0,
        counted: bool = True,
    ) -> Future[Hit]:
        """`claim` by another thread. Never blocks.

        The deadline counts from now. When a thousand calls wait already, or the client is closed,
        the hit is empty (`MissReason.DROPPED`). The hit has to be released. Raises InvalidKey, at
        once.
        """
        self._begin(deadline_ms, wait_ms)
        mode = _checked(mode)
        checked = checked_keys(keys)
        prompt_tokens = whole("prompt_tokens", prompt_tokens, 0)
        left_ms = self._context.countdown(deadline_ms)
        return self._calls.submit(
            lambda: self._claim(
                checked,
                mode,
                wait_ms,
                Deadline(left_ms() + wait_ms),
                prompt_tokens,
                counted=counted,
            ),
            lambda: Hit(self._reader, miss=MissReason.DROPPED),
        )

    # ---- how each call begins

    def _check_usable(self) -> None:
        """Raises CallerError if the client can't be used (any more)."""
        if self._closed:
            raise ClientClosed("this client is closed")
        self._context.owner.check()

    def _begin(self, deadline_ms: int | None, wait_ms: int = 0) -> Deadline:
        """Check that a call may be made, and until when. Raises CallerError."""
        self._check_usable()
        wait_ms = whole("wait_ms", wait_ms, 0, MAX_WAIT_MS)
        return Deadline(self._within_ms(deadline_ms) + wait_ms)

    def _within_ms(self, deadline_ms: int | None) -> int:
        return self.deadline_ms if deadline_ms is None else whole("deadline_ms", deadline_ms)


def _checked(mode: ClaimMode) -> ClaimMode:
    if not isinstance(mode, ClaimMode):
        raise CallerError(f"a mode is one of ClaimMode, not {mode!r}")
    return mode
