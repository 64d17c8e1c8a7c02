"""Generated traces: deterministic, in Mooncake's format, with the published hit rates."""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest

from prefixd.client.lab.generate import BlockIds, generate
from prefixd.client.lab.profiles import PROFILES, Arrivals
from prefixd.client.lab.trace import Request, format_request, read_trace, write_trace
from tests.support.lengths import times

NAMES = sorted(PROFILES)


def digest(requests: Iterable[Request]) -> str:
    return sha256(b"".join(map(format_request, requests))).hexdigest()


def unlimited_hit_rate(requests: Iterable[Request]) -> float:
    """Hit blocks by the prefix rule over all blocks, in a cache that never forgets."""
    seen: set[int] = set()
    hits = blocks = 0
    for request in requests:
        for block in request.hash_ids:
            if block not in seen:
                break
            hits += 1
        seen.update(request.hash_ids)
        blocks += len(request.hash_ids)
    return hits / blocks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("requests", "seed"), [(300, 0), (300, 7), (times(2000, 6000), 1)])
def test_hit_rates_fall_into_the_published_bands(name: str, requests: int, seed: int) -> None:
    lowest, highest = PROFILES[name].band
    rate = unlimited_hit_rate(generate(name, requests=requests, seed=seed))
    assert lowest <= rate <= highest


@pytest.mark.parametrize("name", NAMES)
def test_traces_are_well_formed(name: str, tmp_path: Path) -> None:
    requests = list(generate(name, requests=700, seed=3))
    assert len(requests) == 700
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    assert times[0] == 0
    assert all(request.output_length > 0 for request in requests)
    write_trace(tmp_path / "t.jsonl", requests)
    reader = read_trace(tmp_path / "t.jsonl")
    assert list(reader) == requests
    assert reader.warnings() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_id_stands_for_its_block_and_everything_before_it(name: str) -> None:
    """Every id is only ever seen after one and the same id, so it names a whole prefix."""
    before: dict[int, int] = {}
    for request in generate(name, requests=500, seed=4, block_tokens=64):
        for parent, block in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert before.setdefault(block, parent) == parent
    assert sorted(before) == list(range(len(before)))


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    for name in NAMES:
        once = digest(generate(name, requests=200, seed=5))
        assert digest(generate(name, requests=200, seed=5)) == once
        assert digest(generate(name, requests=200, seed=6)) != once


def test_string_hashing_of_the_process_does_not_matter() -> None:
    script = (
        "import sys; from hashlib import sha256\n"
        "from prefixd.client.lab.generate import generate\n"
        "from prefixd.client.lab.trace import format_request\n"
        "lines = map(format_request, generate('rag', requests=100, seed=5))\n"
        "print(sha256(b''.join(lines)).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    assert digests == {digest(generate("rag", requests=100, seed=5))}


def test_the_block_size_changes_the_cut_and_nothing_else() -> None:
    coarse = list(generate("chatbot", requests=300, seed=1, block_tokens=512))
    fine = list(generate("chatbot", requests=300, seed=1, block_tokens=16))
    for a, b in zip(coarse, fine, strict=True):
        assert (a.timestamp_ms, a.input_length, a.output_length) == (
            b.timestamp_ms,
            b.input_length,
            b.output_length,
        )
        assert len(a.hash_ids) == -(-a.input_length // 512)
        assert len(b.hash_ids) == -(-b.input_length // 16)
    assert unlimited_hit_rate(fine) > unlimited_hit_rate(coarse)


def test_the_rate_moves_arrivals_and_nothing_else() -> None:
    slow = list(generate("rag", requests=300, seed=1, sessions_per_s=1.0))
    fast = list(generate("rag", requests=300, seed=1, sessions_per_s=10.0))
    assert [r.hash_ids for r in slow] == [r.hash_ids for r in fast]
    assert slow[-1].timestamp_ms == pytest.approx(10 * fast[-1].timestamp_ms, rel=0.01)


def test_a_longer_trace_has_the_sessions_of_a_shorter_one() -> None:
    """The shorter one ends with whole sessions, but for the last of them."""
    short = {format_request(r)[:40] for r in generate("batch", requests=400, seed=9)}
    long = {format_request(r)[:40] for r in generate("batch", requests=800, seed=9)}
    assert short <= long


def test_sessions_grow_turn_by_turn() -> None:
    """A second turn begins with all whole blocks of the first, and is longer."""
    profile = replace(PROFILES["multi-turn"], arrivals=Arrivals(1e-9))
    requests = list(generate(profile, requests=60, seed=2))
    grown = 0
    for first, second in pairwise(requests):
        whole = first.hash_ids[: first.input_length // 512]
        if second.hash_ids[: len(whole)] == whole and len(whole) > 3:
            assert second.input_length > first.input_length + first.output_length
            assert second.timestamp_ms > first.timestamp_ms
            grown += 1
    assert grown > 30


def test_blocks_share_ids_exactly_as_far_as_prompts_share_content() -> None:
    blocks = BlockIds(10)
    first = blocks.of([("system", 15), ("a", 20)])  # 35 tokens: 10, 10, 10, 5
    assert first == (0, 1, 2, 3)
    assert blocks.of([("system", 15), ("a", 20)]) == first
    assert blocks.of([("system", 15), ("b", 20)]) == (0, 4, 5, 6)  # block 1 has 5 of b
    assert blocks.of([("system", 15), ("a", 15)]) == (0, 1, 2)  # ends on the block
    assert blocks.of([("system", 15), ("a", 14)]) == (0, 1, 7)  # a shorter last block
    assert blocks.of([("system", 15), ("a", 25)]) == (0, 1, 2, 8)  # a longer one
    assert blocks.of([("a", 20)]) == (9, 10)  # same content, elsewhere: another id
    assert blocks.of([]) == ()
    assert blocks.of([("nothing", 0), ("system", 10)]) == (0,)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="no profile 'voice'; the profiles are chatbot, multi"):
        generate("voice", requests=1)
    with pytest.raises(ValueError, match="must not be negative"):
        generate("rag", requests=-1)
    with pytest.raises(ValueError, match="at least one token"):
        generate("rag", requests=1, block_tokens=0)
    with pytest.raises(ValueError, match="must be above 0"):
        generate("rag", requests=1, sessions_per_s=0)
    assert list(generate("rag", requests=0)) == []
