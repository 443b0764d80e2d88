"""Layers that PyTorch runs with cuDNN: on a phantom GPU their shapes and memory are right."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.allocator

HERE = Path(__file__).resolve().parent
PROGRAM = f"sys.path.insert(0, {str(HERE)!r}); import cudnn_cases; cudnn_cases.main()"
# Bytes of the convolution in `cudnn_cases.one_convolution`, in single precision.
IMAGES, FILTER = 16 * 64 * 56 * 56 * 4, 64 * 64 * 3 * 3 * 4
MODES = {
    "cuDNN's own workspaces": {},
    "estimated workspaces": {"PHANTOM_CUDNN_WORKSPACE": "estimate"},
    "no workspaces": {"PHANTOM_CUDNN_WORKSPACE": "0"},
    "the older calls": {"TORCH_CUDNN_V8_API_DISABLED": "1"},
}
Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("mode", MODES)
def test_every_layer_runs(mode: str, run: Run, environment: dict[str, str]) -> None:
    """Forward and backward run with PyTorch's shapes, all gradients, and a plausible peak."""
    environment.update(MODES[mode])

    done = run(PROGRAM)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [f"{name}: {case}" for name, case in result["cases"].items() if not is_right(case)] == []
    assert result["ctc"] == [20, 4, 9]
    assert all(
        result[name]["shape"] == [2, 32, 8, 8]
        for name in ("benchmark", "deterministic", "autocast")
    )
    check_attention(result["attention"])
    check_flat_weights(**result["flat_weights"])
    check_workspace(mode, **result["workspace"])


def is_right(case: dict[str, Any]) -> bool:
    """Return whether there is no error, PyTorch's shape, every gradient, and a plausible peak."""
    if "error" in case:
        return False
    return (
        case["shape"] == case["meta"]
        and not case["without_gradient"]
        and case["peak"] >= case["minimum"] > 0
    )


def check_attention(backward: dict[str, str]) -> None:
    """Check that each implementation can be chosen, and that the default on an H100 is cuDNN."""
    names = {
        "flash": "FlashAttention",
        "efficient": "EfficientAttention",
        "cudnn": "CudnnAttention",
    }
    names[""] = names["cudnn"]
    assert all(name in backward[kind] for kind, name in names.items())
    assert "Attention" not in backward["math"]


def check_flat_weights(spans: list[list[int]], buffer: int) -> None:
    """Check that the weights fill the buffer without gap or overlap."""
    assert [0, *(end for _, end in spans)] == [*(start for start, _ in spans), buffer]


def check_workspace(mode: str, nchw: int, nhwc: int) -> None:
    """Check that in NCHW, the estimate is the copies to NHWC and back; cuDNN copies the images."""
    if mode == "no workspaces":
        assert (nchw, nhwc) == (0, 0)
        return
    copies = 2 * IMAGES + FILTER
    minimum = IMAGES if mode == "cuDNN's own workspaces" else copies
    assert minimum <= nchw < copies + 2 * 2**20
    assert 0 <= nhwc < 2 * 2**20


def test_an_invalid_workspace_setting_is_an_error(run: Run, environment: dict[str, str]) -> None:
    """An invalid setting ends the script with one sentence."""
    environment["PHANTOM_CUDNN_WORKSPACE"] = "none"

    done = run("torch.nn.Conv2d(1, 1, 1).cuda()(torch.ones(1, 1, 4, 4, device='cuda'))")

    assert done.returncode == 2
    message = "PHANTOM_CUDNN_WORKSPACE=none is invalid: set it to 0 or estimate, or unset it"
    assert done.stderr == f"phantom: {message}\n"
