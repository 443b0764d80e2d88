"""Agents that start with a sitecustomize of their own, beside those of torchmem.

An agent such as New Relic's puts a folder on PYTHONPATH, as torchmem does, and its sitecustomize
loads the next one. tests/allocator_tier/test_agents.py has the real agents.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.plain_and_hooked import SOURCES, pythons

from torchmem.phantom.environment import STARTUP as PHANTOM
from torchmem.run.launch import STARTUP as RUN

BEGINNING = """
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
HERE = itself = os.path.dirname(__file__)
sys.path.remove(HERE)
print("agent begins")
"""
END = """
HERE == itself == sys.argv or print("agent is active", __name__)
"""
# How agents load the next sitecustomize: New Relic, ddtrace, and Python's documentation.
WAYS = {
    "load_module": """
next_one = PathFinder.find_spec("sitecustomize", path=sys.path)
if next_one is not None:
    next_one.loader.load_module("sitecustomize")
""",
    "import": """
agent = sys.modules.pop("sitecustomize")
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = agent
""",
    "exec_module": """
next_one = PathFinder.find_spec("sitecustomize", path=sys.path)
if next_one is not None:
    module = module_from_spec(next_one)
    next_one.loader.exec_module(module)
""",
}
OWN = {
    "none": {},
    "both": {
        "sitecustomize": "VALUE = 7\nprint('own')\n",
        "usercustomize": "VALUE = 8\nprint('own of the user')\n",
    },
    "broken": {"sitecustomize": "raise ValueError('its own')\n"},
    "incomplete": {"sitecustomize": "import nothing_of_this\n"},
}
LOOK = """
import sys
for name in ("sitecustomize", "usercustomize"):
    try:
        print(getattr(__import__(name), "VALUE", "no value"))
    except ImportError as error:
        print(error)
print(sys.path)
print(*sorted(name for name in sys.modules if "torchmem" not in name and name != "__future__"))
"""


def start(interpreter: str, *folders: Path) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a Python with these folders on PYTHONPATH."""
    done = subprocess.run(
        [interpreter, "-B", "-c", LOOK],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "TORCHMEM": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("startup", [RUN, PHANTOM], ids=["run", "phantom"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("own", OWN)
def test_an_agent_starts_as_without_torchmem(
    own: str, way: str, startup: Path, tmp_path: Path
) -> None:
    """Before or behind torchmem's folder, it prints the same, and the user's own files run once."""
    agent, users = tmp_path / "agent", tmp_path / "user"
    for folder in (agent, users):
        folder.mkdir()
    (agent / "sitecustomize.py").write_text(BEGINNING + WAYS[way] + END)
    for name, text in OWN[own].items():
        (users / f"{name}.py").write_text(text)
    for interpreter in pythons() if startup == RUN else pythons()[:1]:
        plain = start(interpreter, agent, users, *SOURCES)
        assert plain == start(interpreter, agent, startup, users, *SOURCES)
        assert plain == start(interpreter, startup, agent, users, *SOURCES)
        assert plain[1].count("agent begins") == 1
        assert plain[1].count("own of the user\n") == ("usercustomize" in OWN[own])


@pytest.mark.parametrize("way", WAYS)
def test_an_agent_starts_in_an_environment_without_torchmem(way: str, tmp_path: Path) -> None:
    """Where `torchmem run` is of another environment, the agent works all the same."""
    (tmp_path / "sitecustomize.py").write_text(BEGINNING + WAYS[way] + END)
    plain = start(pythons()[0], tmp_path)
    assert plain == start(pythons()[0], tmp_path, RUN)
    assert plain == start(pythons()[0], RUN, tmp_path)
    assert plain[1].startswith("agent begins\nagent is active")


def test_every_startup_file_hands_on_in_the_same_way() -> None:
    """Each must stand alone, also in a Python without torchmem, so the function is in both."""
    texts = [(folder / "sitecustomize.py").read_text() for folder in (RUN, PHANTOM)]
    assert len({text.partition("\ndef torchmem_hands_on()")[2] for text in texts}) == 1
    assert all("def torchmem_hands_on()" in text for text in texts)
