"""The optional build by mypyc (setup.py). Compiling its C takes a minute, so only wheels do it."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.lengths import LONG

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_without_the_variable_everything_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFIXD_COMPILE", raising=False)
    (kernel,) = SETUP["options"]()["ext_modules"]
    assert kernel.optional
    assert len(kernel.sources) == len(list((ROOT / "proto/native").glob("*.c"))) > 0


def test_every_pattern_names_modules() -> None:
    package = ROOT / "src" / "prefixd"
    assert all(list(package.glob(pattern)) for pattern in SETUP["COMPILED"])


@pytest.mark.skipif(not LONG, reason="takes as long as a hundred others; set PREFIXD_LONG")
def test_the_compiled_modules_translate_and_compile(tmp_path: Path) -> None:
    """mypyc refuses code that it can't translate, and a C compiler the mistakes of mypyc."""
    mypyc = pytest.importorskip("mypyc", reason="mypyc is not installed")
    (tmp_path / "src").symlink_to(ROOT / "src")
    translate = (
        "import runpy; from mypyc.build import mypycify;"
        f"setup = runpy.run_path({str(ROOT / 'setup.py')!r}, run_name='setup');"
        "mypycify(setup['arguments'](), target_dir='build')"
    )
    command = [sys.executable, "-c", translate]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sources = list((tmp_path / "build").glob("__native_*.c"))
    assert sources
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: mypyc's own check has passed")
    includes = [sysconfig.get_path("include"), str(Path(mypyc.__file__).parent / "lib-rt"), "build"]
    check = [compiler, "-fsyntax-only", "-w", *(f"-I{path}" for path in includes), *sources]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
