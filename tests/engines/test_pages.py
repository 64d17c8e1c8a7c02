"""The pages of llama-cpp-python and transformers, followed literally (`make engines`)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from prefixd.client import Client
from prefixd.client.ctl.private import PrivateDaemon
from tests.engines.tiny_models import make_transformer, write_gguf
from tests.support.daemon import private_daemon

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
TEXT = "".join(chr(97 + (n * n * 31 + n * 7) % 26) for n in range(600))


@pytest.fixture
def daemon() -> Iterator[PrivateDaemon]:
    with private_daemon(ram="256MiB") as daemon:
        yield daemon


def blocks(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def environment(daemon: PrivateDaemon, folder: Path) -> dict[str, str]:
    cache = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **cache, "PREFIXD_ADDRESS": daemon.address}


def test_llama_cpp_python(daemon: PrivateDaemon, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    write_gguf(tmp_path / "model.gguf")
    program, _ = blocks("llama-cpp-python.md")
    program = program.replace('create_completion("...")', f'create_completion("{TEXT}")')
    for hits in (0, 1):
        run = [sys.executable, "-c", program + 'print(client.counters["hits"])']
        done = subprocess.run(
            run, cwd=tmp_path, env=environment(daemon, tmp_path), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == str(hits)


def test_the_server_of_llama_cpp_python(daemon: PrivateDaemon, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp.server.app")
    write_gguf(tmp_path / "model.gguf")
    _, program = blocks("llama-cpp-python.md")
    (tmp_path / "serve.py").write_text(program)
    request = {"prompt": TEXT, "max_tokens": 4, "temperature": 0.0}
    options = ["--model", "model.gguf", "--n_ctx", "8192", "--port", "0"]
    texts = []
    for _ in range(2):
        server = subprocess.Popen(
            [sys.executable, "serve.py", *options],
            cwd=tmp_path,
            env=environment(daemon, tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert server.stderr is not None
        lines = (re.search(r"running on (\S+)", line) for line in server.stderr)
        address = next(found[1] for found in lines if found)
        made = urllib.request.Request(
            f"{address}/v1/completions",
            json.dumps(request).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(made, timeout=60) as answer:
            texts.append(json.load(answer)["choices"][0]["text"])
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert texts[0] == texts[1]
    with daemon.admin() as admin:
        assert sum(usage.hits for usage in admin.stats().usage.values()) == 1


def test_transformers(
    daemon: PrivateDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    _, generate, own_pass = blocks("transformers.md")
    if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24):
        own_pass, generate = (
            each.replace("past_key_values=", "cache=") for each in (own_pass, generate)
        )
    monkeypatch.setenv("PREFIXD_ADDRESS", daemon.address)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = make_transformer()
    model.generation_config.pad_token_id = 0
    names: dict[str, Any] = {"model": model, "ids": torch.tensor([[1, *range(3, 500)]])}
    generate = generate.replace("client.close()", "client.flush(); client.close()")
    counts = []
    for _ in range(2):
        exec(generate, names)
        counts.append(names["found"].token_count)
    assert counts == [0, 256]
    found_again = "found = load_cache(client, namespace, model.config, ids)\n"
    names["client"] = Client()
    with names["client"]:
        exec(found_again + own_pass, names)
    assert names["out"].logits.shape[1] == 498 - 256
    assert not names["out"].logits.requires_grad
