"""Writes what the clients of a daemon look up as a trace: `prefixctl trace record`.

Clients send what they look up a few times a second, each in its order. A look-up is held back until
the others of its time have come, so that the trace is in the order of the times, and is written as
one request. Its time is that of its client, but not more than ten seconds before it came, and not
after: a client whose clock is wrong moves only its own requests, and by little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Final

from ...proto import prefixd_pb2 as pb
from .trace import Request, format_request
from .trace_file import STDIN, open_output

#: How long a look-up waits for earlier ones. Clients send four times a second.
HOLD_S: Final = 1.5
#: How long before it came a look-up may have been.
_OLDEST_NS: Final = 10_000_000_000
#: The label of clients that were given none.
_NO_LABEL: Final = "default"


class LookupOrder:
    """Look-ups of many clients as requests, in the order of their times."""

    def __init__(self, block_tokens: int | None = None) -> None:
        """`block_tokens`: of look-ups that say neither this nor how many tokens they stand for."""
        self._block_tokens = block_tokens
        self._heap: list[tuple[int, int, float, pb.RecordedLookup]] = []
        self._number = 0
        self._last_ns = 0
        #: Look-ups that stand for an unknown number of tokens, which no trace can have.
        self.untold = 0
        #: Blocks that were hit.
        self.hit_blocks = 0

    def take(self, response: pb.RecordResponse, now_s: float) -> None:
        """Take what came at `now_s`, a time since 1970."""
        now_ns = round(now_s * 1e9)
        for lookup in response.lookups:
            at_ns = min(max(lookup.at_unix_ns, now_ns - _OLDEST_NS), now_ns)
            heappush(self._heap, (at_ns, self._number, now_s, lookup))
            self._number += 1

    def ready(self, now_s: float | None = None) -> Iterator[tuple[Request, int | None]]:
        """The next requests, and the tokens of their blocks if that is known. None: all that
        wait."""
        heap = self._heap
        while heap and (now_s is None or heap[0][2] <= now_s - HOLD_S):
            at_ns, _, _, lookup = heappop(heap)
            block_tokens = lookup.block_tokens or self._block_tokens
            tokens = lookup.prompt_tokens or (block_tokens or 0) * len(lookup.ids)
            if not tokens:
                self.untold += 1
                continue
            self._last_ns = max(self._last_ns, at_ns)  # of one that came late
            self.hit_blocks += lookup.hit_blocks
            label = "" if lookup.label == _NO_LABEL else lookup.label
            request = Request(self._last_ns // 1_000_000, tokens, 0, tuple(lookup.ids), label=label)
            yield request, block_tokens


class TraceFiles(ExitStack):
    """The files of a recording. The first appears with its first request; each appears under its
    name when it is whole, the last one at the end. A context manager.

    A file is full with `max_bytes` before compression. Then another one begins, and the last `keep`
    files are kept; with `keep` 0 there is one file, with which the recording ends."""

    def __init__(self, path: str, max_bytes: int, keep: int = 0) -> None:
        super().__init__()
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._file: IO[bytes] | None = None
        self._bytes = 0
        self._pieces = 0
        #: Those that are kept.
        self.paths: deque[str] = deque()
        #: The file is full, and there is to be no other one.
        self.full = False

    def write(self, request: Request, block_tokens: int | None) -> bool:
        """Write a request; False if the file is `full`. Raises TraceError."""
        line = format_request(request, block_tokens)
        if self._file is not None and self._bytes + len(line) > self._max_bytes:
            if not self._keep:
                self.full = True
                return False
            self._finish()
        if self._file is None:
            self._pieces += 1
            path = piece_name(self._path, self._pieces) if self._keep else self._path
            self._file = self.enter_context(open_output(path))
            self._bytes = 0
            self.paths.append(path)
        self._file.write(line)
        self._bytes += len(line)
        return True

    def _finish(self) -> None:
        self.close()
        self._file = None
        while len(self.paths) >= self._keep:
            Path(self.paths.popleft()).unlink(missing_ok=True)


def piece_name(path: str, number: int) -> str:
    """`trace.jsonl.gz` and 3: `trace.3.jsonl.gz`."""
    if path == STDIN:
        raise ValueError("standard output can't be rotated")
    whole = Path(path)
    stem, dot, rest = whole.name.partition(".")
    return str(whole.with_name(f"{stem}.{number}{dot}{rest}"))
