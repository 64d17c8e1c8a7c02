"""Workload profiles: what their sessions look like, and the distributions they draw from."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import mean, median, pstdev

import pytest

from prefixd.client.lab.profiles import (
    PROFILES,
    Arrivals,
    Lengths,
    Profile,
    Turn,
    geometric,
    output_tokens,
    zipf,
)


def sessions(profile: Profile, count: int) -> list[list[Turn]]:
    found = []
    for number in range(count):
        random = Random(number)
        found.append(list(profile.session(number, profile.turns(random), random)))
    return found


def tokens(turn: Turn) -> int:
    return sum(count for _, count in turn.prompt)


def test_names_and_bands() -> None:
    assert list(PROFILES) == ["chatbot", "multi-turn", "rag", "code", "batch", "random"]
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert 0 <= profile.band[0] < profile.band[1] <= 1


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
    """A completion where the last one ended goes on from its prompt, others begin anew."""
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
        gaps = [Arrivals(4.0, variation).gap_s(random) for _ in range(4000)]
        assert mean(gaps) == pytest.approx(0.25, rel=0.1)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.15)
