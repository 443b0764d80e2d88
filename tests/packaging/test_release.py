"""Releases: one version everywhere, a changelog, and workflows that pin what they run."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
sys.path.append(str(ROOT))

from deploy.release import PLACES, VALUES, ReleaseError, bump, check, main  # noqa: E402

TODAY = dt.date(2027, 2, 1)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files with a version, and the changelog."""
    for name in (*PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_bump_is_ready_for_its_tag(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a bump every file has the new version, and the notes are what was unreleased."""
    bump("7.8.9rc1", checkout, TODAY)

    assert main(["check", "v7.8.9rc1"], checkout) == 0
    notes = capsys.readouterr().out
    assert notes.strip() in (ROOT / "CHANGELOG.md").read_text()
    assert (
        "## [Unreleased]\n\n## [7.8.9rc1] - 2027-02-01\n" in (checkout / "CHANGELOG.md").read_text()
    )


def test_a_second_bump_changes_nothing(checkout: Path) -> None:
    """A bump to the version that is there writes the same files."""
    bump("7.8.9", checkout, TODAY)
    before = {name: (checkout / name).read_text() for name in (*PLACES, "CHANGELOG.md")}
    bump("7.8.9", checkout, TODAY)

    assert {name: (checkout / name).read_text() for name in before} == before


@pytest.mark.parametrize("name", PLACES)
def test_a_file_that_was_forgotten(checkout: Path, name: str) -> None:
    """A release is refused while one file has another version."""
    bump("7.8.9", checkout, TODAY)
    shutil.copy(ROOT / name, checkout / name)

    with pytest.raises(ReleaseError, match=re.escape(name)):
        check("7.8.9", checkout)


def test_a_version_without_notes(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release is refused while the changelog does not describe it."""
    bump("7.8.9", checkout, TODAY)
    (checkout / "CHANGELOG.md").write_text("# Changelog\n\n## [7.8.9] - 2027-02-01\n")

    assert main(["check", "7.8.9"], checkout) == 1
    assert "says nothing about 7.8.9" in capsys.readouterr().err


def test_the_versions_of_this_checkout_agree() -> None:
    """Every file has one version, so only the changelog is missing at most."""
    versions = {
        name: set(re.findall(f"(?:{before})([0-9.a-z]+)", (ROOT / name).read_text(), re.MULTILINE))
        for name, before in PLACES.items()
    }

    assert len(set.union(*versions.values())) == 1, versions


@pytest.mark.parametrize("version", ["1.0", "v1", "1.0.0-beta", "", "1.0.0\n"])
def test_a_version_that_pip_does_not_know(checkout: Path, version: str) -> None:
    """A wrong version is refused before any file is written."""
    with pytest.raises(ReleaseError, match="is not a version"):
        bump(version, checkout, TODAY)
    assert (checkout / "pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text()


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
def test_the_image_has_the_tag_that_the_chart_asks_for(tmp_path: Path) -> None:
    """The image's name is in lower case also in a fork, and its tag is the version without a v."""
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
            "GITHUB_REF_NAME": "v0.2.0",
        },
        check=True,
    )

    assert output.read_text().splitlines() == [
        "image=ghcr.io/ada/torchmem-exporter",
        "charts=ghcr.io/ada/charts",
        "tag=0.2.0",
    ]
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
