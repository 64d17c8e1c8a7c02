"""Workload profiles: who asks what, how long, how often. Every number has its unit in its name.

Lengths follow log-normal and exponential distributions and arrivals a gamma process, which is
what studies of production traffic report (ServeGen, arXiv 2505.09999: log-normal bodies of the
input lengths, exponential outputs, bursty arrivals that a Poisson process does not describe).
The other anchors: 3.5 turns in a ShareGPT conversation (ShareChat, arXiv 2512.17843); four
fifths of the reuses within ten minutes in consumer chat (KVCache in the Wild, arXiv
2506.02634); 3 % of the documents in 60 % of the retrievals (RAGCache, arXiv 2404.12457).

At 512 tokens a block, a cache without limits hits (blocks, by the prefix rule): chatbot
92-97 %, multi-turn 80-95 %, rag 25-40 %, code 15-35 %, batch 8-15 %, random 0-2 %; the tests
hold this for several seeds and sizes. Smaller blocks hit more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import log
from random import Random
from typing import ClassVar

#: Content and its length in tokens; equal content is the same text.
Prompt = list[tuple[Hashable, int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: seconds after the one before it, its prompt, its answer."""

    delay_s: float
    prompt: Prompt
    output_tokens: int


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
class Arrivals:
    """A gamma renewal process: sessions per second, and how bursty (1 = Poisson, more = bursts)."""

    sessions_per_s: float
    variation: float = 1.0

    def gap_s(self, random: Random) -> float:
        """Seconds to the next arrival."""
        shape = 1 / self.variation**2
        return random.gammavariate(shape, 1 / (shape * self.sessions_per_s))


@dataclass(frozen=True, kw_only=True)
class Profile(ABC):
    """A workload: sessions arrive, each sends one or more requests.

    Content names are tuples that start with what they are; whatever is one session's own has
    the session's number in it.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    #: Block hit rate of a cache without limits at 512 tokens a block, lowest and highest.
    band: ClassVar[tuple[float, float]]

    arrivals: Arrivals
    #: Seconds per output token; a session's next request waits for the answer.
    decode_s_per_token: float = 0.02

    @abstractmethod
    def turns(self, random: Random) -> int:
        """How many requests a session sends."""

    @abstractmethod
    def session(self, number: int, turns: int, random: Random) -> Iterator[Turn]:
        """The requests of session `number`, in order; at least `turns` of them."""


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


@dataclass(frozen=True, kw_only=True)
class Conversations(Profile):
    """Conversations: a system prompt that many share, then turns that make the prompt grow."""

    #: Different system prompts, with Zipf popularity.
    assistants: int
    assistant_exponent: float = 1.0
    #: Every system prompt begins with the same text (house rules, tools) ...
    common_tokens: int
    #: ... and goes on with the assistant's own.
    assistant_tokens: int
    mean_turns: float
    user: Lengths
    #: Share of the sessions that start from a text of their own (a file, a task, a log).
    attachment_share: float = 0.0
    attachment: Lengths = Lengths(2000, 0.6)
    mean_output_tokens: float
    think_median_s: float
    think_sigma: float = 1.0

    def turns(self, random: Random) -> int:
        return geometric(random, self.mean_turns)

    def session(self, number: int, turns: int, random: Random) -> Iterator[Turn]:
        assistant = zipf(random, self.assistants, self.assistant_exponent)
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
            yield Turn(delay_s, list(prompt), answer_tokens)
            prompt.append((("answer", number, turn), answer_tokens))
            think_s = random.lognormvariate(log(self.think_median_s), self.think_sigma)
            delay_s = answer_tokens * self.decode_s_per_token + think_s


class Chatbot(Conversations):
    name = "chatbot"
    about = "one product, a long system prompt with tools, short chats"
    band = (0.92, 0.97)


class MultiTurn(Conversations):
    name = "multi-turn"
    about = "long working sessions: a short system prompt, an own text, many turns"
    band = (0.80, 0.95)


@dataclass(frozen=True, kw_only=True)
class Rag(Profile):
    """Questions over retrieved documents: one request each, documents in order of relevance.

    A topic has its documents in a fixed order; each question asks about one topic and gets
    them in that order until the retrieval differs, which ends what can be shared.
    """

    name = "rag"
    about = "questions over retrieved documents, in order of relevance"
    band = (0.25, 0.40)

    system_tokens: int
    topics: int
    topic_exponent: float
    documents: int
    document: Lengths
    #: Chance, document by document, that a topic's next one is where it always is.
    same_document_chance: float
    question: Lengths
    mean_output_tokens: float

    def turns(self, random: Random) -> int:  # noqa: ARG002 (one for everybody)
        return 1

    def session(self, number: int, turns: int, random: Random) -> Iterator[Turn]:
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
            yield Turn(0.0, [*prompt, question], output_tokens(random, self.mean_output_tokens))


@dataclass(frozen=True, kw_only=True)
class Code(Profile):
    """Completions while somebody types: instructions, snippets of the repository, the file.

    The snippets stay while the cursor stays; after a jump they are others and the file is cut
    elsewhere. What follows the cursor comes last and is sent in full (prefix, suffix, middle).
    """

    name = "code"
    about = "code completions while typing, with snippets of the repository"
    band = (0.15, 0.35)

    instruction_tokens: int
    mean_turns: float
    #: Chance that the cursor is where the last completion left it.
    stay_chance: float
    snippets: Lengths
    before_cursor: Lengths
    after_cursor: Lengths
    mean_typed_tokens: float
    mean_output_tokens: float
    pause_median_s: float
    pause_sigma: float = 1.0

    def turns(self, random: Random) -> int:
        return geometric(random, self.mean_turns)

    def session(self, number: int, turns: int, random: Random) -> Iterator[Turn]:
        prompt: Prompt = []
        delay_s = 0.0
        after_tokens = 0
        for turn in range(turns):
            if turn and random.random() < self.stay_chance:
                prompt.append(
                    (("typed", number, turn), output_tokens(random, self.mean_typed_tokens))
                )
            else:
                prompt = [
                    ("instructions", self.instruction_tokens),
                    (("snippets", number, turn), self.snippets.draw(random)),
                    (("before", number, turn), self.before_cursor.draw(random)),
                ]
                after_tokens = self.after_cursor.draw(random)
            answer_tokens = output_tokens(random, self.mean_output_tokens)
            after = (("after", number, turn), after_tokens)
            yield Turn(delay_s, [*prompt, after], answer_tokens)
            pause_s = random.lognormvariate(log(self.pause_median_s), self.pause_sigma)
            delay_s = answer_tokens * self.decode_s_per_token + pause_s


@dataclass(frozen=True, kw_only=True)
class Batch(Profile):
    """One instruction with examples over many documents, sent as fast as they are taken."""

    name = "batch"
    about = "batch summarisation: one instruction, every document once"
    band = (0.08, 0.15)

    instruction_tokens: int
    document: Lengths
    #: Share of the requests that are sent again, a minute later.
    retry_share: float
    mean_output_tokens: float

    def turns(self, random: Random) -> int:
        return 2 if random.random() < self.retry_share else 1

    def session(self, number: int, turns: int, random: Random) -> Iterator[Turn]:
        document = (("document", number), self.document.draw(random))
        prompt: Prompt = [("instruction", self.instruction_tokens), document]
        for turn in range(turns):
            delay_s = 60.0 if turn else 0.0
            yield Turn(delay_s, prompt, output_tokens(random, self.mean_output_tokens))


@dataclass(frozen=True, kw_only=True)
class Unrelated(Profile):
    """Prompts with nothing in common: what a cache costs where it cannot help."""

    name = "random"
    about = "prompts with nothing in common"
    band = (0.0, 0.02)

    prompt_tokens: tuple[int, int]
    mean_output_tokens: float

    def turns(self, random: Random) -> int:  # noqa: ARG002 (one for everybody)
        return 1

    def session(self, number: int, turns: int, random: Random) -> Iterator[Turn]:
        for turn in range(turns):
            tokens = random.randint(*self.prompt_tokens)
            answer_tokens = output_tokens(random, self.mean_output_tokens)
            yield Turn(0.0, [(("prompt", number, turn), tokens)], answer_tokens)


_ALL: tuple[Profile, ...] = (
    Chatbot(
        arrivals=Arrivals(sessions_per_s=1.0, variation=1.5),
        assistants=3,
        common_tokens=9_000,
        assistant_tokens=3_500,
        mean_turns=3.5,
        user=Lengths(60, 1.0, 4, 4_000),
        mean_output_tokens=220,
        think_median_s=45,
    ),
    MultiTurn(
        arrivals=Arrivals(sessions_per_s=0.3, variation=1.5),
        assistants=12,
        common_tokens=900,
        assistant_tokens=1_200,
        mean_turns=14,
        user=Lengths(180, 1.1, 8, 12_000),
        attachment_share=0.6,
        mean_output_tokens=380,
        think_median_s=75,
    ),
    Rag(
        arrivals=Arrivals(sessions_per_s=3.0, variation=1.3),
        system_tokens=1_600,
        topics=10_000,
        topic_exponent=1.0,
        documents=5,
        document=Lengths(850, 0.35, 150, 2_000),
        same_document_chance=0.6,
        question=Lengths(45, 0.7, 5, 600),
        mean_output_tokens=200,
    ),
    Code(
        arrivals=Arrivals(sessions_per_s=0.5, variation=1.5),
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
    Batch(
        arrivals=Arrivals(sessions_per_s=4.0, variation=0.2),
        instruction_tokens=1_100,
        document=Lengths(7_500, 0.5, 800, 60_000),
        retry_share=0.005,
        mean_output_tokens=250,
    ),
    Unrelated(
        arrivals=Arrivals(sessions_per_s=2.0),
        prompt_tokens=(500, 8_000),
        mean_output_tokens=150,
    ),
)

PROFILES: dict[str, Profile] = {profile.name: profile for profile in _ALL}
