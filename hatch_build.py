"""Steps of the build: pack the shipped files, and make the README's links work."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or a picture whose address is relative.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


class ShippedFiles(BuildHookInterface[Any]):
    """Put the files of `torchmem manifests` into the wheel, and where they were into the sdist.

    An editable install reads them from the checkout.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to those that hatchling packs."""
        if version == "editable":
            return
        root = Path(self.root)
        shipped = runpy.run_path(str(root / "tools/src/torchmem/manifests/shipped.py"))
        folder = f"{shipped['BUNDLE']}/" if self.target_name == "wheel" else ""
        for path in shipped["paths"](root, *shipped["KINDS"]):
            build_data["force_include"][str(root / path)] = f"{folder}{path}"


class PackageReadme(MetadataHookInterface):
    """Make the README's links work on a package index, which serves no other file.

    They become absolute, below the URL `Repository` of [project.urls]. Without this URL, links
    become plain text and pictures are left out.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the package."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": _LINK.sub(lambda link: _on_an_index(link, repository), text),
        }


def _on_an_index(link: re.Match[str], repository: str | None) -> str:
    picture, text, path = link.groups()
    if repository is None:
        return "" if picture else text
    view = "raw" if picture else "blob"
    return f"{picture}[{text}]({repository.rstrip('/')}/{view}/main/{path})"
