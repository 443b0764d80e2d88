"""torch.compile, Triton, run-time compilation, and CUDA graphs on a phantom GPU."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from support.phantom import json_of_script

pytestmark = [
    pytest.mark.allocator,
    pytest.mark.skipif(
        not Path(sysconfig.get_path("include"), "Python.h").exists(),
        reason="Triton needs Python's C headers, which are not installed (apt install python3-dev)",
    ),
]

TRAINING = """
from torch._inductor import metrics
def held_after(mode, model):
    torch._dynamo.reset()
    optimizer, compiled = torch.optim.AdamW(model.parameters()), torch.compile(model, mode=mode)
    for _ in range(5):
        x, y = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")
        torch.nn.functional.cross_entropy(compiled(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield torch.cuda.memory_allocated()
def new():
    layers = torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 10)
    return torch.nn.Sequential(*layers).cuda()
plain = list(held_after("default", new()))
kernels = metrics.generated_kernel_count
graphs = list(held_after("reduce-overhead", new()))
private = [s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
weights = sum(weight.nbytes for weight in new().parameters())
print(json.dumps({"kernels": kernels, "plain": plain, "graphs": graphs, "private": sum(private),
    "weights": weights}))
"""


def test_a_compiled_model_trains(tmp_path: Path) -> None:
    """Forward and backward run as generated kernels and CUDA graphs, and memory is steady."""
    answer = json_of_script(TRAINING, tmp_path)

    assert answer["kernels"] >= 2
    assert answer["private"]
    for held in (answer["plain"], answer["graphs"]):
        # The weights, and two values for each that AdamW keeps.
        assert held[-1] == held[-2] >= 3 * answer["weights"]


TRITON = """
import triton, triton.language as tl

@triton.autotune(configs=[triton.Config({"B": b}) for b in (128, 1024)], key=["n"])
@triton.jit
def add(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

@triton.jit
def copy(x, n, B: tl.constexpr):
    tensor = tl.make_tensor_descriptor(x, shape=[n, n], strides=[n, 1], block_shape=[B, B])
    tensor.store([0, 0], tensor.load([0, 0]))

x = torch.randn(10000, device="cuda")
add[lambda meta: (triton.cdiv(10000, meta["B"]),)](x, torch.empty_like(x), 10000)
before = torch.cuda.memory_stats()["allocation.all.allocated"]
scratch_sizes = []
def scratch(size, alignment, stream):
    scratch_sizes.append(size)
    return torch.empty(size, dtype=torch.int8, device="cuda")
triton.set_allocator(scratch)
copy[(4,)](torch.zeros(128, 128, device="cuda", dtype=torch.float16), 128, B=64)
taken = torch.cuda.memory_stats()["allocation.all.allocated"] - before
print(json.dumps({"tuned": len(add.configs_timings), "scratch": scratch_sizes, "taken": taken,
    "times": [bench(lambda: x + 1)
        for bench in (triton.testing.do_bench, triton.testing.do_bench_cudagraph)]}))
"""


def test_custom_triton_kernels_run(tmp_path: Path) -> None:
    """They are compiled, tuned, launched, and timed, with scratch memory of the allocator."""
    answer = json_of_script(TRITON, tmp_path)

    assert answer["tuned"] == 2
    assert answer["scratch"]
    assert answer["taken"] == len(answer["scratch"]) + 1  # the tensor itself
    assert all(time > 0 for time in answer["times"])


RUN_TIME = """
from torch.cuda import _compile_kernel
x = torch.randn(64, 64, device="cuda")
fused = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x + 1; }")
kernel = _compile_kernel('extern "C" __global__ void f(float *x, int n) { x[0] = n; }', "f")
kernel((1, 1, 1), (32, 1, 1), (x, 3))
scripted = torch.jit.trace(lambda a: (a + 1).relu(), x)
results = fused(x), torch.special.zeta(x, x), [scripted(x) for _ in range(3)][2]
print(json.dumps([list(result.shape) for result in results]))
"""


def test_code_compiled_by_nvrtc_runs(tmp_path: Path) -> None:
    """Jiterator, special functions, TorchScript's fuser, and CUDA C++ compile and launch."""
    assert json_of_script(RUN_TIME, tmp_path) == [[64, 64]] * 3


GRAPHS = """
model, x = torch.nn.Linear(256, 256).cuda(), torch.randn(64, 256, device="cuda")
model(x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    first, side = model(x), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = first + 1
    torch.cuda.current_stream().wait_stream(side)
graph.replay()
graphed = torch.cuda.make_graphed_callables(torch.nn.Linear(256, 256).cuda(), (x,))
graphed(x).sum().backward()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    message = ""
except RuntimeError as error:
    message = str(error)
after = (x + 1).sum().item()
private = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
held, outputs = sum(s["allocated_size"] for s in private), first.nbytes + second.nbytes
print(json.dumps({"message": message, "after": after, "held": held, "outputs": outputs,
    "capturing": torch.cuda.is_current_stream_capturing()}))
"""


def test_graphs_keep_their_outputs_and_refuse_to_wait(tmp_path: Path) -> None:
    """A graph keeps its tensors in its pool; reading a value during capture fails as on CUDA."""
    answer = json_of_script(GRAPHS, tmp_path)

    assert answer["held"] >= answer["outputs"]
    assert "previous error during capture" in answer["message"]
    assert not answer["capturing"]
    assert answer["after"] == 0
