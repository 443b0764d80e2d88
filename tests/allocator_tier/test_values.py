"""Values that a script reads from a phantom GPU: zeros, passed checks, and the host's writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.phantom import json_of_script

pytestmark = pytest.mark.allocator

# Evaluates all expressions in one process; an error gives the name of its type.
SCRIPT = """
import math
F = torch.nn.functional
x, labels = torch.randn(8, 16, device="cuda"), torch.randint(10, (8,), device="cuda")
loss, mask, weight = x.pow(2).mean(), x > -100, torch.nn.Parameter(x.clone())
weight.grad = x.clone()
def scaled():
    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.AdamW([weight])
    scaler.scale((weight * 2).sum()).backward()
    scaler.unscale_(optimizer); scaler.step(optimizer); scaler.update()
    return optimizer.state[weight]["step"].item()
def read(expression):
    try:
        value = eval(expression)
    except Exception as error:
        return type(error).__name__
    return list(value.shape) if isinstance(value, torch.Tensor) else value
print(json.dumps({expression: read(expression) for expression in json.loads(sys.argv[1])}))
"""

NUMBERS = {
    "loss.item()": 0.0,
    "float(loss)": 0.0,
    "x.cpu().abs().sum().item()": 0.0,
    "labels.tolist()": [0] * 8,
    "x.argmax().item()": 0,
    "math.exp(loss)": 1.0,
    "1 / loss": [],
    "math.log(loss.item())": "ValueError",
    "1 / loss.item()": "ZeroDivisionError",
    "torch.nn.utils.clip_grad_norm_([weight], 1.0).item()": 0.0,
    "torch.randperm(3, device='cuda').tolist()": [0, 0, 0],
}
CHECKS = {
    "bool(torch.isnan(loss))": False,
    "bool(torch.isnan(x).any())": False,
    "bool(torch.isinf(x).any())": False,
    "bool(torch.isfinite(loss))": True,
    "bool(torch.isfinite(x).all())": True,
    "bool(~torch.isnan(loss))": True,
    "bool(torch.logical_not(loss.isnan()))": True,
    "math.isfinite(loss)": True,
    "torch.equal(x, x.clone())": True,
    "torch.allclose(x, x + 1)": True,
    "bool((labels < 10).all())": True,
    "bool(x.min() >= 0)": True,
    "torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)": [],
    "scaled()": 1.0,
    "torch.distributions.Normal(x, x.exp()).sample()": [8, 16],
    "torch.normal(x, x.exp())": [8, 16],
    "torch.distributions.Categorical(logits=x).sample()": [8],
    "torch.multinomial(x.softmax(-1), 2)": [8, 2],
    "torch.linalg.eigvals(x[:, :8])": [8],
    "F.embedding(labels + 10**6, x)": [8, 16],
    "F.cross_entropy(x, labels + 99)": [],
}
COMPARISONS = {
    "bool(loss < 0.5)": True,
    "bool(loss > 0.5)": False,
    "bool(loss <= 0)": True,
    "bool(loss < -1)": False,
    "bool(loss.double() >= 0)": True,
    "bool(loss.bfloat16() > -1)": True,
    "bool(labels.max() < 10)": True,
    "bool(labels.max() == 3)": False,
    "bool(loss < x.max())": False,
}
SHAPES = {
    "x[mask]": [0],
    "mask.nonzero()": [0, 2],
    "x.masked_select(mask)": [0],
    "torch.unique(labels)": [0],
    "torch.repeat_interleave(x, labels, dim=0)": [0, 16],
    "F.one_hot(labels)": [8, 1],
    "F.one_hot(labels, 10)": [8, 10],
    "torch.bincount(labels)": [1],
    "torch.bincount(labels, minlength=10)": [10],
    "torch.where(mask, x, 0)": [8, 16],
    "x.masked_fill(mask, 0)": [8, 16],
    "x.topk(3).values": [8, 3],
    "x.split(labels.tolist())": "RuntimeError",
    "x[: labels.max()]": [0, 16],
}
HOST_WRITES = {
    "torch.tensor([1, 2, 3]).cuda().tolist()": [1, 2, 3],
    "torch.tensor(5.0, device='cuda').item()": 5.0,
    "(torch.tensor(5.0, device='cuda') + 0).item()": 0.0,
    "torch.tensor(False).cuda().item()": False,
}


GROUPS: dict[str, dict[str, Any]] = {
    "zero": NUMBERS,
    "checks": CHECKS,
    "comparisons": COMPARISONS,
    "shapes": SHAPES,
    "host writes": HOST_WRITES,
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the value of each expression of all groups."""
    expressions = [expression for group in GROUPS.values() for expression in group]
    answer: dict[str, Any] = json_of_script(
        SCRIPT, tmp_path_factory.mktemp("values"), json.dumps(expressions)
    )
    return answer


@pytest.mark.parametrize("group", GROUPS)
def test_values_that_a_script_reads(group: str, read: dict[str, Any]) -> None:
    """Numbers are 0, checks pass, selections are empty, and the host's writes read back."""
    assert GROUPS[group] == {expression: read[expression] for expression in GROUPS[group]}


STEPS = """
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
peaks = []
for guarded in (False, True):
    for _ in range(3):
        loss = model(torch.randn(64, 512, device="cuda")).pow(2).mean()
        if guarded:
            assert torch.isfinite(loss) and not torch.isnan(loss).any()
            assert torch.isfinite(loss).all()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=guarded)
        optimizer.step()
        optimizer.zero_grad()
    peaks.append(torch.cuda.max_memory_allocated())
print(json.dumps(peaks))
"""


def test_checks_do_not_change_the_peak(tmp_path: Path) -> None:
    """A loop that checks loss and gradients for finite values has the peak of one without."""
    plain, guarded = json_of_script(STEPS, tmp_path)

    assert plain == guarded


COMPARED = """
OPERATIONS = ("eq", "ne", "lt", "le", "gt", "ge")
READS = ("all", "any", "max", "min", "sum", "float().mean", "tolist")
EXPRESSIONS = [
    f"x.{operation}({other}).{read}()"
    for operation in OPERATIONS for other in ("-1", "0", "1", "y") for read in READS
] + [f"x.{read}()" for read in (
    "all", "any", "isnan", "isinf", "isfinite", "signbit", "logical_not", "argmax", "argmin", "max",
    "min", "sum", "mean", "prod", "nonzero", "count_nonzero", "bool", "exp", "tolist",
)] + [
    "torch.equal(x, y)", "torch.allclose(x, y)", "x.max() == 0", "x.sum() != 0", "x.bitwise_not()",
    "~(x == 0).all()", "~x.isfinite()", "((x >= 0) & (x <= 1)).all()", "((x > 0) | (x < 1)).any()",
    "((x > 0) ^ (x < 1)).all()", "torch.logical_and(x == 0, x > 0).any()",
    "torch.logical_or(x == 0, x > 0).all()", "(x == 0).clone()", "(x[::2] == 0).all()",
    "(x.t() == 0).all()", "(x == 0).all(-1)", "(x == 0)[0]", "(x == 0).sum() == x.numel()",
    "((x == 0) == True).all()", "torch.full_like(x, 1) == 1", "torch.ones_like(x).all()",
]
TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
def read(expression, values):
    try:
        value = eval(expression, values)
    except (RuntimeError, TypeError) as error:
        return type(error).__name__
    return value.tolist() if isinstance(value, torch.Tensor) else value
different = []
for name in TYPES:
    on_host, on_gpu = (
        {"torch": torch} | {
            key: torch.zeros(4, 6, dtype=getattr(torch, name), device=device) for key in "xy"
        } for device in ("cpu", "cuda")
    )
    different += [
        (name, expression) for expression in EXPRESSIONS
        if read(expression, on_host) != read(expression, on_gpu)
    ]
print(json.dumps([len(EXPRESSIONS), different]))
"""


def test_comparisons_and_reductions_are_those_of_zeros(tmp_path: Path) -> None:
    """Each comparison and reduction of a tensor of zeros has the value that it has on the CPU."""
    number, different = json_of_script(COMPARED, tmp_path)

    assert number > 0
    assert different == []


GENERATION = """
end = torch.tensor([999], device="cuda")
unfinished, length = torch.ones(4, dtype=torch.long, device="cuda"), 0
while length < 50:
    length += 1
    tokens = torch.randn(4, 1000, device="cuda").argmax(-1)
    done = torch.full((4,), length >= 20, dtype=torch.bool, device="cuda")
    done = done | torch.isin(tokens, end)
    unfinished = unfinished & ~done
    if unfinished.max() == 0:
        break
print(length)
"""


def test_generation_ends_at_its_maximum_length(tmp_path: Path) -> None:
    """A loop like that of Hugging Face's generate() ends at its maximum length, not before."""
    assert json_of_script(GENERATION, tmp_path) == 20
