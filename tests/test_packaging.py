"""What setup.py does: checkouts that lost their symbolic links, and the README of an index."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import release
from tests.support.lengths import LONG

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
LINKED = SETUP["LINKED"]


def checkout(at: Path, *, as_text: bool) -> Path:
    """The folders of a checkout that lost its links: they are missing, or files with their text."""
    package = at / "src/prefixd"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", at)
    for name in LINKED:
        (at / name).mkdir()
        (at / name / "there.py").touch()
        if as_text:
            (package / name).write_text(f"../../{name}")
    return package


def mend(at: Path) -> None:
    runpy.run_path(str(at / "setup.py"), run_name="setup")["mend_links"]()


def test_every_link_of_the_package_is_known() -> None:
    package = ROOT / "src/prefixd"
    assert {each.name for each in package.iterdir() if each.is_symlink()} == set(LINKED)


@pytest.mark.parametrize("as_text", [False, True])
def test_lost_links_are_made_again(tmp_path: Path, as_text: bool) -> None:
    package = checkout(tmp_path, as_text=as_text)
    mend(tmp_path)
    mend(tmp_path)
    for name in LINKED:
        assert (package / name).readlink() == Path("../..", name)
        assert (package / name / "there.py").is_file()


def test_an_incomplete_checkout_ends_with_a_sentence(tmp_path: Path) -> None:
    checkout(tmp_path, as_text=True)
    shutil.rmtree(tmp_path / "tiers")
    with pytest.raises(SystemExit, match=r"incomplete checkout: tiers/ is missing"):
        mend(tmp_path)


def test_where_links_are_impossible_the_build_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout(tmp_path, as_text=False)

    def refuse(*_arguments: object, **_options: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    with pytest.raises(SystemExit, match=r"has to be a symbolic link .* \(Operation not permitted"):
        mend(tmp_path)


def test_the_readme_of_an_index_has_no_relative_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", SETUP["readme"]())
    found = [either or other for either, other in targets]
    assert len(found) > 10
    assert all(each.startswith(("https://", "#")) for each in found)
    pages = [each.partition("/main/")[2] for each in found if "/main/" in each]
    assert all((ROOT / page.partition("#")[0]).exists() for page in pages)


def a_wheel() -> list[str]:
    own = ["client/client.py", "server/daemon.py", "server/api/page.html", "py.typed"]
    return [*(f"prefixd/{each}" for each in own), "prefixd-0.1.0.dist-info/RECORD"]


@pytest.mark.parametrize(
    ("added", "told"),
    [
        ("tests/conftest.py", "outside the package"),
        ("prefixd/client/test_client.py", "is a test"),
        ("prefixd/server/notes.md", "of no kind"),
    ],
)
def test_a_release_finds_what_does_not_belong_into_a_wheel(added: str, told: str) -> None:
    good = [*a_wheel(), "prefixd/proto/_native.abi3.so"]
    assert list(release.wheel_problems(good)) == []
    assert any(told in each for each in release.wheel_problems([*good, added]))


@pytest.mark.parametrize("missing", range(4))
def test_a_release_finds_what_a_wheel_lacks(missing: int) -> None:
    names = a_wheel()
    gone = names.pop(missing)
    assert list(release.wheel_problems(names)) == [f"{gone} is missing"]


def test_a_release_finds_what_a_source_distribution_lacks(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in release.IN_SOURCES[1:]:
            archive.addfile(tarfile.TarInfo(f"prefixd-0.1.0/{name}"))
        link = tarfile.TarInfo("prefixd-0.1.0/deploy/link")
        link.type, link.linkname = tarfile.SYMTYPE, "../elsewhere"
        archive.addfile(link)
    with tarfile.open(tmp_path / "a.tar") as archive:
        problems = list(release.source_problems(archive))
    assert problems == [
        f"{release.IN_SOURCES[0]} is missing", "deploy/link is a link to ../elsewhere"
    ]  # fmt: skip


def test_every_file_names_the_same_version(tmp_path: Path) -> None:
    version = release.version_of(ROOT)
    names = "pyproject.toml", "CHANGELOG.md", "deploy/Dockerfile"
    for name in (*names, "deploy/helm/Chart.yaml", "deploy/kubernetes/kustomization.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    chart = tmp_path / "deploy/helm/Chart.yaml"
    chart.write_text(chart.read_text().replace(f"appVersion: {version}", "appVersion: 9.9"))
    with pytest.raises(SystemExit, match=r"Chart\.yaml names version .*9\.9"):
        release.version_of(tmp_path)


@pytest.mark.skipif(not LONG, reason="builds two wheels and installs them; set PREFIXD_LONG")
def test_a_zip_and_the_source_distribution_make_the_same_wheel(tmp_path: Path) -> None:
    """Python's zipfile unpacks a link as a file with its text."""
    archive, unpacked = tmp_path / "checkout.zip", tmp_path / "unpacked"
    git = ["git", "-C", str(ROOT), "archive", "--format=zip", "-o", str(archive), "HEAD"]
    subprocess.run(git, check=True)
    zipfile.ZipFile(archive).extractall(unpacked)
    assert (unpacked / "src/prefixd/client").is_file()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-w", str(tmp_path / "a"), str(unpacked)], check=True)
    build = [sys.executable, "-m", "build", "--sdist", "--outdir", str(tmp_path), str(unpacked)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (source,) = tmp_path.glob("*.tar.gz")
    subprocess.run([*pip, "-w", str(tmp_path / "b"), str(source)], check=True)

    def names(folder: str) -> list[str]:
        (wheel,) = (tmp_path / folder).glob("*.whl")
        return sorted(zipfile.ZipFile(wheel).namelist())

    assert names("a") == names("b")
    assert {"prefixd/client/client.py", "prefixd/server/daemon.py"} <= set(names("a"))
