"""The examples run unchanged on a phantom GPU, and their traces replay exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.phantom import run_on_phantom, torch_server

from torchmem.phantom.gpus import parse_gpu_model
from torchmem.preflight.plan import RunPlan
from torchmem.preflight.result import GpuMemory, RunResult
from torchmem.preflight.run import run
from torchmem.trace import read
from torchmem.whatif.engine import what_if

pytestmark = pytest.mark.allocator

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 4
NEEDS = {"huggingface.py": ("transformers", "accelerate"), "lightning_loop.py": ("lightning",)}
"""Packages that an example imports besides torch and torchmem."""
GPT = ("gpt.py",)
LLAMA = ("huggingface.py", "--width", "512", "--layers", "4", "--length", "512", "--batch", "4")
LLAMA_CHECKPOINTED = (*LLAMA, "--gradient-checkpointing")
VIT = ("lightning_loop.py", "--width", "384", "--layers", "4", "--batch", "16")
VIT_ACCUMULATED = (*VIT, "--accumulate", "4")
CROSS_ENTROPY = ("custom_function.py", "--positions", "16384")
FUSED = (*CROSS_ENTROPY, "--fused")
Preflight = Callable[[tuple[str, ...]], RunResult]


@pytest.fixture(scope="module")
def preflight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preflight]:
    """Return a function that runs an example on 24 GB for four steps; each command runs once."""
    results: dict[tuple[str, ...], RunResult] = {}

    def preflight_once(command: tuple[str, ...]) -> RunResult:
        script, *flags = command
        for package in NEEDS.get(script, ()):
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed; run make test-allocator")
        if command not in results:
            program = (*torch_server().python(), str(EXAMPLES / script), *flags)
            plan = RunPlan(program, parse_gpu_model("24GB"), steps=STEPS)
            results[command] = run(plan, tmp_path_factory.mktemp("preflight"), lambda _: None)
        return results[command]

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHMEM_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        yield preflight_once


def memory(outcome: RunResult) -> GpuMemory:
    """Return the memory of the GPU, of a script that made its steps and lacked no call."""
    assert (outcome.ended, outcome.steps, outcome.lacking) == ("steps", STEPS, ())
    (device,) = outcome.devices
    return device


def events(outcome: RunResult) -> int:
    """Return the number of events of the trace."""
    assert outcome.snapshot is not None
    (recording,) = read(outcome.snapshot)
    return len(recording.events)


@pytest.mark.parametrize(
    "command", [GPT, LLAMA, LLAMA_CHECKPOINTED, VIT, VIT_ACCUMULATED, FUSED], ids=" ".join
)
def test_the_trace_replays_exactly(command: tuple[str, ...], preflight: Preflight) -> None:
    """Every allocation gets its recorded address, so what-if has a verdict for every setting."""
    outcome = preflight(command)
    device = memory(outcome)
    assert outcome.snapshot is not None
    (recording,) = read(outcome.snapshot)
    answer = what_if(
        recording,
        gpu_bytes=device.total - device.outside,
        total_bytes=device.total,
        settings=("expandable_segments:True", "max_split_size_mb:128"),
    )

    assert answer.fidelity.share == 1.0
    assert answer.fidelity.allocations > 100 * STEPS
    assert answer.verdict.decision != "none"
    assert [each.refused for each in answer.outcomes] == [None] * 3
    replayed = answer.outcomes[0]
    for name in ("peak_allocated", "peak_reserved", "retries"):
        assert (name, getattr(device, name)) == (name, getattr(replayed, name))


def test_varying_lengths_leave_memory_stranded(preflight: Preflight) -> None:
    """Batches of varying length make the allocator reserve unused memory and strand some of it."""
    device = memory(preflight(GPT))

    assert device.peak_reserved > 1.1 * device.peak_allocated
    assert device.stranded > 0
    assert len({step.peak_allocated for step in device.steps}) > 1


def test_gradient_checkpointing_takes_less(preflight: Preflight) -> None:
    """Recomputing the activations of a Hugging Face model takes less memory than storing them."""
    stored, recomputed = memory(preflight(LLAMA)), memory(preflight(LLAMA_CHECKPOINTED))

    assert recomputed.peak_allocated < stored.peak_allocated
    assert recomputed.peak_reserved < stored.peak_reserved


def test_a_step_of_lightning_is_an_optimizer_step(preflight: Preflight) -> None:
    """Accumulated batches are one step, which takes at most the gradients in addition."""
    single, accumulated = preflight(VIT), preflight(VIT_ACCUMULATED)
    once, four = memory(single), memory(accumulated)

    assert events(accumulated) > 3 * events(single)
    weights = dict(once.phase_peaks)["setup"]
    assert once.peak_allocated <= four.peak_allocated <= once.peak_allocated + weights


def test_the_fused_function_fits_where_cross_entropy_does_not(preflight: Preflight) -> None:
    """The custom Function fits on a GPU where plain cross-entropy runs out of memory."""
    plain, fused = preflight(CROSS_ENTROPY), memory(preflight(FUSED))

    assert plain.ended == "oom"
    assert plain.exit_code != 0
    assert plain.oom_report is not None
    assert (fused.retries, fused.ooms) == (0, 0)


def test_the_fused_function_is_cross_entropy(tmp_path: Path) -> None:
    """Loss and gradients equal those of plain cross-entropy, even with a shorter last chunk."""
    done = run_on_phantom(
        *("-c", COMPARED),
        memory="1GB",
        environment={"CUDA_VISIBLE_DEVICES": ""},
        state=tmp_path / "phantom",
        folder=EXAMPLES,
    )

    assert done.returncode == 0, done.stderr


COMPARED = """
import torch, torch.nn.functional as F
from custom_function import FusedLinearCrossEntropy

torch.manual_seed(0)
hidden, weight = (torch.randn(rows, 16, requires_grad=True) for rows in (50, 40))
targets = torch.randint(40, (50,))
plain = F.cross_entropy(hidden @ weight.T, targets)
fused = FusedLinearCrossEntropy.apply(hidden, weight, targets, 15)
torch.testing.assert_close(fused, plain)
expected, actual = (torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (plain, fused))
torch.testing.assert_close(actual, expected)
"""
