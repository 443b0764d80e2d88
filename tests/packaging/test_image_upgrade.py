"""An upgrade in Kubernetes: the documented commands, from one commit's image to the next."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.version import version
from support.git import GitRepo
from support.helm_chart import ROOT, Values, manifests, rendered
from support.kustomize import built

helm = pytest.importorskip("helm_python", reason="Helm's engine has no package for this platform")
pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
DIGEST = f"sha256:{'5' * 64}"
IMAGE = "registry.example.com/torchmem-exporter"


@pytest.fixture
def checkout(tmp_path: Path) -> GitRepo:
    """A repository, and programs that only note their arguments in place of docker and helm."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("docker", "helm"):
        (programs / name).write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/called\n'
            f'printf "%s\\0" "$@" >{tmp_path}/{name}\n'
        )
        (programs / name).chmod(0o755)
    repository = GitRepo(tmp_path / "checkout")
    files = {name: (ROOT / name).read_text() for name in ("deploy/version.py", "CHANGELOG.md")}
    repository.commit(files, "zero")
    return repository


def installed(checkout: GitRepo) -> Values:
    """Run the page's commands, and return the values that they give to Helm."""
    folder = checkout.folder.parent
    (script,) = ["\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))]
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["/bin/sh", "-e", "-c", script],
        cwd=checkout.folder,
        env={**os.environ, "PATH": path},
        check=True,
    )
    words = (folder / "helm").read_text().split("\0")
    image: dict[str, Any] = {}
    for flag, parse in (
        ("--set", helm.parse_set_string),
        ("--set-string", helm.parse_set_string_values),
    ):
        image |= parse(words[words.index(flag) + 1])["image"]
    return {"image": image}


def test_the_next_commit_changes_the_pods(chart: Any, checkout: GitRepo) -> None:
    """Each commit has a tag of its own, and only the image in the DaemonSet differs by it."""
    checkout.commit({"a": "1"}, "one")
    first = installed(checkout)
    checkout.commit({"a": "2"}, "two")
    second = installed(checkout)
    tags = [values["image"]["tag"] for values in (first, second)]
    before, after = rendered(chart, first), rendered(chart, second)

    assert [tag.rpartition("-g")[2] for tag in tags] == [
        commit[:10] for commit in checkout.commits[-2:]
    ]
    assert [name for name in before if before[name] != after[name]] == [
        "torchmem/templates/daemonset.yaml"
    ]
    for text, tag in zip((before, after), tags, strict=True):
        changed = text["torchmem/templates/daemonset.yaml"]
        assert changed.count(f"image: {IMAGE}:{tag}\n") == 2
    called = (checkout.folder.parent / "called").read_text()
    argument = f"--build-arg VERSION={version(checkout.folder, {})}"
    assert f"build -f exporter/Dockerfile {argument} -t {IMAGE}:{tags[1]} ." in called
    assert f"push {IMAGE}:{tags[1]}" in called


def test_the_same_image_changes_nothing(chart: Any, checkout: GitRepo) -> None:
    """The same commit renders the same manifests, so that Helm replaces no pod."""
    checkout.commit({"a": "1"}, "one")

    assert rendered(chart, installed(checkout)) == rendered(chart, installed(checkout))


def test_a_release_is_named_by_its_tag(chart: Any, checkout: GitRepo) -> None:
    """At a tag of git, the image has the version of the release."""
    checkout.commit({"a": "1"}, "one")
    checkout.git("tag", "v0.1.0")
    (daemonset,) = manifests(chart, installed(checkout))["DaemonSet"]

    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"{IMAGE}:0.1.0"


def test_the_kustomization_of_the_page_names_the_image(tmp_path: Path) -> None:
    """The kustomization replaces the placeholder in all containers; another digest is visible."""
    shutil.copytree(ROOT / "deploy" / "kubernetes", tmp_path / "deploy" / "kubernetes")
    shutil.copytree(ROOT / "dashboards" / "json", tmp_path / "dashboards" / "json")
    (text,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", PAGE, re.DOTALL)
    folder = tmp_path / "deploy" / "kubernetes"
    seen = []
    for digest in (DIGEST, DIGEST.replace("5", "6")):
        (folder / "kustomization.yaml").write_text(text.replace("sha256:…", digest))
        documents = list(yaml.safe_load_all(built(folder)))
        (pod,) = [d["spec"]["template"]["spec"] for d in documents if d["kind"] == "DaemonSet"]
        seen.append({each["image"] for each in pod["initContainers"] + pod["containers"]})

    assert seen == [{f"{IMAGE}@{DIGEST}"}, {f"{IMAGE}@{DIGEST.replace('5', '6')}"}]
