"""What `make generate` writes where this project's URLs belong: they are set in pyproject.toml.

[project.urls] is the one setting, which a fork or the first release fills in:

    [project.urls]
    Repository = "https://git.example.org/torchmem"
    Documentation = "https://docs.example.org/torchmem"

Other links of the package index, such as Issues, may stand beside them. Without the section, no
file has a URL, and the alerts link to runbooks that Prometheus serves; those for the Prometheus
Operator, whose Prometheus serves none, have no such link.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCAL_RUNBOOKS = "/user/docs/runbooks"
_SECTION = re.compile(r"^\[project\.urls\]\n(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_URL = re.compile(r'^(\w+) *= *"([^"]+)"', re.MULTILINE)
_VERSION_LABEL = '      org.opencontainers.image.version="'
Urls = Mapping[str, str]


def project_urls(root: Path = ROOT) -> dict[str, str]:
    """Return [project.urls] by name, without slashes at their ends; empty without the section."""
    section = _SECTION.search((root / "pyproject.toml").read_text(encoding="utf-8"))
    return {name: url.rstrip("/") for name, url in _URL.findall(section[1] if section else "")}


def rendered(root: Path = ROOT) -> dict[Path, str]:
    """Return the text of every file in which a URL of the project stands."""
    urls = project_urls(root)
    return {
        root / name: change((root / name).read_text(encoding="utf-8"), urls)
        for name, change in _PLACES.items()
    }


def _thresholds(text: str, urls: Urls) -> str:
    """Alerts link to the published runbooks, else to those that Prometheus serves."""
    site = urls.get("Documentation")
    runbooks = f"{site}/runbooks" if site else LOCAL_RUNBOOKS
    return re.sub(r"^runbooks_at: .*$", f"runbooks_at: {runbooks}", text, flags=re.MULTILINE)


def _chart(text: str, urls: Urls) -> str:
    """Helm shows a home page, and the sources."""
    kept = re.sub(r"^(?:home: .*|sources: .*)\n", "", text, flags=re.MULTILINE)
    repository = urls.get("Repository")
    home = urls.get("Documentation", repository)
    added = [f"home: {home}\n"] if home else []
    return "".join([kept, *added, *([f"sources: [{repository}]\n"] if repository else [])])


def _image(text: str, urls: Urls) -> str:
    """A registry links the image to its repository by this label."""
    kept = re.sub(r" *org\.opencontainers\.image\.source=.*\n", "", text)
    repository = urls.get("Repository")
    if repository is None:
        return kept
    label = f'      org.opencontainers.image.source="{repository}" \\\n'
    return kept.replace(_VERSION_LABEL, f"{label}{_VERSION_LABEL}")


def _issues(text: str, urls: Urls) -> str:
    """The page for a new issue names the documentation, and where to report a vulnerability."""
    kept = text.partition("contact_links:\n")[0]
    repository, site = urls.get("Repository"), urls.get("Documentation")
    links = [
        ("Documentation", site, "Guides, runbooks, and what every metric and setting means"),
        ("Vulnerability", repository and f"{repository}/security/policy", "Report it in private"),
    ]
    entries = [
        f"  - name: {name}\n    url: {url}\n    about: {about}\n"
        for name, url, about in links
        if url
    ]
    return "".join([kept, *(["contact_links:\n"] if entries else []), *entries])


_PLACES: Mapping[str, Callable[[str, Urls], str]] = {
    ".github/ISSUE_TEMPLATE/config.yml": _issues,
    "core/src/torchmem/explain/thresholds.yml": _thresholds,
    "deploy/helm/torchmem/Chart.yaml": _chart,
    "exporter/Dockerfile": _image,
}
