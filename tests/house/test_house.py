"""Rules of the code that ruff and import-linter cannot check."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = [*ROOT.glob("*/src"), ROOT]
MAX_FUNCTION_LINES = 40
PACKAGES = [path for root in SOURCE_ROOTS[:-1] for path in (root / "torchmem").iterdir()]


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    """Return all modules of the package and of the dashboards, parsed, by name."""
    folders = [*((root, "torchmem") for root in SOURCE_ROOTS[:-1]), (ROOT, "dashboards")]
    files = ((path, root) for root, name in folders for path in (root / name).rglob("*.py"))
    return {module_name(path, root): ast.parse(path.read_text()) for path, root in files}


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a file below a source root."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imports(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module imports, also inside functions and for type checking only."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_imports_form_a_circle(modules: dict[str, ast.Module]) -> None:
    """No file imports itself through other files, not even for types or inside a function."""

    def owner(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    graph = {
        name: {owner(target) for target in imports(module)} - {name}
        for name, module in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_functions_are_short(modules: dict[str, ast.Module]) -> None:
    """No function is longer than 40 lines without its docstring."""
    assert [
        f"{name}.{node.name}"
        for name, module in modules.items()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and body_lines(node) > MAX_FUNCTION_LINES
    ] == []


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function without its docstring."""
    last = function.end_lineno or function.lineno
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) else 0
    return last - function.lineno + 1 - docstring


def test_one_name_names_one_class(modules: dict[str, ast.Module]) -> None:
    """No two public classes share a name, except the callbacks that users import."""
    names = Counter(
        node.name
        for module in modules.values()
        for node in module.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == {"TorchmemCallback"}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_is_typed(package: Path) -> None:
    """Type checkers use the annotations of each package, because it has a py.typed."""
    assert (package / "py.typed").exists()


def test_tests_are_collected_without_pytorch(root: Path) -> None:
    """`make test` works without torch, because no file with tests imports it at its top level."""
    modules = r"torch\b|torchmem\.sdk\.pytorch\.backend"
    needs_torch = re.compile(rf"^(import|from) ({modules})", re.MULTILINE)

    assert [
        str(path)
        for path in (root / "tests").glob("*/test_*.py")
        if needs_torch.search(code(path.read_text()))
    ] == []


def test_the_allocator_tier_is_in_its_folder(root: Path) -> None:
    """`make test-allocator` runs every test of its marker, because it looks only in that folder."""
    assert [
        str(path)
        for path in (root / "tests").glob("*/test_*.py")
        if "pytest.mark.allocator" in path.read_text() and path.parent.name != "allocator_tier"
    ] == [str(Path(__file__))]


def code(text: str) -> str:
    """Return Python without the scripts in it, which are strings."""
    return re.sub(r'"""(?:.|\n)*?"""', "", text)
