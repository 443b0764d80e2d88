"""Steps of the build: pack the shipped files, and make the README's links work."""

from __future__ import annotations

import re
import runpy
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CHART = "deploy/helm/torchmem/Chart.yaml"


class ShippedFiles(BuildHookInterface[Any]):
    """Put the files of `torchmem manifests` into the wheel, and where they were into the sdist.

    An editable install reads them from the checkout. The chart in a wheel has the wheel's version.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to those that hatchling packs."""
        if version == "editable":
            return
        root = Path(self.root)
        shipped = runpy.run_path(str(root / "tools/src/torchmem/manifests/shipped.py"))
        folder = f"{shipped['BUNDLE']}/" if self.target_name == "wheel" else ""
        for path in shipped["paths"](root, *shipped["KINDS"]):
            named = path == CHART and self.target_name == "wheel"
            source = self._chart(root) if named else root / path
            build_data["force_include"][str(source)] = f"{folder}{path}"

    def _chart(self, root: Path) -> Path:
        """Write the chart's metadata with the version of the wheel, and return its path."""
        self._folder = tempfile.TemporaryDirectory()  # is removed with this object
        names = runpy.run_path(str(root / "deploy/version.py"))
        chart = names["as_chart"](self.metadata.version)
        text = re.sub(
            r"^((?:v|appV)ersion): .*$",
            rf"\1: {chart}",
            (root / CHART).read_text(encoding="utf-8"),
            flags=re.MULTILINE,
        )
        path = Path(self._folder.name, "Chart.yaml")
        path.write_text(text, encoding="utf-8")
        return path


class PackageReadme(MetadataHookInterface):
    """Make the README's links work on a package index, which serves no other file.

    They become absolute, below the URL `Repository` of [project.urls]. Without this URL, links
    become plain text and pictures are left out.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the package."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        links = runpy.run_path(str(root / "deploy/links.py"))
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": links["rewritten"](text, partial(links["in_repository"], repository)),
        }
