"""What a trace offers a prefix cache, in one pass: sharing, reuse, popularity, sessions.

All figures are for a cache without limits; `client.lab.curve` has those of a real size. Memory
grows with the number of different blocks and of different prompt ends, not with the trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .histogram import LogHistogram
from .trace import PrefixTree, Request

#: A prompt end that more requests than this continue is a template, such as a system prompt, and
#: not a turn of a session.
TEMPLATE_FANOUT = 4


@dataclass(slots=True)
class Analysis:
    """The results; every rate is a share between 0 and 1.

    - `blocks` are references; `unique_blocks` are different blocks, of which `shared_blocks` are
      referenced by at least two requests and `single_use_blocks` by one;
    - `reused_references` are references to a block seen before, `prefix_hit_blocks` those that are
      hits by the prefix rule, and `infinite_hit_tokens` the prompt tokens that these save;
    - `shared_prefix_tokens` is the distribution of hit tokens per request;
    - `reuse_distance_blocks` counts block references between two uses of a block, and
      `reuse_time_ms` the time between them;
    - a block's popularity is its number of references;
    - `session_depth` is the turn of a request in its session: 1 + the earlier requests that it
      continues, each of which begins with all whole blocks of the one before.
    """

    block_tokens: int
    requests: int = 0
    duration_ms: float = 0
    blocks: int = 0
    unique_blocks: int = 0
    shared_blocks: int = 0
    single_use_blocks: int = 0
    reused_references: int = 0
    prefix_hit_blocks: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    infinite_hit_tokens: int = 0
    requests_without_shared_prefix: int = 0
    common_prefix_blocks: int = 0
    hottest_block_references: int = 0
    top_1_percent_reference_share: float = 0.0
    top_10_percent_reference_share: float = 0.0
    first_turn_requests: int = 0
    input_length: LogHistogram = field(default_factory=LogHistogram)
    output_length: LogHistogram = field(default_factory=LogHistogram)
    shared_prefix_tokens: LogHistogram = field(default_factory=LogHistogram)
    reuse_distance_blocks: LogHistogram = field(default_factory=LogHistogram)
    reuse_time_ms: LogHistogram = field(default_factory=LogHistogram)
    session_depth: LogHistogram = field(default_factory=LogHistogram)

    @property
    def infinite_hit_rate(self) -> float:
        """Hit tokens over prompt tokens of a cache without limits: the potential saving."""
        return self.infinite_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def infinite_block_hit_rate(self) -> float:
        """Hit blocks over all blocks of a cache without limits."""
        return self.prefix_hit_blocks / self.blocks if self.blocks else 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain values, with units in the names."""
        return {
            "block_tokens": self.block_tokens,
            "trace": {
                "requests": self.requests,
                "duration_s": self.duration_ms / 1000,
                "blocks": self.blocks,
                "unique_blocks": self.unique_blocks,
                "prompt_tokens": self.prompt_tokens,
                "output_tokens": self.output_tokens,
                "input_length_tokens": self.input_length.summary(),
                "output_length_tokens": self.output_length.summary(),
            },
            "sharing": {
                "shared_blocks": self.shared_blocks,
                "single_use_blocks": self.single_use_blocks,
                "reused_references": self.reused_references,
                "prefix_hit_blocks": self.prefix_hit_blocks,
                "common_prefix_blocks": self.common_prefix_blocks,
                "requests_without_shared_prefix": self.requests_without_shared_prefix,
                "shared_prefix_tokens": self.shared_prefix_tokens.summary(),
            },
            "saving": {
                "infinite_hit_tokens": self.infinite_hit_tokens,
                "infinite_hit_rate": self.infinite_hit_rate,
                "infinite_block_hit_rate": self.infinite_block_hit_rate,
            },
            "reuse": {
                "distance_blocks": self.reuse_distance_blocks.summary(),
                "time_ms": self.reuse_time_ms.summary(),
                "within_1_minute_share": self.reuse_time_ms.at_most(60_000),
                "within_10_minutes_share": self.reuse_time_ms.at_most(600_000),
            },
            "popularity": {
                "hottest_block_references": self.hottest_block_references,
                "top_1_percent_reference_share": self.top_1_percent_reference_share,
                "top_10_percent_reference_share": self.top_10_percent_reference_share,
            },
            "sessions": {
                "first_turn_requests": self.first_turn_requests,
                "depth_turns": self.session_depth.summary(),
            },
        }


def analyze(requests: Iterable[Request], *, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> Analysis:
    """Analyse requests in order of arrival; they are read once."""
    analyzer = Analyzer(block_tokens)
    for _ in analyzer.watch(requests):
        pass
    return analyzer.finish()


class Analyzer:
    """Analyses requests while they pass through, for example on the way to a file."""

    def __init__(self, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> None:
        self._analysis = Analysis(block_tokens)
        self._blocks = _Blocks()
        self._ends = _PromptEnds(block_tokens)

    def watch(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Count each request and pass it on."""
        analysis = self._analysis
        first_ms = last_ms = None
        common: tuple[int, ...] = ()
        for request in requests:
            ids = request.hash_ids
            hit_blocks = self._blocks.use(request, analysis)
            hit_tokens = min(hit_blocks * analysis.block_tokens, request.input_length)
            common = _common_prefix(common, ids) if analysis.requests else ids
            analysis.requests += 1
            analysis.blocks += len(ids)
            analysis.prefix_hit_blocks += hit_blocks
            analysis.prompt_tokens += request.input_length
            analysis.output_tokens += request.output_length
            analysis.infinite_hit_tokens += hit_tokens
            analysis.requests_without_shared_prefix += not hit_blocks
            analysis.input_length.add(request.input_length)
            analysis.output_length.add(request.output_length)
            analysis.shared_prefix_tokens.add(hit_tokens)
            self._ends.add(request)
            first_ms = request.timestamp_ms if first_ms is None else first_ms
            last_ms = max(request.timestamp_ms, last_ms or 0)
            yield request
        analysis.duration_ms = (last_ms or 0) - (first_ms or 0)
        # With a single request all blocks would count as common.
        analysis.common_prefix_blocks = len(common) if analysis.requests > 1 else 0

    @property
    def collisions(self) -> int:
        """Requests whose blocks do not stand for whole prefixes (`TraceColumns`)."""
        return self._blocks.tree.collisions

    def finish(self) -> Analysis:
        """The results, after all requests have passed."""
        self._blocks.finish(self._analysis)
        self._ends.finish(self._analysis)
        return self._analysis


class _Blocks:
    """Per different block: the number of references and of requests, and the last use."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._references = array("q")
        self._requests = array("q")
        self._last_reference = array("q")
        self._last_ms = array("d")
        self.tree = PrefixTree()
        self._last_request = array("q")

    def use(self, request: Request, analysis: Analysis) -> int:
        """Count the blocks of a request; returns how many leading blocks were known."""
        position, now_ms = analysis.blocks, request.timestamp_ms
        number = analysis.requests
        hits, in_prefix = 0, True
        known = len(self._references)
        numbers = []
        for block in request.hash_ids:
            index = self._index.setdefault(block, len(self._references))
            numbers.append(index)
            if index == len(self._references):
                in_prefix = False
                self._references.append(1)
                self._requests.append(1)
                self._last_reference.append(position)
                self._last_ms.append(now_ms)
                self._last_request.append(number)
            else:
                same_request = self._last_request[index] == number
                # A block that this request itself brought follows its first miss, so it is no hit.
                hits += in_prefix
                self._references[index] += 1
                self._requests[index] += not same_request
                analysis.reused_references += 1
                analysis.reuse_distance_blocks.add(position - self._last_reference[index] - 1)
                analysis.reuse_time_ms.add(max(round(now_ms - self._last_ms[index]), 0))
                self._last_reference[index] = position
                self._last_ms[index] = now_ms
                self._last_request[index] = number
            position += 1
        self.tree.add(numbers, known, len(self._references))
        return hits

    def finish(self, analysis: Analysis) -> None:
        analysis.unique_blocks = len(self._references)
        analysis.shared_blocks = sum(count > 1 for count in self._requests)
        analysis.single_use_blocks = analysis.unique_blocks - analysis.shared_blocks
        if not self._references:
            return
        ranked = sorted(self._references, reverse=True)
        analysis.hottest_block_references = ranked[0]
        percent = -(-len(ranked) // 100)
        analysis.top_1_percent_reference_share = sum(ranked[:percent]) / analysis.blocks
        tenth = -(-len(ranked) // 10)
        analysis.top_10_percent_reference_share = sum(ranked[:tenth]) / analysis.blocks


@dataclass(slots=True)
class _End:
    """The last whole block of some prompts, and the end that they continue."""

    parent: int | None
    requests: int = 0
    continuations: int = 0


class _PromptEnds:
    """The tree of prompt ends, which gives the turns of sessions.

    A request continues an earlier one if it begins with all whole blocks of that one and has more.
    Ends are stored after those that they continue, so one pass finds all depths.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ends: dict[int | None, _End] = {}

    def add(self, request: Request) -> None:
        whole = min(request.input_length // self._block_tokens, len(request.hash_ids))
        last = request.hash_ids[whole - 1] if whole else None
        end = self._ends.get(last)
        if end is None:
            before = (b for b in reversed(request.hash_ids[: max(whole - 1, 0)]) if b in self._ends)
            end = self._ends[last] = _End(next(before, None))
        end.requests += 1
        if end.parent is not None:
            self._ends[end.parent].continuations += 1

    def finish(self, analysis: Analysis) -> None:
        depths: dict[int | None, int] = {}
        for last, end in self._ends.items():
            parent = end.parent
            turn = 1
            if parent is not None:
                is_template = self._ends[parent].continuations > TEMPLATE_FANOUT
                turn = 1 if is_template else depths[parent] + 1
            depths[last] = turn
            for _ in range(end.requests):
                analysis.session_depth.add(turn)
            if turn == 1:
                analysis.first_turn_requests += end.requests


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    pairs = zip(a, b, strict=False)
    return tuple(left for left, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
