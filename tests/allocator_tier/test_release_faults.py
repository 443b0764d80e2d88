"""Faults while memory is released, on PyTorch's real allocator: training goes on unchanged."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.allocator

Run = Callable[[str], subprocess.CompletedProcess[str]]

PROGRAM = """
import threading
from pathlib import Path
def take(mib, device="cuda"):
    return torch.empty(int(mib * 2**20), dtype=torch.uint8, device=device)
def reserved(device=0): return torch.cuda.memory_reserved(device) >> 20
def show(**values): print(json.dumps(values))
parameter = torch.nn.Parameter(torch.zeros(2**18, device="cuda"))
optimizer = torch.optim.Adam([parameter])
def step():
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
def request():
    # Ask as the command does, and wait for the answer.
    sample = next(Path(os.environ["TORCHMEM_RUN_DIR"]).glob("*/*.sample.json"))
    beside = lambda suffix: sample.with_name(sample.name.replace(".sample.json", suffix))
    asked, answer = beside(".release-request.json"), beside(".release-answer.json")
    asked.write_text('{"asker": "request", "hook_bytes": 0}')
    written = asked.stat().st_mtime_ns
    def answered():
        if not answer.exists(): return None
        said = json.loads(answer.read_text())
        return said if said["request_ns"] == written and said["state"] != "waiting" else None
    until(answered)
    return answered()
step()
until(published)
"""


def run_json(run: Run, options: str, body: str) -> dict[str, Any]:
    """Run a training with these settings and return what it printed last."""
    result = run(f"session = sdk.instrument(interval=1e-3{options})\n{PROGRAM}{body}")
    assert not result.returncode, result.stderr
    return dict(json.loads(result.stdout.splitlines()[-1]))


EMERGENCIES = """
class Needy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient):
        take(3000)
        return gradient
def backward(): Needy.apply(parameter).sum().backward()
def generator(): yield take(3000)
@torch.compile(backend="aot_eager")
def compiled(x): return x.expand(3000 * 2**18).contiguous()
def in_thread(act):
    failed = []
    def catch():
        try: act()
        except torch.OutOfMemoryError: failed.append(1)
    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    if failed: raise torch.OutOfMemoryError
def nested():
    try: return take(3000)
    except torch.OutOfMemoryError:
        try: return take(3900)
        except torch.OutOfMemoryError: return take(3000)
cache, calls, one = [], [], torch.zeros(1, device="cuda")
def give(wanted):
    calls.append(threading.current_thread() is threading.main_thread())
    cache.clear()
session.on_pressure(give)
cases = {
    "forward": lambda: take(3000), "generator": lambda: next(generator()), "backward": backward,
    "nested": nested, "compiled": lambda: compiled(one),
    "thread": lambda: in_thread(lambda: take(3000)),
    "backward of a thread": lambda: in_thread(backward),
}
shown = {}
for name, act in cases.items():
    cache.append(take(2500))
    for attempt in range(2):
        try: act()
        except torch.OutOfMemoryError: continue
        break
    else: attempt = None
    shown[name] = [attempt, *calls]
    calls.clear(); cache.clear(); torch.cuda.empty_cache()
show(errors=session.errors.counts["release"], **shown)
"""


def test_an_emergency_reaches_the_retry_wherever_the_main_thread_asked(run: Run) -> None:
    """In forward, backward, generators, compiled code, and retries of retries; not for threads."""
    shown = run_json(run, ", release='emergency'", EMERGENCIES)

    assert shown.pop("errors") == 0
    assert shown == {
        "forward": [1, True],
        "generator": [1, True],
        "backward": [1, True],
        "nested": [0, True, True],
        "compiled": [1, True],
        "thread": [None],
        "backward of a thread": [None],
    }


CAPTURE = """
spare = take(1000)
graph, pool, answers = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), []
captured = []
def capture():
    global spare
    with torch.cuda.graph(graph, pool=pool):
        captured.append(take(100))
        spare = None
        answers.append(request()["reason"])
thread = threading.Thread(target=capture)
thread.start()
thread.join()
own = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(own):
    held, kept = take(50), take(50)
del kept
before = reserved()
released = request()
graph.replay()
show(answers=answers, before=before, after=reserved(), released=released["state"],
    errors=session.errors.counts["release"])
"""


def test_a_capture_in_another_thread_is_not_disturbed(run: Run) -> None:
    """The main thread waits meanwhile and counts as idle; pools of graphs keep their memory."""
    shown = run_json(run, ", idle_after=0.01", CAPTURE)

    assert shown["answers"] == ["a CUDA graph is being captured."]
    assert (shown["released"], shown["errors"]) == ("done", 0)
    assert shown["before"] - shown["after"] >= 1000
    assert shown["after"] >= 150


DEVICES = """
wanted, caches = [], [take(3000), take(400, "cuda:1")]
def give(size):
    wanted.append(size >> 20)
    caches.clear()
session.on_pressure(give)
step(); time.sleep(0.002); step()
session.close()
done = [device["releases"]["hooks"] for device in published()[0]["devices"]]
show(wanted=wanted, times=[each["times"] for each in done],
    released=[each["released_bytes"] >> 20 for each in done])
"""


def test_devices_of_one_process_have_accounts_of_their_own(run: Run) -> None:
    """A hook is asked once, for the device that is short, and each device counts its own bytes."""
    shown = run_json(run, ", release='hooks=0.5', release_interval=1e-6", DEVICES)

    assert len(shown["wanted"]) == 1
    assert 1400 <= shown["wanted"][0] <= 2048
    assert (shown["times"], shown["released"]) == ([1, 1], [3000, 400])


SAVE = """
weights = {name: torch.randn(2**20) for name in "ab"}
weights["pinned"] = torch.randn(2**20).pin_memory()
weights["cuda"] = torch.zeros(2**20, device="cuda")
address = weights["cuda"].data_ptr()
large = take(1000); del large
staged = torch.empty(2**20, pin_memory=True)
staged.copy_(weights["cuda"], non_blocking=True)
answers = []
class Slow:
    # A file whose first large write lasts until a request was served.
    def __init__(self, file): self.file = file
    def write(self, data):
        if len(data) > 2**20 and not answers: answers.append(request())
        return self.file.write(data)
    def __getattr__(self, name): return getattr(self.file, name)
with open("saved.pt", "wb") as file: torch.save(weights, Slow(file))
loaded = torch.load("saved.pt", map_location="cpu")
os.unlink("saved.pt")
show(state=answers[0]["state"], released=sum(answers[0]["released"].values()) >> 20,
    equal=all(torch.equal(loaded[name], weights[name].cpu()) for name in weights),
    same=address == weights["cuda"].data_ptr(), allocated=torch.cuda.memory_allocated() >> 20)
"""


def test_a_release_in_the_middle_of_a_save_changes_no_bit(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """While torch.save writes, unused memory alone is returned, and the file is complete."""
    monkeypatch.chdir(tmp_path)
    shown = run_json(run, ", idle_after=0.01", SAVE)

    assert shown["state"] == "done"
    assert shown["released"] >= 1000
    assert (shown["equal"], shown["same"]) == (True, True)
    assert shown["allocated"] >= 4
