"""The README's code does what it says, against a real daemon."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client, Namespace, SaveItem, Tier
from prefixd.client.ctl.private import PrivateDaemon
from prefixd.proto.endpoints import ADDRESS_VARIABLE
from tests.support.daemon import eventually, private_daemon
from tests.support.warm import WARM

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCK_TOKENS, BLOCK_BYTES, BLOCKS = 512, 4096, 5
TOKENS = list(range(BLOCKS * BLOCK_TOKENS + 100))


def examples() -> list[str]:
    """Saving and restoring; whether a daemon is there; whole states; ranks."""
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


def example() -> str:
    return examples()[0]


class Worker:
    """Provides the names that the example assumes."""

    def __init__(self) -> None:
        self.prefilled_tokens: list[int] = []
        self.kv_buffers = [bytearray(BLOCK_BYTES) for _ in range(BLOCKS)]

    def prefill(self, tokens: Sequence[int]) -> list[bytes]:
        self.prefilled_tokens.append(len(tokens))
        whole = range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        return [tokens[start].to_bytes(4, "big") * (BLOCK_BYTES // 4) for start in whole]

    def run(self) -> None:
        names: dict[str, Any] = {
            "sha256_of_the_weights": b"w" * 32,
            "sha256_of_the_context": b"c" * 32,
            "tokens": TOKENS,
            "kv_buffers": self.kv_buffers,
            "prefill": self.prefill,
        }
        exec(compile(example(), "README.md", "exec"), names)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Any:
    with private_daemon() as daemon:
        monkeypatch.setenv(ADDRESS_VARIABLE, daemon.address)
        yield daemon


def test_the_example_computes_what_is_missing_and_saves_it(daemon: PrivateDaemon) -> None:
    worker = Worker()
    worker.run()
    with daemon.admin() as admin:
        (evicted,) = admin.evict(2 * BLOCK_BYTES, [Tier.RAM]).results
        assert evicted.entries == 2
    worker.run()  # the root of the chain hits
    worker.run()  # everything hits
    assert worker.prefilled_tokens == [len(TOKENS), 2 * BLOCK_TOKENS + 100, 100]
    expected = [
        (number * BLOCK_TOKENS).to_bytes(4, "big") * (BLOCK_BYTES // 4) for number in range(BLOCKS)
    ]
    assert worker.kv_buffers == expected


def test_the_example_works_without_a_daemon(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, f"{daemon.address}.none")
    worker = Worker()
    worker.run()
    assert worker.prefilled_tokens == [len(TOKENS)]


def test_the_example_computes_blocks_that_could_not_be_restored(
    daemon: PrivateDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restore may fail after a hit."""
    assert daemon.pid
    Worker().run()
    monkeypatch.setattr(
        "prefixd.client.restores.Copier.copy", lambda *_: (_ for _ in ()).throw(OSError("no"))
    )
    worker = Worker()
    worker.run()
    assert worker.prefilled_tokens == [len(TOKENS)]


def test_the_example_makes_a_client() -> None:
    assert Client.__name__ in example()


@pytest.mark.parametrize("there", [True, False])
def test_whether_a_daemon_is_there_is_seen(
    daemon: PrivateDaemon,  # noqa: ARG001  # its address is the default
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: bool,
) -> None:
    code = examples()[1]
    if not there:
        monkeypatch.setenv(ADDRESS_VARIABLE, "unix:/nowhere/at-all")
        code = code.replace("5_000", "1")
    exec(code, {"Client": Client})
    said = capsys.readouterr().out
    assert ("no daemon" in said) is not there
    assert said.splitlines()[-1].startswith(str(there))


def whole_state(known: list[int], shard: str | None = None) -> dict[str, Any]:
    """Run the recipe for whole states, in the namespace of a rank if there is one."""
    _, _, whole, ranks = examples()
    names: dict[str, Any] = {
        "Client": Client,
        "Tier": Tier,
        "model": Namespace(b"w" * 32, "q4_k_m", b"c" * 32),
        "tokens": known,
        "prefill": lambda tokens, _state, _known: repr((tokens, shard)).encode(),
        "rank": shard,
        "size": 2,
    }
    if shard is not None:
        exec(ranks, names)
        names["model"] = names["mine"]
    exec(compile(whole, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("count", [7, 700, 2_999])
def test_a_state_of_any_length_is_found_by_a_longer_prompt(
    daemon: PrivateDaemon,  # noqa: ARG001  # its address is the default
    count: int,
) -> None:
    first, second = list(range(count)), list(range(count + 5))
    assert whole_state(first)["known"] == 0
    seen: list[object] = []
    names = whole_state(second)
    assert names["known"] == count
    with Client() as cache, cache.longest_prefix(names["model"], second) as hit:
        seen.append(hit.read(0))
    assert seen == [repr((second, None)).encode()]


def test_ranks_find_only_their_own_states(
    daemon: PrivateDaemon,  # noqa: ARG001  # its address is the default
) -> None:
    tokens = list(range(600))
    whole_state(tokens, "0")
    names = whole_state(tokens, "1")
    assert names["known"] == 0
    again = whole_state(tokens, "0")
    assert again["known"] == 600
    assert names["mine"] != again["mine"]


def test_a_whole_state_is_computed_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "unix:/nowhere/at-all")
    names = whole_state(list(range(9)))
    assert (names["known"], bool(names["hit"])) == (0, False)
    assert names["hit"].miss.value == "unavailable"


def test_the_session_on_the_first_screen_is_a_real_one(daemon: PrivateDaemon) -> None:
    (session,) = re.findall(r"^```pycon\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    model = Namespace(b"w" * 32, "q4_k_m", b"c" * 32)
    tokens = list(range(2048))
    with Client(daemon.address) as cache:
        chain = cache.chain(model, tokens)
        names = {
            "cache": cache,
            "chain": chain,
            "blocks": [SaveItem(key, bytes(4096), token_count=512) for key in chain],
            "chain_of_another_prompt": cache.chain(model, tokens[:1536] + tokens[:512]),
            "buffers": [bytearray(4096) for _ in range(3)],
            "Tier": Tier,
        }
        test = doctest.DocTestParser().get_doctest(session, names, "README.md", None, None)
        assert len(test.examples) == 3
        assert doctest.DocTestRunner().run(test).failed == 0


# ---- pasted into a file

GIVEN = """
import json, sys
rank, size = int(sys.argv[1]), 2
tokens = list(range(2_148))
sha256_of_the_weights, sha256_of_the_context = b"w" * 32, b"c" * 32
"""
BLOCKS_GIVEN = """
def prefill(rest):
    first = len(tokens) - len(rest)
    return [payload(start) for start in range(first, len(tokens) - 511, 512)]

def payload(start):
    return f"rank {rank}, from token {start}".encode().ljust(4096)

kv_buffers = [bytearray(4096) for _ in range(4)]
"""
BLOCKS_SEEN = """
right = kv_buffers[: restored.run] == [payload(512 * block) for block in range(restored.run)]
print(json.dumps([restored.token_count, right, restored.miss and restored.miss.label]))
"""
WHOLE_GIVEN = """
from prefixd.client import Client, Namespace, Tier

model = Namespace(sha256_of_the_weights, "q4_k_m", sha256_of_the_context)
seen = []

def prefill(tokens, state, known):
    seen.append(state)
    return f"rank {rank}, of {len(tokens)} tokens".encode()
"""
WHOLE_SEEN = """
right = seen == [state if known else None]
print(json.dumps([known, right, hit.miss and hit.miss.label]))
"""


def pasted(recipe: str, *, ranks: bool) -> str:
    """A program that is the recipe and what it leaves to its reader."""
    blocks, _, whole, of_ranks = examples()
    if recipe == "blocks":
        if ranks:
            assert 'shard=""' in blocks
            blocks = blocks.replace('shard=""', 'shard=f"tp {rank}/{size}"')
        return GIVEN + BLOCKS_GIVEN + blocks + BLOCKS_SEEN
    of_ranks = of_ranks + "\nmodel = mine\n" if ranks else ""
    return GIVEN + WHOLE_GIVEN + of_ranks + whole + WHOLE_SEEN


@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize(("recipe", "known"), [("blocks", 2_048), ("whole", 2_148)])
def test_a_recipe_gives_right_bytes_or_says_why_not(
    daemon: PrivateDaemon, recipe: str, known: int, ranks: bool
) -> None:
    def run(rank: int, python: Sequence[str] = WARM) -> tuple[list[Any], str]:
        command = [*python, "-c", pasted(recipe, ranks=ranks), str(rank)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    def each_twice() -> bool:
        with daemon.admin() as admin:
            admin.evict(2**40, [])
        seen = [run(rank) for rank in range(1 + ranks) for _ in range(2)]
        if any(result[2] in ("unavailable", "deadline") for result, _ in seen):
            return False  # a busy machine took too long, which is a visible miss
        assert seen == [([0, True, "absent"], ""), ([known, True, None], "")] * (1 + ranks)
        return True

    eventually(each_twice)
    daemon.kill()
    # Its own interpreter: in the warm one, prefixctl has set up the log.
    result, said = run(0, [sys.executable])
    assert result == [0, True, "unavailable"]
    assert said.count("\n") == said.count(f"no daemon at {daemon.address}") == 1, said
