"""Who says how much memory is used, on machines that a test makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto.errors import ConfigError
from prefixd.server.config.memory_sources import make_source

GIB = 2**30


def machine(root: Path, *, psi: str | None = "some avg10=12.50", limit: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    total, available = 16 * GIB // 1024, 4 * GIB // 1024
    (root / "proc/meminfo").write_text(f"MemTotal: {total} kB\nMemAvailable: {available} kB\n")
    (root / "proc/self/cgroup").write_text("0::/pod/engine\n")
    if psi is not None:
        (root / "proc/pressure").mkdir()
        (root / "proc/pressure/memory").write_text(f"{psi} total=1\nfull avg10=90.00 total=1\n")
    group = root / "sys/fs/cgroup/pod/engine"
    group.mkdir(parents=True)
    if limit:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{6 * GIB}\n")
        (group / "memory.stat").write_text(f"inactive_file {GIB}\n")
        (group / "memory.pressure").write_text("some avg10=3.00 avg60=0.00 total=1\n")
    return root


def test_the_machine_says_what_it_could_not_give_at_once(tmp_path: Path) -> None:
    source = make_source("system", machine(tmp_path))
    assert source is not None
    assert source() == (12 * GIB, 16 * GIB, 0.125)


def test_a_kernel_without_psi_says_that_nobody_waits(tmp_path: Path) -> None:
    source = make_source("system", machine(tmp_path, psi=None))
    assert source is not None
    assert source() == (12 * GIB, 16 * GIB, 0.0)


def test_a_cgroup_says_what_it_could_not_drop(tmp_path: Path) -> None:
    source = make_source("cgroup", machine(tmp_path, limit=str(8 * GIB)))
    assert source is not None
    assert source() == (5 * GIB, 8 * GIB, 0.03)


def test_a_cgroup_without_a_limit_is_refused_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pressure\.source = 'cgroup': no cgroup .* limit"):
        make_source("cgroup", machine(tmp_path, limit="max"))


def test_a_function_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_source.py").write_text("def read():\n    return 1, 2, 0.0\nnumber = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = make_source("own_source:read")
    assert source is not None
    assert source() == (1, 2, 0.0)
    for wrong in ("own_source:absent", "no_such_module:read", "own_source:number"):
        with pytest.raises(ConfigError, match=rf"pressure\.source = '{wrong}'"):
            make_source(wrong)


def test_nobody_is_asked_unless_somebody_says_so() -> None:
    assert make_source("none") is None


def test_this_machine_can_be_asked() -> None:
    source = make_source("system")
    assert source is not None
    used, total, stalled = source()
    assert 0 < used < total
    assert 0 <= stalled <= 1
