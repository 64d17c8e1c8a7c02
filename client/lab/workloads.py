"""Seeded example traces for common workloads.

A prompt is a list of named pieces of content ("the system prompt", "document 17", "what this
user typed in turn 3") with their lengths in tokens. `BlockIds` cuts it into blocks and gives
each block an id that stands for its content and everything before it. Two prompts therefore
share ids exactly as far as they share content, whatever the block size, and a partial last
block is shared with no longer prompt, as in a real cache.

Every session draws from its own generator, seeded by the profile, the seed and the session's
number: the same arguments give the same bytes, and a longer trace has the sessions of a shorter
one and more. Sessions are whole; only the last one may be cut short.

Lengths follow log-normal and exponential distributions and arrivals a gamma process, which is
what studies of production traffic report (ServeGen, arXiv 2505.09999: log-normal bodies of the
input lengths, exponential outputs, bursty arrivals that a Poisson process does not describe).
The other sources: 3.5 turns in a ShareGPT conversation (ShareChat, arXiv 2512.17843); four
fifths of the reuses within ten minutes in consumer chat (KVCache in the Wild, arXiv
2506.02634); 3 % of the documents in 60 % of the retrievals (RAGCache, arXiv 2404.12457).

At 512 tokens a block, a cache without limits hits these shares of the blocks (prefix rule):
chatbot 92-97 %, multi-turn 80-95 %, rag 25-40 %, code 15-35 %, batch 8-15 %, random 0-2 %. The
tests hold this for several seeds and sizes. Smaller blocks hit more.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count
from math import inf, log
from random import Random

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .trace import Request

#: Pieces of content with their lengths in tokens. Equal content is the same text.
Prompt = list[tuple[Hashable, int]]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """One request of a session: seconds since the one before, its prompt, its answer's length."""

    delay_s: float
    prompt: Prompt
    output_tokens: int


# ---- distributions


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal length in tokens, clipped."""

    median_tokens: int
    sigma: float
    min_tokens: int = 1
    max_tokens: int = 1 << 17

    def draw(self, random: Random) -> int:
        tokens = round(random.lognormvariate(log(self.median_tokens), self.sigma))
        return min(max(tokens, self.min_tokens), self.max_tokens)


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """A gamma renewal process: sessions per second, and how bursty (1 = Poisson, more = bursts)."""

    sessions_per_s: float
    variation: float = 1.0

    def gap_s(self, random: Random) -> float:
        """Seconds to the next arrival."""
        shape = 1 / self.variation**2
        return random.gammavariate(shape, 1 / (shape * self.sessions_per_s))


def output_tokens(random: Random, mean_tokens: float) -> int:
    """An exponential answer length of at least one token."""
    return 1 + int(random.expovariate(1 / mean_tokens))


def geometric(random: Random, mean: float) -> int:
    """At least 1, with the given mean: go on with probability 1 - 1/mean."""
    if mean <= 1:
        return 1
    return 1 + int(log(1 - random.random()) / log(1 - 1 / mean))


@lru_cache(maxsize=16)
def _zipf_sums(items: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(items)))


def zipf(random: Random, items: int, exponent: float) -> int:
    """A rank below `items`, 0 the most popular, with weight (rank + 1)^-exponent."""
    sums = _zipf_sums(items, exponent)
    return bisect(sums, random.random() * sums[-1], hi=items - 1)


# ---- profiles


@dataclass(frozen=True, kw_only=True)
class Profile(ABC):
    """A workload: sessions arrive, each sends one or more requests.

    A piece of content is named by a string or by a tuple that starts with what it is. Content
    that only one session has carries the session's number.
    """

    name: str
    arrivals: ArrivalProcess
    mean_output_tokens: float
    #: Seconds per output token. A session's next request waits for the answer.
    decode_s_per_token: float = 0.02
    #: Requests of a session, where `turns` doesn't say otherwise.
    mean_turns: float = 1.0

    def turns(self, random: Random) -> int:
        """How many requests a session sends."""
        return geometric(random, self.mean_turns)

    @abstractmethod
    def session(self, number: int, turns: int, random: Random) -> Iterator[SessionTurn]:
        """The requests of session `number`, in order; `turns` of them."""

    def _pause_s(self, random: Random, answer_tokens: int, median_s: float) -> float:
        """Seconds until the next request: the answer is decoded, then the user thinks or types."""
        return answer_tokens * self.decode_s_per_token + random.lognormvariate(log(median_s), 1.0)


@dataclass(frozen=True, kw_only=True)
class ConversationProfile(Profile):
    """Conversations: a system prompt that many share, then turns that make the prompt grow."""

    #: Number of different system prompts, with Zipf popularity.
    assistants: int
    #: Every system prompt begins with the same text (house rules, tools) ...
    common_tokens: int
    #: ... and goes on with the assistant's own.
    assistant_tokens: int
    user: Lengths
    #: Share of the sessions that start from a text of their own (a file, a task, a log).
    attachment_share: float = 0.0
    attachment: Lengths = Lengths(2000, 0.6)
    think_median_s: float

    def session(self, number: int, turns: int, random: Random) -> Iterator[SessionTurn]:
        assistant = zipf(random, self.assistants, 1.0)
        prompt: Prompt = [
            ("common", self.common_tokens),
            (("assistant", assistant), self.assistant_tokens),
        ]
        if random.random() < self.attachment_share:
            prompt.append((("attachment", number), self.attachment.draw(random)))
        delay_s = 0.0
        for turn in range(turns):
            prompt.append((("user", number, turn), self.user.draw(random)))
            answer_tokens = output_tokens(random, self.mean_output_tokens)
            yield SessionTurn(delay_s, list(prompt), answer_tokens)
            prompt.append((("answer", number, turn), answer_tokens))
            delay_s = self._pause_s(random, answer_tokens, self.think_median_s)


@dataclass(frozen=True, kw_only=True)
class RagProfile(Profile):
    """Questions over retrieved documents: one request each, documents in order of relevance.

    A topic has its documents in a fixed order. A question asks about one topic and gets its
    documents in that order until the retrieval returns another one, which ends the shared
    prefix.
    """

    system_tokens: int
    topics: int
    topic_exponent: float
    documents: int
    document: Lengths
    #: Chance, document by document, that the retrieval returns the topic's usual one.
    same_document_chance: float
    question: Lengths

    def session(self, number: int, turns: int, random: Random) -> Iterator[SessionTurn]:
        topic = zipf(random, self.topics, self.topic_exponent)
        prompt: Prompt = [("system", self.system_tokens)]
        same = True
        for rank in range(self.documents):
            same = same and random.random() < self.same_document_chance
            content = ("document", topic, rank) if same else ("other", number, rank)
            # A document has the same length in every request.
            length_of = Random(f"{content}") if same else random
            prompt.append((content, self.document.draw(length_of)))
        for turn in range(turns):
            question = (("question", number, turn), self.question.draw(random))
            yield SessionTurn(
                0.0, [*prompt, question], output_tokens(random, self.mean_output_tokens)
            )


@dataclass(frozen=True, kw_only=True)
class CodeProfile(Profile):
    """Completions during typing: instructions, snippets of the repository, the file.

    The snippets stay while the cursor stays. After a jump there are others, and the file is cut
    elsewhere. The text after the cursor comes last and is sent in full (prefix, suffix, middle).
    """

    instruction_tokens: int
    #: Chance that the cursor is where the last completion left it.
    stay_chance: float
    snippets: Lengths
    before_cursor: Lengths
    after_cursor: Lengths
    mean_typed_tokens: float
    pause_median_s: float

    def session(self, number: int, turns: int, random: Random) -> Iterator[SessionTurn]:
        prompt: Prompt = []
        delay_s = 0.0
        after_tokens = 0
        for turn in range(turns):
            if turn and random.random() < self.stay_chance:
                typed_tokens = output_tokens(random, self.mean_typed_tokens)
                prompt.append((("typed", number, turn), typed_tokens))
            else:
                prompt = [
                    ("instructions", self.instruction_tokens),
                    (("snippets", number, turn), self.snippets.draw(random)),
                    (("before", number, turn), self.before_cursor.draw(random)),
                ]
                after_tokens = self.after_cursor.draw(random)
            answer_tokens = output_tokens(random, self.mean_output_tokens)
            after = (("after", number, turn), after_tokens)
            yield SessionTurn(delay_s, [*prompt, after], answer_tokens)
            delay_s = self._pause_s(random, answer_tokens, self.pause_median_s)


@dataclass(frozen=True, kw_only=True)
class BatchProfile(Profile):
    """One instruction with examples over many documents, sent as fast as they are processed."""

    instruction_tokens: int
    document: Lengths
    #: Share of the requests that are sent again, a minute later.
    retry_share: float

    def turns(self, random: Random) -> int:
        return 2 if random.random() < self.retry_share else 1

    def session(self, number: int, turns: int, random: Random) -> Iterator[SessionTurn]:
        document = (("document", number), self.document.draw(random))
        prompt: Prompt = [("instruction", self.instruction_tokens), document]
        for turn in range(turns):
            delay_s = 60.0 if turn else 0.0
            yield SessionTurn(delay_s, prompt, output_tokens(random, self.mean_output_tokens))


@dataclass(frozen=True, kw_only=True)
class UnrelatedProfile(Profile):
    """Prompts with nothing in common: what a cache costs where it cannot help."""

    prompt_tokens: tuple[int, int]

    def session(self, number: int, turns: int, random: Random) -> Iterator[SessionTurn]:
        for turn in range(turns):
            tokens = random.randint(*self.prompt_tokens)
            answer_tokens = output_tokens(random, self.mean_output_tokens)
            yield SessionTurn(0.0, [(("prompt", number, turn), tokens)], answer_tokens)


_ALL: tuple[Profile, ...] = (
    # One product, a long system prompt with tools, short chats.
    ConversationProfile(
        name="chatbot",
        arrivals=ArrivalProcess(sessions_per_s=1.0, variation=1.5),
        assistants=3,
        common_tokens=9_000,
        assistant_tokens=3_500,
        mean_turns=3.5,
        user=Lengths(60, 1.0, 4, 4_000),
        mean_output_tokens=220,
        think_median_s=45,
    ),
    # Long working sessions: a short system prompt, often an attachment, many turns.
    ConversationProfile(
        name="multi-turn",
        arrivals=ArrivalProcess(sessions_per_s=0.3, variation=1.5),
        assistants=12,
        common_tokens=900,
        assistant_tokens=1_200,
        mean_turns=14,
        user=Lengths(180, 1.1, 8, 12_000),
        attachment_share=0.6,
        mean_output_tokens=380,
        think_median_s=75,
    ),
    RagProfile(
        name="rag",
        arrivals=ArrivalProcess(sessions_per_s=3.0, variation=1.3),
        system_tokens=1_600,
        topics=10_000,
        topic_exponent=1.0,
        documents=5,
        document=Lengths(850, 0.35, 150, 2_000),
        same_document_chance=0.6,
        question=Lengths(45, 0.7, 5, 600),
        mean_output_tokens=200,
    ),
    CodeProfile(
        name="code",
        arrivals=ArrivalProcess(sessions_per_s=0.5, variation=1.5),
        instruction_tokens=220,
        mean_turns=25,
        stay_chance=0.37,
        snippets=Lengths(900, 0.5, 0, 4_000),
        before_cursor=Lengths(1_000, 0.6, 20, 3_000),
        after_cursor=Lengths(350, 0.6, 0, 1_500),
        mean_typed_tokens=25,
        mean_output_tokens=25,
        pause_median_s=6,
    ),
    BatchProfile(
        name="batch",
        arrivals=ArrivalProcess(sessions_per_s=4.0, variation=0.2),
        instruction_tokens=1_100,
        document=Lengths(7_500, 0.5, 800, 60_000),
        retry_share=0.005,
        mean_output_tokens=250,
    ),
    UnrelatedProfile(
        name="random",
        arrivals=ArrivalProcess(sessions_per_s=2.0),
        prompt_tokens=(500, 8_000),
        mean_output_tokens=150,
    ),
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in _ALL}


# ---- requests


class BlockIds:
    """Gives blocks their ids: small integers, in order of first appearance.

    Memory grows with the number of different blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        #: (id of the block before, pieces as content, start and length) -> id
        self._ids: dict[tuple[int, tuple[tuple[Hashable, int, int], ...]], int] = {}

    def of(self, prompt: Sequence[tuple[Hashable, int]]) -> tuple[int, ...]:
        """The block ids of a prompt given as `(content, tokens)` in order."""
        ids: list[int] = []
        parent, room = -1, self.block_tokens
        pieces: list[tuple[Hashable, int, int]] = []
        for content, tokens in prompt:
            start = 0
            while start < tokens:
                take = min(room, tokens - start)
                pieces.append((content, start, take))
                start += take
                room -= take
                if not room:
                    parent = self._ids.setdefault((parent, tuple(pieces)), len(self._ids))
                    ids.append(parent)
                    pieces, room = [], self.block_tokens
        if pieces:
            ids.append(self._ids.setdefault((parent, tuple(pieces)), len(self._ids)))
        return tuple(ids)


def generate(
    profile: Profile | str,
    *,
    requests: int,
    seed: int = 0,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    sessions_per_s: float | None = None,
) -> Iterator[Request]:
    """Exactly `requests` requests of a profile (or the name of one), in order of arrival.

    `sessions_per_s` replaces the profile's own rate; prompts stay the same. Streamed: memory
    grows with the sessions in flight and the different blocks. Raises ValueError for an
    unknown profile or an argument out of range.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            known = ", ".join(PROFILES)
            raise ValueError(f"there is no profile {profile!r}; the profiles are {known}")
        profile = PROFILES[profile]
    if sessions_per_s is not None:
        if not 0 < sessions_per_s < inf:
            raise ValueError(f"sessions per second must be above 0, got {sessions_per_s}")
        arrivals = replace(profile.arrivals, sessions_per_s=sessions_per_s)
        profile = replace(profile, arrivals=arrivals)
    if requests < 0:
        raise ValueError(f"the number of requests must not be negative, got {requests}")
    if block_tokens < 1:
        raise ValueError(f"a block must have at least one token, got {block_tokens}")
    return _generate(profile, requests, seed, BlockIds(block_tokens))


#: Sessions in flight: when the next request arrives, session number (unique, so that turns are
#: never compared), that request, and the ones after it.
_Flight = list[tuple[float, int, SessionTurn, Iterator[SessionTurn]]]


def _generate(profile: Profile, requests: int, seed: int, blocks: BlockIds) -> Iterator[Request]:
    arrivals = Random(f"{profile.name}/{seed}/arrivals")
    next_arrival_s = 0.0
    planned = 0
    flight: _Flight = []
    for session_number in count():
        if planned == requests:
            break
        yield from _until(next_arrival_s, flight, blocks)
        random = Random(f"{profile.name}/{seed}/{session_number}")
        turns = min(profile.turns(random), requests - planned)
        planned += turns
        session = profile.session(session_number, turns, random)
        heapq.heappush(flight, (next_arrival_s, session_number, next(session), session))
        next_arrival_s += profile.arrivals.gap_s(arrivals)
    yield from _until(inf, flight, blocks)


def _until(end_s: float, flight: _Flight, blocks: BlockIds) -> Iterator[Request]:
    """Send what arrives before `end_s`, and put each session's next request in its place."""
    while flight and flight[0][0] < end_s:
        arrival_s, session_number, turn, session = flight[0]
        input_length = sum(tokens for _, tokens in turn.prompt)
        ids = blocks.of(turn.prompt)
        yield Request(int(arrival_s * 1000), input_length, turn.output_tokens, ids)
        if (following := next(session, None)) is None:
            heapq.heappop(flight)
        else:
            due_s = arrival_s + following.delay_s
            heapq.heapreplace(flight, (due_s, session_number, following, session))
