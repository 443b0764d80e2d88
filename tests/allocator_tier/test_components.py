"""What holds the memory, as the SDK counts it, against an independent count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.phantom import SCRIPT_MEMORY, run_on_phantom

pytestmark = pytest.mark.allocator

HERE = Path(__file__).resolve().parent
CASES = (
    "transformer",
    "fused",
    "momentum",
    "no_state",
    "accumulation",
    "lora",
    "eight_bit",
    "offload",
    "average",
    "shared",
    "tied",
    "kv_cache",
    "raising",
    "prefetch",
    "hugging_face",
    "fsdp2",
)
"""Functions of component_cases.py."""


@pytest.mark.parametrize("zero", ["none", "in_place", "late"])
@pytest.mark.parametrize("place", ["forward", "backward", "optimizer"])
def test_components_of_the_peak_are_those_of_its_moment(
    place: str, zero: str, tmp_path: Path
) -> None:
    """Wherever the peak lies, each component has the bytes that the script counts there itself."""
    peaks, truth, peak, errors = _run("peak_cases.py", tmp_path, place, zero)

    assert truth == peaks | {"held": peaks["held"] + peaks.pop("step")}
    assert peak == sum(truth.values())
    assert "components" not in errors


@pytest.mark.parametrize("case", CASES)
def test_components_are_those_of_the_blocks(case: str, tmp_path: Path) -> None:
    """All are absent, or each has the bytes of its blocks and they add up to the active bytes."""
    rows, errors = _run("component_cases.py", tmp_path, case)
    for first, found, independent, active in rows:
        assert independent == found
        assert first in ({}, independent) or "kv_cache" in first  # which is counted now and then
        assert active == sum(found.values()) == sum(first.values() or found.values())
    assert "components" not in errors


def _run(script: str, folder: Path, *arguments: str) -> Any:
    """Return the last line that a script of this folder prints, as JSON."""
    done = run_on_phantom(
        HERE / script,
        *arguments,
        memory=SCRIPT_MEMORY,
        state=folder / "phantom",
        environment={"TORCHMEM_RUN_DIR": str(folder / "run")},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


LOOP = """
def serve(metric):
    import urllib.request
    while not session.url: time.sleep(0.01)
    text = urllib.request.urlopen(session.url).read().decode()
    rows = [line for line in text.splitlines() if line.startswith(metric + "{")]
    return {row.split('component="')[1].split('"')[0]: float(row.split()[-1]) for row in rows}
session = sdk.instrument(interval=1e-6, port=0)
model = torch.nn.Sequential(*[torch.nn.Linear(300, 300) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def step(size=64):
    model(torch.randn(size, 300, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
def is_recording(): return torch._C._cuda_isHistoryEnabled()
def step_until_recording():
    # A step's end is skipped while another thread of the SDK reads.
    while not is_recording(): step()
def record(): torch.cuda.memory._record_memory_history(context="all", stacks="python")
def recorded(): return sum(map(len, torch.cuda.memory._snapshot()["device_traces"]))
"""
RECORDINGS = {
    "none": "step_until_recording(); step(); assert not is_recording()",
    "before": """
record()
for _ in range(3): before = recorded(); step(); assert recorded() > before
""",
    "within": """
step_until_recording(); record()
for _ in range(3): before = recorded(); step(); assert recorded() > before
""",
    "ended": """
step_until_recording(); record(); torch.cuda.memory._record_memory_history(enabled=None)
step(); assert not is_recording()
""",
}


@pytest.mark.parametrize("recording", RECORDINGS)
def test_a_recording_of_the_script_is_left_alone(run: Callable[..., Any], recording: str) -> None:
    """The SDK records one step; a recording of the script's, before or within it, goes on."""
    done = run(LOOP + RECORDINGS[recording] + "\nprint(session.errors.counts['components'])")

    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


IN_BACKWARD = """
session = sdk.instrument(interval=1e-6, port=0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).cuda()
optimizers = {weight: torch.optim.AdamW([weight]) for weight in model.parameters()}
def update(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()
for weight in model.parameters(): weight.register_post_accumulate_grad_hook(update)
def step(): model(torch.randn(8, 64, device="cuda")).mean().backward()
"""


def test_optimizers_in_backward_run_as_without_torchmem(
    run: Callable[..., Any], series: Callable[..., Any]
) -> None:
    """PyTorch prints nothing, no recording is left, and each backward pass counts as a step."""
    done = run(
        IN_BACKWARD
        + """
for _ in range(20): step()
session.close()
print(torch._C._cuda_isHistoryEnabled(), session.errors.counts["components"])
"""
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "False 0\n", "")
    assert [count for _, count in series("torchmem_steps_total")] == [20.0]


def test_a_history_may_begin_in_one_backward_pass_and_end_in_another(
    run: Callable[..., Any],
) -> None:
    """A capture of such a training prints nothing either."""
    done = run("""
from torchmem.sdk.pytorch.backend import TorchBackend
backend = TorchBackend()
def record(_): backend.stop_history() if backend.owns_history() else backend.start_history(1000)
weight = torch.ones(4, device="cuda", requires_grad=True)
weight.register_post_accumulate_grad_hook(record)
for _ in range(4): weight.sum().backward()
""")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_rank_with_pending_memory_is_exported(
    run: Callable[..., Any], series: Callable[..., Any]
) -> None:
    """With a prefetcher on a stream of its own, the exporter serves all of the rank's series."""
    done = run(
        LOOP
        + """
import ctypes
side = torch.cuda.Stream()
for _ in range(4):
    with torch.cuda.stream(side): batch = torch.ones(9001, 300, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    batch.record_stream(torch.cuda.current_stream())
    model(batch).mean().backward()
    ctypes.CDLL(None).phantom_hold_events(1)
    del batch
    optimizer.step()
session.close()
"""
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = {labels["component"]: size for labels, size in series("torchmem_component_bytes")}

    assert found["pending"] >= 4 * 9001 * 300
    assert min(found.values()) >= 0
    assert sum(size for _, size in series("torchmem_active_bytes")) == sum(found.values())
    assert [count for _, count in series("torchmem_steps_total")] == [4.0]
    for metric in ("rejected_samples", "impossible_values"):
        assert not any(count for _, count in series(f"torchmem_exporter_{metric}_total"))


@pytest.mark.parametrize("cap", [1, 100])
def test_buckets_that_gradients_are_views_of_are_gradients(
    run: Callable[..., Any], cap: int
) -> None:
    """With DDP's gradient_as_bucket_view, buckets stay gradients between steps."""
    done = run(
        f"""
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
session = sdk.instrument(interval=1e-6, port=0, idle_after=0.01)
model = torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(4)]).cuda()
ddp = torch.nn.parallel.DistributedDataParallel(
    model, gradient_as_bucket_view=True, bucket_cap_mb={cap})
"""
        """
optimizer = torch.optim.AdamW(ddp.parameters())
def components_after(moment):
    while True:
        for device in [each for sample in published() for each in sample["devices"]]:
            components = device["components"] or {}
            if "step" in components and device["layout"]["timestamp"] > moment:
                return components
        time.sleep(0.01)
rows = []
for _ in range(4):
    ddp(torch.randn(64, 700, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    rows.append(components_after(time.time()))
size = sum(p.nbytes for p in model.parameters())
print(json.dumps([rows, size, session.errors.counts["components"]]))
dist.destroy_process_group()
"""
    )
    assert done.returncode == 0, done.stderr
    rows, size, errors = json.loads(done.stdout.splitlines()[-1])

    assert [size] * 4 == [row["gradients"] for row in rows]
    assert [row["step"] for row in rows] == [0] * 4
    assert errors == 0


def test_a_buffer_of_gradients_is_not_kept(run: Callable[..., Any]) -> None:
    """What gradients are views of is found once, and freed when the script drops it."""
    done = run("""
from torchmem.sdk.pytorch.storages import TensorReader
reader, flat = TensorReader(torch), torch.zeros(3000, device="cuda")
parameters = [torch.nn.Parameter(torch.zeros(1000, device="cuda")) for _ in range(3)]
for parameter, view in zip(parameters, flat.split(1000)): parameter.grad = view
storages = reader.viewed_storages(parameters)
def found():
    sizes = {}
    for storage in storages: storage.add(sizes)
    return [size for by_address in sizes.values() for size in by_address.values()]
rows = [found()]
for parameter in parameters: parameter.grad = None
del view; rows.append(found()); before = torch.cuda.memory_allocated()
del flat; rows += [found(), [before - torch.cuda.memory_allocated()]]
print(json.dumps(rows))
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[12_000], [12_000], [], [12_288]]


def test_components_at_an_oom(run: Callable[..., Any]) -> None:
    """At an OOM in the backward pass the gradients that exist are counted, and all add up."""
    done = run(
        LOOP
        + """
class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, value): return value.clone()
    @staticmethod
    def backward(context, gradient):
        Failing.truth = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
for _ in range(3): step()
try: model[2:](Failing.apply(model[:2](torch.randn(64, 300, device="cuda")))).mean().backward()
except torch.OutOfMemoryError: pass
found = serve("torchmem_component_bytes")
parameters = sum(p.nbytes for p in model.parameters())
print(json.dumps([found, Failing.truth, parameters]))
"""
    )
    assert done.returncode == 0, done.stderr
    found, gradients, parameters = json.loads(done.stdout.splitlines()[-1])

    assert parameters // 2 == gradients == found["gradients"]
    assert parameters == found["parameters"]
    assert 2 * parameters == found["optimizer_state"]
    assert found["step"] > 0


@pytest.mark.parametrize("interval", [1e-6, 3600.0])
def test_an_oom_in_a_fast_loop_says_since_when(run: Callable[..., Any], interval: float) -> None:
    """What was allocated since the latest step that was read is not said to be of this step."""
    done = run(
        LOOP.replace("1e-6", str(interval))
        + """
from torchmem.explain.oom_report import decode, memory_parts
from torchmem.explain.parts import part_words
for _ in range(12): step()
kept, before = [], torch.cuda.memory_allocated()
for _ in range(200):
    kept.append(torch.empty(5 << 20, dtype=torch.uint8, device="cuda")); step()
leaked = torch.cuda.memory_allocated() - before
within = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
try: torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError: pass
(path,) = glob.glob(os.environ["TORCHMEM_RUN_DIR"] + "/*/*.oom.json")
report = decode(open(path, "rb").read())
parts = {part_words(part, report.steps.unread): part.bytes for part in memory_parts(report)}
print(json.dumps([parts, leaked, report.steps.count]))
"""
    )
    assert done.returncode == 0, done.stderr
    parts, leaked, steps = json.loads(done.stdout.splitlines()[-1])

    assert steps == 212
    named = {name: size for name, size in parts.items() if name.startswith("allocated")}
    if interval < 1:
        assert named == {"allocated within this step": 100 << 20}
    else:
        assert {f"allocated in the last {212 - 11 + 1} steps": leaked + (100 << 20)} == named


def test_parameters_of_modules_without_an_optimizer(run: Callable[..., Any]) -> None:
    """In inference the parameters of all models count, of whatever kind, and all add up."""
    done = run(
        """
import copy, itertools
from torch import nn
from torchmem.sdk.components.components import Components
from torchmem.sdk.safety.errors import Errors
from torchmem.sdk.reading.recorder import Recorder
from torchmem.sdk.pytorch.backend import TorchBackend

class Lazy(nn.Linear):
    reads = asked = False
    def __getattr__(self, name):
        Lazy.asked = Lazy.asked or Lazy.reads
        return super().__getattr__(name)

def infer():
    backend, errors, clock = TorchBackend(), Errors(), itertools.count(0, 1.0)
    recorder = Recorder(backend)
    recorder.components = Components(
        backend.tensor_counter(), errors, lambda: next(clock) * 0.05, backend.modules()
    )
    with torch.device("meta"):
        late = nn.TransformerEncoderLayer(96, 6, 200, batch_first=True)
    model = nn.Sequential(Lazy(300, 300), nn.Embedding(99, 31), nn.BatchNorm1d(77)).cuda()
    model.append(nn.Linear(300, 300, bias=False).cuda())
    model[3].weight = model[0].weight  # tied
    loaded = copy.deepcopy(model).half()
    model.append(loaded)
    late.to_empty(device="cuda")
    on_cpu, empty = nn.Linear(50, 50), nn.LazyLinear(9)
    cache = [torch.zeros(1000, 99, device="cuda") for _ in range(3)]
    rows = []
    Lazy.reads = True
    for _ in range(2000):
        recorder.read_stats()
        (device,) = recorder.samples()
        if device.components: break
    Lazy.reads = False
    parameters = {p.data_ptr(): p.nbytes for m in (model, late) for p in m.parameters()}
    rows.append([device.components, sum(parameters.values()), torch.cuda.memory_allocated()])
    del late
    recorder.read_stats()
    rows.append(recorder.samples()[0].components)
    print(json.dumps([rows, errors.counts, Lazy.asked]))
infer()
"""
    )
    assert done.returncode == 0, done.stderr
    (first, after), errors, was_asked = json.loads(done.stdout.splitlines()[-1])
    found, parameters, allocated = first

    assert parameters == found["parameters"] > 800_000
    assert allocated == sum(found.values())
    assert found.keys() == {"parameters", "held", "rounding"}
    assert after == {}
    assert not was_asked
    assert "components" not in errors
