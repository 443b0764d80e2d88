"""The documentation is complete: pages are reachable, links work, and tables match the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchmem import sdk
from torchmem.cli.main import COMMANDS, main
from torchmem.commands.manifests import MADE
from torchmem.exporter.collect import COLLECTORS
from torchmem.manifests.shipped import KINDS
from torchmem.sdk.session import Session
from torchmem.sdk.settings import PREFIX, Settings

SETTINGS = {field.name for field in dataclasses.fields(Settings)}
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
CONTRIBUTORS = ("CONTRIBUTING.md", "docs/develop/recipes.md")
INTEGRATION_PAGES = ("frameworks", "integrations", "serving")


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    """Return the text of README.md."""
    return (root / "README.md").read_text()


def test_every_page_is_reachable_from_the_index(root: Path) -> None:
    """Links lead from docs/README.md to every Markdown file under docs/."""
    reached: set[Path] = set()
    new = {root / "docs" / "README.md"}
    while new:
        reached |= new
        targets = {target for page in new for target, _ in links(page)}
        new = {target for target in targets if target.suffix == ".md"} - reached

    assert {path for path in (root / "docs").rglob("*.md") if path not in reached} == set()


def test_every_relative_link_leads_somewhere(root: Path) -> None:
    """Each link leads to a file, and to a heading of it if the link names one."""
    pages = [*(root / name for name in PAGES), *(root / "docs").rglob("*.md")]

    assert [
        f"{page.relative_to(root)}: {target.name}#{anchor}"
        for page in pages
        for target, anchor in links(page)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ] == []


def links(page: Path) -> list[tuple[Path, str]]:
    """Return file and anchor of every relative link outside of code blocks."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    matches = re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", text)
    return [((page.parent / file).resolve() if file else page, anchor) for file, anchor in matches]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_percentages_are_written_alike(root: Path) -> None:
    """No page has a space before the percent sign."""
    pages = [*(root / name for name in PAGES), *(root / "docs").rglob("*.md")]
    spaced = {str(page.relative_to(root)) for page in pages if re.search(r"\d %", page.read_text())}

    assert {"docs/measurements/prediction.md"} >= spaced


def python_blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the code of each Python block of a page."""
    text = page.read_text()
    for match in re.finditer(r"^( *)```python\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 2
        yield f"{page.name}:{line}", textwrap.dedent(match[2])


def test_every_python_block_can_call_what_it_calls(root: Path) -> None:
    """The code on the pages compiles, and its calls of the SDK have the parameters they need."""
    pages = [*(root / name for name in PAGES), *(root / "docs").rglob("*.md")]
    blocks = [block for page in pages for block in python_blocks(page)]
    assert any(calls(ast.parse(code)) for _, code in blocks)
    for place, code in blocks:
        compile(code, place, "exec")
        for owner, name, call in calls(ast.parse(code)):
            function = getattr(owner, name, None)
            assert function, f"{place}: there is no {name}"
            itself = [None] if owner is Session else []
            keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
            inspect.signature(function).bind(*itself, *call.args, **dict.fromkeys(keywords))
            if name == "instrument":
                assert set(keywords) - {"run"} <= {
                    each.name for each in dataclasses.fields(Settings)
                }


def calls(tree: ast.AST) -> list[tuple[object, str, ast.Call]]:
    """Return the calls `sdk.NAME(...)` and `session.NAME(...)`."""
    owners = {"sdk": sdk, "session": Session}
    return [
        (owners[node.func.value.id], node.func.attr, node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in owners
    ]


def test_the_readme_is_short(readme: str) -> None:
    """The README has at most 120 lines and 700 words; details are under docs/."""
    assert len(readme.splitlines()) <= 120
    assert len(readme.split()) <= 700


@pytest.mark.parametrize(
    ("page", "lines", "words"), [("CONTRIBUTING", 100, 1200), ("CHANGELOG", 60, 500)]
)
def test_the_pages_beside_it_are_short(root: Path, page: str, lines: int, words: int) -> None:
    """They are read in minutes: recipes are under docs/, and a release has one page."""
    text = (root / f"{page}.md").read_text()
    assert len(text.splitlines()) <= lines
    assert len(text.split()) <= words


def test_the_documentation_is_short_enough_to_be_kept_true(root: Path) -> None:
    """docs/ has at most 65,000 words, with the runbooks: say each fact once."""
    assert sum(len(page.read_text().split()) for page in (root / "docs").rglob("*.md")) <= 65_000


def test_every_command_is_shown(readme: str) -> None:
    """The README mentions every subcommand."""
    assert [
        name
        for name in COMMANDS
        if f"torchmem {name}" not in readme and f"make {name}" not in readme
    ] == []


@pytest.mark.parametrize("name", [*COMMANDS, *(f"manifests {kind}" for kind in (*KINDS, *MADE))])
def test_every_flag_is_documented(
    name: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In docs/commands.md, the section of a command has each flag of its help text."""
    with pytest.raises(SystemExit):
        main([*name.split(), "--help"])
    flags = set(re.findall(r"^ +(--[\w.-]+)", capsys.readouterr().out, re.MULTILINE))
    page = (root / "docs" / "commands.md").read_text()
    heading = f"torchmem {'manifests KIND' if name.rpartition(' ')[2] in KINDS else name}"
    section = re.split(
        r"^#+ ", page.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE
    )[0]

    assert section
    assert {flag for flag in flags if f"`{flag}" not in section} == set()


def test_the_outputs_on_the_pages_are_real(root: Path) -> None:
    """Each output that names a recorded file has lines of that file, in its order."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    examples = [
        (root / golden, shown)
        for page in pages
        for golden, shown in re.findall(
            r"<!-- (tests/\S+) -->\n+```text\n(.*?)```", page.read_text(), re.DOTALL
        )
    ]

    assert len(examples) > 10
    for golden, shown in examples:
        recorded = iter(golden.read_text().splitlines())
        lines = [line for line in shown.splitlines() if line != "…" and not line.startswith("$ ")]
        assert [line for line in lines if line not in recorded] == [], golden


def test_every_make_target_exists(root: Path) -> None:
    """Each `make TARGET` in the documentation is a target of the Makefile."""
    makefile = (root / "Makefile").read_text()
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    pattern = re.compile(r"(?:`|^    |^)make ([a-z][a-z-]+)\b[^.,\n]*(?:`|$)", re.MULTILINE)
    targets = {target for page in pages for target in pattern.findall(page.read_text())}

    assert {target for target in targets if f"\n{target}:" not in makefile} == set()


def test_make_help_lists_every_target(root: Path) -> None:
    """Each phony target has the sentence that `make help` prints."""
    makefile = (root / "Makefile").read_text()
    phony = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)[0].split()

    assert phony == re.findall(r"^([a-z-]+):.*  ## .+\.$", makefile, re.MULTILINE)


def test_every_setting_of_the_sdk_is_documented(root: Path) -> None:
    """docs/settings.md has each setting with its variable, and its default if a number."""
    page = (root / "docs" / "settings.md").read_text()
    rows = dict(re.findall(rf"^\| `(\w+)` \| `({PREFIX}\w+)` \|", page, re.MULTILINE))
    settings = dataclasses.fields(Settings)

    assert {field.name: PREFIX + field.name.upper() for field in settings} == rows
    for field in settings:
        if isinstance(field.default, float):
            assert f"| `{field.name}` | `{rows[field.name]}` | {field.default:g} |" in page


def test_every_integration_is_documented(root: Path) -> None:
    """The pages of frameworks, servers and trackers name each module that no other one imports."""
    folder = root / "sdk" / "src" / "torchmem" / "integrations"
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    pages = "".join((root / "docs" / f"{name}.md").read_text() for name in INTEGRATION_PAGES)
    names = {path.stem for path in folder.glob("*.py")}

    assert {
        name
        for name in names
        if f"torchmem.integrations.{name} import" not in code
        and f"torchmem.integrations.{name}" not in pages
    } == set()


def test_every_package_is_in_the_layout(root: Path) -> None:
    """The table in CONTRIBUTING.md names each package of the source roots, and no other."""
    page = (root / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+/src/torchmem)/([\w{},]+)` \|", page, re.MULTILINE)
    named = {f"{top}/{name}" for top, names in rows for name in names.strip("{}").split(",")}
    packages = {path.parent for path in root.glob("*/src/torchmem/*/*.py")}

    assert {path.relative_to(root).as_posix() for path in packages} == named


def test_every_path_for_contributors_exists(root: Path) -> None:
    """Each path on their pages exists, in the repository or below a source root's package."""
    pages = "".join((root / name).read_text() for name in CONTRIBUTORS)
    text = re.sub(r"```.*?```", "", pages, flags=re.DOTALL)
    quoted = " ".join(re.findall(r"`([^`]+)`", text))
    paths = {word for word in quoted.split() if re.fullmatch(r"\w[\w.-]*/[\w./-]*", word)}
    written = {
        path for path in paths if "NAME" not in path and not path.startswith(("build/", "site/"))
    }
    places = [root, *root.glob("*/src/torchmem")]

    assert len(written) > 40
    assert {path for path in written if not any((place / path).exists() for place in places)} == {
        "torchmem/__init__.py"
    }


def test_every_collector_is_documented(root: Path) -> None:
    """The table in docs/exporter.md has a row for each collector that reads NVML."""
    page = (root / "docs" / "exporter.md").read_text()

    assert COLLECTORS.keys() <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
