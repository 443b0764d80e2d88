"""Calls of cuBLAS, cuSOLVER, cuSPARSE and cuFFT: the form of results, and workspaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.phantom import SCRIPT_MEMORY, json_of_script, run_on_phantom

pytestmark = pytest.mark.allocator

ROOT = Path(__file__).resolve().parents[2]

# Makes each call on the host and on the GPU; "differ" has those whose results differ in form.
COMPARING = """
torch.manual_seed(0)
def form(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), str(value.layout), list(value.shape)]
    return [form(each) for each in value] if isinstance(value, (tuple, list)) else repr(value)
def on(device, call):
    def there(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value
    try:
        return form(call(*[there(value) for value in VALUES]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def compare(calls):
    forms = {name: [on("cpu", call), on("cuda", call)] for name, call in calls.items()}
    differ = {name: pair for name, pair in forms.items()
              if pair[0] != pair[1] or "Error" in pair[0]}
    print(json.dumps({"calls": len(forms), "differ": differ}))
"""

LINALG = """
L = torch.linalg
base = torch.randn(3, 24, 24)
good = base @ base.mT + torch.eye(24)
VALUES = good, torch.randn(3, 24, 5)
ONE = '''cholesky cholesky_ex det eig eigh eigvals eigvalsh inv inv_ex ldl_factor lu lu_factor
matrix_norm matrix_rank pinv qr slogdet svd svdvals'''.split()
TWO = {
    "solve": L.solve, "lstsq": lambda a, b: L.lstsq(a, b)[0],
    "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a),
    "triangular": lambda a, b: L.solve_triangular(a, b, upper=True),
    "lu_solve": lambda a, b: L.lu_solve(*L.lu_factor(a), b),
    "ldl_solve": lambda a, b: L.ldl_solve(*L.ldl_factor(a), b),
    "ormqr": lambda a, b: torch.ormqr(a, b[..., 0], b),
    "orgqr": lambda a, b: L.householder_product(a, b[..., 0]),
    "lu_unpack": lambda a, b: torch.lu_unpack(*L.lu_factor(a)),
    "one": lambda a, b: L.solve(a[0], b[0]),
}
calls = dict(TWO)
CHANGES = {"batch": lambda a: a, "one": lambda a: a[0], "tall": lambda a: a[..., :8],
           "double": torch.Tensor.double, "complex": lambda a: a.to(torch.complex64)}
for kind, change in CHANGES.items():
    for name in ("svd", "svdvals", "qr", "pinv", "lu", "lu_factor") if kind == "tall" else ONE:
        calls[f"{name} {kind}"] = lambda a, b, name=name, change=change: getattr(L, name)(change(a))
compare(calls)
"""

FFT = """
F = torch.fft
complex_values = torch.randn(4, 30, 32, dtype=torch.complex64)
VALUES = torch.randn(4, 30, 32), complex_values, torch.hann_window(16)
real = "fft ifft rfft fft2 ifft2 rfft2 fftn ifftn rfftn".split()
half = "irfft irfft2 irfftn hfft fft".split()
def stft(x, w):
    return torch.stft(x[0], 16, window=w, return_complex=True)
calls = {name: lambda x, z, w, name=name: getattr(F, name)(x) for name in real}
calls |= {name: lambda x, z, w, name=name: getattr(F, name)(z) for name in half}
calls |= {"double": lambda x, z, w: F.fft(x.double()), "prime": lambda x, z, w: F.fft(x, n=97),
          "stft": lambda x, z, w: stft(x, w),
          "istft": lambda x, z, w: torch.istft(stft(x, w), 16, window=w)}
compare(calls)
"""

SPARSE = """
dense = torch.randn(6, 4)
index = torch.tensor
coo = torch.sparse_coo_tensor(index([[0, 1, 2], [2, 0, 2]]), torch.ones(3), (3, 6))
csr = torch.sparse_csr_tensor(index([0, 2, 3, 4]), index([0, 1, 1, 2]), torch.ones(4), (3, 3))
bsr = torch.sparse_bsr_tensor(index([0, 1, 2]), index([0, 1]), torch.ones(2, 2, 2), (4, 4))
VALUES = dense, coo, csr, bsr
def gradient(x, coo, csr, bsr):
    weight = x.clone().requires_grad_()
    torch.sparse.mm(coo, weight).sum().backward()
    return weight.grad
def embedding(x, coo, csr, bsr):
    table = torch.nn.Embedding(10, 8, sparse=True).to(x.device)
    table(torch.zeros(4, 6, dtype=torch.long, device=x.device)).sum().backward()
    torch.optim.SparseAdam(table.parameters()).step()
    return table.weight
compare({
    "coo mm": lambda x, coo, csr, bsr: torch.sparse.mm(coo, x),
    "coo coo": lambda x, coo, csr, bsr: torch.sparse.mm(coo, coo.t()),
    "coo add": lambda x, coo, csr, bsr: coo + coo,
    "to dense": lambda x, coo, csr, bsr: coo.to_dense(),
    "addmm": lambda x, coo, csr, bsr: torch.sparse.addmm(x[:3], coo, x),
    "softmax": lambda x, coo, csr, bsr: torch.sparse.softmax(coo, 1),
    "csr mm": lambda x, coo, csr, bsr: csr @ x[:3],
    "csr mv": lambda x, coo, csr, bsr: csr @ x[:3, 0],
    "csr csr": lambda x, coo, csr, bsr: csr @ csr, "csr add": lambda x, coo, csr, bsr: csr + csr,
    "sampled": lambda x, coo, csr, bsr: torch.sparse.sampled_addmm(csr, x[:3], x[:3].t()),
    "solve": lambda x, coo, csr, bsr: torch.triangular_solve(x[:3], csr)[0],
    "coo csr": lambda x, coo, csr, bsr: coo.coalesce().to_sparse_csr(),
    "csr csc": lambda x, coo, csr, bsr: csr.to_sparse_csc(),
    "bsr mm": lambda x, coo, csr, bsr: bsr @ x[:4],
    "bsr mv": lambda x, coo, csr, bsr: bsr @ x[:4, 0],
    "gradient": gradient, "embedding": embedding,
})
"""

BLAS = """
VALUES = torch.randn(3, 16, 16), torch.randn(16)
calls = {}
names = "float32 float64 bfloat16 float16 complex64 complex128".split()
for dtype in [getattr(torch, name) for name in names]:
    calls |= {
        f"mm {dtype}": lambda a, v, t=dtype: a[0].to(t) @ a[1].to(t),
        f"bmm {dtype}": lambda a, v, t=dtype: a.to(t) @ a.to(t),
        f"mv {dtype}": lambda a, v, t=dtype: a[0].to(t) @ v.to(t),
        f"dot {dtype}": lambda a, v, t=dtype: v.to(t) @ v.to(t),
        f"vdot {dtype}": lambda a, v, t=dtype: torch.vdot(v.to(t), v.to(t)),
        f"addmm {dtype}": lambda a, v, t=dtype: torch.addmm(v.to(t), a[0].to(t), a[1].to(t)),
        f"baddbmm {dtype}": lambda a, v, t=dtype: torch.baddbmm(a.to(t), a.to(t), a.to(t)),
    }
calls["multi_dot"] = lambda a, v: torch.linalg.multi_dot([a[0], a[1], v])
calls["linear"] = lambda a, v: torch.nn.functional.gelu(torch.nn.functional.linear(a, a[0], v))
calls["int8"] = lambda a, v: torch._int_mm(a.to(torch.int8).reshape(-1, 16), a[0].to(torch.int8))
compare(calls)
"""


@pytest.mark.parametrize(
    "calls", [LINALG, FFT, SPARSE, BLAS], ids=["linalg", "fft", "sparse", "blas"]
)
def test_results_have_the_same_form_as_on_the_host(calls: str, tmp_path: Path) -> None:
    """Type, layout and shape of every result equal those of the same call on the CPU."""
    answer = json_of_script(COMPARING + calls, tmp_path)

    assert answer["differ"] == {}
    assert answer["calls"] >= 17


WORKSPACES = """
def temporary_bytes(call, *shape, dtype=torch.float32):
    values = torch.randn(*shape, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call(values)
    tensors = result if isinstance(result, tuple) else [result]
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - held
complex64 = {"dtype": torch.complex64}
rows, columns = torch.arange(4097), torch.zeros(4096, dtype=torch.long)
sparse = torch.sparse_csr_tensor(rows, columns, torch.ones(4096), (4096, 8)).cuda()
print(json.dumps({
    "short": temporary_bytes(torch.fft.fft, 64, 1021, **complex64),
    "long": temporary_bytes(torch.fft.fft, 2, 1 << 20, **complex64),
    "real": temporary_bytes(torch.fft.rfft, 2, 1 << 20),
    "primes": temporary_bytes(torch.fft.fft, 64, 10007, **complex64),
    "eigh": [temporary_bytes(torch.linalg.eigh, n, n) for n in (600, 1200)],
    "spmm": temporary_bytes(lambda x: sparse @ x, 8, 4),
}))
"""


def test_workspaces_come_from_the_allocator(tmp_path: Path) -> None:
    """A long transform takes a copy of its data, four with a large prime; eigh grows with n²."""
    answer: dict[str, Any] = json_of_script(WORKSPACES, tmp_path)

    assert answer["short"] == 0
    assert answer["long"] == 2 * answer["real"] == 2 * (1 << 20) * 8
    assert answer["primes"] == pytest.approx(4.05 * 64 * 10007 * 8, rel=1e-4)
    small, large = answer["eigh"]
    assert 3.5 < large / small < 4.5
    assert answer["spmm"] >= 4096 / 3


MEASURED = json.loads((ROOT / "experiments/phantom_truth/h200.json").read_bytes())["operations"]
GROUPS = ("blas", "fft", "sorting")  # others depend on PyTorch's version, too
MEASURING = f"""
sys.path.insert(0, {str(ROOT)!r})
from experiments.phantom_truth.operations import measure
torch.zeros(1, device="cuda")
print(json.dumps({{group: measure(group) for group in {GROUPS}}}))
"""


@pytest.fixture(scope="module")
def measured_here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the peaks of operations on the phantom GPU, by group."""
    peaks: dict[str, dict[str, Any]] = json_of_script(MEASURING, tmp_path_factory.mktemp("peaks"))
    return peaks


@pytest.mark.parametrize("group", GROUPS)
def test_peaks_are_those_of_an_h200(group: str, measured_here: dict[str, dict[str, Any]]) -> None:
    """Operations need what they needed on an H200, within 2% or 4 KiB."""
    there, here = MEASURED[group]["peaks"][group], measured_here[group]
    differ = {
        name: (there[name], here[name])
        for name in there
        if here[name] != pytest.approx(there[name], rel=0.02, abs=4096)
    }

    assert differ == {}


LACKING = """
torch.nn.functional.linear(torch.zeros(128, 128, device="cuda").half(),
    torch.sparse.to_sparse_semi_structured(torch.tensor([0, 0, 1, 1]).tile(128, 32).half().cuda()))
"""


def test_a_lacking_library_is_named(tmp_path: Path) -> None:
    """Semi-structured sparsity (cuSPARSELt) ends with a traceback, and the call is named."""
    with pytest.raises(AssertionError) as stopped:
        json_of_script(LACKING, tmp_path)

    assert "the phantom GPU does not support cusparseLtInit" in str(stopped.value)
    assert "RuntimeError" in str(stopped.value)


@pytest.mark.parametrize(
    ("call", "libraries"),
    [
        ("x @ x", ""),
        ("torch.fft.fft(x)", "cuFFT"),
        ("torch.linalg.qr(x)", "cuSOLVER"),
        ("torch.nn.LSTM(8, 8).cuda()(x)", "cuDNN"),
    ],
)
def test_libraries_with_estimated_workspaces_are_named(
    call: str, libraries: str, tmp_path: Path
) -> None:
    """A library is in the file `estimated` once if a workspace of it was an estimate."""
    state = tmp_path / "state"
    script = f"import torch; x = torch.zeros(8, 8, device='cuda'); {call}; {call}"
    done = run_on_phantom("-c", script, memory=SCRIPT_MEMORY, state=state, environment={})
    path = state / "estimated"

    assert done.returncode == 0, done.stderr
    assert libraries == (path.read_text().strip() if path.exists() else "")
