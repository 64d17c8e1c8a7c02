"""States of a model in the cache: found, put into slot files, and saved out of them.

A state that can be cut by tokens is kept as a chain of blocks, and the rest behind the last whole
block as an entry with the key of the whole prefix. A state that can't be cut is one entry with the
key of its prefix.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from ...proto.keys import Key, Namespace, prefix_key, prefix_keys
from ...proto.limits import MAX_BATCH_KEYS
from ...proto.vocabulary import ClaimMode, SaveReason, Tier
from ..aio import AsyncClient, AsyncHit
from ..saves import SaveItem
from .folder import SlotFolder
from .identity import Probe
from .slot_file import BadSlotFile, Layout, SlotFile, Tokens, UnknownVersion, common_tokens

logger = logging.getLogger("prefixd.llama_server")


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore put into a slot."""

    tokens: int
    payload_bytes: int
    seconds: float


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
        self._block_tokens = probe.block_tokens

    # ---- finding and restoring

    async def restore(
        self,
        tokens: Tokens,
        present: int,
        heads: Sequence[int],
        why_not: Callable[[int, int], str | None],
        load: Callable[[str, int], Awaitable[None]],
    ) -> Restored | str:
        """Have `load` put the longest cached prefix of `tokens` into a slot, which has the first
        `present` of them. `load` is given the name of a slot file and its tokens.

        `heads`: lengths that are looked for beside the longest ones. `why_not`: of a gain in tokens
        and a size in bytes. Returns why nothing was restored, in a few words that are counted.
        Raises what `load` raises, and OSError if there is no room for the file.
        """
        began_s = time.perf_counter()
        if self._layout is not None:
            found = await self._restore_blocks(self._layout, tokens, present, why_not, load)
        else:
            found = await self._restore_whole(tokens, present, heads, why_not, load)
        if isinstance(found, str):
            return found
        return Restored(*found, time.perf_counter() - began_s)

    async def _restore_blocks(
        self,
        layout: Layout,
        tokens: Tokens,
        present: int,
        why_not: Callable[[int, int], str | None],
        load: Callable[[str, int], Awaitable[None]],
    ) -> tuple[int, int] | str:
        size = self._block_tokens
        chain = self._cache.chain(self._namespace, tokens.data, size)
        if present and (await self._cache.leading_run(chain) + 1) * size <= present:
            return "nothing longer"
        async with self._cache.longest_run(chain) as run:
            whole = len(run) * size
            lengths = list(range(whole + 1, min(whole + size, len(tokens) + 1)))
            async with self._longest(tokens, lengths) as tail:
                length = lengths[::-1][tail.positions[0]] if tail else whole
                if length <= present:
                    return "nothing longer" if length else "miss"
                payload_bytes = length * layout.token_bytes
                if why := why_not(length - present, payload_bytes):
                    return why
                hits = [hit for hit in (run, tail) if hit]
                made = await self._file_of_blocks(layout, tokens[:length], hits)
        if made is None:
            return "unreadable entries"
        try:
            await load(made, length)
        finally:
            self._folder.unlink(made)
        return length, payload_bytes

    async def _file_of_blocks(
        self, layout: Layout, tokens: Tokens, hits: Sequence[AsyncHit]
    ) -> str | None:
        """The name of a slot file made of hits; None: an entry could not be read."""
        count = len(tokens)
        name, file = self._folder.create(layout.file_bytes(count))
        good = False
        try:
            layout.write_frame(file, tokens)
            first = 0
            for hit in hits:
                spans = []
                for entry in hit.entries:
                    covered = entry.payload_bytes // layout.token_bytes
                    spans.append((first, first + covered))
                    first += covered
                if layout.transposed:
                    restored = await self._fill(hit, layout, file, count, spans)
                else:
                    places = [layout.rows(file, count, *span) for span in spans]
                    restored = bool(await hit.restore_into(places))
                if not restored:
                    return None
            good = first == count
        finally:
            if not good:
                self._folder.unlink(name)
        return name if good else None

    @staticmethod
    async def _fill(
        hit: AsyncHit,
        layout: Layout,
        file: memoryview,
        count: int,
        spans: Sequence[tuple[int, int]],
    ) -> bool:
        buffers = [bytearray(entry.payload_bytes) for entry in hit.entries]
        if not await hit.restore_into(buffers):
            return False
        for (first, _), buffer in zip(spans, buffers, strict=True):
            await asyncio.to_thread(layout.fill, file, count, first, memoryview(buffer))
        return True

    async def _restore_whole(
        self,
        tokens: Tokens,
        present: int,
        heads: Sequence[int],
        why_not: Callable[[int, int], str | None],
        load: Callable[[str, int], Awaitable[None]],
    ) -> tuple[int, int] | str:
        # The server evaluates the last token in any case, and such a state can't forget it.
        last = len(tokens) - 1
        lengths = sorted(
            {
                *range(max(1, last - MAX_BATCH_KEYS // 2), last + 1),
                *(head for head in heads if 0 < head <= last),
            }
        )
        async with self._longest(tokens, [n for n in lengths if n > present]) as hit:
            if not hit:
                return "nothing longer" if present else "miss"
            length = [n for n in lengths if n > present][::-1][hit.positions[0]]
            payload_bytes = hit.entries[0].payload_bytes
            if why := why_not(length - present, payload_bytes):
                return why
            name, file = self._folder.create(payload_bytes)
            try:
                if not await hit.restore_into([file]):
                    return "unreadable entries"
                name = await asyncio.to_thread(self._checked, name, file, tokens[:length])
                await load(name, length)
            except BadSlotFile as why:
                logger.warning("a cached state is none of this server's: %s", why)
                return "unreadable entries"
            finally:
                self._folder.unlink(name)
        return length, payload_bytes

    def _checked(self, name: str, memory: memoryview, tokens: Tokens) -> str:
        """The name of the file to load: this one, or a longer one that takes its place. Raises
        BadSlotFile for other tokens."""
        try:
            file = SlotFile(memory)
        except UnknownVersion:
            return name  # checked by its checksum, and by its key
        if len(file.tokens) != len(tokens) or common_tokens(file.tokens, tokens) != len(tokens):
            raise BadSlotFile("it has other tokens")
        longer = file.with_an_older_cell()
        if longer is None:
            return name
        other, place = self._folder.create(len(longer))
        place[:] = longer
        self._folder.unlink(name)
        return other

    def _longest(self, tokens: Tokens, lengths: Sequence[int]) -> _MaybeHit:
        keys = prefix_keys(self._namespace, tokens.data, lengths)[::-1]
        return _MaybeHit(self._cache, keys)

    # ---- saving

    def would_drop(self, token_count: int) -> bool:
        """Would a save of a slot with so many tokens be dropped?"""
        size_bytes = self._layout.token_bytes * token_count if self._layout else 0
        return not self._cache.connected or self._cache.would_drop(size_bytes)

    async def save(
        self, memory: memoryview, prompt: int, known: Tokens, reason: SaveReason
    ) -> tuple[Tokens, Awaitable[object] | None]:
        """Save the state in a slot file. `prompt`: the tokens of the last prompt, whose end the
        same prompt looks for. `known`: the tokens, for a file that does not tell them.

        Returns the tokens of the file, and the save in progress; None if there was nothing new.
        Raises BadSlotFile.
        """
        try:
            file = SlotFile(memory)
        except UnknownVersion:
            return known, await self._save_whole(memory, known, reason)
        if self._layout is None:
            return file.tokens, await self._save_whole(memory, file.tokens, reason)
        if file.uncuttable:
            raise BadSlotFile(file.uncuttable)
        if file.layout != self._layout:
            raise BadSlotFile("it has another form than that of the probe")
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
        run = await self._cache.leading_run(chain)
        items = [
            SaveItem(chain[number], file.block(number * size, (number + 1) * size), size)
            for number in range(run, len(chain))
        ]
        for end in sorted({prompt, count}):
            first = end - end % size
            if first == end:
                continue
            key = prefix_key(self._namespace, tokens[:end].data)
            if not await self._cache.exists_one(key):
                items.append(SaveItem(key, file.block(first, end), end - first))
        return items, chain[:run]

    async def _save_whole(
        self, memory: memoryview, tokens: Tokens, reason: SaveReason
    ) -> Awaitable[object] | None:
        if not len(tokens):
            return None
        key = prefix_key(self._namespace, tokens.data)
        if await self._cache.exists_one(key):
            return None
        return self._cache.save_async(
            key, memory, tier=self._tier, reason=reason, token_count=len(tokens)
        )


class _MaybeHit:
    """A claim on the first of `keys` that is there; without keys nothing is asked."""

    def __init__(self, cache: AsyncClient, keys: list[Key]) -> None:
        self._cache = cache
        self._keys = keys
        self._hit: AsyncHit | None = None

    async def __aenter__(self) -> AsyncHit | None:
        if self._keys:
            self._hit = await self._cache.claim(self._keys, mode=ClaimMode.FIRST)
        return self._hit

    async def __aexit__(self, *_: object) -> None:
        if self._hit is not None:
            await self._hit.release()


__all__: Final = ["Restored", "States"]
