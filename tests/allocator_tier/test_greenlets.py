"""Monitoring a process whose threads gevent or eventlet has replaced by greenlets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.phantom import phantom_variables, run_on_phantom

from torchmem.sample.sample import Sample, decode

pytestmark = pytest.mark.allocator

LIBRARIES = ("gevent", "eventlet")
MEMORY = "8GiB"
PATCH = """
import sys
library, moment = sys.argv[1:]

def patch(here):
    if here != moment:
        return
    import importlib, warnings
    warnings.simplefilter("ignore")
    if library == "gevent":
        importlib.import_module("gevent.monkey").patch_all()
    else:
        importlib.import_module("eventlet").monkey_patch()

def run_all(*calls):
    module = __import__(library)
    if library == "gevent":
        greenlets = [module.spawn(call) for call in calls]
        module.joinall(greenlets, raise_error=True)
        return [each.value for each in greenlets]
    return [each.wait() for each in [module.spawn(call) for call in calls]]

patch("first")
import torch
patch("after torch")
from torchmem import sdk
patch("after the import")
"""
TRAIN = """
def train():
    model = torch.nn.Linear(8, 8)
    has_gradients = torch.is_grad_enabled()
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(5):
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return has_gradients
"""
TRAINING = (
    PATCH
    + TRAIN
    + """
session = sdk.instrument(SETTINGS)
patch("after instrument")
with_gradients = run_all(train, train, train)
import os, time
deadline = time.monotonic() + 100
while (session.newest is None or session.newest.steps.count < 12) and time.monotonic() < deadline:
    time.sleep(0.01)
text = ""
while HAS_PORT and "torchmem_steps_total" not in text and time.monotonic() < deadline:
    import urllib.request
    time.sleep(0.01)
    text = urllib.request.urlopen(session.url, timeout=50).read().decode() if session.url else ""
errors = {stage: count for stage, count in session.errors.counts.items() if count}
session.close()
print(with_gradients, errors, session.newest.ended, "torchmem_steps_total" in text)
"""
)


def script(text: str, settings: str = "interval=0.05") -> str:
    return text.replace("SETTINGS", settings).replace("HAS_PORT", str("port=" in settings))


def run(folder: Path, library: str, moment: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script; in a process of its own if it is patched before the import of torch."""
    pytest.importorskip(library, reason=f"needs pip install {library}")
    environment = {"TORCHMEM_RUN_DIR": str(folder / "run")}
    arguments = ("-c", text, library, moment)
    if moment != "first":
        return run_on_phantom(
            *arguments, memory=MEMORY, state=folder / "phantom", environment=environment
        )
    place = {"PHANTOM_STATE_DIR": str(folder / "phantom")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=os.environ | phantom_variables(MEMORY, 1) | environment | place,
        capture_output=True,
        text=True,
        check=False,
    )


def newest(folder: Path) -> Sample:
    (path,) = (folder / "run").rglob("*.sample.json")
    return decode(path.read_bytes())


MOMENTS = ("first", "after torch", "after the import", "after instrument")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_greenlets_train_as_without_monitoring(library: str, moment: str, tmp_path: Path) -> None:
    """Whenever the process is patched, no greenlet runs while CUDA starts, and all is published."""
    done = run(tmp_path, library, moment, script(TRAINING))
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "[True, True, True] {} exited False\n",
        "",
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_port_serves_beside_greenlets(library: str, tmp_path: Path) -> None:
    """The setting `port` resolves its address and answers without running a greenlet."""
    text = script(TRAINING, 'interval=0.05, port=0, address="localhost"')
    done = run(tmp_path, library, "after torch", text)
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "[True, True, True] {} exited True\n",
        "",
    )


HARM = (
    PATCH
    + TRAIN
    + """
import threading

def start():
    "Start a thread inside CUDA's initialization, as an SDK that uses `threading` would."
    threading.Thread(target=lambda: None, daemon=True).start()

torch.cuda._lazy_call(start)
print(run_all(train, train, train))
"""
)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_thread_of_threading_would_harm(library: str, tmp_path: Path) -> None:
    """With `threading.Thread`, another greenlet trains without gradients."""
    done = run(tmp_path, library, "after torch", HARM)
    assert done.returncode != 0
    assert done.returncode == -11 or "does not require grad" in done.stderr


YIELDING_HANDLER = (
    PATCH
    + TRAIN
    + """
import logging, time

class Yielding(logging.Handler):
    "A handler that lets other greenlets run, as one that sends records does."

    def emit(self, record):
        seen.append(record.getMessage())
        time.sleep(0.001)

seen = []
logging.getLogger("torchmem").addHandler(Yielding())
sdk.instrument(run_dir="/proc/nowhere", interval=0.05, capture_on_oom="trace")
print(run_all(train, train, train))
sdk.current_session().close()
print(any("publish failed" in each for each in seen))
"""
)


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_message_is_logged_while_cuda_starts(library: str, tmp_path: Path) -> None:
    """A message about CUDA's start is logged later: the script's handler may run a greenlet."""
    done = run(tmp_path, library, "after torch", YIELDING_HANDLER)
    assert (done.returncode, done.stdout) == (0, "[True, True, True]\nTrue\n"), done.stderr


OUT_OF_MEMORY = (
    PATCH
    + """
import json, time
session = sdk.instrument(interval=0.01)
torch.zeros(4, device="cuda")
yields, inside = [], []

def fail():
    for _ in range(20):
        before = len(yields)
        try:
            torch.empty(2**40, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            inside.append(len(yields) - before)
        time.sleep(0.002)

def other():
    for _ in range(200):
        yields.append(1)
        time.sleep(0)

# In a greenlet of gevent, an exception of PyTorch's may end the process without the SDK, too.
greenlet = __import__(library).spawn(other)
fail()
session.close()
print(set(inside), sum(session.errors.counts.values()))
"""
)


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_greenlet_runs_in_an_oom_observer(library: str, tmp_path: Path) -> None:
    """While the evidence of an OOM is kept, no greenlet runs, and each OOM counts."""
    done = run(tmp_path, library, "after torch", OUT_OF_MEMORY)
    assert (done.returncode, done.stdout) == (0, "{0} 0\n"), done.stderr
    counters = newest(tmp_path).devices[0].counters
    assert counters is not None
    assert sum((counters.ooms or {}).values()) == 20
