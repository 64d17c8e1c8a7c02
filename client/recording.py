"""Records what a client looks up, as a trace that `prefixctl replay` and the others read.

Off by default. `Client(record=RecordOptions(folder))`, or $PREFIXD_RECORD=FOLDER for every client
of a process, those in engines too, records into a folder; $PREFIXD_RECORD_SAMPLE=0.1 records a
tenth. `prefixctl trace record` has the daemon ask all of its clients, which then send what they
look up with their session.

A look-up of blocks becomes one line: its time, prompt tokens, block ids and hit blocks. An id is 64
bits of a BLAKE2b of the block's key under a secret: one in the folder (`secret`, readable by its
owner alone), or one that the daemon draws. So a trace says which prompts share what, and no guess
of a prompt can be tried on it by those who lack the secret; all clients that record into one
folder, or for one daemon, have the same ids. Deleting the secret of a folder makes guessing
impossible for all.

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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from secrets import token_bytes
from typing import IO, TYPE_CHECKING, Final, TypeAlias

from ..proto.errors import ConfigError
from ..proto.keys import Key
from ..proto.limits import MAX_RECORDED_IDS, MAX_RECORDED_LOOKUPS, RECORD_SECRET_BYTES
from .chains import BlockChain

if TYPE_CHECKING:
    from ..proto import prefixd_pb2 as pb

logger = logging.getLogger("prefixd.client")

FOLDER_VARIABLE: Final = "PREFIXD_RECORD"
SAMPLE_VARIABLE: Final = "PREFIXD_RECORD_SAMPLE"
_SECRET: Final = "secret"
#: Look-ups that may wait to be written, and their keys, of some 70 bytes each.
_MAX_PENDING: Final = 4_096
_MAX_PENDING_KEYS: Final = 1 << 18
_WRITE_EVERY_S: Final = 0.25
_STOP_WITHIN_S: Final = 2.0
#: A message to the daemon ends with the look-up that brings it to so many ids.
_ENOUGH_IDS: Final = 8_192
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


#: A look-up: its time in seconds, keys, tokens of a block (0: not known), prompt tokens (0: not
#: known) and hit blocks. A plain tuple, because a look-up waits for it to be made.
_Lookup: TypeAlias = tuple[float, Sequence[Key], int, int, int]


class Recorder(ABC):
    """Takes look-ups, and has a thread of its own that records them. Thread-safe; `close` records
    what is pending."""

    def __init__(self, sample: float, secret: bytes, clock: Callable[[], float]) -> None:
        """`secret`: what ids are made with. The subclass calls `_start`."""
        self._keyed = blake2b(digest_size=8, key=secret)
        self._clock = clock
        self._below = None if sample == 1 else round(sample * (1 << 64))
        self._pending: deque[_Lookup] = deque()
        #: Keys that were put into `_pending`, and that were taken out: each by one thread, or under
        #: the interpreter's lock. A race makes the bound a little less exact.
        self._keys_in = self._keys_out = 0
        #: Look-ups that were recorded; those that were not because too many waited; and those that
        #: can't be, because they don't name the blocks of a prompt.
        self.recorded = self.dropped = self.unnamed = 0
        self._failed = False
        self._write_lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixd-recorder", daemon=True)

    def looked(self, keys: BlockChain | Sequence[Key], prompt_tokens: int, hit_blocks: int) -> None:
        """Note a look-up of blocks, root first. `keys`: not changed any more by the caller.
        `prompt_tokens`: what they stand for, 0 if that is not known."""
        chain = isinstance(keys, BlockChain)
        blocks = keys.whole_blocks if chain else len(keys)  # type: ignore[union-attr]
        if self._failed or not blocks:
            return
        if self._below is not None and int.from_bytes(keys[0][:8], "big") >= self._below:
            return
        if (
            len(self._pending) >= _MAX_PENDING
            or self._keys_in - self._keys_out + blocks > _MAX_PENDING_KEYS
        ):
            self.dropped += 1
            return
        at_s = self._clock()
        self._keys_in += blocks
        if chain:
            # Hashed to the end now: a chain is not thread-safe, and its save needs the keys anyway.
            size = keys.block_tokens  # type: ignore[union-attr]
            tokens = size * blocks + keys.partial_tokens  # type: ignore[union-attr]
            self._pending.append((at_s, keys[:blocks], size, tokens, hit_blocks))
        else:
            self._pending.append((at_s, keys, 0, prompt_tokens, hit_blocks))

    def looked_otherwise(self) -> None:
        """Note a look-up that can't be recorded: of a single block of a prompt, when nobody says
        which other blocks the prompt has, or of a whole state."""
        self.unnamed += 1

    def close(self) -> None:
        """Record what is pending, and end. Idempotent. If that hangs it waits two seconds."""
        self._stop.set()
        self._thread.join(_STOP_WITHIN_S)
        if self._thread.is_alive():
            logger.warning("look-ups are not recorded to the end: the disk hangs")
            return
        self.flush()

    def flush(self) -> None:
        """Record what is pending now."""
        with self._write_lock:
            waiting = [self._pending.popleft() for _ in range(len(self._pending))]
            self._keys_out += sum(len(keys) for _, keys, *_ in waiting)
            waiting.sort(key=_time_of)
            try:
                self._record(waiting)
            except OSError as error:
                self._failed = True
                self._pending.clear()
                logger.warning("recording look-ups ends: %s", error.strerror or error)

    def _start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_WRITE_EVERY_S):
            self.flush()

    @abstractmethod
    def _record(self, lookups: Iterable[_Lookup]) -> None:
        """Record these, in the order of their times. Raises OSError, which ends the recording."""

    def _ids(self, keys: Sequence[Key]) -> Iterator[int]:
        keyed = self._keyed.copy  # half of the time of a new one for each
        for key in keys:
            digest = keyed()
            digest.update(key)
            yield int.from_bytes(digest.digest(), "big")


def _time_of(lookup: _Lookup) -> float:
    return lookup[0]


class FolderRecorder(Recorder):
    """Records into the files of a folder."""

    def __init__(
        self, options: RecordOptions, label: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        """`label` is written with each request. Raises ConfigError if the folder can't
        be used."""
        self._folder = Path(options.folder)
        self._options = options
        self._more = f', "label": {json.dumps(label)}' if label else ""
        self._last_ms = 0
        self._file: IO[bytes] | None = None
        self._paths: deque[Path] = deque()
        self._told = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            secret = _secret(self._folder)
            self._next_file()
        except OSError as error:
            raise ConfigError(
                f"look-ups cannot be recorded in {self._folder}: {error.strerror or error}"
            ) from None
        super().__init__(options.sample, secret, clock)
        self._start()

    def looked_otherwise(self) -> None:
        super().looked_otherwise()
        if not self._told:
            self._told = True
            logger.warning(
                "look-ups of single blocks, as vLLM makes them, and of whole states are not "
                "recorded: they don't say which blocks make a prompt"
            )

    def close(self) -> None:
        super().close()
        if self._file is not None and not self._thread.is_alive():
            self._file.close()

    def _record(self, lookups: Iterable[_Lookup]) -> None:
        for at_s, keys, block_tokens, prompt_tokens, hit_blocks in lookups:
            # Never before the one above it, whatever the clock does.
            self._last_ms = max(self._last_ms, round(at_s * 1000))
            ids = ", ".join(map(str, self._ids(keys)))
            size = f', "block_size": {block_tokens}' if block_tokens else ""
            length = f'"input_length": {prompt_tokens}, ' if prompt_tokens else ""
            self._write(
                f'{{"timestamp": {self._last_ms}, {length}"output_length": 0, '
                f'"hash_ids": [{ids}]{size}{self._more}, "hit_blocks": {hit_blocks}}}\n'.encode()
            )
        if self._file is not None and not self._file.closed:
            self._file.flush()

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


class SessionRecorder(Recorder):
    """Sends look-ups to the daemon, which has asked for them."""

    def __init__(self, record: pb.Record, send: Callable[[pb.SessionRequest], bool]) -> None:
        """`send` returns False if it takes no more for now."""
        super().__init__(record.sample_permille / 1000, record.secret, time.time)
        self.record = record
        self._send = send
        self._last_ns = 0
        #: `dropped` and `unnamed` as the daemon knows them.
        self._told_dropped = self._told_unnamed = 0
        self._message()  # says that this client records
        self._start()

    def _record(self, lookups: Iterable[_Lookup]) -> None:
        from ..proto import prefixd_pb2 as pb

        waiting: list[pb.RecordedLookup] = []
        ids = 0
        for at_s, keys, block_tokens, prompt_tokens, hit_blocks in lookups:
            if len(keys) > MAX_RECORDED_IDS:
                self.dropped += 1
                continue
            if ids + len(keys) > _ENOUGH_IDS or len(waiting) == MAX_RECORDED_LOOKUPS:
                self._message(waiting)
                waiting, ids = [], 0
            # Never before the one above it, whatever the clock does.
            self._last_ns = max(self._last_ns, round(at_s * 1e9))
            waiting.append(
                pb.RecordedLookup(
                    at_unix_ns=self._last_ns,
                    ids=self._ids(keys),
                    block_tokens=block_tokens,
                    prompt_tokens=prompt_tokens,
                    hit_blocks=hit_blocks,
                )
            )
            ids += len(keys)
        if waiting or (self.dropped, self.unnamed) != (self._told_dropped, self._told_unnamed):
            self._message(waiting)

    def _message(self, lookups: Sequence[pb.RecordedLookup] = ()) -> None:
        from ..proto import prefixd_pb2 as pb

        dropped, unnamed = self.dropped, self.unnamed
        message = pb.LookedUp(
            lookups=lookups,
            dropped=dropped - self._told_dropped,
            unnamed=unnamed - self._told_unnamed,
        )
        if self._send(pb.SessionRequest(looked_up=message)):
            self._told_dropped, self._told_unnamed = dropped, unnamed
            self.recorded += len(lookups)
        else:
            self.dropped += len(lookups)


class Recorders:
    """The recorders of a client: one into a folder, if it was asked for, and one for its daemon
    while that asks. Thread-safe."""

    def __init__(self, folder: FolderRecorder | None = None) -> None:
        self._folder = folder
        self._session: SessionRecorder | None = None
        self._closed = False
        self._lock = threading.Lock()
        #: Those that record now. Replaced as a whole, so that look-ups need no lock.
        self.active: tuple[Recorder, ...] = (folder,) if folder else ()

    def looked(self, keys: BlockChain | Sequence[Key], prompt_tokens: int, hit_blocks: int) -> None:
        """See `Recorder.looked`."""
        for recorder in self.active:
            recorder.looked(keys, prompt_tokens, hit_blocks)

    def looked_otherwise(self) -> None:
        """See `Recorder.looked_otherwise`."""
        for recorder in self.active:
            recorder.looked_otherwise()

    def asked(self, record: pb.Record, send: Callable[[pb.SessionRequest], bool]) -> None:
        """The daemon asks for a recording, or for none any more."""
        with self._lock:
            if self._session is not None and self._session.record == record:
                return
            self._end_session()
            valid = len(record.secret) == RECORD_SECRET_BYTES
            if valid and 0 < record.sample_permille <= 1000 and not self._closed:
                self._session = SessionRecorder(record, send)
                self.active = (*self.active, self._session)

    def leave(self) -> None:
        """The session ends: send it what is pending."""
        with self._lock:
            self._end_session()

    def close(self, *, leaving: bool = False) -> None:
        """End all, or with `leaving` the daemon's. No more is begun. Idempotent."""
        with self._lock:
            self._closed = True
            self._end_session()
        if self._folder is not None and not leaving:
            self._folder.close()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self.active = (self._folder,) if self._folder else ()
            session.close()


def _secret(folder: Path) -> bytes:
    """The secret of a folder, made by the first client that records into it."""
    path = folder / _SECRET
    try:
        aside = folder / f".{_SECRET}.{os.getpid()}.{next(_numbers)}"
        with aside.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(token_bytes(RECORD_SECRET_BYTES))
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
    if len(secret) != RECORD_SECRET_BYTES:
        raise OSError(f"{path} is no secret of {RECORD_SECRET_BYTES} bytes")
    return secret
