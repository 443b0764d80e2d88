"""The wheel works with only its base dependencies."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import yaml
from deploy.version import as_chart
from support.reports import STRANDED

from torchmem.explain.oom_report import encode
from torchmem.manifests import shipped

ROOT = Path(__file__).resolve().parents[2]
THRESHOLDS = ROOT / "core/src/torchmem/explain/thresholds.yml"
BOARDS = "dashboards/json"
CHART = "deploy/helm/torchmem/Chart.yaml"
RELATIVE_LINK = re.compile(r"\]\((?!https?:)[^)]*\)")
NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", ".programs", ".stack", "build", "tests")


def build(checkout: Path, folder: Path) -> Path:
    """Build the wheel of a checkout in a folder and return its path."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*command, folder, checkout], check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """Build the wheel from this checkout and return its path."""
    return build(root, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Install the wheel with its base dependencies and return the environment's bin folder."""
    environment = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    subprocess.run(
        [environment / "bin" / "python", "-m", "pip", "install", "--quiet", str(wheel)], check=True
    )
    return environment / "bin"


def version(wheel: Path) -> str:
    """Return the version in the name of a wheel."""
    return wheel.name.split("-")[1]


def torchmem(bare: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the installed `torchmem`, outside of the checkout."""
    command = [bare / "torchmem", *arguments]
    return subprocess.run(command, cwd=bare, capture_output=True, text=True, check=False)


def written(folder: Path, *paths: str) -> dict[str, bytes]:
    """Return every file below a folder by its path, or those at the paths."""
    places = [folder / path for path in paths] or [folder]
    found = [place for place in places if place.is_file()]
    for place in places:
        for parent, _, names in os.walk(place, followlinks=True):
            found += [Path(parent, name) for name in names]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def of_checkout(root: Path, *paths: str) -> dict[str, bytes]:
    """Return the files of the checkout at these paths, without Python modules."""
    found = written(root, *paths)
    return {name: found[name] for name in found if not name.endswith((".py", ".pyc"))}


def test_the_wheel_holds_one_namespace(wheel: Path) -> None:
    """The wheel contains all source roots, nothing else, and no `torchmem/__init__.py`."""
    names = zipfile.ZipFile(wheel).namelist()

    roots = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert roots == {"torchmem", "torchmem-autostart.pth"}
    assert {
        "torchmem/sdk/py.typed",
        "torchmem/exporter/py.typed",
        "torchmem/sample/py.typed",
        "torchmem/exporter/live/static/index.html",
        "torchmem/exporter/live/static/uplot-license.txt",
    } <= set(names)
    assert "torchmem/__init__.py" not in names


def test_the_command_has_the_version_of_the_wheel(bare: Path, wheel: Path) -> None:
    """`torchmem --version` shows what the name of the wheel says."""
    assert torchmem(bare, "--version").stdout == f"torchmem {version(wheel)}\n"


def test_the_wheel_of_a_source_distribution_has_its_version(root: Path, tmp_path: Path) -> None:
    """A source distribution knows its version without git, and has all that the wheel needs."""
    target = str(tmp_path / "backend")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", target, "hatchling"]
    subprocess.run(install, check=True)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "-d", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "backend")}
    subprocess.run(command, cwd=root, env=environment, check=True)
    (source,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "-xf", source.name], cwd=tmp_path, check=True)
    folder = tmp_path / source.name.removesuffix(".tar.gz")

    assert version(build(folder, tmp_path / "built")) == folder.name.removeprefix("torchmem-")


def test_the_sdk_imports_and_trains_without_torch(bare: Path) -> None:
    """In the base install `sdk.instrument()` works, even without PyTorch."""
    script = "from torchmem import sdk; sdk.instrument(); print('trained')"
    done = subprocess.run(
        [bare / "python", "-c", script], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "torchmem is inactive" in done.stderr


@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True\n"), ("0", "False\n"), ("", "False\n")]
)
def test_a_variable_alone_is_enough(bare: Path, value: str, expected: str) -> None:
    """With TORCHMEM=1 every Python of the environment waits for torch, isolated ones too."""
    script = "import sys; print('torchmem.run.autostart' in sys.modules)"
    done = subprocess.run(
        [bare / "python", "-I", "-c", script],
        env={"TORCHMEM": value},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_the_command_helps_without_extras(bare: Path) -> None:
    """`torchmem --help` works in the base install."""
    done = subprocess.run(
        [bare / "torchmem", "--help"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0
    assert "exporter" in done.stdout


def test_an_oom_is_explained_without_extras(bare: Path, tmp_path: Path) -> None:
    """`torchmem why` explains a report in the base install, as text and as a page."""
    page = tmp_path / "oom.html"
    (tmp_path / "report").write_bytes(encode(STRANDED))
    done = subprocess.run(
        [bare / "torchmem", "why", tmp_path / "report", "--html", page],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, f"torchmem: {page} written.\n")
    assert "expandable_segments:True" in done.stdout
    assert "</html>" in page.read_text()


@pytest.mark.parametrize(
    "command",
    [
        ["exporter", "--once"],
        ["demo", "--duration", "1"],
        ["top", "--once"],
        ["manifests", "rules", "--thresholds", str(THRESHOLDS), "--out", "rules"],
    ],
    ids=lambda c: c[0],
)
def test_a_command_that_needs_an_extra_names_it(bare: Path, command: list[str]) -> None:
    """A command without its extra prints in one sentence what to install; the exit code is 2."""
    done = subprocess.run(
        [bare / "torchmem", *command], capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "pip install 'torchmem[exporter]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_no_configuration_of_the_checkout_is_left_out(root: Path) -> None:
    """The kinds of `torchmem manifests` have every configuration file of the repository."""
    folders = ["alertmanager", "deploy", BOARDS, "dashboards/provisioning", "prometheus"]
    left_out = of_checkout(root, *folders).keys() - set(shipped.paths(root, *shipped.KINDS))

    assert {name for name in left_out if not name.startswith("prometheus/tests/")} == {
        "deploy/pin_images.sh",
        "deploy/release-requirements.txt",
        "deploy/site/site.css",
    }


@pytest.mark.parametrize("kind", shipped.KINDS)
def test_the_wheel_writes_what_the_checkout_contains(
    kind: str, bare: Path, wheel: Path, root: Path, tmp_path: Path
) -> None:
    """Each kind of manifests is equal to the checkout's files, except for the chart's version."""
    chart = as_chart(version(wheel))
    done = torchmem(bare, "manifests", kind, "--out", tmp_path)
    files = written(tmp_path)
    wheels = {name for name in files if name.endswith(".whl")}

    assert (done.returncode, done.stderr) == (0, "")
    expected = of_checkout(root, *shipped.KINDS[kind])
    if kind == "helm":
        expected[CHART] = expected[CHART].replace(b"ersion: 0.0.0", f"ersion: {chart}".encode())
    assert {name: files[name] for name in files.keys() - wheels} == expected
    assert bool(wheels) == (kind in shipped.NEED_THE_WHEEL)
    assert done.stdout.startswith(f"Wrote {len(files)} files to {tmp_path}.\n")


@pytest.fixture(scope="session")
def everything(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all kinds of manifests to one folder."""
    folder = tmp_path_factory.mktemp("everything")
    for kind in shipped.KINDS:
        assert torchmem(bare, "manifests", kind, "--out", folder).returncode == 0
    return folder


def test_the_relative_paths_of_the_compose_files_exist(everything: Path) -> None:
    """Compose finds every file and folder that it mounts, and what the image is built from."""
    compose = yaml.safe_load((everything / "docker-compose.yml").read_text())
    mounted = {
        everything / mount.split(":")[0]
        for service in compose["services"].values()
        for mount in service.get("volumes", [])
        if mount.startswith(".")
    }
    dockerfile = everything / compose["services"]["exporter"]["build"]["dockerfile"]
    requirements = re.findall(r"-r (\S+\.txt)", dockerfile.read_text())

    assert len(mounted) > 5
    assert {path for path in mounted if not path.is_dir()} == set()
    assert {name for name in requirements if not (everything / name).is_file()} == set()


def test_the_relative_paths_of_the_kustomizations_exist(everything: Path) -> None:
    """Each resource and component of each kustomization exists."""
    missing = []
    for file in everything.rglob("kustomization.yaml"):
        content = yaml.safe_load(file.read_text())
        names = [*content.get("resources", []), *content.get("components", [])]
        missing += [name for name in names if not (file.parent / name).exists()]
        generated = content.get("configMapGenerator", [])
        names = [name for each in generated for name in each["files"]]
        missing += [name for name in names if not (file.parent / name).is_file()]

    assert missing == []


@pytest.mark.stack
@pytest.mark.parametrize(
    "check",
    [
        "promtool check config prometheus/prometheus.yml",
        "amtool check-config alertmanager/alertmanager.yml",
    ],
)
def test_the_configuration_is_valid_where_it_is(check: str, everything: Path) -> None:
    """Prometheus and Alertmanager accept the written configuration with the files it names."""
    done = subprocess.run(
        shlex.split(check), cwd=everything, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_programs_are_executable(everything: Path, root: Path) -> None:
    """A written file is executable if it is so in the checkout."""
    names = shipped.paths(root, *shipped.KINDS)

    assert [name for name in names if os.access(everything / name, os.X_OK)] == [
        name for name in names if os.access(root / name, os.X_OK)
    ]


def test_a_changed_manifest_is_kept(bare: Path, tmp_path: Path) -> None:
    """A file that the user changed is replaced only with --force, which says so."""
    target = "prometheus/targets/exporters.yml"
    command = ("manifests", "prometheus", "--out", str(tmp_path))
    torchmem(bare, *command)
    (tmp_path / target).write_text("- targets: [mine]\n")
    refused = torchmem(bare, *command)
    kept = (tmp_path / target).read_text()
    forced = torchmem(bare, *command, "--force")

    assert (refused.returncode, kept) == (2, "- targets: [mine]\n")
    assert refused.stderr.startswith(f"torchmem: {target} in {tmp_path} would be replaced")
    assert f"Replaced: {target}.\n" in forced.stdout


def test_the_wheel_writes_dashboards_and_rules(bare: Path, root: Path, tmp_path: Path) -> None:
    """In the base install, dashboards and rules are equal to the checkout's files."""
    for command, folder in (("dashboards", BOARDS), ("rules", "prometheus/rules")):
        done = torchmem(bare, "manifests", command, "--out", tmp_path / command)
        files = written(tmp_path / command)
        expected = of_checkout(root, folder)
        expected.pop(f"{BOARDS}/kustomization.yaml", None)

        assert (done.returncode, done.stderr) == (0, "")
        assert {f"{folder}/{name}": content for name, content in files.items()} == expected


def test_the_image_is_built_from_the_installed_files(
    bare: Path, wheel: Path, tmp_path: Path
) -> None:
    """The wheel for the image has the files of the wheel that was installed, and pip accepts it."""
    assert torchmem(bare, "manifests", "image", "--out", tmp_path / "context").returncode == 0
    (made,) = (tmp_path / "context").glob("*.whl")
    files = [
        {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}
        for archive in map(zipfile.ZipFile, (made, wheel))
    ]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(tmp_path / "site"), str(made)], check=True)
    again = shutil.which("torchmem", path=str(tmp_path / "site" / "bin"))

    assert made.name == wheel.name
    assert files[0] == files[1]
    assert again is not None


def readme(wheel: Path) -> str:
    """Return the README in the metadata of a wheel."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = message_from_string(archive.read(name).decode())
    return str(metadata.get_payload())


def test_the_readme_on_an_index_has_no_relative_link(wheel: Path) -> None:
    """Without the URL of a repository, the package's README has no link that leads nowhere."""
    text = readme(wheel)

    assert text.startswith("# torchmem\n")
    assert RELATIVE_LINK.findall(text) == []


def test_the_readme_on_an_index_links_to_the_repository(root: Path, tmp_path: Path) -> None:
    """With the URL, pictures and links are absolute, and the rest of the README is the same."""
    url = "https://git.example.org/torchmem"
    checkout = tmp_path / "checkout"
    shutil.copytree(root, checkout, ignore=shutil.ignore_patterns(*NOT_COPIED))
    project = checkout / "pyproject.toml"
    section = f'[project.urls]\nRepository = "{url}"\n\n[project.scripts]'
    project.write_text(project.read_text().replace("[project.scripts]", section))
    text = readme(build(checkout, tmp_path / "built"))
    relative = text.replace(f"{url}/raw/main/", "").replace(f"{url}/blob/main/", "")

    assert relative.strip() == (root / "README.md").read_text().strip()
    assert RELATIVE_LINK.findall(text) == []
    assert f"]({url}/raw/main/docs/demo.webp)" in text
    assert f"]({url}/blob/main/docs/README.md)" in text
