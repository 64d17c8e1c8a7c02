"""Records what a client looks up, as a trace that `prefixctl replay` and the others read.

Off by default: `Client(record=RecordOptions(folder))`, or $PREFIXD_RECORD=FOLDER for every client
of a process, those in engines too. $PREFIXD_RECORD_SAMPLE=0.1 records a tenth.

A look-up of blocks becomes one line: its time, prompt tokens, block ids and hit blocks. An id is 64
bits of a BLAKE2b of the block's key under a secret in the folder (`secret`, readable by its owner
alone). So a trace says which prompts share what, and no guess of a prompt can be tried on it by
those who lack the secret; all clients that record into one folder have the same ids, and deleting
the secret afterwards makes guessing impossible for all.

What it costs: the look-up itself puts a tuple into a bounded queue; a thread hashes and writes,
four times a second. Look-ups that find the queue full are dropped and counted. Files have a limit,
and the oldest of a client's are deleted. A sample takes or leaves whole trees of prompts, by their
first block, so that the shares in what is left stay true. If the disk is full recording ends, and
the log says so: it is never the reason a look-up fails.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from secrets import token_bytes
from typing import IO, Final, NamedTuple

from ..proto.errors import ConfigError
from ..proto.keys import Key
from .chains import BlockChain

logger = logging.getLogger("prefixd.client")

FOLDER_VARIABLE: Final = "PREFIXD_RECORD"
SAMPLE_VARIABLE: Final = "PREFIXD_RECORD_SAMPLE"
_SECRET: Final = "secret"
_SECRET_BYTES: Final = 32
#: Look-ups that may wait to be written, and their keys, of some 70 bytes each.
_MAX_PENDING: Final = 4_096
_MAX_PENDING_KEYS: Final = 1 << 18
_WRITE_EVERY_S: Final = 0.25
_STOP_WITHIN_S: Final = 2.0
_numbers = count()


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Where and how much to record.

    `folder` is made if need be. `sample`: the share of prompts, by their first block, above 0 and
    at most 1. A file of `max_file_bytes` is followed by another; of a client's files the last
    `max_files` are kept. Raises ConfigError for values out of range.
    """

    folder: str | os.PathLike[str]
    sample: float = 1.0
    max_file_bytes: int = 64 << 20
    max_files: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.sample <= 1:
            raise ConfigError(f"a sample is a share above 0 and at most 1, not {self.sample}")
        if self.max_file_bytes < 1 or self.max_files < 1:
            raise ConfigError("a recorder needs at least one file of at least one byte")

    @classmethod
    def from_environment(cls) -> RecordOptions | None:
        """What the variables say; None: nothing is recorded. Raises ConfigError."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if not folder:
            return None
        share = os.environ.get(SAMPLE_VARIABLE, "1")
        try:
            return cls(folder, float(share))
        except ValueError:
            raise ConfigError(f"{SAMPLE_VARIABLE} is a number, not {share!r}") from None


class _Lookup(NamedTuple):
    at_s: float
    keys: Sequence[Key]
    block_tokens: int
    prompt_tokens: int
    hit_blocks: int


class Recorder:
    """The recorder of one client. Thread-safe; `close` writes what is pending."""

    def __init__(
        self, options: RecordOptions, label: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        """`label` is written as the tenant of each request. Raises ConfigError if the folder can't
        be used."""
        self._folder = Path(options.folder)
        self._options = options
        self._clock = clock
        self._more = f', "tenant": {json.dumps(label)}' if label else ""
        self._below = round(options.sample * (1 << 64))
        self._pending: deque[_Lookup] = deque()
        #: Keys that were put into `_pending`, and that were taken out: each by one thread, or under
        #: the interpreter's lock. A race makes the bound a little less exact.
        self._keys_in = self._keys_out = 0
        self._last_ms = 0
        self._file: IO[bytes] | None = None
        self._paths: deque[Path] = deque()
        #: Look-ups that were written, and those that were not because too many waited.
        self.recorded = self.dropped = 0
        self._failed = self._told_of_one = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._secret = _secret(self._folder)
            self._next_file()
        except OSError as error:
            raise ConfigError(
                f"look-ups cannot be recorded in {self._folder}: {error.strerror or error}"
            ) from None
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixd-recorder", daemon=True)
        self._thread.start()

    def looked(self, keys: BlockChain | Sequence[Key], prompt_tokens: int, hit_blocks: int) -> None:
        """Note a look-up of blocks, root first. `prompt_tokens`: what they stand for, 0 if that is
        not known."""
        if self._failed or not len(keys):
            return
        if self._below < 1 << 64 and int.from_bytes(keys[0][:8], "big") >= self._below:
            return
        waiting = self._keys_in - self._keys_out
        if len(self._pending) >= _MAX_PENDING or waiting + len(keys) > _MAX_PENDING_KEYS:
            self.dropped += 1
            return
        at_s = self._clock()
        if isinstance(keys, BlockChain):
            # Hashed to the end now: a chain is not thread-safe, and its save needs the keys anyway.
            size, whole = keys.block_tokens, keys[: keys.whole_blocks]
            if not whole:
                return
            tokens = size * len(whole) + keys.partial_tokens
            lookup = _Lookup(at_s, whole, size, tokens, hit_blocks)
        else:
            # The caller's list may change before it is written.
            lookup = _Lookup(at_s, tuple(keys), 0, prompt_tokens, hit_blocks)
        self._keys_in += len(lookup.keys)
        self._pending.append(lookup)

    def looked_for_one(self) -> None:
        """Note a look-up of a single block of a prompt, which can't be recorded: nobody says which
        other blocks the prompt has."""
        if not self._told_of_one:
            self._told_of_one = True
            logger.warning("look-ups of single blocks, as vLLM makes them, are not recorded: they "
                           "don't say which blocks make a prompt")  # fmt: skip

    def close(self) -> None:
        """Write what is pending, and end. Idempotent. Of a disk that hangs it waits two seconds."""
        self._stop.set()
        self._thread.join(_STOP_WITHIN_S)
        if self._thread.is_alive():
            logger.warning("look-ups are not recorded to the end: the disk hangs")
            return
        self.flush()
        if self._file is not None:
            self._file.close()

    def flush(self) -> None:
        """Write what is pending now."""
        with self._write_lock:
            try:
                for line in self._lines():
                    self._write(line)
                if self._file is not None and not self._file.closed:
                    self._file.flush()
            except OSError as error:
                self._failed = True
                self._pending.clear()
                logger.warning("recording look-ups ends: %s", error.strerror or error)

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_EVERY_S):
            if self._pending:
                self.flush()

    def _lines(self) -> Iterator[bytes]:
        """The pending look-ups, in the order of their times."""
        waiting = [self._pending.popleft() for _ in range(len(self._pending))]
        self._keys_out += sum(len(lookup.keys) for lookup in waiting)
        for lookup in sorted(waiting, key=lambda each: each.at_s):
            # Never before the one above it, whatever the clock does.
            self._last_ms = max(self._last_ms, round(lookup.at_s * 1000))
            ids = ", ".join(str(self._id(key)) for key in lookup.keys)
            size = f', "block_size": {lookup.block_tokens}' if lookup.block_tokens else ""
            yield (
                f'{{"timestamp": {self._last_ms}, "input_length": {lookup.prompt_tokens}, '
                f'"output_length": 0, "hash_ids": [{ids}]{size}{self._more}, '
                f'"hit_blocks": {lookup.hit_blocks}}}\n'
            ).encode()

    def _id(self, key: Key) -> int:
        return int.from_bytes(blake2b(key, digest_size=8, key=self._secret).digest(), "big")

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        if self._file.tell() and self._file.tell() + len(line) > self._options.max_file_bytes:
            self._next_file()
        self._file.write(line)
        self.recorded += 1

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.close()
        # Unique beside other processes, other hosts' among them, and sorted by time.
        name = f"lookups-{time.time_ns()}-{os.getpid()}-{next(_numbers)}.jsonl"
        path = self._folder / name
        self._file = path.open("xb")
        os.fchmod(self._file.fileno(), 0o600)
        self._paths.append(path)
        while len(self._paths) > self._options.max_files:
            self._paths.popleft().unlink(missing_ok=True)


def _secret(folder: Path) -> bytes:
    """The secret of a folder, made by the first client that records into it."""
    path = folder / _SECRET
    try:
        aside = folder / f".{_SECRET}.{os.getpid()}.{next(_numbers)}"
        with aside.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(token_bytes(_SECRET_BYTES))
        try:
            os.link(aside, path)  # whole or not at all, and only the first
        except FileExistsError:
            pass
        finally:
            aside.unlink()
    except OSError:
        if not path.exists():
            raise
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise OSError(f"{path} is no secret of {_SECRET_BYTES} bytes")
    return secret
