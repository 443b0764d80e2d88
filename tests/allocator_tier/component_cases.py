"""Training loops whose memory is counted twice: by the SDK, and by an independent method.

    python -m torchmem.phantom -- python component_cases.py CASE

The independent count takes the allocator's own blocks. A block belongs to a component if a tensor
that Python's garbage collector finds there lies in it. The last line printed is JSON: for each
step the SDK's components at its end and when they are up to date, the independent ones, and the
active bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchmem import sdk
from torchmem.metrics.families import ProcessView, families

STEPS = 4
MAX_WAIT_SECONDS = 300.0  # the budget may put off a count
WIDTH = 300  # no power of two, so that there is rounding
Step = Callable[[], None]


@dataclass
class Case:
    """A loop: its optimizers, its step without `zero_grad`, and the parts that it tracks."""

    optimizers: list[Any]
    step: Step
    tracked: dict[str, Any]
    zero_grad: bool = True


def layers(number: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Return a small model on the GPU."""
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(number)]).cuda()


def backward(model: Any, rows: int = 64) -> None:
    """Run a forward and a backward pass."""
    model(torch.randn(rows, WIDTH, device="cuda")).square().mean().backward()


def simple(model: Any, optimizer: Any, **tracked: Any) -> Case:
    """Return the ordinary loop of one model with one optimizer."""

    def step() -> None:
        backward(model)
        optimizer.step()

    return Case([optimizer], step, tracked)


def transformer() -> Case:
    """AdamW on a transformer."""
    layer = nn.TransformerEncoderLayer(WIDTH, 6, 700, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 50, WIDTH, device="cuda")).mean().backward()
        optimizer.step()

    return Case([optimizer], step, {})


def fused() -> Case:
    """Fused AdamW keeps its steps on the GPU, too."""
    model = layers()
    return simple(model, torch.optim.AdamW(model.parameters(), fused=True))


def momentum() -> Case:
    """SGD with momentum."""
    model = layers()
    return simple(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def no_state() -> Case:
    """SGD without momentum has no state."""
    model = layers()
    return simple(model, torch.optim.SGD(model.parameters(), lr=0.1))


def accumulation() -> Case:
    """Gradients of four batches, which are zeroed in place."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(4):
            backward(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Case([optimizer], step, {}, zero_grad=False)


def lora() -> Case:
    """A frozen model, of which only low-rank factors are trained."""
    model = layers().requires_grad_(requires_grad=False)
    factors = nn.ModuleList([nn.Linear(WIDTH, 7, bias=False) for _ in range(3)]).cuda()
    optimizer = torch.optim.AdamW(factors.parameters())

    def step() -> None:
        x = torch.randn(64, WIDTH, device="cuda")
        sum(factor(model(x)).mean() for factor in factors).backward()
        optimizer.step()

    return Case([optimizer], step, {"base_model": model})


class Quantized:
    """A state tensor in 8 bits with its scales and a table that all parameters share."""

    def __init__(self, size: int, table: torch.Tensor) -> None:
        self.table = table
        self.values = [torch.zeros(size, dtype=torch.uint8, device="cuda")]
        self.scales = {"blocks": torch.zeros(-(-size // 256), device="cuda")}


class EightBit(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer with nested state: objects, lists, strings, and tensors on the CPU."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.table = torch.zeros(256, device="cuda")

    def step(self, closure: Any = None) -> None:
        """Create the states."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    state = [Quantized(parameter.numel(), self.table) for _ in range(2)]
                    self.state[parameter] = {"moments": state, "on_cpu": torch.zeros(99)}
        self.state["name"] = {"kind": "eight bit", "count": 7}


def eight_bit() -> Case:
    """A nested custom state."""
    model = layers()
    return simple(model, EightBit(model.parameters()))


class OnCpu(torch.optim.Optimizer):  # type: ignore[misc]
    """Keeps its moments on the CPU."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """Create the states."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("moment", torch.zeros(parameter.shape))


def offload() -> Case:
    """Optimizer state on the CPU is no GPU memory; nor are parameters there."""
    model, on_cpu = layers(), nn.Linear(50, 50)
    return simple(model, OnCpu([*model.parameters(), *on_cpu.parameters()]))


def average() -> Case:
    """An exponential moving average of the weights, tracked as a module."""
    model = layers()
    average = torch.optim.swa_utils.AveragedModel(model)
    return simple(model, torch.optim.AdamW(model.parameters()), average=average)


def shared() -> Case:
    """Two optimizers share a layer; each steps once in an iteration."""
    model = layers()
    first = torch.optim.AdamW(model[:3].parameters())
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        backward(model)
        first.step()
        second.step()

    return Case([first, second], step, {})


def tied() -> Case:
    """Views of one storage, a transposed weight, and sparse gradients."""
    flat = torch.zeros(3 * WIDTH * WIDTH, device="cuda")
    slices = [nn.Parameter(part.view(WIDTH, WIDTH)) for part in flat.split(WIDTH * WIDTH)]
    table = nn.Embedding(1000, 31, sparse=True).cuda()
    transposed = nn.Parameter(torch.zeros(WIDTH, 40, device="cuda").t())
    optimizer = torch.optim.SGD([*slices, transposed, *table.parameters()], lr=0.1)

    def step() -> None:
        x = torch.zeros(8, WIDTH, device="cuda")
        for weight in slices:
            x = x @ weight
        (x @ transposed.t()).mean().backward()
        table(torch.zeros(5, dtype=torch.long, device="cuda")).sum().backward()
        optimizer.step()

    return Case([optimizer], step, {})


def kv_cache() -> Case:
    """A tracked part that grows, returned by a callable."""
    model, cache = layers(), []
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        cache.append(torch.zeros(10_000, device="cuda"))
        backward(model)
        optimizer.step()

    return Case([optimizer], step, {"kv_cache": lambda: {"blocks": cache}})


class Raising(torch.Tensor):  # type: ignore[misc]
    """A subclass that raises whatever it is asked, outside its own computation."""

    armed = False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if Raising.armed:
            raise AttributeError("armed")
        return super().__torch_function__(function, types, args, kwargs or {})


def raising() -> Case:
    """A state with a tensor of a subclass that raises."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        Raising.armed = False
        backward(model)
        state = optimizer.state[model[0].weight]
        state.setdefault("odd", torch.zeros(999, device="cuda").as_subclass(Raising))
        Raising.armed = True
        optimizer.step()

    return Case([optimizer], step, {})


def prefetch() -> Case:
    """Batches copied on a stream of their own; each waits for the main stream after its use."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    side, phantom = torch.cuda.Stream(), ctypes.CDLL(None)

    def step() -> None:
        phantom.phantom_hold_events(0)
        with torch.cuda.stream(side):
            batch = torch.randn(5001, WIDTH).to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        model(batch).square().mean().backward()
        phantom.phantom_hold_events(int(bool(optimizer.state)))  # from the second step on
        del batch
        optimizer.step()

    return Case([optimizer], step, {})


def hugging_face() -> Case:
    """A Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=999,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).cuda().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        tokens = torch.zeros(2, 40, dtype=torch.long, device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return Case([optimizer], step, {})


def fsdp2() -> Case:
    """Rank 0 of 8 with FSDP2 in a fake world; sizes that do not divide by 8 are padded."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = layers()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return simple(model, torch.optim.AdamW(model.parameters()))


def addresses(objects: Iterable[object]) -> set[int]:
    """Return the addresses of all tensors that the collector finds from these objects."""
    found: set[int] = set()
    seen, left = set[int](), list(objects)
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, str)) or type(value).__name__ == "module":
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found |= set(_addresses(value))
        elif not callable(value):
            left += gc.get_referents(value)
    return found


def _addresses(tensor: torch.Tensor) -> Iterator[int]:
    with torch._C.DisableTorchFunction():
        if hasattr(tensor, "_local_tensor"):
            tensor = tensor._local_tensor
        parts = [tensor._values(), tensor._indices()] if tensor.is_sparse else [tensor]
        yield from (part.untyped_storage().data_ptr() for part in parts if part.is_cuda)


def independent_components(case: Case) -> dict[str, int]:
    """Count by the allocator's blocks; what is in no component is `held`."""
    parameters = [
        parameter
        for optimizer in case.optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    gradients = [parameter.grad for parameter in parameters]
    members = {name: addresses([_content(part)]) for name, part in case.tracked.items()}
    members |= {
        "parameters": addresses(parameters),
        "gradients": addresses(gradients),
        "optimizer_state": addresses(state for o in case.optimizers for state in o.state.values()),
    }
    counted = dict.fromkeys([*members, "held", "rounding"], 0)
    for segment in torch.cuda.memory_snapshot():
        for block in segment["blocks"]:
            if block["state"] == "active_pending_free":
                counted["pending"] = counted.get("pending", 0) + block["size"]
            elif block["state"] == "active_allocated":
                owners = [name for name, found in members.items() if block["address"] in found]
                counted[owners[0] if owners else "held"] += block["requested_size"]
                counted["rounding"] += block["size"] - block["requested_size"]
    return counted


def _content(part: Any) -> object:
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return part() if callable(part) else part


def served(session: sdk.Session, metric: str = "torchmem_component_bytes") -> dict[str, int]:
    """Return the components that the process would publish now; its port keeps a page longer."""
    views = [ProcessView(session.lifetime.monitor.sample(), os.getpid(), "running", gpus={})]
    return {
        sample.labels["component"]: int(sample.value)
        for family in families(views)
        for sample in family.samples
        if sample.name == metric
    }


def main(name: str) -> None:
    """Train, and print both counts after every step."""
    session = sdk.instrument(interval=1e-6)
    case: Case = globals()[name]()
    for part, tensors in case.tracked.items():
        session.track(part, tensors)
    rows = []
    for _ in range(STEPS):
        case.step()
        Raising.armed = False
        session.step()
        first, independent = served(session), independent_components(case)
        found, end = first, time.monotonic() + MAX_WAIT_SECONDS
        while found != independent and time.monotonic() < end:
            time.sleep(0.05)
            session.step()
            found = served(session)
        active = torch.cuda.memory_stats()["active_bytes.all.current"]
        rows.append([first, found, independent, active])
        if case.zero_grad:
            for optimizer in case.optimizers:
                optimizer.zero_grad()
    session.close()
    print(json.dumps([rows, session.errors.counts]))


if __name__ == "__main__":
    main(sys.argv[1])
