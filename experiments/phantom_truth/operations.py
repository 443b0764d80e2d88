"""Measure what single operations take from PyTorch's allocator, and what is outside of it.

Usage: `python -m experiments.phantom_truth.operations fft linalg`. Every group runs in the order of
the arguments. Prints one line of JSON: for each operation the peak above what was allocated before
it, in bytes, including the result; and after each group the memory of this process outside the
allocator, as NVML reports it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as in PyTorch's documentation
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Operation = Callable[[], Any]
Operations = dict[str, Operation]
HALF, BRAIN, COMPLEX = torch.float16, torch.bfloat16, torch.complex64


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return random numbers on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


def positive(*shape: int) -> Tensor:
    """Return positive definite matrices."""
    matrix = random(*shape)
    return matrix @ matrix.mT + shape[-1] * torch.eye(shape[-1], device="cuda")


def with_gradients(module: nn.Module, *inputs: Tensor, dtype: torch.dtype | None = None) -> None:
    """Run a module forward and backward, in autocast if `dtype` is given."""
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        output = module(*(each.requires_grad_(each.is_floating_point()) for each in inputs))
    output = output[0] if isinstance(output, tuple) else output
    output.float().sum().backward()


def inference(module: nn.Module, *inputs: Tensor) -> None:
    """Run a module as for inference, but with gradients, as scripts do that forget `no_grad`."""
    module.eval()(*inputs)


def gelu_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return GELU of a module's output, which cuBLASLt can compute in one."""
    return F.gelu(module(inputs))


def attend(backend: SDPBackend, shape: tuple[int, ...], is_causal: bool) -> None:
    """Run attention forward and backward."""
    queries = random(*shape, dtype=BRAIN).requires_grad_()
    with sdpa_kernel(backend):
        F.scaled_dot_product_attention(
            queries, queries, queries, is_causal=is_causal
        ).sum().backward()


def fft() -> Operations:
    """Return transforms of lengths with small and with large prime factors."""
    cases: Operations = {}
    for length in (1024, 1000, 1021, 2 * 1021, 1 << 20, 1009 * 1013):
        rows = max(1, (1 << 22) // length)
        real, number = random(rows, length), random(rows, length, dtype=COMPLEX)
        cases[f"fft {rows}x{length}"] = partial(torch.fft.fft, number)
        cases[f"rfft {rows}x{length}"] = partial(torch.fft.rfft, real)
        cases[f"irfft {rows}x{length}"] = partial(torch.fft.irfft, number, n=length)
    for side in (1024, 1000, 1021):
        plane = random(4, side, side, dtype=COMPLEX)
        cases[f"fft2 4x{side}x{side}"] = partial(torch.fft.fft2, plane)
    cube = random(128, 128, 128)
    cases["rfftn 128³"] = partial(torch.fft.rfftn, cube)
    wave = random(8, 1 << 18)
    window = torch.hann_window(1024, device="cuda")
    cases["stft 8x262144"] = lambda: torch.stft(wave, 1024, window=window, return_complex=True)
    return cases


def linalg() -> Operations:
    """Return factorizations and solutions, of one matrix and of many."""
    cases: Operations = {}
    for shape in ((512, 512), (2048, 2048), (64, 128, 128)):
        square, definite, right = random(*shape), positive(*shape), random(*shape[:-1], 16)
        name = "x".join(map(str, shape))
        calls: dict[str, Operation] = {
            "solve": partial(torch.linalg.solve, square, right),
            "inv": partial(torch.linalg.inv, square),
            "lu_factor": partial(torch.linalg.lu_factor, square),
            "qr": partial(torch.linalg.qr, square),
            "cholesky": partial(torch.linalg.cholesky, definite),
            "cholesky_inverse": partial(torch.cholesky_inverse, definite),
            "eigh": partial(torch.linalg.eigh, definite),
            "eigvalsh": partial(torch.linalg.eigvalsh, definite),
            "svd": partial(torch.linalg.svd, square),
            "svd gesvd": partial(torch.linalg.svd, square, driver="gesvd"),
            "svd gesvda": partial(torch.linalg.svd, square, driver="gesvda"),
            "lstsq": partial(torch.linalg.lstsq, square, right),
            "slogdet": partial(torch.linalg.slogdet, square),
            "solve_triangular": partial(torch.linalg.solve_triangular, definite, right, upper=True),
        }
        cases |= {f"{call} {name}": operation for call, operation in calls.items()}
    return cases


def sparse() -> Operations:
    """Return products with sparse matrices of 16 entries a row, and a solution."""
    cases: Operations = {}
    for rows in (4096, 1 << 18):
        starts = torch.arange(0, 16 * rows + 1, 16)
        columns = (torch.arange(16 * rows) * 7919) % rows
        columns = columns.reshape(rows, 16).sort(dim=1).values.reshape(-1)
        matrix = torch.sparse_csr_tensor(starts, columns, torch.ones(16 * rows), (rows, rows))
        matrix, right = matrix.cuda(), random(rows, 32)
        coordinates = matrix.to_sparse_coo()
        cases[f"csr @ dense {rows}"] = partial(torch.matmul, matrix, right)
        cases[f"csr @ vector {rows}"] = partial(torch.mv, matrix, right[:, 0].contiguous())
        cases[f"coo @ dense {rows}"] = partial(torch.matmul, coordinates, right)
        cases[f"sampled_addmm {rows}"] = partial(
            torch.sparse.sampled_addmm, matrix, right, right.mT.contiguous()
        )
    return cases


def convolutions() -> Operations:
    """Return convolutions forward and backward, in each precision and both layouts."""
    cases: Operations = {}
    shapes = {
        "7x7/2 3→64 @224": (3, 64, 7, 2, 224),
        "3x3 64→64 @56": (64, 64, 3, 1, 56),
        "1x1 256→64 @56": (256, 64, 1, 1, 56),
        "3x3/2 256→256 @28": (256, 256, 3, 2, 28),
        "3x3 512→512 @7": (512, 512, 3, 1, 7),
    }
    for name, (inputs, outputs, kernel, stride, side) in shapes.items():
        for precision, dtype in {"fp32": None, "fp16": HALF, "bf16": BRAIN}.items():
            for layout in (torch.contiguous_format, torch.channels_last):
                layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False).cuda()
                layer = layer.to(memory_format=layout)
                image = random(64, inputs, side, side).to(memory_format=layout)
                label = "nhwc" if layout is torch.channels_last else "nchw"
                cases[f"{name} {precision} {label}"] = partial(
                    with_gradients, layer, image, dtype=dtype
                )
    depthwise, image = nn.Conv2d(256, 256, 3, padding=1, groups=256).cuda(), random(64, 256, 28, 28)
    cases["depthwise 256 @28"] = lambda: with_gradients(depthwise, image)
    upward, small = nn.ConvTranspose2d(256, 128, 4, 2, 1).cuda(), random(32, 256, 28, 28)
    cases["transposed 256→128 @28"] = lambda: with_gradients(upward, small)
    volume, cube = nn.Conv3d(16, 32, 3, padding=1).cuda(), random(4, 16, 32, 64, 64)
    cases["3d 16→32"] = lambda: with_gradients(volume, cube)
    return cases


def recurrent() -> Operations:
    """Return what else cuDNN computes: recurrent networks, CTC, batch normalization."""
    cases: Operations = {}
    sequence = random(128, 32, 512)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for directions in (1, 2):
            for dtype in (None, HALF):
                network = kind(512, 512, 2, bidirectional=directions == 2).cuda()
                name = f"{kind.__name__} x{directions} {'fp16' if dtype else 'fp32'}"
                cases[name] = partial(with_gradients, network, sequence, dtype=dtype)
                cases[f"{name} inference"] = partial(inference, network, sequence)
    normalization, image = nn.BatchNorm2d(256).cuda(), random(64, 256, 28, 28)
    cases["batch_norm fp32"] = lambda: with_gradients(normalization, image)
    half = image.half()
    cases["batch_norm fp16"] = lambda: with_gradients(normalization, half, dtype=HALF)
    logs = random(150, 16, 40)
    targets, lengths = torch.randint(1, 40, (16 * 30,), dtype=torch.int32), torch.full((16,), 30)
    cases["ctc_loss"] = lambda: F.ctc_loss(
        logs.requires_grad_().log_softmax(2), targets, [150] * 16, lengths.tolist()
    ).backward()
    return cases


def attention() -> Operations:
    """Return attention forward and backward by each implementation."""
    cases: Operations = {}
    for name, backend in {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }.items():
        for length, head in ((512, 64), (2048, 128), (1000, 96)):
            for causal in (True, False):
                cases[f"{name} {length}x{head}{' causal' if causal else ''}"] = partial(
                    attend, backend, (4, 16, length, head), causal
                )
    return cases


def blas() -> Operations:
    """Return matrix products, and layers of a transformer."""
    cases: Operations = {}
    for dtype in (torch.float32, BRAIN):
        name = "fp32" if dtype is torch.float32 else "bf16"
        square, batch = random(4096, 4096, dtype=dtype), random(64, 512, 512, dtype=dtype)
        layer = nn.Linear(4096, 4096, device="cuda", dtype=dtype)
        cases[f"mm 4096 {name}"] = partial(torch.matmul, square, square)
        cases[f"bmm 64x512 {name}"] = partial(torch.matmul, batch, batch)
        cases[f"linear 4096 {name}"] = partial(with_gradients, layer, square)
        cases[f"linear+gelu 4096 {name}"] = partial(gelu_of, layer, square)
    small = torch.ones(64, 64, device="cuda", dtype=torch.int8)
    cases["_int_mm 64"] = lambda: torch._int_mm(small, small)  # noqa: SLF001
    return cases


def sorting() -> Operations:
    """Return operations with temporary memory of PyTorch's own kernels."""
    values = random(1 << 24)
    indices = (torch.arange(1 << 22, device="cuda") * 7919) % 50_000
    table = nn.Embedding(50_000, 256).cuda()
    logits = random(8192, 32_000)
    labels = torch.zeros(8192, dtype=torch.long, device="cuda")
    return {
        "sort 16M": values.sort,
        "sort rows": lambda: values.view(4096, 4096).sort(dim=1),
        "argsort stable": lambda: values.argsort(stable=True),
        "topk 100": lambda: values.topk(100),
        "topk rows": lambda: values.view(4096, 4096).topk(8, dim=1),
        "cumsum": lambda: values.cumsum(0),
        "median": values.median,
        "std": values.std,
        "histc": lambda: values.histc(100),
        "multinomial": lambda: values.view(4096, 4096).abs().multinomial(1),
        "cross_entropy": lambda: F.cross_entropy(logits.requires_grad_(), labels).backward(),
        "embedding": lambda: with_gradients(table, indices[: 1 << 16]),
        "index_put": lambda: values.clone().index_put_(
            (indices,), values[: 1 << 22], accumulate=True
        ),
        "index_add": lambda: random(50_000, 64).index_add_(
            0, indices[: 1 << 16], values[: 1 << 22].view(-1, 64)
        ),
        "scatter_add": lambda: random(50_000).scatter_add_(0, indices, values[: 1 << 22]),
        "layer_norm": lambda: with_gradients(nn.LayerNorm(4096).cuda(), values.view(4096, 4096)),
        "dropout": lambda: F.dropout(values, 0.1),
    }


GROUPS: dict[str, Callable[[], Operations]] = {
    group.__name__: group
    for group in (blas, fft, linalg, sparse, convolutions, recurrent, attention, sorting)
}


def peak(operation: Operation) -> int | str:
    """Return the peak bytes of an operation above what was allocated before, or its error."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    try:
        operation()
        torch.cuda.synchronize()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return int(torch.cuda.max_memory_allocated() - before)


def outside() -> int | None:
    """Return this process's memory on the GPU besides PyTorch's segments, in bytes."""
    used = process_bytes()
    return None if used is None else used - torch.cuda.memory_reserved()


def process_bytes() -> int | None:
    """Return what NVML counts for this process; None if it does not."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    own = [each.usedGpuMemory for each in processes if each.pid == os.getpid()]
    return own[0] if own else None


def measure(name: str) -> dict[str, int | str]:
    """Return the peaks of one group: of the second run, when workspaces that stay exist."""
    peaks: dict[str, int | str] = {}
    operations = GROUPS[name]()
    for label, operation in operations.items():
        peak(operation)
        peaks[label] = peak(operation)
    return peaks


def main(names: list[str]) -> None:
    """Measure the groups, and print."""
    torch.zeros(1, device="cuda")
    figures: dict[str, Any] = {"outside": {"the first tensor": outside()}, "peaks": {}}
    for name in names or GROUPS:
        figures["peaks"][name] = measure(name)
        torch.cuda.empty_cache()
        figures["outside"][name] = outside()
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
