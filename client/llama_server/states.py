"""States of a model in the cache: found, put into slot files, and saved out of them.

Keys and values are kept as a chain of blocks. What is behind the last whole block is an entry with
the key of the whole prefix: the rows of the tokens there, and the remainder of the state, if it has
one. A state with a remainder can be restored only where it was saved. One without keys and values
(or of an unknown form) is one entry with the key of its prefix.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ...proto.keys import Key, Namespace, prefix_key, prefix_keys
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from ..aio import AsyncClient, AsyncHit
from ..saves import SaveItem
from .folder import SlotFolder
from .server_identity import Probe
from .slot_file import BadSlotFile, SlotFile, SlotLayout, Tokens, UnknownVersion, common_tokens

T = TypeVar("T")

#: Why a gain in tokens is not worth loading so many bytes; None: it is.
WhyNot = Callable[[int, int], str | None]
#: Has the server restore a file of so many tokens.
Load = Callable[[str, int], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore put into a slot."""

    tokens: int
    payload_bytes: int
    seconds: float


class _Found(NamedTuple):
    """A prefix that can be loaded."""

    #: Of its slot file; None: an entry could not be read.
    name: str | None
    tokens: int
    payload_bytes: int


class States:
    """The states of one model for one tenant."""

    def __init__(
        self,
        cache: AsyncClient,
        folder: SlotFolder,
        tier: Tier,
        namespace: Namespace,
        probe: Probe,
    ) -> None:
        self._cache = cache
        self._folder = folder
        self._tier = tier
        self._namespace = namespace
        self._layout = probe.layout
        self._has_remainder = probe.has_remainder
        self._block_tokens = probe.block_tokens

    # ---- finding and restoring

    async def restore(
        self,
        tokens: Tokens,
        present: int,
        heads: Sequence[int],
        why_not: WhyNot,
        load: Load,
    ) -> Restored | str:
        """Have `load` put the longest cached prefix of `tokens` into a slot, which has the first
        `present` of them. `load` is given the name of a slot file and its tokens.

        `heads`: lengths that are looked for beside the longest ones. `why_not`: of a gain in tokens
        and a size in bytes. Returns why nothing was restored, in a few words that are counted.
        Raises what `load` raises, and OSError if there is no room for the file.
        """
        began_s = time.perf_counter()
        found: _Found | str
        with ExitStack() as files:
            if self._layout is None or self._has_remainder:
                found = await self._find_state(files, tokens, present, heads, why_not)
            else:
                found = await self._find_blocks(files, self._layout, tokens, present, why_not)
            if isinstance(found, str):
                return found
            if found.name is None:
                return "unreadable entries"
            await load(found.name, found.tokens)
        return Restored(found.tokens, found.payload_bytes, time.perf_counter() - began_s)

    async def _find_blocks(
        self, files: ExitStack, layout: SlotLayout, tokens: Tokens, present: int, why_not: WhyNot
    ) -> _Found | str:
        """Up to wherever there are blocks, and an entry behind them."""
        size = self._block_tokens
        chain = self._cache.chain(self._namespace, tokens.data, size)
        if present and (await self._cache.leading_run(chain) + 1) * size <= present:
            return "nothing longer"
        async with self._cache.longest_run(chain, counted=not present) as run:
            whole = len(run) * size
            lengths = list(range(whole + 1, min(whole + size, len(tokens) + 1)))
            async with self._longest(tokens, lengths, counted=not len(chain)) as tail:
                length = lengths[::-1][tail.positions[0]] if tail else whole
                if length <= present:
                    return "nothing longer" if length else "miss"
                payload_bytes = length * layout.token_bytes
                if why := why_not(length - present, payload_bytes):
                    return why
                made = await self._fill(files, layout, tokens[:length], run, tail or None)
        return _Found(made, length, payload_bytes)

    async def _find_state(
        self, files: ExitStack, tokens: Tokens, present: int, heads: Sequence[int], why_not: WhyNot
    ) -> _Found | str:
        """Up to where a state was saved: whole, or if all of its blocks are there."""
        layout, lengths = self._layout, _places(tokens, present, heads)
        async with self._longest(tokens, lengths) as end:
            if not end:
                return "nothing longer" if present else "miss"
            length = lengths[::-1][end.positions[0]]
            tokens, payload_bytes = tokens[:length], end.entries[0].payload_bytes
            if layout is None:
                if why := why_not(length - present, payload_bytes):
                    return why
                made = await self._fill_whole(files, tokens, end)
            else:
                chain = self._cache.chain(self._namespace, tokens.data, self._block_tokens)
                payload_bytes += len(chain) * self._block_tokens * layout.token_bytes
                if why := why_not(length - present, payload_bytes):
                    return why
                async with self._cache.longest_run(chain, counted=False) as run:
                    if len(run) < len(chain):
                        return "blocks are gone"
                    made = await self._fill(files, layout, tokens, run, end)
        return _Found(made, length, payload_bytes)

    async def _fill_whole(self, files: ExitStack, tokens: Tokens, hit: AsyncHit) -> str | None:
        """Make a slot file, one of `files`, that is an entry. None: the entry could not be read, or
        is of other tokens."""
        name = files.enter_context(self._folder.name())
        file = await _finished(self._folder.create, name, hit.entries[0].payload_bytes)
        if not await hit.restore_into([file]) or not _is_of(file, tokens):
            return None
        await self._lengthen(name, file)
        return name

    async def _fill(
        self,
        files: ExitStack,
        layout: SlotLayout,
        tokens: Tokens,
        run: AsyncHit,
        end: AsyncHit | None,
    ) -> str | None:
        """Make a slot file, one of `files`, of blocks, and of an entry behind them. None: one of
        them could not be read, or is none of this model's."""
        count = len(tokens)
        first = len(run) * self._block_tokens
        remainder_bytes = 0
        if end:
            remainder_bytes = end.entries[0].payload_bytes - (count - first) * layout.token_bytes
        if remainder_bytes < 0 or (remainder_bytes > 0) != self._has_remainder:
            return None
        size_bytes = layout.file_bytes(count)
        name = files.enter_context(self._folder.name())
        file = await _finished(self._folder.create, name, size_bytes + remainder_bytes)
        if not await self._restore_into(layout, file, tokens, run, end, file[size_bytes:]):
            return None
        if remainder_bytes:
            await self._lengthen(name, file)
        return name

    async def _restore_into(
        self,
        layout: SlotLayout,
        file: memoryview,
        tokens: Tokens,
        run: AsyncHit,
        end: AsyncHit | None,
        remainder: memoryview,
    ) -> bool:
        count, size = len(tokens), self._block_tokens
        layout.write_frame(file, tokens)
        first = len(run) * size
        spans = [(start, start + size) for start in range(0, first, size)]
        if layout.transposed:
            blocks = [bytearray(entry.payload_bytes) for entry in run.entries]
            if run and not await run.restore_into(blocks):
                return False
            rest = bytearray((count - first) * layout.token_bytes)
            if end and not await end.restore_into([_flat([rest, remainder])]):
                return False
            for (start, _), block in zip([*spans, (first, count)], [*blocks, rest], strict=True):
                if block:
                    await asyncio.to_thread(layout.fill, file, count, start, memoryview(block))
            return True
        places = [layout.rows(file, count, *span) for span in spans]
        if run and not await run.restore_into(places):
            return False
        rows = layout.rows(file, count, first, count)
        return not end or bool(await end.restore_into([_flat([*rows, remainder])]))

    async def _lengthen(self, name: str, memory: memoryview) -> None:
        """Let a longer file take the place of this one, if it has to be longer."""

        def write(other: str) -> bool:
            try:
                longer = SlotFile(memory).with_an_older_cell()
            except UnknownVersion:
                return False
            if longer is None:
                return False
            place = self._folder.create(other, sum(map(len, longer)))
            at = 0
            for piece in longer:
                place[at : at + len(piece)] = piece
                at += len(piece)
            return True

        with self._folder.name() as other:
            if await _finished(write, other):
                self._folder.replace(other, name)

    @asynccontextmanager
    async def _longest(
        self, tokens: Tokens, lengths: Sequence[int], *, counted: bool = True
    ) -> AsyncIterator[AsyncHit | None]:
        """A claim on the entry of the longest of these prefixes; without `lengths` nothing is
        asked. A request is one look-up, so it is not `counted` behind another one."""
        if not lengths:
            yield None
            return
        keys = prefix_keys(self._namespace, tokens.data, lengths)[::-1]
        async with self._cache.claim(
            keys, mode=ClaimMode.FIRST, prompt_tokens=len(tokens), counted=counted
        ) as hit:
            yield hit

    # ---- saving

    def would_drop(self, token_count: int) -> bool:
        """Would a save of a slot with so many tokens be dropped?"""
        size_bytes = self._layout.token_bytes * token_count if self._layout else 0
        return not self._cache.connected or self._cache.would_drop(size_bytes)

    async def save(
        self, memory: memoryview, prompt: int, known: Tokens, reason: SaveReason
    ) -> tuple[Tokens, Awaitable[object] | None]:
        """Save the state in a slot file. `prompt`: the tokens of the last prompt, whose end the
        same prompt looks for. `known`: what is known to be in the slot, which may go on behind it
        or end before it; the tokens of a file that does not tell them.

        Returns the tokens of the file, and the save in progress; None if there was nothing new.
        Raises BadSlotFile.
        """
        try:
            file = SlotFile(memory)
        except UnknownVersion:
            return known, await self._save_whole(memory, known, reason)
        if common_tokens(file.tokens, known) < min(len(file.tokens), len(known)):
            raise BadSlotFile("another request had the slot")
        if self._layout is None:
            return file.tokens, await self._save_whole(memory, file.tokens, reason)
        if file.layout != self._layout:
            raise BadSlotFile("it has another form than that of the probe")
        if (len(file.remainder) > 0) != self._has_remainder:
            raise BadSlotFile(f"it has {len(file.remainder)} bytes behind its keys and values")
        file = await asyncio.to_thread(file.sorted)
        items, ancestors = await self._new_blocks(file, min(prompt, len(file.tokens)))
        if not items:
            return file.tokens, None
        saving = self._cache.save_many_async(
            items, tier=self._tier, reason=reason, ancestors=ancestors
        )
        return file.tokens, saving

    async def _new_blocks(
        self, file: SlotFile, prompt: int
    ) -> tuple[list[SaveItem], Sequence[Key]]:
        """The blocks that the cache does not have, and the rests behind the last whole block: of
        the prompt, and of everything."""
        size, count, tokens = self._block_tokens, len(file.tokens), file.tokens
        chain = self._cache.chain(self._namespace, tokens.data, size)
        run = await self._cache.leading_run(chain, counted=False)
        items = [
            SaveItem(chain[number], file.block(number * size, (number + 1) * size), size)
            for number in range(run, len(chain))
        ]
        for end in sorted({prompt, count} if not self._has_remainder else {count}):
            first, remainder = end - end % size, file.remainder
            if first == end and not remainder:
                continue
            key = prefix_key(self._namespace, tokens[:end].data)
            if not await self._cache.exists_one(key, counted=False):
                rows = file.block(first, end) if first < end else []
                payload = _flat([*rows, remainder])
                # A state that can't be cut stands for everything before it: without it the
                # blocks are of no use.
                items.append(SaveItem(key, payload, end if self._has_remainder else end - first))
        return items, chain[:run]

    async def _save_whole(
        self, memory: memoryview, tokens: Tokens, reason: SaveReason
    ) -> Awaitable[object] | None:
        if not len(tokens):
            return None
        key = prefix_key(self._namespace, tokens.data)
        if await self._cache.exists_one(key, counted=False):
            return None
        return self._cache.save_async(
            key, memory, tier=self._tier, reason=reason, token_count=len(tokens)
        )


async def _finished(call: Callable[..., T], *arguments: object) -> T:
    """What a call on a thread returns. Who is cancelled waits for its end all the same: it makes a
    file, which can be removed only then."""
    working = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


def _places(tokens: Tokens, present: int, heads: Sequence[int]) -> list[int]:
    """The lengths at which a state is looked for that can't be cut, ascending: `heads`, and as many
    of the longest ones as one call takes."""
    # The server evaluates the last token in any case, and such a state can't forget it.
    last = len(tokens) - 1
    longest = range(max(1, last - MAX_BATCH_KEYS // 2), last + 1)
    return sorted({length for length in (*longest, *heads) if present < length <= last})


def _is_of(memory: memoryview, tokens: Tokens) -> bool:
    """Whether a whole file is of these tokens. One of an unknown version is checked by its key and
    its checksum alone."""
    try:
        file = SlotFile(memory)
    except UnknownVersion:
        return True
    except BadSlotFile:
        return False
    return len(file.tokens) == len(tokens) == common_tokens(file.tokens, tokens)


def _flat(pieces: Sequence[Any]) -> list[Any]:
    """Those that have any bytes."""
    return [piece for piece in pieces if len(piece)]
