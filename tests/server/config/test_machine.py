"""What the probe and the sources of memory use read, from trees that look like /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.proto.errors import ConfigError
from prefixd.server.config.machine import Machine, make_source

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB, of which 40 GiB are available, and no cgroups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    kib = GIB // 1024
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal:       {64 * kib} kB\nMemAvailable:   {40 * kib} kB\nHugePages_Total:  0\n"
    )
    return tmp_path


def cgroup(root: Path, name: str, **files: int | str) -> None:
    group = root / "sys/fs/cgroup" / name
    group.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (group / file.replace("__", ".")).write_text(f"{content}\n")


def memory(root: Path) -> tuple[float, float]:
    machine = Machine.probe(root / "shm", root / "disk", root)
    return machine.memory_bytes / GIB, machine.available_bytes / GIB


def test_a_machine_without_cgroups(root: Path) -> None:
    assert memory(root) == (64, 40)


def test_a_machine_without_the_kernels_estimate(root: Path) -> None:
    (root / "proc/meminfo").write_text(f"MemTotal: {GIB // 1024} kB\n")
    assert memory(root) == (1, 1)


def test_cgroup_v2_the_tightest_of_the_groups_above_counts(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/pod/container\n")
    cgroup(root, "pod/container", memory__max="max", memory__current=0, memory__stat="")
    stat = f"anon 5\ninactive_file {2 * GIB}\nactive_file 9"
    cgroup(root, "pod", memory__max=16 * GIB, memory__current=6 * GIB, memory__stat=stat)
    assert memory(root) == (16, 12)


def test_cgroup_v2_inside_a_container_whose_path_is_the_hosts(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("0::/../../kubepods/abc\n")
    cgroup(root, "", memory__max=8 * GIB, memory__current=GIB, memory__stat="inactive_file 0")
    assert memory(root) == (8, 7)


def test_cgroup_v1(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("5:cpu:/x\n4:hugetlb,memory:/docker/abc\n0::/\n")
    cgroup(root, "memory", memory__limit_in_bytes=9223372036854771712)
    cgroup(
        root,
        "memory/docker/abc",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=5 * GIB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB // 2}",
    )
    assert memory(root) == (4, 0)


def test_what_the_directories_hold_counts_as_room(root: Path) -> None:
    for name in ("shm", "disk"):
        (root / name / "index").mkdir(parents=True)
        (root / name / "data").write_bytes(bytes(2**20))
        (root / name / "index" / "data").write_bytes(bytes(2**19))
    machine = Machine.probe(root / "shm", root / "disk", root)
    assert machine.shm_held_bytes >= 2**20 + 2**19
    assert machine.shm_room_bytes <= machine.shm_size_bytes
    # tmp_path is one file system, and probably nothing else is written to it between the two
    # measurements, so the free bytes are nearly the same.
    free_bytes = machine.shm_room_bytes - machine.shm_held_bytes
    assert 0 < free_bytes <= machine.shm_size_bytes


def test_arenas_of_an_earlier_start_are_as_large_as_their_pages(root: Path) -> None:
    (root / "shm").mkdir()
    with (root / "shm" / "arena").open("wb") as file:
        file.write(bytes(2**20))
        file.truncate(2**30)
    machine = Machine.probe(root / "shm", root / "disk", root)
    assert (machine.shm_arena_bytes, machine.disk_arena_bytes) == (2**20, 0)


def test_directories_that_do_not_exist_yet_are_looked_at_from_above(root: Path) -> None:
    machine = Machine.probe(root / "a/b/c", root / "d/e", root)
    assert machine.shm_held_bytes == 0
    assert machine.shm_size_bytes > 0
    assert machine.disk_room_bytes > 0


def test_this_machine(tmp_path: Path) -> None:
    machine = Machine.probe(Path("/dev/shm/does-not-exist"), tmp_path)
    assert 0 < machine.available_bytes <= machine.memory_bytes


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


def test_system_memory_in_use(tmp_path: Path) -> None:
    source = make_source("system", machine(tmp_path))
    assert source is not None
    assert source() == (12 * GIB, 16 * GIB, 0.125)


def test_a_kernel_without_psi_reports_no_stall(tmp_path: Path) -> None:
    source = make_source("system", machine(tmp_path, psi=None))
    assert source is not None
    assert source() == (12 * GIB, 16 * GIB, 0.0)


def test_cgroup_memory_in_use(tmp_path: Path) -> None:
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


def test_without_a_source_memory_is_not_watched() -> None:
    assert make_source("none") is None


def test_this_machine_can_be_asked() -> None:
    source = make_source("system")
    assert source is not None
    used, total, stalled = source()
    assert 0 < used < total
    assert 0 <= stalled <= 1
