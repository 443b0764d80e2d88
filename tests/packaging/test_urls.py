"""The URLs of the project: set once in pyproject.toml, and written where they belong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from deploy.urls import LOCAL_RUNBOOKS, rendered

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY, SITE = "https://git.example.org/torchmem", "https://docs.example.org/torchmem"
CHART = "deploy/helm/torchmem/Chart.yaml"
THRESHOLDS = "core/src/torchmem/explain/thresholds.yml"
DOCKERFILE = "exporter/Dockerfile"
ISSUES = ".github/ISSUE_TEMPLATE/config.yml"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files with URLs, of a project that has none."""
    for name in (CHART, THRESHOLDS, DOCKERFILE, ISSUES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n')
    generate(tmp_path)
    return tmp_path


def generate(checkout: Path, **urls: str) -> dict[str, str]:
    """Set [project.urls], write what is generated, and return the texts."""
    project = checkout / "pyproject.toml"
    section = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    head = project.read_text().partition("[project.urls]")[0]
    project.write_text(f"{head}[project.urls]\n{section}\n[tool.x]\nOther = 'y'\n")
    files = rendered(checkout)
    for path, text in files.items():
        path.write_text(text)
    return {path.relative_to(checkout).as_posix(): text for path, text in files.items()}


def test_one_setting_is_enough(checkout: Path) -> None:
    """Alerts, chart, image and the page for a new issue name the URLs of [project.urls]."""
    files = generate(checkout, Repository=REPOSITORY, Documentation=f"{SITE}/")

    chart = yaml.safe_load(files[CHART])
    assert (chart["home"], chart["sources"]) == (SITE, [REPOSITORY])
    assert yaml.safe_load(files[THRESHOLDS])["runbooks_at"] == f"{SITE}/runbooks"
    assert f'\n      org.opencontainers.image.source="{REPOSITORY}" \\\n' in files[DOCKERFILE]
    links = yaml.safe_load(files[ISSUES])["contact_links"]
    assert [link["url"] for link in links] == [SITE, f"{REPOSITORY}/security/policy"]
    assert all(link["name"] and link["about"] for link in links)


def test_a_setting_that_is_removed_leaves_nothing(checkout: Path) -> None:
    """Without the section, no file has a URL, and runbooks are those that Prometheus serves."""
    before = {path: path.read_text() for path in rendered(checkout)}
    generate(checkout, Repository=REPOSITORY, Documentation=SITE)
    generate(checkout)

    assert {path: path.read_text() for path in before} == before
    assert "https://" not in before[checkout / CHART] + before[checkout / ISSUES]
    assert f"\nrunbooks_at: {LOCAL_RUNBOOKS}\n" in before[checkout / THRESHOLDS]


def test_a_repository_alone_is_the_home_of_the_chart(checkout: Path) -> None:
    """A fork without a site links to its repository, and its alerts to Prometheus."""
    files = generate(checkout, Repository=REPOSITORY)

    assert yaml.safe_load(files[CHART])["home"] == REPOSITORY
    assert yaml.safe_load(files[THRESHOLDS])["runbooks_at"] == LOCAL_RUNBOOKS
