"""The hook that waits for torch: a program imports as it would without it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from support.plain_and_hooked import HOOKED, PLAIN, WATCHED, outputs, pythons

# Finders that programs have on sys.meta_path, and how they import torch.
OLD_FINDER = """
import sys
class OldFinder:
    def find_module(self, fullname, path=None):
        return None
sys.meta_path.insert({index}, OldFinder())
"""
DELEGATE = """
import sys
class Delegate:
    asked = 0
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        self.asked += 1
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        return next((spec for spec in specs if spec is not None), None)
delegate = Delegate()
sys.meta_path.insert({index}, delegate)
"""
OTHER_FINDER = """
import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, [{folder!r}]) if name == "torch" else None
sys.path.remove({folder!r})
sys.meta_path.append(Editable())
"""
LAZY_RECIPE = """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
torch = importlib.util.module_from_spec(spec)
sys.modules["torch"] = torch
spec.loader.exec_module(torch)
print("lazy")
"""
LAZY_FINDER = (
    DELEGATE
    + """
import importlib.util
class Lazy(Delegate):
    def find_spec(self, name, path=None, target=None):
        spec = super().find_spec(name, path)
        if spec is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec
sys.meta_path[0] = Lazy()
"""
).format(index=0)
IMPORT = "\nimport torch\nprint(torch.version.VALUE)\n"
TRY = "\ntry:\n    import torch\nexcept ImportError as error:\n    print(repr(error), error.name)\n"
LOOK = """
import sys, torch
print(type(torch.__spec__), type(torch.__loader__), torch.__spec__.loader is torch.__loader__)
print(sorted(vars(torch)), vars(torch.__loader__), sorted(vars(torch.__spec__)))
"""
FIND = """
import copy, importlib, pickle
from importlib.util import find_spec
spec = find_spec("torch")
print(type(spec), type(spec.loader), spec == find_spec("torch"), spec.loader.name)
for loader in (pickle.loads(pickle.dumps(spec.loader)), copy.deepcopy(spec.loader)):
    print(type(loader), loader.path, loader.get_code("torch").co_filename)
"""
READ = """
import importlib.resources, inspect, pkgutil, runpy
import torch
print(inspect.getsource(torch), pkgutil.get_data("torch", "data"))
print(importlib.resources.files("torch").joinpath("data").read_bytes())
runpy.run_module("torch.version", run_name="__main__")
print(importlib.reload(torch) is torch, [m.name for m in pkgutil.iter_modules(torch.__path__)])
"""
THREADS = """
import threading
def work():
    import torch
    print('3\\n', end='')
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
NO_PATH_FINDER = """
import sys
from importlib.machinery import PathFinder
sys.meta_path.remove(PathFinder)
"""
RESTORED = """
import sys
finders = list(sys.meta_path)
import torch
del sys.modules["torch"], sys.modules["torch.version"]
sys.meta_path[:] = finders
"""
OWN_PATH_FINDER = """
import sys
from importlib.machinery import PathFinder
class Own(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.startswith("torch"):
            print("own", name)
        return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Own
"""
LOADED = """
import importlib, sys
print(hasattr(importlib, "util"), sorted(m for m in sys.modules if "torchmem" not in m))
"""
# Of an import of torch the program sees the same, and `imported` is called at the end of it.
PROGRAMS = {
    "import": IMPORT,
    "a submodule": "import torch.version" + IMPORT,
    "what is imported": LOOK,
    "readers": READ,
    "threads": THREADS,
    "a finder of Python 2 first": OLD_FINDER.format(index=0) + IMPORT,
    "a finder of Python 2 last": OLD_FINDER.format(index="len(sys.meta_path)") + IMPORT,
    "a finder that asks the others": DELEGATE.format(index=0) + IMPORT + "print(delegate.asked)",
    "its own path finder": OWN_PATH_FINDER + IMPORT,
    "finders restored": RESTORED + IMPORT,
    "an exception that is caught": "try:\n    import broken_torch\nexcept Exception: pass" + IMPORT,
    "lazy recipe": LAZY_RECIPE + "print(torch.version.VALUE)",
    "lazy finder": LAZY_FINDER + "import torch\nprint('lazy')\nprint(torch.version.VALUE)",
}
# torch is not imported.
WITHOUT = {
    "loaded modules": LOADED,
    "find": FIND,
    "no path finder": NO_PATH_FINDER + TRY,
    "lazy and unused": LAZY_RECIPE,
    "blocked": "import sys\nsys.modules['torch'] = None" + TRY,
}
ABSENT = {
    "absent": TRY,
    "a finder of Python 2 first": OLD_FINDER.format(index=0) + TRY,
    "a finder of Python 2 last": OLD_FINDER.format(index="len(sys.meta_path)") + TRY,
    "a finder that asks the others first": DELEGATE.format(index=0) + TRY + "print(delegate.asked)",
    "a finder that asks the others last": DELEGATE.format(index=9) + TRY + "print(delegate.asked)",
    "find": "from importlib.util import find_spec\nprint(find_spec('torch'))",
}
BROKEN = {
    "an error": "raise ValueError('broken')",
    "a missing module": "import nothing_of_this",
    "a deep error": "import torch.deep",
    "syntax": "x = = 1",
    "a null byte": "\0",
    "an exit": "raise SystemExit(3)",
}


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a package named torch."""
    folder = tmp_path_factory.mktemp("torch")
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("import torch.version\nprint('executed')\n")
    (folder / "torch/version.py").write_text("VALUE = 3\nprint(__name__)\n")
    (folder / "torch/data").write_text("data\n")
    (folder / "broken_torch.py").write_text("raise ValueError\n")
    return folder


@pytest.mark.parametrize("python", pythons())
def test_a_program_sees_the_same(torch: Path, tmp_path: Path, python: str) -> None:
    """Whatever finders and loaders a program uses, it prints the same with the hook."""
    programs = PROGRAMS | WITHOUT
    assert outputs(programs, PLAIN, torch, python) == outputs(programs, HOOKED, torch, python)
    assert outputs(ABSENT, PLAIN, tmp_path, python) == outputs(ABSENT, HOOKED, tmp_path, python)


@pytest.mark.parametrize("python", pythons())
def test_the_import_is_noticed_once(torch: Path, python: str) -> None:
    """The function is called once, when torch has been executed, and not when it is only found."""
    printed = outputs(PROGRAMS, WATCHED, torch, python)
    assert dict.fromkeys(PROGRAMS, 1) == {
        name: text.count("imported\n") for name, text in printed.items()
    }
    assert all("executed\nimported\n" in text for text in printed.values())
    assert printed["lazy finder"].partition("torch.version\n")[0] == "lazy\n"
    assert not any("imported" in text for text in outputs(WITHOUT, WATCHED, torch).values())


@pytest.mark.parametrize("python", pythons())
def test_a_broken_torch_fails_with_its_own_traceback(tmp_path: Path, python: str) -> None:
    """What is on stderr if torch cannot be imported is the same, line by line."""
    for name, code in BROKEN.items():
        folder = tmp_path / name.replace(" ", "_")
        (folder / "torch").mkdir(parents=True)
        (folder / "torch/__init__.py").write_text(code)
        (folder / "torch/deep.py").write_text("def f():\n    raise ValueError\nf()")
        program = {name: "import torch"}
        plain = outputs(program, PLAIN, folder, python)
        assert plain == outputs(program, HOOKED, folder, python)
        assert "Error" in plain[name] or "SystemExit" in plain[name]


def test_a_torch_of_another_finder_is_noticed(torch: Path) -> None:
    """An editable installation may have a finder that is asked after Python's own."""
    program = {"other": OTHER_FINDER.format(folder=str(torch)) + IMPORT + LOOK}
    plain, watched = (outputs(program, mode, torch)["other"] for mode in (PLAIN, WATCHED))
    assert plain == watched.replace("imported\n", "", 1)
    assert "executed\nimported\n" in watched


def test_a_torch_in_a_zip_file_is_noticed(torch: Path, tmp_path: Path) -> None:
    """The loader of a zip file, which all of its modules share, stays as it is."""
    with zipfile.ZipFile(tmp_path / "torch.zip", "w") as archive:
        for path in sorted((torch / "torch").glob("*.py")):
            archive.write(path, path.relative_to(torch))
    program = {"zip": "import torch; print(vars(torch.__loader__).keys())"}
    plain, watched = (
        outputs(program, mode, tmp_path / "torch.zip")["zip"] for mode in (PLAIN, WATCHED)
    )
    assert plain == watched.replace("imported\n", "", 1)
    assert "executed\nimported\n" in watched
