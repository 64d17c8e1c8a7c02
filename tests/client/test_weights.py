"""Fingerprints of weight files: contents only, from a cache that is never believed too much."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from prefixd.client import weights
from prefixd.client.weights import digest_of_contents, fingerprint_of_files, weights_of
from prefixd.proto.errors import CallerError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LONG_AGO_NS = 1_600_000_000 * 10**9


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder, empty."""
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_known", {})
    # Files of a test have just changed: here that is long enough ago.
    monkeypatch.setattr(weights, "_SETTLED_NS", -(10**18))
    return tmp_path / "cache" / "prefixd" / "weights"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose bytes were read."""
    read: list[str] = []
    segment = weights._segment

    def noted(path: Path, offset: int) -> bytes:
        read.append(path.name)
        return segment(path, offset)

    monkeypatch.setattr(weights, "_segment", noted)
    return read


def forget() -> None:
    """As in another process."""
    weights._known.clear()


def make(folder: Path, **files: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, text in files.items():
        path = folder / name.replace("__", ".").replace("_", "-")
        path.write_text(text)
        made.append(path)
    return made


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


# ---- fingerprints


def test_contents_count_and_folders_and_times_do_not(tmp_path: Path) -> None:
    one = make(tmp_path / "one", a__bin="A", b__bin="B")
    same = make(tmp_path / "deep" / "er", a__bin="A", b__bin="B")
    os.utime(same[0], ns=(0, LONG_AGO_NS))
    assert fingerprint_of_files(one) == fingerprint_of_files(same[::-1])
    for number, changed in enumerate(
        (
            {"a__bin": "A", "b__bin": "C"},
            {"a__bin": "AB", "b__bin": ""},
            {"a__bin": "B", "b__bin": "A"},
            {"a__bin": "A", "c__bin": "B"},
            {"a__bin": "A", "b__bin": "B", "c__bin": ""},
        )
    ):
        other = make(tmp_path / str(number), **changed)
        assert fingerprint_of_files(other) != fingerprint_of_files(one)


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    one, other, empty = make(tmp_path, a__gguf="A", b__gguf="A", c__gguf="")
    assert fingerprint_of_files([one]) == fingerprint_of_files([other, other])
    assert fingerprint_of_files([one]) != fingerprint_of_files([empty])


def test_segments_are_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_SEGMENT_BYTES", 4)
    monkeypatch.setattr(weights, "_READ_BYTES", 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    texts = ["abcdefghij", "efghabcdij", "abcdefgh", "abcdefghijk", "abcd"]
    paths = make(tmp_path, **{f"f{i}__bin": text for i, text in enumerate(texts)})
    assert len({fingerprint_of_files([path]) for path in paths}) == len(texts)
    same = make(tmp_path / "again", **{f"f{i}__bin": text for i, text in enumerate(texts)})
    assert fingerprint_of_files(paths) == fingerprint_of_files(same)


def test_the_formula(tmp_path: Path) -> None:
    """A change of these digests makes everything that connectors saved a miss."""
    paths = make(tmp_path, a__bin="A", b__bin="B")
    files = [
        sha256(b"prefixd/file/v1\0", struct.pack("<Q", 1), sha256(one)) for one in (b"A", b"B")
    ]
    assert fingerprint_of_files(paths[:1]) == files[0]
    one = struct.pack("<I", 5)
    assert fingerprint_of_files(paths) == sha256(
        b"prefixd/weights/v1\0", one, b"a.bin", files[0], one, b"b.bin", files[1]
    )


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = make(tmp_path, a__bin="A")

    def changing(_path: Path, _offset: int) -> bytes:
        path.write_text("BB")
        return b"?" * 32

    monkeypatch.setattr(weights, "_segment", changing)
    with pytest.raises(CallerError, match="changed"):
        fingerprint_of_files([path])


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(CallerError):
        fingerprint_of_files([])
    with pytest.raises(FileNotFoundError):
        fingerprint_of_files([tmp_path / "none"])


# ---- the cache


def test_a_file_is_read_once(tmp_path: Path, hashed: list[str]) -> None:
    paths = make(tmp_path, a__bin="A", b__bin="B")
    first = fingerprint_of_files(paths)
    assert sorted(hashed) == ["a.bin", "b.bin"]
    assert fingerprint_of_files(paths) == first
    forget()
    assert fingerprint_of_files(paths) == first
    assert len(hashed) == 2


def test_a_file_that_changed_is_read_again_with_the_same_size_and_time(
    tmp_path: Path, hashed: list[str]
) -> None:
    (path,) = make(tmp_path, a__bin="A")
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    first = fingerprint_of_files([path])
    path.write_text("B")
    os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert fingerprint_of_files([path]) != first
    forget()
    assert fingerprint_of_files([path]) != first
    assert hashed == ["a.bin"] * 2


def test_another_file_in_its_place_is_read(tmp_path: Path, hashed: list[str]) -> None:
    path, other = make(tmp_path, a__bin="A", b__bin="B")
    first = fingerprint_of_files([path])
    other.replace(path)
    assert fingerprint_of_files([path]) != first
    assert len(hashed) == 2


def test_a_file_from_the_future_is_kept(tmp_path: Path, hashed: list[str]) -> None:
    (path,) = make(tmp_path, a__bin="A")
    os.utime(path, ns=(0, 2**62))
    assert fingerprint_of_files([path]) == fingerprint_of_files([path])
    assert len(hashed) == 1


def test_a_file_that_changed_just_now_is_not_kept(
    tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_SETTLED_NS", 10**18)
    (path,) = make(tmp_path, a__bin="A")
    assert fingerprint_of_files([path]) == fingerprint_of_files([path])
    assert len(hashed) == 2


@pytest.mark.parametrize("kept", [0, 31, 40, 72, 103])
def test_a_damaged_record_is_not_believed(
    tmp_path: Path, cache: Path, hashed: list[str], kept: int
) -> None:
    (path,) = make(tmp_path, a__bin="A")
    first = fingerprint_of_files([path])
    (record,) = cache.iterdir()
    raw = record.read_bytes()
    for damaged in (
        raw[:kept],
        raw[:kept] + bytes([raw[kept] ^ 1]) + raw[kept + 1 :],
        raw + b"\0",
    ):
        record.write_bytes(damaged)
        forget()
        assert fingerprint_of_files([path]) == first
        assert record.read_bytes() == raw
    assert len(hashed) == 4


def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, cache: Path, hashed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    (path,) = make(tmp_path, a__bin="A")
    fingerprint_of_files([path])
    assert list(cache.iterdir()) == []
    assert "other users can write" in caplog.text
    fingerprint_of_files([path])
    assert len(hashed) == 1


def test_the_folder_is_for_its_user_only(tmp_path: Path, cache: Path) -> None:
    fingerprint_of_files(make(tmp_path, a__bin="A"))
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in cache.iterdir()} == {0o600}


def test_without_a_folder_it_takes_longer(tmp_path: Path, cache: Path, hashed: list[str]) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("in the way")
    (path,) = make(tmp_path, a__bin="A")
    first = fingerprint_of_files([path])
    assert fingerprint_of_files([path]) == first
    forget()
    assert fingerprint_of_files([path]) == first
    assert len(hashed) == 2


def test_a_folder_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is full or read-only: everything that fails while a record is written."""

    def fails(*_: object, **__: object) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", fails)
    assert len(fingerprint_of_files(make(tmp_path, a__bin="A"))) == 32


def test_many_writers_leave_whole_records(tmp_path: Path, cache: Path, hashed: list[str]) -> None:
    paths = make(tmp_path, **{f"f{i}__bin": str(i) for i in range(8)})

    def attach(_: int) -> bytes:
        forget()
        return fingerprint_of_files(paths)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(attach, range(32)))) == 1
    assert len(list(cache.iterdir())) == len(paths)
    hashed.clear()
    forget()
    fingerprint_of_files(paths)
    assert hashed == []


def test_the_cache_does_not_grow_without_bound(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_MAX_CACHED", 4)
    for path in make(tmp_path, **{f"f{i}__bin": str(i) for i in range(20)}):
        fingerprint_of_files([path])
        assert len(list(cache.iterdir())) <= 4
        assert len(weights._known) <= 4


# ---- models


def test_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder, config__json="{}", model_1__safetensors="A", model_2__safetensors="B")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "training_args.bin").write_text("x")
    (folder / "README.md").write_text("x")
    found = weights_of(folder)
    assert found is not None
    assert [path.name for path in found.files] == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    assert (found.source, found.commit) == ("SHA-256 of 3 files", "")
    (folder / "tokenizer.json").write_text("{1}")
    assert weights_of(str(folder)) == found
    # New weights under the old name, and the code of the model.
    (folder / "model-2.safetensors").write_text("C")
    again = weights_of(folder)
    assert again is not None
    assert again.digest != found.digest
    (folder / "modeling_own.py").write_text("x")
    with_code = weights_of(folder)
    assert with_code is not None
    assert with_code.digest != again.digest


def test_what_has_no_weights(tmp_path: Path) -> None:
    make(tmp_path / "model", config__json="{}")
    assert weights_of(tmp_path / "model") is None
    assert weights_of(tmp_path / "nothing") is None
    assert weights_of("org/model") is None
    assert weights_of("../../etc") is None
    assert weights_of("") is None


def test_all_shards_of_a_split_file(tmp_path: Path) -> None:
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / "other-00001-of-00003.gguf").write_text("x")
    found = weights_of(tmp_path / names[0])
    assert found is not None
    assert [path.name for path in found.files] == names
    (tmp_path / names[2]).write_text("other weights")
    again = weights_of(tmp_path / names[1])
    assert again is not None
    assert again.digest != found.digest
    (tmp_path / names[2]).unlink()
    assert weights_of(tmp_path / names[0]) is None


def test_a_name_that_promises_many_shards_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_text("x")
    assert weights_of(path) is None


def hub(cache: Path, text: str, commit: str = COMMIT) -> Path:
    repository = cache / "models--org--model"
    snapshot = repository / "snapshots" / commit
    make(repository / "blobs", **{f"b{commit[:4]}": text})
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/b{commit[:4]}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


@pytest.mark.parametrize("where", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "cache_dir"])
def test_a_snapshot_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    below = {"HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}.get(where, "")
    hub(tmp_path / "hf" / below, "A")
    if where != "cache_dir":
        monkeypatch.setenv(where, str(tmp_path / "hf"))
    cache_dir = tmp_path / "hf" if where == "cache_dir" else None
    found = weights_of("org/model", cache_dir=cache_dir)
    assert found is not None
    assert found.commit == COMMIT
    assert found.source == "SHA-256 of 1 file, hub commit 0123456789ab"
    make(tmp_path / "copy", model__safetensors="A")
    copied = weights_of(tmp_path / "copy")
    assert copied is not None
    assert copied.digest == found.digest


def test_the_commit_that_was_loaded_counts_and_not_where_the_branch_is_now(
    tmp_path: Path,
) -> None:
    hub(tmp_path, "A")
    hub(tmp_path, "B", "f" * 40)
    main = weights_of("org/model", cache_dir=tmp_path)
    loaded = weights_of("org/model", revision=COMMIT, cache_dir=tmp_path)
    assert main is not None
    assert loaded is not None
    assert main.commit == "f" * 40
    assert main.digest != loaded.digest
    assert weights_of("org/model", revision="none", cache_dir=tmp_path) is None
    assert weights_of("org/model", revision="../refs/main", cache_dir=tmp_path) is not None
    (tmp_path / "models--org--model" / "refs" / "main").write_text("../../elsewhere")
    assert weights_of("org/model", cache_dir=tmp_path) is None


# ---- contents in memory


def test_contents_are_identified_by_names_and_bytes() -> None:
    def digest(**contents: bytes | None) -> bytes:
        return digest_of_contents(
            [
                (name, partial(bytes.__add__, b"", value) if value else no_bytes)
                for name, value in contents.items()
            ]
        )

    def no_bytes() -> None:
        return None

    made = [
        digest(),
        digest(a=b"1"),
        digest(a=b"2"),
        digest(b=b"1"),
        digest(a=b"1", b=b"2"),
        digest(a=b"2", b=b"1"),
        digest(a=b"12", b=None),
        digest(a=b"12"),
    ]
    assert len(set(made)) == len(made)
    assert digest(a=b"1") == made[1]


def test_known_contents_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = digest_of_contents([("a", lambda: b"content")])
    monkeypatch.setattr("prefixd.client.weights._sha256", lambda _: 1 / 0)
    assert digest_of_contents([("a", lambda: b"content")]) == first
    with pytest.raises(ZeroDivisionError):
        digest_of_contents([("a", lambda: b"other content")])
