"""The entry points that engines call at their start."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from prefixd.client.connectors import engine, plugins, sglang
from tests.support.daemon import WITHIN_S

ROOT = Path(__file__).resolve().parents[3]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
FACTORY = "vllm.v1.kv_offload.tiering.factory"


class SecondaryTierFactory:
    _registry: dict[str, tuple[str, str]]

    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        if tier_type in cls._registry:
            raise ValueError(f"Tier {tier_type!r} is already registered.")
        cls._registry[tier_type] = module_path, class_name


def install(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    parts = FACTORY.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    vars(sys.modules[FACTORY]).update(contents)


def test_they_are_those_that_engines_look_for() -> None:
    assert {group: list(names) for group, names in GROUPS.items()} == {
        "vllm.general_plugins": ["prefixd"],
        "sglang.srt.plugins": ["prefixd"],
    }


@pytest.mark.parametrize("group", GROUPS)
def test_without_the_engine_nothing_happens(group: str) -> None:
    """In a process of its own: no engine is imported, and no thread is started."""
    value = GROUPS[group]["prefixd"]
    script = (
        "import sys, threading\n"
        "from importlib.metadata import EntryPoint\n"
        f"found = EntryPoint('prefixd', {value!r}, {group!r}).load()\n"
        "assert found() is None and found() is None\n"
        "assert threading.active_count() == 1\n"
        "assert not {'vllm', 'sglang', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_vllm_knows_the_tier_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    SecondaryTierFactory._registry = {}
    install(monkeypatch, SecondaryTierFactory=SecondaryTierFactory)
    register = EntryPoint("prefixd", GROUPS["vllm.general_plugins"]["prefixd"], "").load()
    register()
    register()  # in some processes vLLM calls it twice
    tier = "prefixd.client.connectors.vllm", "PrefixdTier"
    assert SecondaryTierFactory._registry == {"prefixd": tier}


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    plugins.register_vllm()
    install(monkeypatch, SecondaryTierFactory=object())
    plugins.register_vllm()


@pytest.mark.parametrize(
    ("found", "said"), [("0.5.16", 0), ("0.5.23", 0), ("0.5.15", 1), ("9.9", 1), ("unknown", 0)]
)
def test_another_sglang_is_said_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str, said: int
) -> None:
    monkeypatch.setattr(engine, "version", lambda _package: found)
    with caplog.at_level(logging.INFO, "prefixd.client.connectors"):
        plugins.register_sglang()
    assert len(caplog.records) == said


class HookRegistry:
    """SGLang's, for hooks around and after methods."""

    hooks: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: str) -> None:
        cls.hooks[target] = hook, hook_type


class SchedulerWeightUpdaterManager:
    def update_weights_from_disk(self) -> None: ...
    def update_weights_from_tensor(self) -> None: ...


class Scheduler:
    def flush_cache(self) -> None: ...


class Backend:
    def __init__(self) -> None:
        self.told: list[str] = []

    def weights_updated(self) -> None:
        self.told.append("updated")

    def cache_flushed(self) -> None:
        self.told.append("flushed")


def test_sglang_tells_of_weights_that_are_updated_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_watched", False)
    monkeypatch.setattr(HookRegistry, "hooks", {})
    backend = Backend()
    monkeypatch.setattr(sglang, "_backends", [backend])
    plugins.register_sglang()
    assert not sglang._watched, "a process without a scheduler updates nothing"
    hook_type = SimpleNamespace(AROUND="around", AFTER="after")
    for name, contents in {
        "sglang.srt.plugins.hook_registry": [
            ("HookType", hook_type),
            ("HookRegistry", HookRegistry),
        ],
        sglang._UPDATER: [(SchedulerWeightUpdaterManager.__name__, SchedulerWeightUpdaterManager)],
        sglang._SCHEDULER: [("Scheduler", Scheduler)],
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    plugins.register_sglang()
    plugins.register_sglang()
    hooks = {target.rpartition(".")[2]: hook for target, hook in HookRegistry.hooks.items()}
    assert {name: kind for name, (_, kind) in hooks.items()} == {
        "update_weights_from_disk": "around",
        "update_weights_from_tensor": "around",
        "flush_cache": "after",
    }
    (around, _), (after, _) = hooks["update_weights_from_disk"], hooks["flush_cache"]
    assert around(lambda value: value + 1, 1) == 2
    assert after(True) is None
    assert backend.told == ["updated", "flushed"]
    with pytest.raises(ZeroDivisionError):
        around(lambda: 1 // 0)
    assert backend.told[2:] == ["updated"], "some weights may have changed"


def test_an_sglang_with_other_hooks_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "_watched", False)
    module = ModuleType(sglang._UPDATER)
    vars(module)[SchedulerWeightUpdaterManager.__name__] = SchedulerWeightUpdaterManager
    monkeypatch.setitem(sys.modules, sglang._UPDATER, module)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    plugins.register_sglang()
    assert "updates of weights in place will not be noticed" in caplog.text
