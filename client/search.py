"""The search for the longest cached prefix: which keys to ask for, and what is
made of the answer.

Prefix entries hold the whole state of `tokens[:n]` and are saved where n is a multiple of the
stride, so the walk asks for those lengths, longest first. Block chains hold a block each; the
walk goes forward and stops at the first block that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, overload

from ..proto.errors import InvalidSize, InvalidTokens
from ..proto.keys import Key, Namespace, check_key, iter_block_keys, prefix_keys
from ..proto.limits import KEY_BYTES, MAX_BATCH_KEYS, MAX_TOLD_KEYS
from ..proto.vocabulary import ClaimMode, DeleteStatus, MissReason, Presence
from .benefit import MinBenefit
from .counters import Counters
from .failures import Failures
from .hits import Hit, Reader
from .results import NOT_FOUND, Entry, Found
from .wire.deadline import Deadline
from .wire.link import Holding
from .wire.transport import Claimed, Transport

if TYPE_CHECKING:
    from ..proto.keys import Tokens

# ---- which keys


class PrefixWalk(NamedTuple):
    """Keys to look for, longest prefix first, and the tokens that each stands for."""

    keys: list[Key]
    token_counts: list[int]


def count_tokens(tokens: Tokens) -> int:
    """Raises InvalidTokens for what has no length."""
    try:
        return len(tokens)  # type: ignore[arg-type]  # a buffer without one is caught
    except TypeError:
        raise InvalidTokens(f"tokens are a sequence, not a {type(tokens).__name__}") from None


def boundaries(token_count: int, stride_tokens: int, *, exact_end: bool = False) -> list[int]:
    """The multiples of the stride in 1 ... token_count, ascending, and with `exact_end` the
    count itself. At most the `MAX_BATCH_KEYS` longest."""
    if stride_tokens < 1:
        raise InvalidSize(f"a stride has at least one token, not {stride_tokens}")
    lengths = range(stride_tokens, token_count + 1, stride_tokens)
    ends = [token_count] if exact_end and token_count % stride_tokens else []
    first = max(0, len(lengths) + len(ends) - MAX_BATCH_KEYS)
    return [*lengths[first:], *ends]


def prefix_walk(
    namespace: Namespace, tokens: Tokens, stride_tokens: int, *, exact_end: bool = False
) -> PrefixWalk:
    """The walk over `tokens`, all keys in one hash pass. Empty if no stride is complete.

    `exact_end` also asks for the state of all of `tokens`, wherever they end.
    """
    lengths = boundaries(count_tokens(tokens), stride_tokens, exact_end=exact_end)
    keys = prefix_keys(namespace, tokens, lengths)
    keys.reverse()
    lengths.reverse()
    return PrefixWalk(keys, lengths)


class BlockChain(Sequence[Key]):
    """The keys of a prompt cut into blocks, root first, each hashed when it is asked for.

    A walk that misses early hashes little. `tokens` are referenced, not copied: don't change
    them before every key was asked for. Not thread-safe until then.
    """

    def __init__(
        self,
        namespace: Namespace,
        tokens: Tokens,
        block_tokens: int,
        *,
        include_partial: bool = False,
    ) -> None:
        """`include_partial`: a trailing incomplete block is part of the chain, to be saved; a
        walk does not look for it. Raises InvalidSize, InvalidTokens."""
        token_count = count_tokens(tokens)
        self._keys: list[Key] = []
        self._rest: Iterator[Key] = iter_block_keys(
            namespace, tokens, block_tokens, include_partial=include_partial
        )
        #: Tokens of a whole block.
        self.block_tokens = block_tokens
        #: Blocks that are complete.
        self.whole_blocks, partial_tokens = divmod(token_count, block_tokens)
        #: Tokens of the trailing incomplete block; 0 if it is not part of the chain.
        self.partial_tokens = partial_tokens if include_partial else 0

    def __len__(self) -> int:
        return self.whole_blocks + bool(self.partial_tokens)

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> list[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | list[Key]:
        wanted = range(len(self))[index]
        if isinstance(wanted, int):
            self._hash_up_to(wanted)
            return self._keys[wanted]
        if wanted:
            self._hash_up_to(max(wanted[0], wanted[-1]))
        return [self._keys[position] for position in wanted]

    def __iter__(self) -> Iterator[Key]:
        keys = self._keys
        for index in range(len(self)):
            if index == len(keys):
                keys.append(next(self._rest))
            yield keys[index]

    @property
    def complete_keys(self) -> Sequence[Key]:
        """The complete blocks, as lazily as the chain itself."""
        return _Blocks(self, range(self.whole_blocks))

    @property
    def keys(self) -> list[Key]:
        """Every key, hashed now if they were not."""
        return self[:]

    @property
    def token_counts(self) -> list[int]:
        """Tokens of each block."""
        counts = [self.block_tokens] * self.whole_blocks
        return [*counts, self.partial_tokens] if self.partial_tokens else counts

    def _hash_up_to(self, last: int) -> None:
        while len(self._keys) <= last:
            self._keys.append(next(self._rest))


class _Blocks(Sequence[Key]):
    """Some blocks of a chain, hashed when they are asked for; so are slices of it."""

    def __init__(self, chain: BlockChain, blocks: range) -> None:
        self._chain = chain
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> Key: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Key]: ...
    def __getitem__(self, index: int | slice) -> Key | Sequence[Key]:
        wanted = self._blocks[index]
        return self._chain[wanted] if isinstance(wanted, int) else _Blocks(self._chain, wanted)

    def __iter__(self) -> Iterator[Key]:
        if self._blocks.start or self._blocks.step != 1:
            return (self._chain[block] for block in self._blocks)
        return islice(self._chain, len(self._blocks))


# ---- from keys to a hit


class _Search:
    """What the keys of one search turned out to be."""

    def __init__(self) -> None:
        self.claims: list[Holding] = []
        self.positions: list[int] = []
        self.entries: list[Entry] = []
        #: Where the entries lie, if that was seen.
        self.in_place: object | None = None
        #: Why there is not more, unless there is everything.
        self.gap = MissReason.ABSENT


class Searcher:
    """Searches for one client. Thread-safe.

    `token_counts` say what each key stands for, where the caller knows; None is what the entry
    says of itself. More keys than a call takes go in several calls, and make one hit.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        counters: Counters,
        failures: Failures,
        benefit: MinBenefit,
        *,
        lease_ms: int,
        shared_wait_ms: int,
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._counters = counters
        self._failures = failures
        self._benefit = benefit
        self._lease_ms = lease_ms
        self._shared_wait_ms = shared_wait_ms

    def search(
        self,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
        prompt_tokens: int = 0,
        *,
        pin: bool = True,
    ) -> Hit:
        """What `mode` wants of the keys: pinned, by one rpc, or not, in place if possible, else by
        one rpc. None without keys. `prompt_tokens`: what all of them stand for, for the hit ratio;
        0: what `token_counts` say."""
        found = _Search()
        step = self._claim if pin else self._look
        try:
            step(found, keys, mode, wait_ms, deadline)
            while self._bring(found, keys, token_counts, mode, deadline, step):
                pass
        except Exception as problem:
            found.gap = self._failures.reason(problem)
        prompt_tokens = prompt_tokens or _wanted_tokens(token_counts, mode)
        return self._hit(found, keys, token_counts, mode, prompt_tokens)

    def _claim(
        self,
        found: _Search,
        keys: Sequence[Key],
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
    ) -> None:
        size = self._transport.max_batch_keys
        for start in range(0, len(keys), size):
            batch = keys if len(keys) <= size else keys[start : start + size]
            claimed = self._transport.claim(batch, mode, wait_ms, self._lease_ms, deadline)
            if claimed.in_flight:
                found.gap = MissReason.IN_FLIGHT
            if claimed.holding is not None:
                found.claims.append(claimed.holding)
                found.positions += [start + position for position in claimed.positions]
                found.entries += claimed.entries
            if mode is ClaimMode.FIRST and found.entries:
                return
            if mode is ClaimMode.RUN and len(claimed.entries) < len(batch):
                return

    def _look(
        self,
        found: _Search,
        keys: Sequence[Key],
        mode: ClaimMode,
        wait_ms: int,
        deadline: Deadline,
    ) -> None:
        if not keys:
            return
        # The index knows nothing of saves in flight: to wait for those the daemon is asked.
        looked = None if wait_ms else self._transport.find(keys, mode, deadline)
        if looked is not None:
            found.positions += looked.positions
            found.entries += looked.entries
            found.in_place = looked.in_place
            return
        results = self._transport.lookup(list(keys), wait_ms, deadline)
        wanted = _wanted(results, mode)
        if any(result.presence is Presence.IN_FLIGHT for result in results):
            found.gap = MissReason.IN_FLIGHT
        found.positions += [position for position, _ in wanted]
        found.entries += [entry for _, entry in wanted]

    def _bring(
        self,
        found: _Search,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        deadline: Deadline,
        step: Callable[[_Search, Sequence[Key], ClaimMode, int, Deadline], None],
    ) -> bool:
        """Have the daemon bring what other nodes have beyond what was found here, and search for
        that. True: all that was asked for came, and there may be more."""
        if mode is ClaimMode.ANY or found.gap is not MissReason.ABSENT or not self._shared_wait_ms:
            return False
        if not self._transport.shares:
            return False
        if mode is ClaimMode.FIRST:
            wanted = range(found.positions[0] if found.positions else len(keys))
        else:
            wanted = range(len(found.entries), len(keys))
        wanted = wanted[: self._transport.max_batch_keys]
        if not wanted:
            return False
        some = keys[wanted.start : wanted.stop]
        tokens = [token_counts[n] or 0 for n in wanted] if token_counts is not None else []
        prefill_ms = self._benefit.prefill_ms(
            max(tokens, default=0) if mode is ClaimMode.FIRST else sum(tokens)
        )
        wait_ms = min(self._shared_wait_ms, prefill_ms or self._shared_wait_ms)
        if not self._transport.pull(some, mode, wait_ms, deadline):
            return False
        more = _Search()
        step(more, some, mode, 0, deadline)
        if mode is ClaimMode.FIRST and more.entries:
            for claim in found.claims:
                self._transport.forget(claim)
            found.claims, found.positions, found.entries = [], [], []
        found.claims += more.claims
        found.positions += [wanted.start + position for position in more.positions]
        found.entries += more.entries
        found.gap = more.gap
        return mode is ClaimMode.RUN and len(more.entries) == len(some)

    def exist(self, keys: Sequence[Key], deadline: Deadline) -> list[bool]:
        """Which keys are published; none when the daemon can't be asked."""
        try:
            return self._transport.exist(keys, deadline) if keys else []
        except Exception as problem:
            self._counters.failure(self._failures.reason(problem))
            return [False] * len(keys)

    def leading_run(self, keys: Sequence[Key], deadline: Deadline) -> int:
        """How many keys from the first on are published; 0 when the daemon can't be asked."""
        try:
            return self._transport.leading_run(keys, deadline) if keys else 0
        except Exception as problem:
            self._counters.failure(self._failures.reason(problem))
            return 0

    def delete(self, keys: Sequence[Key], deadline: Deadline) -> list[DeleteStatus]:
        """What became of each key."""
        statuses: list[DeleteStatus] = []
        size = self._transport.max_batch_keys
        for start in range(0, len(keys), size):
            batch = keys[start : start + size]
            try:
                statuses += self._transport.delete(batch, deadline)
            except Exception as problem:
                self._failures.reason(problem)
                statuses += [DeleteStatus.FAILED] * len(batch)
        return statuses

    def probe(self, keys: Sequence[Key], wait_ms: int, deadline: Deadline) -> list[Found]:
        """What is known of each key; nothing of any of them when the call fails."""
        try:
            return self._transport.lookup(keys, wait_ms, deadline) if keys else []
        except Exception as problem:
            self._counters.failure(self._failures.reason(problem))
            return [NOT_FOUND] * len(keys)

    def claimed_at_once(
        self,
        claimed: Claimed | MissReason,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
    ) -> Hit:
        """What was claimed, read and released in one, as a hit that pins nothing; or why it could
        not be. Counted as a search is."""
        found = _Search()
        if isinstance(claimed, MissReason):
            found.gap = claimed
        else:
            found.positions += claimed.positions
            found.entries += claimed.entries
            if claimed.in_flight:
                found.gap = MissReason.IN_FLIGHT
        return self._hit(found, keys, token_counts, mode, _wanted_tokens(token_counts, mode))

    def sees_all(self, mode: ClaimMode) -> bool:
        """Is what the daemon has by itself all that a search finds, and nothing of it left out?"""
        if mode is ClaimMode.ANY:
            return True
        shared = self._shared_wait_ms and self._transport.shares
        return not shared and not self._benefit.gates

    def _hit(
        self,
        found: _Search,
        keys: Sequence[Key],
        token_counts: Sequence[int | None] | None,
        mode: ClaimMode,
        lookup_tokens: int,
    ) -> Hit:
        """Counted: one hit or one miss."""
        entries = found.entries
        if not entries:
            # A run that lacks its first block is none, whatever else there is.
            told = keys[:1] if mode is ClaimMode.RUN else keys[:MAX_TOLD_KEYS]
            return self._miss(found.gap, lookup_tokens, told)
        counts = _counts(entries, found.positions, token_counts)
        worth = len(entries)
        if mode is not ClaimMode.ANY and self._benefit.gates:
            worth = self._benefit.worth(entries, counts)
        complete = mode is ClaimMode.FIRST or len(entries) == len(keys)
        hit = Hit(
            self._reader,
            entries[:worth],
            counts[:worth],
            claims=found.claims,
            in_place=found.in_place,
            positions=found.positions[:worth],
            miss=MissReason.SLOW if worth < len(entries) else None if complete else found.gap,
        )
        if not worth:
            self._reader.release([hit], None)
            return self._miss(MissReason.SLOW, lookup_tokens)
        self._counters.hit(hit.entries, hit.token_counts, lookup_tokens)
        return hit

    def _miss(self, reason: MissReason, lookup_tokens: int, keys: Sequence[Key] = ()) -> Hit:
        self._counters.miss(reason, lookup_tokens, keys)
        return Hit(self._reader, miss=reason)


def _wanted(answers: Sequence[Found], mode: ClaimMode) -> list[tuple[int, Entry]]:
    """Positions and entries that `mode` wants of what was looked up."""
    wanted: list[tuple[int, Entry]] = []
    for position, answer in enumerate(answers):
        if answer.entry is not None:
            wanted.append((position, answer.entry))
            if mode is ClaimMode.FIRST:
                break
        elif mode is ClaimMode.RUN:
            break
    return wanted


def checked_keys(keys: Sequence[Key]) -> list[Key]:
    """Raises InvalidKey."""
    keys = list(keys)
    if set(map(type, keys)) == {bytes} and set(map(len, keys)) == {KEY_BYTES}:
        return keys  # nearly always, at a tenth of the cost
    return [check_key(key) for key in keys]


def _wanted_tokens(token_counts: Sequence[int | None] | None, mode: ClaimMode) -> int:
    """What a full hit would have: of the longest prefix, or of all blocks; 0: not known."""
    known = [count or 0 for count in token_counts or ()]
    if mode is ClaimMode.FIRST:
        return max(known, default=0)
    return sum(known)


def _counts(
    entries: Sequence[Entry],
    positions: Sequence[int],
    token_counts: Sequence[int | None] | None,
) -> list[int]:
    if token_counts is None:
        return [entry.token_count for entry in entries]
    return [
        entry.token_count if (known := token_counts[position]) is None else known
        for entry, position in zip(entries, positions, strict=True)
    ]
