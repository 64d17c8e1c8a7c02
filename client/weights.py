"""The identity of a model's weights, from its files: SHA-256 of their contents.

    found = weights_of("org/model", revision=commit)    # or a folder, or a file
    found.digest, found.source          # 32 bytes, "SHA-256 of 3 weight files, hub commit 0123abcd"

Contents are hashed, never times or paths, so that hosts with the same files share, and new weights
under an old name do not:

    file      SHA-256( "prefixd/file/v1\\0"    || u64le(bytes of file) || SHA-256 of each 32 MiB )
    files     SHA-256( "prefixd/weights/v1\\0" || for each file, by name:
                       u32le(bytes of name) || name || file )

A name is the path within the folder that all files have in common. A single file has no name.

A digest is kept in `$XDG_CACHE_HOME/prefixd/weights` (else `~/.cache/prefixd/weights`), and used as
long as device, inode, size, time of change and time of the last status change of the file are the
same. A file that changed in the last two seconds is not kept: its times could stay the same when it
changes again. The cache may be lost, damaged or out of reach; that costs time only. A cache folder
that other users can write to is not used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fastcrc import crc64

from ..proto.errors import CallerError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Weights", "digest_of_contents", "fingerprint_of_files", "shards_of", "weights_of"]

logger = logging.getLogger(__name__)

_FILE_LABEL: Final = b"prefixd/file/v1\0"
_FILES_LABEL: Final = b"prefixd/weights/v1\0"
_CONTENTS_LABEL: Final = b"prefixd/contents/v1\0"
_QUICK_LABEL: Final = b"prefixd/contents/crc64/v1\0"
_SEGMENT_BYTES: Final = 32 << 20
_READ_BYTES: Final = 1 << 20
#: Beyond this more threads wait for the device, not for the processor.
_MAX_THREADS: Final = 8
#: The coarsest times of a file system that weights lie on.
_SETTLED_NS: Final = 2_000_000_000
_MAX_CACHED: Final = 4096

#: Weights, and what decides how an engine reads them. Code is weights too: a repository's own model
#: code computes the state.
_KINDS: Final = frozenset(
    (".safetensors", ".bin", ".gguf", ".ggml", ".pt", ".pth", ".npz", ".msgpack", ".h5", ".json")
) | {".py"}
#: Files of these kinds that no KV state depends on: token ids are in the keys themselves, and the
#: rest is about sampling, training and presentation.
_WITHOUT_EFFECT: Final = re.compile(
    r"tokenizer.*|vocab.*|merges.*|added_tokens.*|special_tokens_map.*|chat_template.*|"
    r"generation_config.*|training_args.*|trainer_state.*|optimizer.*|scheduler.*|rng_state.*|"
    r"scaler\.pt|.*_results\.json|README.*"
)
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_HUB_NAME: Final = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class Weights(NamedTuple):
    """`digest`: 32 bytes. `source`: how it was found, in words. `commit`: of the hub's snapshot, or
    an empty string. `files`: those that were read."""

    digest: bytes
    source: str
    commit: str
    files: tuple[Path, ...]


def weights_of(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Weights | None:
    """The weights of a model: of a file (with all shards of a split GGUF), of a folder, or of a
    snapshot in the local cache of the hub. None: there is nothing of it on this host, or a shard is
    missing; the caller needs a fingerprint from the user then.

    `revision`: give the commit that the engine loaded, if it tells: a branch may have moved since.
    `cache_dir`: the folder of the hub's cache; None: where its library looks. Subfolders are not
    read. The first call reads every byte. Raises OSError for files that can't be read.
    """
    path = Path(model)
    commit = ""
    if path.is_file():
        files = shards_of(path)
    elif path.is_dir():
        files = _weight_files(path)
    else:
        found = _snapshot(str(model), revision, cache_dir)
        files = _weight_files(found) if found is not None else ()
        commit = found.name if found is not None else ""
    if not any(each.suffix not in (".json", ".py") for each in files):
        return None
    source = f"SHA-256 of {len(files)} file{'s' * (len(files) > 1)}"
    if commit:
        source += f", hub commit {commit[:12]}"
    return Weights(fingerprint_of_files(files), source, commit, tuple(files))


def fingerprint_of_files(paths: Iterable[str | os.PathLike[str]]) -> bytes:
    """32 bytes that identify files by their contents, and by their names if there are several. See
    the formulas above. Raises OSError, and CallerError without files or if one changes meanwhile.
    """
    # The hub's snapshots are links to blobs: names are those of the links.
    files = sorted({Path(path).absolute() for path in paths})
    if not files:
        raise CallerError("the fingerprint of no files")
    digests = _digests(files)
    if len(files) == 1:
        return digests[0]
    common = os.path.commonpath([path.parent for path in files])
    digest = hashlib.sha256(_FILES_LABEL)
    for path, each in zip(files, digests, strict=True):
        name = os.fsencode(path.relative_to(common))
        digest.update(struct.pack("<I", len(name)) + name + each)
    return digest.digest()


# ---- which files


def _weight_files(folder: Path) -> Sequence[Path]:
    """The files of a folder that its KV state depends on."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _KINDS and not _WITHOUT_EFFECT.fullmatch(path.name) and path.is_file()
    )


def shards_of(path: Path) -> Sequence[Path]:
    """The file, or all shards of the GGUF that it is a part of; none if one is missing. Reads no
    contents."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return (path,)
    stem, count = found[1], int(found[3])
    # Counted on the disk first: the name may say anything.
    there = sum(1 for _ in path.parent.glob(f"*-of-{found[3]}.gguf"))
    if count > there:
        return ()
    shards = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    return shards if all(shard.is_file() for shard in shards) else ()


def _snapshot(
    name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None
) -> Path | None:
    """The folder of a snapshot in the hub's cache on this host."""
    if not _HUB_NAME.fullmatch(name) or ".." in name:
        return None
    repository = _hub_cache(cache_dir) / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (repository / "refs" / commit).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        if not _COMMIT.fullmatch(commit):
            return None
    snapshot = repository / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _hub_cache(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir)
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else _user_cache() / "huggingface") / "hub"


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


# ---- digests of files


class _State(NamedTuple):
    """What changes when a file changes."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stat: os.stat_result) -> _State:
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether a later change will show. Every change sets the time of the last status change,
        and unlike that of the contents nobody can set it to something else."""
        return self.ctime_ns + _SETTLED_NS < time_ns()


#: Digests of this process, for hosts without a cache folder. Guarded by `_lock`.
_known: dict[Path, tuple[_State, bytes]] = {}
_lock: Final = threading.Lock()


def _digests(files: Sequence[Path]) -> list[bytes]:
    cache = _Cache()
    states = [_State.of(path.stat()) for path in files]
    found = [cache.get(path, state) for path, state in zip(files, states, strict=True)]
    jobs = [
        (index, offset)
        for index, digest in enumerate(found)
        if digest is None
        for offset in range(0, states[index].size_bytes, _SEGMENT_BYTES)
    ]

    def work(job: tuple[int, int]) -> bytes:
        return _segment(files[job[0]], job[1])

    segments = _on_threads(work, jobs)
    parts: dict[int, list[bytes]] = {}
    for (index, _), segment in zip(jobs, segments, strict=True):
        parts.setdefault(index, []).append(segment)

    digests: list[bytes] = []
    for index, (path, state) in enumerate(zip(files, states, strict=True)):
        digest = found[index]
        if digest is None:
            size = struct.pack("<Q", state.size_bytes)
            digest = hashlib.sha256(_FILE_LABEL + size + b"".join(parts.get(index, ()))).digest()
            if _State.of(path.stat()) != state:
                raise CallerError(f"{path} changed while it was read")
            if state.settled:
                cache.put(path, state, digest)
        digests.append(digest)
    return digests


def _segment(path: Path, offset: int) -> bytes:
    """SHA-256 of at most 32 MiB of a file from an offset on. hashlib and reads free the GIL."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    left = _SEGMENT_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left and (got := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:got])
            left -= got
    return digest.digest()


# ---- digests of contents in memory


def digest_of_contents(parts: Sequence[tuple[str, Callable[[], Buffer | None]]]) -> bytes:
    """32 bytes that identify named contents in memory: SHA-256 over their names and the SHA-256 of
    each. A part is read when its function is called, on several threads; None: it has no bytes.

    Contents whose CRC-64s were all seen before are not hashed again: 20 GB/s instead of 2 GB/s for
    each thread. The CRC-64 finds every change by accident, and none of malice: who can choose the
    contents can read this cache as well.
    """
    reads = [read for _, read in parts]
    quick = hashlib.sha256(_QUICK_LABEL)
    for (name, _), check in zip(parts, _on_threads(_checksum, reads), strict=True):
        quick.update(_named(name) + check)
    folder = _folder()
    known = _load(folder, quick.hexdigest(), 32)
    if known is not None:
        return known
    digest = hashlib.sha256(_CONTENTS_LABEL)
    for (name, _), each in zip(parts, _on_threads(_sha256, reads), strict=True):
        digest.update(_named(name) + each)
    _keep(folder, quick.hexdigest(), digest.digest())
    return digest.digest()


def _on_threads(work: Callable[[Any], bytes], jobs: Sequence[Any]) -> list[bytes]:
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(jobs))
    if threads < 2:
        return list(map(work, jobs))
    with ThreadPoolExecutor(threads, thread_name_prefix="prefixd-weights") as pool:
        return list(pool.map(work, jobs))


def _checksum(read: Callable[[], Buffer | None]) -> bytes:
    content = read()
    if content is None:
        return b""
    return struct.pack("<QQ", memoryview(content).nbytes, crc64.xz(content))


def _sha256(read: Callable[[], Buffer | None]) -> bytes:
    content = read()
    return b"" if content is None else hashlib.sha256(content).digest()


def _named(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack("<I", len(encoded)) + encoded


# ---- the cache


class _Cache:
    """A record for each file that was hashed. Each is written beside its place and renamed, so that
    writers at the same time don't meet, and has a sum, so that a damaged one is not believed."""

    def __init__(self) -> None:
        self._folder = _folder()

    def get(self, path: Path, state: _State) -> bytes | None:
        with _lock:
            known = _known.get(path)
        if known is not None and known[0] == state:
            return known[1]
        record = _load(self._folder, _name(path), _STATE.size + 32)
        if record is None or record[:-32] != _STATE.pack(*_unsigned(state)):
            return None
        return record[-32:]

    def put(self, path: Path, state: _State, digest: bytes) -> None:
        with _lock:
            if len(_known) >= _MAX_CACHED:
                _known.clear()
            _known[path] = state, digest
        _keep(self._folder, _name(path), _STATE.pack(*_unsigned(state)) + digest)


def _name(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()


def _load(folder: Path | None, name: str, size_bytes: int) -> bytes | None:
    """A record of the cache; None: it is not there, or damaged."""
    if folder is None:
        return None
    try:
        with (folder / name).open("rb") as file:
            raw = file.read(size_bytes + 33)
    except OSError:
        return None
    record = raw[:-32]
    intact = len(record) == size_bytes and hashlib.sha256(record).digest() == raw[-32:]
    return record if intact else None


def _keep(folder: Path | None, name: str, record: bytes) -> None:
    """Write a record of the cache, if possible."""
    if folder is None:
        return
    try:
        _make_room(folder)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(record + hashlib.sha256(record).digest())
            Path(temporary).replace(folder / name)
        except BaseException:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as problem:
        logger.debug("a digest is not kept: %s", problem)


def _make_room(folder: Path) -> None:
    """Remove the older half of a full cache."""
    paths = list(folder.iterdir())
    if len(paths) < _MAX_CACHED:
        return
    for path in sorted(paths, key=_mtime_ns)[: len(paths) // 2]:
        with suppress(OSError):
            path.unlink()


_STATE: Final = struct.Struct("<5Q")


def _unsigned(state: _State) -> Iterator[int]:
    """Times before 1970 are negative."""
    return (number % 2**64 for number in state)


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _folder() -> Path | None:
    """The folder of the cache; None if it can't be used."""
    folder = _user_cache() / "prefixd" / "weights"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
    except (OSError, RuntimeError) as problem:
        logger.debug("digests of weights are not kept: %s", problem)
        return None
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o022:
        logger.warning("%s is not used: other users can write to it", folder)
        return None
    return folder
