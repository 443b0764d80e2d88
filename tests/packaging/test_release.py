"""Releases: a tag that can be published, and workflows that pin what they run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deploy.release import VALUES, main
from packaging.requirements import Requirement
from support.git import GitRepo
from support.needs import needs

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> GitRepo:
    """A clone of this checkout's commit, with a tag that is thrown away."""
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no clone, which a tag could be put on")
    repository = GitRepo(tmp_path_factory.mktemp("release") / "clone")
    repository.git("pull", "--quiet", "--depth", "1", f"file://{ROOT}", "HEAD")
    repository.git("tag", "v0.1.0")
    return repository


def checked(clone: GitRepo, tag: str) -> subprocess.CompletedProcess[str]:
    """Run the check of the release workflow in the clone."""
    command = [sys.executable, "deploy/release.py", "check", tag]
    return subprocess.run(command, cwd=clone.folder, capture_output=True, text=True, check=False)


@needs("git")
def test_this_commit_can_be_tagged(clone: GitRepo) -> None:
    """At the tag v0.1.0 the check is green, and its notes are the section of the changelog."""
    done = checked(clone, "v0.1.0")
    changelog = (clone.folder / "CHANGELOG.md").read_text()

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The first release.\n")
    assert f"## [0.1.0]\n\n{done.stdout}" in changelog


@needs("git")
def test_the_wheel_of_the_tag_has_its_version(clone: GitRepo, tmp_path: Path) -> None:
    """pip builds the version of the release from a clone at its tag."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*command, str(clone.folder)], check=True)

    assert [path.name for path in tmp_path.iterdir()] == ["torchmem-0.1.0-py3-none-any.whl"]


@needs("git")
@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ("v0.2.0", "the checkout has the version 0.1.0, not 0.2.0: check out the tag v0.2.0"),
        ("main", "the checkout has the version 0.1.0, not main"),
    ],
)
def test_another_tag_than_that_of_the_checkout(clone: GitRepo, tag: str, problem: str) -> None:
    """The check refuses a version that wheel, chart and image would not have."""
    done = checked(clone, tag)

    assert (done.returncode, done.stdout) == (1, "")
    assert problem in done.stderr


@needs("git")
def test_a_changed_file_is_no_release(clone: GitRepo) -> None:
    """The check refuses a tree that differs from the tag."""
    changelog = clone.folder / "CHANGELOG.md"
    text = changelog.read_text()
    changelog.write_text(f"{text}\n")
    done = checked(clone, "v0.1.0")
    changelog.write_text(text)

    assert done.returncode == 1
    assert ".dirty, not 0.1.0" in done.stderr


@needs("git")
@pytest.mark.parametrize("section", ["", "## [0.3.0]\n\n## [0.1.0]\n\nText.\n"])
def test_a_version_without_notes(tmp_path: Path, section: str) -> None:
    """A release is refused while the changelog does not describe it."""
    repository = GitRepo(tmp_path)
    names = ("deploy/version.py", "deploy/release.py")
    files = {name: (ROOT / name).read_text() for name in names}
    repository.commit({**files, "CHANGELOG.md": f"# Changelog\n\n{section}"}, "one")
    repository.git("tag", "v0.3.0")
    done = checked(repository, "v0.3.0")

    assert done.returncode == 1
    assert "CHANGELOG.md says nothing about 0.3.0" in done.stderr


def test_the_published_chart_names_the_published_image(tmp_path: Path) -> None:
    """The chart of a release runs the image of that release, by its digest and without values."""
    digest = f"sha256:{'5' * 64}"
    path = tmp_path / VALUES
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT / VALUES, path)

    assert main(["image", f"ghcr.io/ada/torchmem-exporter@{digest}"], tmp_path) == 0
    values, shipped = (yaml.safe_load(each.read_text()) for each in (path, ROOT / VALUES))
    assert values == {
        **shipped,
        "image": {
            **shipped["image"],
            "repository": "ghcr.io/ada/torchmem-exporter",
            "digest": digest,
        },
    }


@pytest.mark.parametrize("image", ["ghcr.io/ada/torchmem:0.2.0", f"A@sha256:{'5' * 64}", "@"])
def test_an_image_without_a_digest(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The chart names only images that cannot be replaced later."""
    assert main(["image", image], ROOT) == 1
    assert "give NAME@sha256:" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash, as the runners have it")
def test_image_and_chart_have_the_version_of_the_tag(tmp_path: Path) -> None:
    """The image's name is in lower case also in a fork; its label is its tag."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = {step.get("id"): step for step in workflow["jobs"]["image"]["steps"]}
    output = tmp_path / "output"
    subprocess.run(
        ["/bin/bash", "-e", "-c", steps["name"]["run"]],
        env={
            "PATH": os.environ["PATH"],
            "GITHUB_OUTPUT": str(output),
            "GITHUB_REPOSITORY": "Ada/TorchMem",
            "GITHUB_REPOSITORY_OWNER": "Ada",
            "TORCHMEM_VERSION": "0.2.0rc1",
        },
        cwd=ROOT,
        check=True,
    )

    assert output.read_text().splitlines() == [
        "image=ghcr.io/ada/torchmem-exporter",
        "charts=ghcr.io/ada/charts",
        "tag=0.2.0rc1",
        "chart=0.2.0-rc.1",
    ]
    assert steps["push"]["with"]["build-args"] == "VERSION=${{ steps.name.outputs.tag }}"
    assert steps["push"]["with"]["tags"] == (
        "${{ steps.name.outputs.image }}:${{ steps.name.outputs.tag }}"
    )


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(workflow: Path) -> None:
    """Each action is given by its commit, with the version beside it."""
    uses = re.findall(r"uses: (\S+)(.*)", workflow.read_text())

    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_get_only_what_they_need(workflow: Path) -> None:
    """No workflow has write permissions as a whole, and checkouts leave no token behind."""
    content = yaml.safe_load(workflow.read_text())

    assert "write" not in str(content["permissions"])
    for job in content["jobs"].values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_the_linter_of_workflows_finds_nothing() -> None:
    """The workflows are valid, and free of the mistakes that the linter knows."""
    linter = shutil.which("jactionlint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("jactionlint has no package for this platform")
    done = subprocess.run(
        [linter, "--shellcheck=", *map(str, WORKFLOWS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )

    assert (done.returncode, done.stdout) == (0, "")


def test_the_build_tool_is_pinned() -> None:
    """The release installs exact files."""
    text = (ROOT / "deploy" / "release-requirements.txt").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if not line.startswith("#")]

    assert lines
    for line in lines:
        requirement, *hashes = line.split("--hash=sha256:")
        assert str(Requirement(requirement).specifier).startswith("==")
        assert hashes
