"""Workload profiles, their distributions, and the traces generated from them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median, pstdev

import pytest

from prefixd.client.lab.trace import Request, TraceReader, format_request, write_trace
from prefixd.client.lab.workloads import (
    PROFILES,
    ArrivalProcess,
    BlockIds,
    Lengths,
    Profile,
    SessionTurn,
    generate,
    geometric,
    output_tokens,
    zipf,
)
from tests.support.lengths import times


def sessions(profile: Profile, count: int) -> list[list[SessionTurn]]:
    found = []
    for number in range(count):
        random = Random(number)
        found.append(list(profile.session(number, profile.turns(random), random)))
    return found


def tokens(turn: SessionTurn) -> int:
    return sum(count for _, count in turn.prompt)


def test_names() -> None:
    assert list(PROFILES) == ["chatbot", "multi-turn", "rag", "code", "batch", "random"]
    for name, profile in PROFILES.items():
        assert profile.name == name


@pytest.mark.parametrize("name", list(PROFILES))
def test_sessions_are_well_formed(name: str) -> None:
    for session in sessions(PROFILES[name], 60):
        assert session[0].delay_s == 0
        assert all(turn.delay_s > 0 for turn in session[1:])
        assert all(turn.output_tokens >= 1 for turn in session)
        assert all(count >= 0 for turn in session for _, count in turn.prompt)
        assert all(tokens(turn) > 0 for turn in session)


@pytest.mark.parametrize("name", ["chatbot", "multi-turn"])
def test_a_conversation_is_its_last_prompt_the_answer_and_a_message(name: str) -> None:
    turns = 0
    for session in sessions(PROFILES[name], 40):
        for earlier, later in pairwise(session):
            kept = later.prompt[: len(earlier.prompt)]
            assert kept == earlier.prompt
            answer, message = later.prompt[len(earlier.prompt) :]
            assert answer[1] == earlier.output_tokens
            assert message[1] > 0
            turns += 1
    assert turns > 40


def test_conversations_of_one_product_share_its_system_prompt() -> None:
    firsts = {session[0].prompt[0] for session in sessions(PROFILES["chatbot"], 50)}
    assert len(firsts) == 1


def test_few_documents_answer_most_questions() -> None:
    """Close to what is reported: 3 % of the documents in 60 % of the retrievals."""
    random = Random(4)
    topics, exponent = 10_000, 1.0
    popular = sum(zipf(random, topics, exponent) < topics * 0.03 for _ in range(5000)) / 5000
    assert popular == pytest.approx(0.6, abs=0.08)


def test_the_cursor_mostly_moves() -> None:
    """A completion where the last one ended continues its prompt; others start a new one."""
    stayed = moved = 0
    for session in sessions(PROFILES["code"], 60):
        for earlier, later in pairwise(session):
            if later.prompt[1] == earlier.prompt[1]:
                assert later.prompt[: len(earlier.prompt) - 1] == earlier.prompt[:-1]
                stayed += 1
            else:
                moved += 1
    assert stayed / (stayed + moved) == pytest.approx(0.37, abs=0.05)


def test_a_document_has_one_length_whoever_asks() -> None:
    lengths: dict[object, int] = {}
    shared = 0
    for (turn,) in sessions(replace(PROFILES["rag"], topics=5), 200):  # type: ignore[call-arg]
        for content, count in turn.prompt:
            if content[0] == "document":  # type: ignore[index]
                shared += content in lengths
                assert lengths.setdefault(content, count) == count
    assert shared > 100


def test_distributions() -> None:
    random = Random(1)
    lengths = [Lengths(100, 0.5, 50, 200).draw(random) for _ in range(4000)]
    assert (min(lengths), max(lengths)) == (50, 200)
    assert median(lengths) == pytest.approx(100, rel=0.05)
    outputs = [output_tokens(random, 200) for _ in range(4000)]
    assert min(outputs) >= 1
    assert mean(outputs) == pytest.approx(200, rel=0.06)
    turns = [geometric(random, 3.5) for _ in range(4000)]
    assert min(turns) == 1
    assert mean(turns) == pytest.approx(3.5, rel=0.06)
    assert geometric(random, 1) == 1
    ranks = [zipf(random, 50, 1.0) for _ in range(4000)]
    assert min(ranks) == 0
    assert max(ranks) < 50
    assert ranks.count(0) / ranks.count(1) == pytest.approx(2, rel=0.15)
    for variation in (0.2, 1.0, 1.5):
        gaps = [ArrivalProcess(4.0, variation).gap_s(random) for _ in range(4000)]
        assert mean(gaps) == pytest.approx(0.25, rel=0.1)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.15)


#: Block hit rates of a cache without limits at 512 tokens a block, lowest and highest.
BANDS = {
    "chatbot": (0.92, 0.97),
    "multi-turn": (0.80, 0.95),
    "rag": (0.25, 0.40),
    "code": (0.15, 0.35),
    "batch": (0.08, 0.15),
    "random": (0.0, 0.02),
}
NAMES = sorted(PROFILES)


def digest(requests: Iterable[Request]) -> str:
    return sha256(b"".join(map(format_request, requests))).hexdigest()


def unlimited_hit_rate(requests: Iterable[Request]) -> float:
    """Hit blocks over all blocks, by the prefix rule, in a cache that never evicts."""
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
    lowest, highest = BANDS[name]
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
    reader = TraceReader(tmp_path / "t.jsonl")
    assert list(reader) == requests
    assert reader.warnings() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_id_stands_for_its_block_and_everything_before_it(name: str) -> None:
    """An id always follows the same id, so it stands for a whole prefix."""
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
        "from prefixd.client.lab.workloads import generate\n"
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
    """All sessions of the shorter one are whole, except the last."""
    short = {format_request(r)[:40] for r in generate("batch", requests=400, seed=9)}
    long = {format_request(r)[:40] for r in generate("batch", requests=800, seed=9)}
    assert short <= long


def test_sessions_grow_turn_by_turn() -> None:
    """A second turn begins with all whole blocks of the first, and is longer."""
    profile = replace(PROFILES["multi-turn"], arrivals=ArrivalProcess(1e-9))
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
