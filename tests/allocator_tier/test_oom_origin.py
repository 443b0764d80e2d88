"""The line that asked for memory, at OutOfMemoryErrors of PyTorch's real allocator."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.phantom import run_on_phantom

from torchmem.explain.oom_report import OomReport, decode
from torchmem.sample.run_directory import REPORT_SUFFIX

pytestmark = pytest.mark.allocator

PRELUDE = """
import gc, sys, threading, torch, weakref
from torchmem import sdk
session = sdk.instrument(interval=0.02)
def fill(left):
    free = torch.cuda.mem_get_info()[0]
    return torch.empty(free - (left << 20), dtype=torch.uint8, device="cuda")
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = torch.nn.Linear(size, size)
    def forward(self, x):
        return self.linear(x)  # FORWARD
"""
FORWARD = """
model, x = Model(1024).cuda(), torch.ones(100_000, 1024, device="cuda")
held = fill(100)
with session.phase("rollout"):
    model(x)
"""
BACKWARD = """
loss = Model(1024).cuda()(torch.ones(100_000, 1024, device="cuda")).pow(2).sum()
held = fill(100)
loss.backward()  # HERE
"""
IN_BACKWARD = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(200_000, 1024, device="cuda")  # HERE
loss = Scaled.apply(torch.ones(200_000, 1024, device="cuda", requires_grad=True)).sum()
held = fill(100)
loss.backward()
"""
OPTIMIZER = """
model = Model(8192).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(10, 8192, device="cuda")).sum().backward()
held = fill(1)
optimizer.step()  # HERE
"""
CUDA = """
torch.cuda.init()
held = fill(4)
Model(8192).cuda()  # HERE
"""
COLLATE = """
def collate(items):
    return torch.stack(items).cuda()  # HERE
items = [torch.ones(1 << 20) for _ in range(64)]
torch.cuda.init()
held = fill(4)
for batch in torch.utils.data.DataLoader(items, batch_size=64, collate_fn=collate):
    pass
"""
GENERATOR = """
def batches():
    yield torch.ones(5, device="cuda")
    yield torch.empty(5 << 30, dtype=torch.uint8, device="cuda")  # HERE
for batch in batches():
    pass
"""
COMPILED = """
@torch.compile(backend="aot_eager")  # FUNCTION
def double(x):
    return torch.cat([x, x])
x = torch.ones(600 << 20, dtype=torch.uint8, device="cuda")
held = fill(100)
double(x)
"""
WORKER = """
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.empty(5 << 30, dtype=torch.uint8, device="cuda")  # HERE
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Items(), batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    for item in loader:
        pass
"""
THREAD = """
def prefetch():
    return torch.empty(5 << 30, dtype=torch.uint8, device="cuda")  # HERE
torch.cuda.init()
thread = threading.Thread(target=prefetch, name="prefetcher")
thread.start()
thread.join()
"""
LIBRARY = """
torch.ones(5, device="cuda")
def reduce():
    raise RuntimeError("NCCL error: Failed to CUDA calloc async 4096 bytes")  # HERE
try:
    reduce()
except RuntimeError as error:
    raise ValueError("the collective failed") from error
"""
CASES: dict[str, tuple[str, str]] = {
    "forward": (FORWARD, "# FORWARD"),
    "backward": (BACKWARD, "# HERE"),
    "Python in backward": (IN_BACKWARD, "# HERE"),
    "optimizer": (OPTIMIZER, "# HERE"),
    ".cuda()": (CUDA, "# HERE"),
    "DataLoader": (COLLATE, "# HERE"),
    "worker of a DataLoader": (WORKER, "# HERE"),
    "generator": (GENERATOR, "# HERE"),
    "compiled": (COMPILED, "# FUNCTION"),
    "thread": (THREAD, "# HERE"),
    "library": (LIBRARY, "# HERE"),
}
Failing = Callable[[str], tuple[Path, subprocess.CompletedProcess[str], OomReport]]


@pytest.fixture
def failing(tmp_path: Path) -> Failing:
    """Runs a script that fails on a GPU of 4 GiB; returns the script and the report."""

    def run(body: str) -> tuple[Path, subprocess.CompletedProcess[str], OomReport]:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE + body)
        own = {
            "TORCHMEM_RUN_DIR": str(tmp_path / "run"),
            "PHANTOM_STATE_DIR": str(tmp_path / "phantom"),
        }
        done = run_on_phantom(script, memory="4GiB", environment=own)
        paths = list((tmp_path / "run").rglob(f"*{REPORT_SUFFIX}"))
        assert paths, done.stderr
        return script, done, decode(paths[0].read_bytes())

    return run


def _marked(script: Path, marker: str) -> int:
    """Return the number of the line that ends with the marker."""
    lines = script.read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(marker))
    return number


@pytest.mark.parametrize("case", CASES)
def test_the_report_names_the_line(failing: Failing, case: str) -> None:
    """The user's own line is the one that asked; of a compiled function it is the first one."""
    body, marker = CASES[case]
    script, _, report = failing(body)
    assert report.origin is not None
    own = report.origin.own

    assert own is not None
    assert (str(script), _marked(script, marker)) == (own.file, own.line)
    assert report.oom.line == f"train.py:{own.line}"


def test_the_phase_of_a_forward_pass(failing: Failing) -> None:
    """The open phase is named, and the stack goes from PyTorch's frame to the script's."""
    origin = failing(FORWARD)[2].origin
    assert origin is not None

    assert origin.phase == "rollout"
    assert [origin.stack.frames[0].package, origin.stack.frames[-1].package] == ["torch", None]
    assert (origin.backward, origin.main_stack) == (None, None)


def test_a_backward_pass_is_named(failing: Failing) -> None:
    """Autograd's thread has no Python frames; the main thread's and the node are named."""
    origin = failing(BACKWARD)[2].origin
    assert origin is not None

    assert (len(origin.stack.frames), origin.backward) == (0, "PowBackward0")
    assert origin.main_stack is not None


CAUGHT = """
class Held: pass
def fail():
    held, large = Held(), torch.ones(5, device="cuda")
    references.append(weakref.ref(held))
    references.append(weakref.ref(large))
    try:
        torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print(error)
references = []
gc.disable()
fail()
print([reference() for reference in references])
"""


def test_no_tensor_is_kept_alive(failing: Failing) -> None:
    """After a caught error the local variables are gone without the garbage collector."""
    _, done, _ = failing(CAUGHT)

    assert done.stdout.splitlines()[-1] == "[None, None]"
    assert done.stdout.startswith("CUDA out of memory. Tried to allocate 5.00 GiB.")


LIVE = """
model, optimizer = Model(1024).cuda(), None
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.ones(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
import glob, os, subprocess, time
def is_published():
    paths = glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/*.sample.json")
    samples = [json.load(open(path)) for path in paths]
    return any(s["steps"]["count"] == 4 and s["devices"][0]["components"] for s in samples)
time.sleep(0.1)  # longer than the interval, so that the step is read
optimizer.step()
while not is_published(): time.sleep(0.01)
command = [sys.executable, "-m", "torchmem.cli", "why", "--json"]
shown = json.loads(subprocess.run(command, stdout=-1, check=True).stdout)["devices"][0]
parts = {part["name"]: part["bytes"] for part in shown["parts"]}
allocated = torch.cuda.memory_allocated()
print(shown["allocated_bytes"] == allocated, parts["parameters"])
(path,) = glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/*.sample.json")
peak = json.load(open(path))["devices"][0]["allocator"]["allocated_peak_bytes"]
print(peak == torch.cuda.max_memory_allocated())
fill(-100)
"""


def test_a_report_of_the_running_rank(failing: Failing) -> None:
    """Another process shows the components and the peak that PyTorch itself tells."""
    _, done, _ = failing("import json\n" + LIVE)

    assert done.stdout.splitlines()[-2:] == ["True 4198400", "True"]
