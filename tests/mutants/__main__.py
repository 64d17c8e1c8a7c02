"""Plants random mutants in critical modules, and finds the tests that notice each.

    python -m tests.mutants --mutants 200 --seed 1

Works on a copy of the tree. For each mutant, runs the tests that concern its file, the closest
first, until one fails. If none fails, the mutant survives. Prints one line of JSON for each mutant,
and finally how many were noticed. Exit status 1: fewer than `--least` per cent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from .mutate import Mutant, is_python, mutants_of

ROOT: Final = Path(__file__).resolve().parents[2]
#: The core, the ledger, the arena, the committer, and the validated read.
TARGETS: Final = (
    "server/core/*.py",
    "tiers/ledger.py",
    "tiers/extents.py",
    "tiers/arena.py",
    "tiers/arena_stores.py",
    "server/runtime/committer.py",
    "client/local/node.py",
    "client/local/arenas.py",
    "client/restores.py",
)
#: Further tests that concern files, beside their mirrored tests, by the beginning of the path. Each
#: string is one run of pytest; `sim N` runs N seeds of the simulation.
_CORE: Final = (
    "tests/server/core",
    "sim 20",
    "tests/server/runtime/test_loop.py tests/server/api/test_service.py",
    "tests/server/api/test_admin.py tests/server/api/test_admin_views.py",
    "tests/model/test_meta_state_model.py",
)
ALSO: Final[dict[str, tuple[str, ...]]] = {
    "server/core/": (
        *_CORE,
        "tests/server/runtime/test_resizing.py tests/server/runtime/test_recovery.py "
        "tests/server/runtime/test_verification.py",
    ),
    "tiers/ledger.py": ("tests/tiers/test_tier_shares.py", *_CORE, "tests/tiers/test_foretell.py"),
    "tiers/extents.py": ("tests/tiers/test_ledger.py", *_CORE),
    "tiers/": (
        "tests/tiers/test_arena.py tests/tiers/test_arena_stores.py "
        "tests/tiers/test_disk.py tests/tiers/test_disk_devices.py",
        "tests/contract/test_store_contract.py",
        "sim 20",
        "tests/server/runtime/test_resizing.py tests/server/runtime/test_committer.py "
        "tests/server/runtime/test_incoming.py",
        "tests/hostile/test_full_devices.py tests/power/test_power.py",
    ),
    "server/runtime/committer.py": (
        "tests/server/runtime/test_loop.py tests/server/runtime/test_supervision.py",
        "sim 20",
        "tests/server/api/test_service_faults.py tests/server/runtime/test_devices.py",
        "tests/server/test_tracing.py",
    ),
    "client/": (
        "tests/client/local/test_node.py tests/client/local/test_fast_path.py",
        "tests/client/test_restores.py tests/client/test_hits.py tests/client/test_search.py",
        "tests/client/local",
        "sim 20",
        "tests/client/test_buffers.py tests/client/test_counters.py tests/client/test_context.py",
        "tests/contract/test_transport_contract.py",
    ),
}
_OPTIONS: Final = (
    *("-q", "-x", "-p", "no:cacheprovider", "--no-header", "--timeout=400"),
    # Hypothesis is imported before pytest can rewrite its assertions.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning", "--hypothesis-profile=mutants"),
)
#: The modification time of all unmutated files. It differs from that of any mutant, so bytecode of
#: a mutant is never used for the original.
_LONG_AGO: Final = 946_684_800


def stages(path: str) -> list[str]:
    """The test runs for a file, in order."""
    folder, _, name = path.rpartition("/")
    beside = sorted((ROOT / "tests" / folder).glob(f"test_{name.removesuffix('.py')}*.py"))
    also = next(tests for start, tests in ALSO.items() if path.startswith(start))
    return [*filter(None, [" ".join(str(test.relative_to(ROOT)) for test in beside)]), *also]


def all_mutants() -> tuple[dict[str, str], list[tuple[str, Mutant]]]:
    """The text of each target by its path, and all mutants."""
    sources = {
        str(path.relative_to(ROOT)): path.read_text()
        for pattern in TARGETS
        for path in sorted(ROOT.glob(pattern))
    }
    return sources, [(path, mutant) for path in sources for mutant in mutants_of(sources[path])]


def chosen(count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Random mutants of all targets."""
    sources, found = all_mutants()
    random.Random(seed).shuffle(found)
    return list(islice((one for one in found if is_python(one[1].apply(sources[one[0]]))), count))


class Bench:
    """A copy of the tree in which mutants are tried one by one."""

    def __init__(self, directory: Path, within_s: float) -> None:
        self.root: Final = directory / "tree"
        self._within_s: Final = within_s
        self._output = directory / "output"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        generated = [str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*_pb2*")]
        for name in {*filter(None, listed.stdout.decode().split("\0")), *generated}:
            source, copy = ROOT / name, self.root / name
            if source.is_symlink() or source.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy, follow_symlinks=False)
                os.utime(copy, (_LONG_AGO, _LONG_AGO), follow_symlinks=False)

    def noticed_by(self, path: str, mutant: Mutant) -> tuple[str, float] | None:
        """The test that failed, and the seconds until then. None: the mutant survives.

        A run that exceeds its time also notices the mutant if it passes without it. Its name is
        then prefixed with `late: `.
        """
        file = self.root / path
        source = file.read_text()
        begun_s = time.monotonic()
        try:
            for stage in stages(path):
                file.write_text(mutant.apply(source))
                took_s = time.monotonic()
                if self.passes(stage):
                    continue
                output = self._output.read_text(errors="replace")
                late = time.monotonic() - took_s > self._within_s or "Timeout" in output
                failed = next((s for s in output.splitlines() if s.startswith("FAILED ")), stage)
                after_s = time.monotonic() - begun_s
                if not late:
                    return failed, after_s
                # On a busy machine, the run may be late without the mutant too.
                self._restore(file, source)
                if self.passes(stage):
                    return f"late: {failed}", after_s
            return None
        finally:
            self._restore(file, source)

    @staticmethod
    def _restore(file: Path, source: str) -> None:
        file.write_text(source)
        os.utime(file, (_LONG_AGO, _LONG_AGO))

    def passes(self, stage: str) -> bool:
        """Whether a run passes in time. It runs in a fork, so that common imports are done once."""
        pid = os.fork()
        if not pid:
            self._run(stage)
        deadline_s = time.monotonic() + self._within_s
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status == 0
            if time.monotonic() > deadline_s:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return False
            signal.sigtimedwait([signal.SIGCHLD], 1.0)

    def _run(self, stage: str) -> None:
        """Run tests in the forked process. Never returns."""
        os.setsid()
        fd = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.chdir(self.root)
        # The copy comes first in the import path, also in processes that the tests start.
        paths = [str(self.root / "src"), str(self.root)]
        sys.path[:0] = paths
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["PYTHONHASHSEED"] = "0"
        status = 1
        try:
            import hypothesis
            import pytest

            # Failing examples need not be shrunk.
            hypothesis.settings.register_profile(
                "mutants",
                deadline=None,
                derandomize=True,
                database=None,
                phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
            )
            if stage.startswith("sim "):
                status = _simulated(int(stage.removeprefix("sim ")))
            else:
                status = int(pytest.main([*_OPTIONS, *stage.split()]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _simulated(seeds: int) -> int:
    from tests.sim.plan import plan_of
    from tests.sim.run import run

    return int(any(run(plan_of(seed)).failure is not None for seed in range(seeds)))


def _preload() -> None:
    """Import slow third-party modules. Modules of the project must come from the copy."""
    for name in ("pytest", "hypothesis.stateful", "grpc.aio", "pydantic", "structlog", "numpy"):
        __import__(name)
    for module in [name for name in sys.modules if name.startswith(("tests.", "prefixd"))]:
        if not module.startswith("tests.mutants"):
            raise AssertionError(f"{module} must not be imported yet")
    # So that the package `tests` is found again, in the copy.
    del sys.modules["tests"]


def tried(bench: Bench, path: str, mutant: Mutant) -> dict[str, object]:
    found = bench.noticed_by(path, mutant)
    report: dict[str, object] = {"at": f"{path}:{mutant.line}", "mutant": mutant.description}
    report["line"] = (ROOT / path).read_text().split("\n")[mutant.line - 1].strip()
    if found is None:
        return report | {"survives": True}
    return report | {"survives": False, "noticed_by": found[0], "after_s": round(found[1], 1)}


def failing_runs(bench: Bench, paths: set[str]) -> Iterator[str]:
    """Test runs that fail without any mutant, so that they can't notice one."""
    for stage in sorted({stage for path in paths for stage in stages(path)}):
        if not bench.passes(stage):
            yield stage


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of mutants to skip")
    parser.add_argument(
        "--within", type=float, default=800.0, help="time limit of a run, in seconds"
    )
    parser.add_argument(
        "--least", type=float, default=95.0, help="per cent of mutants that have to be noticed"
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not first run the tests without mutants"
    )
    arguments = parser.parse_args()
    mutants = chosen(arguments.mutants, arguments.seed)[arguments.first :]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    sys.dont_write_bytecode = True
    _preload()
    with tempfile.TemporaryDirectory(prefix="prefixd-mutants-") as directory:
        bench = Bench(Path(directory), arguments.within)
        if not arguments.unchecked:
            failing = list(failing_runs(bench, {path for path, _ in mutants}))
            assert not failing, f"these fail without a mutant: {failing}"
        survivors = 0
        for path, mutant in mutants:
            report = tried(bench, path, mutant)
            survivors += bool(report["survives"])
            print(json.dumps(report), flush=True)
    part = 100 * (len(mutants) - survivors) / max(1, len(mutants))
    print(json.dumps({"mutants": len(mutants), "survivors": survivors, "noticed_percent": part}))
    sys.exit(part < arguments.least)


if __name__ == "__main__":
    main()
