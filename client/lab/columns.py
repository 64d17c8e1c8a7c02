"""A whole trace in memory, packed: 4 bytes for each block reference, 16 for each request."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .trace import Request

_Column: TypeAlias = "array[int] | memoryview[int]"


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in numbers; `infinite_hit_tokens` is what a cache without limits would hit."""

    requests: int
    blocks: int
    unique_blocks: int
    prompt_tokens: int
    infinite_hit_tokens: int

    @property
    def infinite_hit_rate(self) -> float:
        return self.infinite_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "infinite_hit_rate": self.infinite_hit_rate}


class TraceColumns:
    """What a replay needs of a trace, in columns; immutable.

    Block ids are renumbered 0, 1, 2, ... by first appearance, so they may be any integers and
    take 4 bytes each (at most 2**32 different ones). That a block is new when a request
    arrives is then a comparison with the number of blocks seen before.
    """

    def __init__(
        self, blocks: _Column, ends: _Column, lengths: _Column, unique_blocks: int
    ) -> None:
        #: block numbers of all requests, one after the other
        self._blocks = blocks
        #: where each request ends in `_blocks`
        self._ends = ends
        #: prompt tokens of each request
        self._lengths = lengths
        self.unique_blocks = unique_blocks

    @classmethod
    def load(cls, requests: Iterable[Request]) -> TraceColumns:
        """Pack a stream of requests. Memory: the columns, and a table of the different ids."""
        numbers: dict[int, int] = {}
        blocks, ends, lengths = array("I"), array("Q"), array("q")
        for request in requests:
            blocks.extend([numbers.setdefault(id_, len(numbers)) for id_ in request.hash_ids])
            ends.append(len(blocks))
            lengths.append(request.input_length)
        return cls(blocks, ends, lengths, len(numbers))

    def __len__(self) -> int:
        """Requests."""
        return len(self._ends)

    @property
    def blocks(self) -> int:
        """Block references, repeats included."""
        return len(self._blocks)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._lengths)

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """The requests in order: (block numbers in a new list, prompt tokens)."""
        blocks, start = self._blocks, 0
        for end, length in zip(self._ends, self._lengths, strict=True):
            yield blocks[start:end].tolist(), length
            start = end

    def summary(self, block_tokens: int) -> TraceSummary:
        """Count everything, and the hits of a cache without limits."""
        hit_tokens = known = 0
        for blocks, length in self:
            hits = 0
            for block in blocks:
                if block >= known:
                    break
                hits += 1
            hit_tokens += min(hits * block_tokens, length)
            known = max(known, max(blocks, default=-1) + 1)
        return TraceSummary(
            len(self), self.blocks, self.unique_blocks, self.prompt_tokens, hit_tokens
        )

    def save(self, folder: Path) -> None:
        """Write the columns into a folder, for `map` in another process."""
        (folder / "blocks").write_bytes(self._blocks)
        (folder / "ends").write_bytes(self._ends)
        (folder / "lengths").write_bytes(self._lengths)
        (folder / "unique_blocks").write_text(str(self.unique_blocks))

    @classmethod
    def map(cls, folder: Path) -> TraceColumns:
        """The columns in a folder, mapped: processes share one copy in the page cache."""
        return cls(
            _mapped(folder / "blocks").cast("I"),
            _mapped(folder / "ends").cast("Q"),
            _mapped(folder / "lengths").cast("q"),
            int((folder / "unique_blocks").read_text()),
        )


def _mapped(path: Path) -> memoryview:
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        # The view keeps the mapping alive; both go when the columns go.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
