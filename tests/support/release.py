"""What `make release-check` does: builds the distributions, and uses them as a user would.

    python -m tests.support.release DIRECTORY [PYTHON...]

Each PYTHON (all from 3.11 on that are found, if none is named) gets an empty environment for the
wheel, and the first one another for the source distribution. In each the demonstration runs. What
is installed there is written down as a CycloneDX bill of materials. Needs the extra `release`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
#: Every kind of file that a wheel has, beside the native kernel and its own records.
KINDS: Final = (".py", ".pyi", ".proto", ".html", "py.typed")
#: In the source distribution, beside what the wheel is made of.
IN_SOURCES: Final = (
    "Makefile", "mkdocs.yml", "LICENSE", "CHANGELOG.md", "deploy/helm/Chart.yaml",
    "deploy/helm/files/rules.yml", "docs/README.md", "tests/conftest.py", "proto/native/module.c",
)  # fmt: skip


def say(text: str) -> None:
    print(f"release-check: {text}", flush=True)


def run(*command: str | Path) -> str:
    """The output of a command. Ends the check if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def version_of(root: Path) -> str:
    """The one version that package, chart, image, manifests and changelog name. Raises SystemExit
    where they differ."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    version = str(project["version"])
    places = {
        "CHANGELOG.md": r"^## (\S+)",
        "deploy/helm/Chart.yaml": r"^(?:version|appVersion): (\S+)",
        "deploy/Dockerfile": r"^ARG VERSION=(\S+)",
        "deploy/kubernetes/kustomization.yaml": r"newTag: (\S+)",
    }
    for name, pattern in places.items():
        found = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if not found or any(each != version for each in found[: 2 if "Chart" in name else 1]):
            sys.exit(f"{name} names version {', '.join(found)}, pyproject.toml {version}")
    return version


def wheel_problems(names: list[str]) -> Iterator[str]:
    """What does not belong into a wheel with these files, or is missing."""
    for name in names:
        own = ".dist-info/" in name or re.fullmatch(r"prefixd/proto/_native\.[\w.-]*so", name)
        if not own and not name.startswith("prefixd/"):
            yield f"{name} lies outside the package"
        elif not own and not name.endswith(KINDS):
            yield f"{name} is of no kind that belongs there"
        if "/tests/" in name or "test_" in name.rpartition("/")[2]:
            yield f"{name} is a test"
    for needed in ("client/client.py", "server/daemon.py", "server/api/page.html", "py.typed"):
        if f"prefixd/{needed}" not in names:
            yield f"prefixd/{needed} is missing"


def source_problems(archive: tarfile.TarFile) -> Iterator[str]:
    """What is missing in a source distribution, or would not survive its way."""
    members = {each.name.partition("/")[2]: each for each in archive.getmembers()}
    for needed in IN_SOURCES:
        if needed not in members:
            yield f"{needed} is missing"
    for name, member in members.items():
        if member.issym() or member.islnk():
            yield f"{name} is a link to {member.linkname}"
        if name.endswith((".so", ".pyc")) or name.startswith((".venv", "build/")):
            yield f"{name} is made, and no source"


def pythons() -> list[str]:
    """Interpreters of each version, on the path or of pyenv."""
    found = []
    for version in VERSIONS:
        name = f"python{version}"
        of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
        candidates = [shutil.which(name) or "", *map(str, of_pyenv)]
        works = (each for each in candidates if each and _answers(each, version))
        if python := next(works, ""):
            found.append(python)
        else:
            say(f"no Python {version} here: not tried")
    return found


def _answers(python: str, version: str) -> bool:
    say_version = [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
    done = subprocess.run(say_version, capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def installed(python: str, package: Path, folder: Path) -> Path:
    """The bin folder of an empty environment into which the package was installed."""
    run(python, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "--quiet", f"{package}[server]")
    return folder / "bin"


def use(bin_folder: Path, version: str, *, native: bool) -> None:
    """Do what a new user does first."""
    told = run(bin_folder / "prefixctl", "--version")
    if version not in told:
        sys.exit(f"prefixctl says {told}")
    code = "from prefixd.proto import kernel; print(kernel.native is not None)"
    if native and run(bin_folder / "python", "-c", code).strip() != "True":
        sys.exit("the wheel's native kernel is not used")
    run(bin_folder / "prefixd", "--check-config", "--ram=64MiB", "--shm=0", "--disk=0")
    run(bin_folder / "prefixctl", "demo", "--requests", "300")


def main(directory: Path, chosen: list[str]) -> None:
    version = version_of(ROOT)
    if (tag := _tag()) and tag != f"v{version}":
        sys.exit(f"the commit has the tag {tag}, and the version is {version}")
    shutil.rmtree(directory, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", directory, ROOT)
    (wheel,) = directory.glob("*.whl")
    (source,) = directory.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(source) as archive:
        problems = [*wheel_problems(names), *source_problems(archive)]
    if problems:
        sys.exit("\n".join(problems))
    native = any(name.endswith(".so") for name in names)
    if native:
        wheel = _for_any_linux(wheel, directory)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    say(f"{wheel.name} ({len(names)} files) and {source.name}: good")
    with tempfile.TemporaryDirectory(prefix="prefixd-release-") as made:
        found = chosen or pythons()
        for number, python in enumerate(found):
            bin_folder = installed(python, wheel, Path(made, f"wheel-{number}"))
            use(bin_folder, version, native=native)
            say(f"the wheel on {run(python, '--version').strip()}: demonstration good")
        bin_folder = installed(found[0], source, Path(made, "source"))
        use(bin_folder, version, native=False)
        say("the source distribution: demonstration good")
        bill = directory / f"prefixd-{version}.cdx.json"
        run(sys.executable, "-m", "cyclonedx_py", "environment", bin_folder / "python", "-o", bill)
        say(f"{bill.name}: the bill of materials")


def _tag() -> str:
    command = ["git", "describe", "--exact-match", "--tags", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _for_any_linux(wheel: Path, directory: Path) -> Path:
    """The wheel under the name of the oldest glibc that it runs with, as an index demands."""
    out = directory / "repaired"
    run(sys.executable, "-m", "auditwheel", "repair", wheel, "--wheel-dir", out)
    (repaired,) = out.glob("*.whl")
    wheel.unlink()
    found = repaired.rename(directory / repaired.name)
    out.rmdir()
    return found


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
