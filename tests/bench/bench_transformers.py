#!/usr/bin/env python3
"""Measures the first token of a prompt that is cached, beside evaluating it.

    python -m tests.bench.bench_transformers --device cuda --lengths 2048,8192,32768
    python -m tests.bench.bench_transformers --device cpu --layers 4 --width 256 --lengths 512

Needs transformers and torch. The model is a llama with random weights: the time does not depend on
their values, and the shapes are those of Llama 3 8B unless options say otherwise. Prints one JSON
object per line. `cold_ms`, `ttft_ms`: `generate` of one token, without and with `load_cache`;
`load_ms`: that call alone; `save_call_ms`, `saved_ms`: until `save_cache` returned, and until
everything was saved. Medians of --rounds by turns. Every row compares all keys and values that came
back with those that were saved, bit by bit. --links: first, what a copy between host and device
takes from memory of each kind; "registered" is an arena mapped read-only, as clients have it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

GIB = 2**30
#: cudaHostRegisterReadOnly.
_READ_ONLY = 8


def seconds(device: Any, action: Callable[[], object]) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def links(device: Any, rounds: int) -> None:
    import torch

    fd = os.memfd_create("arena")
    os.ftruncate(fd, GIB)
    with mmap.mmap(fd, GIB) as written:
        written[:] = bytes(GIB)
    arena = torch.frombuffer(mmap.mmap(fd, GIB, prot=mmap.PROT_READ), dtype=torch.uint8)
    os.close(fd)
    there = torch.empty(GIB, dtype=torch.uint8, device=device)
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    touched = torch.zeros(GIB, dtype=torch.uint8)
    driver = torch.cuda.cudart()
    cases: dict[str, Callable[[], object]] = {
        "pageable to device": lambda: there.copy_(touched, non_blocking=True),
        "device to pageable": lambda: touched.copy_(there, non_blocking=True),
        "device to new memory": there.cpu,
        "pinned to device": lambda: there.copy_(pinned, non_blocking=True),
        "device to pinned": lambda: pinned.copy_(there, non_blocking=True),
    }
    for name, action in cases.items():
        taken = [seconds(device, action) for _ in range(rounds)]
        print(
            json.dumps({"link": name, "gb_per_s": round(GIB / 1e9 / statistics.median(taken), 1)})
        )
    register_s = seconds(device, lambda: driver.cudaHostRegister(arena.data_ptr(), GIB, _READ_ONLY))
    row = {"link": "registered to device", "is_pinned": arena.is_pinned()}
    if row["is_pinned"]:
        taken = [
            seconds(device, lambda: there.copy_(arena, non_blocking=True)) for _ in range(rounds)
        ]
        row |= {
            "gb_per_s": round(GIB / 1e9 / statistics.median(taken), 1),
            "register_ms_per_gib": round(register_s * 1e3, 1),
        }
        driver.cudaHostUnregister(arena.data_ptr())
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="2048,8192,32768", help="tokens of the prompts")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ram", default="24GiB")
    parser.add_argument("--links", action="store_true")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from prefixd.client import Client
    from prefixd.client.ctl.private import PrivateDaemon, temporary_directories

    device = torch.device(options.device)
    if options.links:
        links(device, options.rounds)
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=7 * options.width // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=128_256 if options.width >= 1024 else 512,
        max_position_embeddings=131_072,
    )
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = AutoModelForCausalLM.from_config(config).eval()
    torch.set_default_dtype(torch.float32)
    budgets = (f"--ram.budget={options.ram}", "--shm.budget=0", "--disk.budget=0")
    with (
        temporary_directories("bench") as directories,
        PrivateDaemon(*directories, budgets) as daemon,
        Client(daemon.address, deadline_ms=60_000) as client,
    ):
        for length in map(int, options.lengths.split(",")):
            print(json.dumps(measured(model, client, length, options.rounds)), flush=True)


def measured(model: Any, client: Any, length: int, rounds: int) -> dict[str, Any]:
    import torch
    from transformers import DynamicCache

    from prefixd.connectors.transformers import load_cache, namespace_of, save_cache

    device = model.device
    namespace = namespace_of(model, fingerprint=os.urandom(32))
    ids = torch.randint(3, 500, (1, length), device=device)
    taken: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        kept: list[Any] = []
        taken.setdefault(name, []).append(seconds(device, lambda: kept.append(action())))
        return kept[0]

    def generate(cache: Any) -> Any:
        return model.generate(
            ids,
            past_key_values=cache,
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )

    def load() -> Any:
        return load_cache(client, namespace, model.config, ids)

    full = generate(DynamicCache(config=model.config))
    saving = timed(
        "save_call_ms", lambda: save_cache(client, namespace, full.sequences, full.past_key_values)
    )
    timed("saved_ms", saving.result)
    taken["saved_ms"][0] += taken["save_call_ms"][0]
    for _ in range(rounds):
        timed("cold_ms", lambda: generate(DynamicCache(config=model.config)))
        found = timed("load_ms", load)
        timed("ttft_ms", lambda: generate(load().cache))
    count = found.token_count
    equal = all(
        torch.equal(getattr(ours, name), getattr(theirs, name)[:, :, :count])
        for ours, theirs in zip(found.cache.layers, full.past_key_values.layers, strict=True)
        for name in ("keys", "values")
    )
    row: dict[str, Any] = {"tokens": length, "restored_tokens": count, "equal": equal}
    row |= {name: round(1e3 * statistics.median(each), 1) for name, each in taken.items()}
    return row | {"ttft / cold": round(row["ttft_ms"] / row["cold_ms"], 3)}


if __name__ == "__main__":
    main()
