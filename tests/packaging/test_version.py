"""deploy/version.py: a commit's wheel, chart and image have names of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploy.version import as_chart, as_image_tag, version
from packaging.version import Version
from support.git import GitRepo
from support.needs import needs

ROOT = Path(__file__).resolve().parents[2]
FILES = (".gitattributes", "deploy/version.py")
CHANGELOG = "# Changelog\n\n## [Unreleased]\n\n## [3.2.1]\n"
pytestmark = needs("git")


@pytest.fixture
def checkout(tmp_path: Path) -> GitRepo:
    """A repository with one commit and what the version is made of."""
    repository = GitRepo(tmp_path / "checkout")
    texts = {name: (ROOT / name).read_text() for name in FILES}
    repository.commit({**texts, "CHANGELOG.md": CHANGELOG}, "one")
    return repository


def of(folder: Path, *arguments: str, **environment: str) -> str:
    """Return what the script prints in a tree."""
    command = [sys.executable, str(folder / "deploy" / "version.py"), *arguments]
    return subprocess.check_output(command, env=environment, text=True).strip()


def commit(checkout: GitRepo) -> str:
    """Return the newest commit, as a version names it."""
    return f"g{checkout.commits[-1][:10]}"


def test_a_commit_before_the_first_release(checkout: GitRepo) -> None:
    """Without a tag, a version is below the release that the changelog describes first."""
    checkout.commit({"a": "1"}, "two")

    assert version(checkout.folder, {}) == f"3.2.1.dev2+{commit(checkout)}"
    assert Version(version(checkout.folder, {})) < Version("3.2.1")


@pytest.mark.parametrize(
    ("tag", "after"), [("v0.1.0", "0.1.1"), ("v0.2.0rc1", "0.2.0rc2"), ("v0.1.9", "0.1.10")]
)
def test_a_tag_and_the_commits_after_it(checkout: GitRepo, tag: str, after: str) -> None:
    """At a tag the version is the release's; the next commits lie between it and the next one."""
    checkout.git("tag", tag)
    released = version(checkout.folder, {})
    checkout.commit({"a": "1"}, "two")
    checkout.commit({"a": "2"}, "three")
    later = version(checkout.folder, {})

    assert (released, later) == (tag[1:], f"{after}.dev2+{commit(checkout)}")
    assert Version(released) < Version(later) < Version(after)


def test_a_changed_tree_is_not_the_release(checkout: GitRepo) -> None:
    """Files that differ from the commit are told, at a tag too; files that git ignores are not."""
    (checkout.folder / "untracked").write_text("1")
    before = version(checkout.folder, {})
    checkout.git("tag", "v0.1.0")
    (checkout.folder / "CHANGELOG.md").write_text(f"{CHANGELOG}\n")

    assert before == f"3.2.1.dev1+{commit(checkout)}"
    assert version(checkout.folder, {}) == f"0.1.1.dev0+{commit(checkout)}.dirty"


@pytest.mark.parametrize("tag", ["nightly", "v1-of-mine", "v2"])
def test_other_tags_break_no_build(checkout: GitRepo, tag: str) -> None:
    """A tag that is no release names nothing, and each version is valid."""
    checkout.git("tag", tag)
    checkout.commit({"a": "1"}, "two")

    found = version(checkout.folder, {})
    assert str(Version(found)) == found
    assert found == f"{'3.dev1' if tag == 'v2' else '3.2.1.dev2'}+{commit(checkout)}"


def test_a_shallow_clone(checkout: GitRepo, tmp_path: Path) -> None:
    """A clone of one commit has the name of this commit, though it cannot count the others."""
    checkout.commit({"a": "1"}, "two")
    source = f"file://{checkout.folder}"
    checkout.git("clone", "--quiet", "--depth", "1", source, str(tmp_path / "shallow"))

    assert version(tmp_path / "shallow", {}) == f"3.2.1.dev1+{commit(checkout)}"


@pytest.mark.parametrize("tag", ["v0.1.0", ""])
def test_an_archive_without_git(checkout: GitRepo, tmp_path: Path, tag: str) -> None:
    """`git archive`, as forges call it, writes the tag and the commit into the script."""
    if tag:
        checkout.git("tag", tag)
    names = [of(_archive(checkout, tmp_path / "a"))]
    checkout.commit({"a": "1"}, "two")
    names.append(of(_archive(checkout, tmp_path / "b")))
    first, second = (f"g{each[:10]}" for each in checkout.commits)

    assert names == (
        ["0.1.0", f"0.1.1.dev1+{second}"]
        if tag
        else [f"3.2.1.dev0+{first}", f"3.2.1.dev0+{second}"]
    )


def _archive(checkout: GitRepo, folder: Path) -> Path:
    folder.mkdir()
    checkout.git("archive", "--output", str(folder / "a.tar"), "HEAD")
    subprocess.run(["tar", "-xf", "a.tar"], cwd=folder, check=True)
    return folder


def test_a_source_distribution_inside_another_repository(checkout: GitRepo) -> None:
    """The metadata counts, and the commit of a repository around the tree never does."""
    inner = checkout.folder / "inner"
    shutil.copytree(checkout.folder / "deploy", inner / "deploy")
    (inner / "CHANGELOG.md").write_text(CHANGELOG)

    assert of(inner, PATH="") == of(inner, PATH="/usr/bin:/bin") == "3.2.1.dev0+unknown"
    (inner / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: torchmem\nVersion: 7.8.9\n\n")
    assert version(inner, {}) == "7.8.9"


def test_a_build_argument_has_precedence(checkout: GitRepo) -> None:
    """The build of an image passes the version; an empty argument counts as none."""
    assert version(checkout.folder, {"TORCHMEM_VERSION": "7.8.9"}) == "7.8.9"
    assert version(checkout.folder, {"TORCHMEM_VERSION": ""}) == version(checkout.folder, {})


@pytest.mark.parametrize(
    ("name", "chart", "image"),
    [
        ("0.1.0", "0.1.0", "0.1.0"),
        ("0.2.0rc1", "0.2.0-rc.1", "0.2.0rc1"),
        ("0.1.1.dev14+g1a", "0.1.1-dev.14+g1a", "0.1.1.dev14-g1a"),
        ("0.2.0rc2.dev3+g1a.dirty", "0.2.0-rc.2.dev.3+g1a.dirty", "0.2.0rc2.dev3-g1a.dirty"),
    ],
)
def test_the_names_of_chart_and_image(name: str, chart: str, image: str) -> None:
    """The chart has a semantic version, and the tag of the image has no +."""
    assert (as_chart(name), as_image_tag(name)) == (chart, image)
    assert of(ROOT, "chart", TORCHMEM_VERSION=name) == chart
    assert of(ROOT, "image", TORCHMEM_VERSION=name) == image
