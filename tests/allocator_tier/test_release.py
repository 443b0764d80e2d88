"""The tiers of the setting `release` on PyTorch's real allocator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.phantom import torch_server
from support.waiting import until

MIB = 1 << 20
EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
pytestmark = pytest.mark.allocator

Run = Callable[[str], subprocess.CompletedProcess[str]]

PROGRAM = """
def take(mib): return torch.empty(int(mib * 2**20), dtype=torch.uint8, device="cuda")
def reserved(): return torch.cuda.memory_reserved() >> 20
def allocated(): return torch.cuda.memory_allocated() >> 20
def done(tier): return published()[0]["devices"][0]["releases"][tier]
def show(**values): print(json.dumps(values))
parameter = torch.nn.Parameter(torch.zeros(2**18, device="cuda"))
optimizer = torch.optim.Adam([parameter])
def step(*sizes):
    held = [take(size) for size in sizes]
    del held
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
"""


def run_json(run: Run, setting: str, body: str) -> dict[str, Any]:
    """Run a training with a setting of `release` and return what it printed."""
    options = f"interval=1e-6, release={setting!r}, release_interval=1e-6"
    result = run(f"session = sdk.instrument({options})\n{PROGRAM}{body}")
    assert not result.returncode, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


def test_the_retry_of_a_script_gets_the_memory_that_hooks_free(run: Run) -> None:
    """After a caught OutOfMemoryError the same request succeeds, in the script's own handler."""
    shown = run_json(
        run,
        "emergency",
        """
cache = [take(1000), take(1000)]
def give(wanted): cache.clear()
session.on_pressure(give)
step()
try:
    held = take(3000)
except torch.OutOfMemoryError:
    held = take(3000)
session.close()
show(cache=len(cache), held=allocated(), **done("emergency"))
""",
    )

    assert (shown["cache"], shown["times"]) == (0, 1)
    assert shown["held"] >= 3000
    assert 2000 << 20 <= shown["released_bytes"] < 2100 << 20


def test_an_oom_that_ends_the_process_calls_no_hooks(run: Run) -> None:
    """Hooks are not called for an OutOfMemoryError that nothing catches."""
    result = run(
        f"""
session = sdk.instrument(interval=1e-6, release="emergency")
{PROGRAM}
session.on_pressure(lambda wanted: print("called"))
step()
take(8000)
"""
    )

    assert (result.returncode, result.stdout) == (1, "")
    assert "\ntorch.OutOfMemoryError: " in result.stderr


def test_an_offloaded_optimizer_state_comes_back_for_its_step(run: Run) -> None:
    """Its bytes leave the device under pressure and are there again in the next step, unchanged."""
    shown = run_json(
        run,
        "hooks=0.99",
        f"import sys; sys.path.append({EXAMPLES!r})"
        """
from offload import OptimizerOffload
large = torch.nn.Parameter(torch.zeros(2**27, device="cuda"))
optimizer = torch.optim.Adam([large])
offload, places = OptimizerOffload(optimizer), []
def note(*_): places.append(optimizer.state[large]["exp_avg"].device.type)
optimizer.register_step_post_hook(note)
for _ in range(3):
    hook = session.on_pressure(offload)  # each time: a slow one is dropped
    large.grad = torch.zeros_like(large)
    optimizer.step()
    note()
    hook.remove()
saved = optimizer.state_dict()["state"][0]["exp_avg"].device.type
session.close()
show(places=places, saved=saved, **done("hooks"))
""",
    )

    assert (shown["places"], shown["saved"]) == (["cuda", "cpu"] * 3, "cuda")
    assert shown["released_bytes"] / shown["times"] >= 1024 << 20


def test_an_offloaded_module_comes_back_for_its_forward_pass(run: Run) -> None:
    """An idle module leaves the device under pressure, each time into the same pinned memory."""
    shown = run_json(
        run,
        "hooks=0.99",
        f"import sys; sys.path.append({EXAMPLES!r})"
        """
from offload import ModuleOffload
reference = torch.nn.Linear(2**13, 2**13, device="cuda")
offload, places = ModuleOffload(reference), []
for _ in range(3):
    hook = session.on_pressure(offload)  # each time: a slow one is dropped
    step()
    hook.remove()
    places.append(reference.weight.device.type)
    with torch.no_grad():
        reference(torch.zeros(1, 2**13, device="cuda"))
    places.append(reference.weight.device.type)
session.close()
show(places=places, pinned=torch.cuda.host_memory_stats()["active_bytes.current"] >> 20)
""",
    )

    assert shown["places"] == ["cpu", "cuda"] * 3
    assert 256 <= shown["pinned"] <= 260


def test_memory_that_a_script_waits_for_is_in_its_cache(run: Run) -> None:
    """Later requests split what was taken, and PyTorch's and torchmem's counters do not show it."""
    shown = run_json(
        run,
        "neighbors",
        """
step(100)
peak, allocs = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["num_device_alloc"]
got = session.wait_for_memory(3000 << 20)
taken, peak_after = reserved(), torch.cuda.max_memory_allocated()
for _ in range(3): step(500, 500, 500, 500, 500, 300)
stats = torch.cuda.memory_stats()
session.close()
show(got=got, taken=taken, allocs=stats["num_device_alloc"] - allocs, same=peak == peak_after,
    retries=stats["num_alloc_retries"])
""",
    )

    assert {name: shown[name] for name in ("got", "same", "retries")} == {
        "got": True,
        "same": True,
        "retries": 0,
    }
    assert 3000 <= shown["taken"] < 3200
    assert shown["allocs"] <= 4


def test_a_block_that_cannot_be_held_is_no_oom_of_the_script(run: Run) -> None:
    """No observer is called, and what was held before goes back to the cache."""
    result = run(
        f"""
from torchmem.allocator.backend import HeldBlock
from torchmem.sdk.pytorch.backend import TorchBackend
backend = TorchBackend()
session = sdk.instrument(interval=1e-6, backend=backend)
{PROGRAM}
step(100)
with backend.hold([HeldBlock(0, 1000 << 20), HeldBlock(0, 64 << 30)]) as held:
    inside = allocated()
try: take(8000)
except torch.OutOfMemoryError: pass
step(100)
session.close()
show(held=held >> 20, inside=inside, ooms=published()[0]["devices"][0]["counters"]["ooms"])
"""
    )

    assert not result.returncode, result.stderr
    shown = json.loads(result.stdout)
    assert (shown["held"], shown["ooms"]) == (1000, {"capacity": 1})
    assert shown["inside"] >= 1000


PHANTOM = [sys.executable, "-m", "torchmem.phantom", "--memory", "4GiB", "--"]
PREPARE = """
import sys, torch
from torchmem import sdk
session = sdk.instrument(interval=0.01)
parameter = torch.nn.Parameter(torch.zeros(2**18, device="cuda"))
optimizer = torch.optim.Adam([parameter])
def step():
    parameter.grad = torch.zeros_like(parameter)
    torch.empty(3000 * 2**20, dtype=torch.uint8, device="cuda")
    optimizer.step()
step()
"""
# At a prompt the main thread waits in a call to C, as in a notebook.
IDLE = PREPARE + "print('ready', flush=True); sys.stdin.readline(); print('alive')"
TRAINING = (
    PREPARE
    + """
import threading
print('ready', flush=True)
stop = threading.Thread(target=sys.stdin.readline)
stop.start()
while stop.is_alive(): step()
print('alive')
"""
)


@contextmanager
def running(environment: dict[str, str], body: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that says when it is ready and has published, and let it end when told."""
    program = [*PHANTOM, *torch_server().python(), "-c", body]
    with subprocess.Popen(
        program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        until(lambda: _samples(environment))
        yield process


def _samples(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["TORCHMEM_RUN_DIR"]).rglob("*.sample.json"))


def _layout(environment: dict[str, str]) -> dict[str, Any]:
    """Return the layout that the only process published."""
    (path,) = _samples(environment)
    return dict(json.loads(path.read_bytes())["devices"][0]["layout"] or {"releasable_bytes": 1e99})


@pytest.mark.parametrize("body", [IDLE, TRAINING], ids=["idle", "training"])
def test_the_command_gets_the_cache_of_a_running_process(
    environment: dict[str, str], body: str
) -> None:
    """`torchmem release` returns the cache of a process at work and of one at its prompt.

    Its sample says so although the main thread of the latter reads nothing.
    """
    command = [sys.executable, "-m", "torchmem.cli", "release", "--rank", "0"]
    with running(environment, body) as process:
        shown = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if body is IDLE:

            def is_shown() -> bool:
                # Again if the snapshot before took long, so that none was due.
                subprocess.run(command, env=environment, capture_output=True, check=False)
                return bool(_layout(environment)["releasable_bytes"] < 256 * MIB)

            until(is_shown)
            assert _layout(environment)["headroom_bytes"] > 3000 * MIB
        rest, _ = process.communicate("stop\n", timeout=600)

    assert (shown.returncode, shown.stderr) == (0, "")
    assert "returned 2.9" in shown.stdout, shown.stdout
    assert ": 2.9" in shown.stdout.splitlines()[-1]
    assert (process.returncode, rest) == (0, "alive\n")
