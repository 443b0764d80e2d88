"""Runs every kind of layer that PyTorch runs with cuDNN, and prints the results as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as in PyTorch's documentation
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Layer = Callable[..., Any]
MIB = 2**20
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def first(output: Any) -> Tensor:
    """Return the tensor of an output, which may be a tuple or a packed sequence."""
    output = output[0] if isinstance(output, tuple) else output
    return (
        getattr(output, "data", output)
        if isinstance(output, nn.utils.rnn.PackedSequence)
        else output
    )


def bytes_of(tensors: list[Tensor | None]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def run(make: Layer, *inputs: Tensor) -> dict[str, Any]:
    """Run a layer forward and backward and return its output shape, peak and minimum bytes."""
    module = make()
    module = module.cuda() if isinstance(module, nn.Module) else module
    leaves = [tensor.cuda().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = first(module(*leaves))
    output.sum().backward()
    weights = list(module.parameters()) if isinstance(module, nn.Module) else []
    missing = [
        tensor for tensor in (*leaves, *weights) if tensor.requires_grad and tensor.grad is None
    ]
    minimum = bytes_of([output, *(tensor.grad for tensor in (*leaves, *weights))])
    return {
        "shape": list(output.shape),
        "without_gradient": len(missing),
        "minimum": minimum,
        "peak": torch.cuda.max_memory_allocated() - before,
        "backward": str(output.grad_fn),
    }


def on_meta(make: Layer, *inputs: Tensor) -> list[int]:
    """Return the shape of the output as PyTorch derives it, without a device."""
    with torch.device("meta"):
        module = make()
    return list(first(module(*(tensor.to("meta") for tensor in inputs))).shape)


def convolutions() -> Iterator[tuple[str, Layer, tuple[Tensor, ...]]]:
    """Yield 1 to 3 dimensions, transposed, grouped, strided, dilated, all types and layouts."""
    settings: tuple[dict[str, int], ...] = (
        {},
        {"groups": 4},
        {"groups": 16},
        {"stride": 2},
        {"dilation": 2},
    )
    of_type = [*product(settings, FLOAT_TYPES[:1]), *product(settings[:2], FLOAT_TYPES[1:])]
    for dimensions, transposed, (more, dtype) in product((1, 2, 3), ("", "Transpose"), of_type):
        layer = getattr(nn, f"Conv{transposed}{dimensions}d")
        images = torch.randn(2, 16, *[10] * dimensions, dtype=dtype)
        yield (
            f"{layer.__name__} {more} {dtype}",
            partial(layer, 16, 32, 3, padding=1, dtype=dtype, **more),
            (images,),
        )
    images = torch.randn(2, 16, 10, 10).to(memory_format=torch.channels_last)
    yield "Conv2d channels_last", partial(nn.Conv2d, 16, 32, 3), (images,)


def recurrent() -> Iterator[tuple[str, Layer, tuple[Tensor, ...]]]:
    """Yield LSTM, GRU and RNN, with all options that change the layout of their weights."""
    deep = {"num_layers": 2, "bidirectional": True, "dropout": 0.25}
    settings: tuple[dict[str, Any], ...] = ({}, deep, {"bias": False})
    for cell, more, dtype in product((nn.LSTM, nn.GRU, nn.RNN), settings, FLOAT_TYPES[:2]):
        steps = torch.randn(7, 3, 24, dtype=dtype)
        yield (
            f"{cell.__name__} {more} {dtype}",
            partial(cell, 24, 32, dtype=dtype, **more),
            (steps,),
        )
    yield (
        "LSTM projected",
        partial(nn.LSTM, 24, 32, proj_size=8, num_layers=2),
        (torch.randn(7, 3, 24),),
    )


def others() -> Iterator[tuple[str, Layer, tuple[Tensor, ...]]]:
    """Yield normalization, pooling, sampling."""
    images = torch.randn(4, 16, 12, 12)
    for layer in (nn.BatchNorm2d, nn.InstanceNorm2d, partial(nn.GroupNorm, 4)):
        yield f"{layer}", partial(layer, 16), (images,)
        yield (
            f"{layer} channels_last",
            partial(layer, 16),
            (images.to(memory_format=torch.channels_last),),
        )
    yield "BatchNorm2d half", partial(nn.BatchNorm2d, 16), (images.half(),)
    yield "BatchNorm1d", partial(nn.BatchNorm1d, 16), (images[..., 0],)
    yield "BatchNorm3d", partial(nn.BatchNorm3d, 16), (images[..., None],)
    yield "BatchNorm2d eval", lambda: nn.BatchNorm2d(16).eval(), (images,)
    bilinear = nn.Upsample(scale_factor=2, mode="bilinear")
    for pool in (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(3), bilinear):
        yield f"{pool}", lambda pool=pool: pool, (images,)
    yield (
        "grid_sample",
        lambda: partial(F.grid_sample, align_corners=False),
        (images, torch.zeros(4, 5, 5, 2)),
    )


def result_of(make: Layer, *inputs: Tensor) -> dict[str, Any]:
    """Return the results of a layer, or its error."""
    try:
        return run(make, *inputs) | {"meta": on_meta(make, *inputs)}
    except RuntimeError as error:
        return {"error": str(error)}


def attention(kind: str) -> str:
    """Return the backward function of attention with one implementation, or PyTorch's choice."""
    new = partial(
        torch.randn, 2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    query, key, value = new(), new(), new()
    with sdpa_kernel(ATTENTION[kind]) if kind else nullcontext():
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output.sum().backward()
    assert query.grad is not None
    return str(output.grad_fn)


def ctc() -> list[int]:
    """Run the CTC loss of cuDNN, which needs 32-bit targets and lengths."""
    scores = torch.randn(20, 4, 9, device="cuda", requires_grad=True)
    targets = torch.randint(1, 9, (4 * 5,), dtype=torch.int32)
    F.ctc_loss(scores.log_softmax(2), targets, (20,) * 4, (5,) * 4).backward()
    assert scores.grad is not None
    return list(scores.grad.shape)


def one_convolution(*, channels_last: bool = False) -> int:
    """Return the temporary bytes of a convolution, besides its output."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda().to(memory_format=layout)
    images = torch.empty(16, 64, 56, 56, device="cuda").to(memory_format=layout)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output: Tensor = layer(images)
    return int(torch.cuda.max_memory_allocated() - before - output.nbytes)


def flat_weights() -> dict[str, Any]:
    """Return where the weights of a recurrent network are in cuDNN's buffer."""
    module = nn.LSTM(24, 32, num_layers=2, bidirectional=True).cuda()
    weights = list(module.parameters())
    start = min(weight.data_ptr() for weight in weights)
    spans = sorted(
        (weight.data_ptr() - start, weight.data_ptr() - start + weight.nbytes) for weight in weights
    )
    return {"spans": spans, "buffer": weights[0].untyped_storage().nbytes()}


def main() -> None:
    """Print all results."""
    result: dict[str, Any] = {
        "ctc": ctc(),
        "attention": {kind: attention(kind) for kind in ("", *ATTENTION)},
    }
    layers = (*convolutions(), *recurrent(), *others())
    result["cases"] = {name: result_of(make, *inputs) for name, make, inputs in layers}
    images = torch.randn(2, 16, 10, 10)
    for switch in ("benchmark", "deterministic"):
        setattr(torch.backends.cudnn, switch, True)
        result[switch] = run(partial(nn.Conv2d, 16, 32, 3), images)
        setattr(torch.backends.cudnn, switch, False)
    with torch.autocast("cuda", dtype=torch.float16):
        result["autocast"] = run(
            lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)), images
        )
    result["flat_weights"] = flat_weights()
    torch.cuda.empty_cache()
    result["workspace"] = {"nchw": one_convolution(), "nhwc": one_convolution(channels_last=True)}
    print(json.dumps(result))
