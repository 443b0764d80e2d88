"""Offloaded tensors keep their values: training with and without offloading is the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples.offload import ModuleOffload, OptimizerOffload, PinnedStore  # noqa: E402

pytestmark = pytest.mark.allocator
EVERYTHING = 1 << 40
Tensor = Any


class OtherMemory(PinnedStore):
    """Host memory of its own, beside which the rest of the CPU's memory counts as the device.

    What comes back is poisoned on the host, so that a tensor left there is noticed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on this host."""
        return tensor.data_ptr() in self.addresses

    def can_take(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device and may move."""
        return self.is_alone(tensor) and not self.holds(tensor)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory of this host."""
        copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        self.addresses.add(copy.data_ptr())
        return copy

    def to_device(self, copy: Tensor, device: Any) -> Tensor:
        """Return a copy outside this host, and leave nothing usable there."""
        back = copy.clone().to(device)
        copy.fill_(float("nan") if copy.is_floating_point() else 0)
        return back


def states(optimizer: Any) -> list[Tensor]:
    """Return the tensors in an optimizer's state."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def network(dtype: Any) -> Any:
    """Return a network with tied weights and an embedding, the same each time."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 16)
    ).to(dtype)
    net[3].weight = net[0].weight
    return net


Make = Callable[[Any], Any]
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW foreach amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.9),
    "Adafactor": torch.optim.Adafactor,
}


def train(make: Make, dtype: Any, *, offload: bool) -> list[Tensor]:
    """Train five steps and return parameters and states; reload the state in the middle."""
    net = network(dtype)
    optimizer = make(net.parameters())
    memory = OtherMemory()
    give = OptimizerOffload(optimizer, memory) if offload else lambda _wanted: 0
    moved = 0
    for step in range(5):
        optimizer.zero_grad()
        net(torch.arange(16)).square().mean().backward()
        optimizer.step()
        assert not any(map(memory.holds, states(optimizer)))
        moved += give(EVERYTHING)
        if step == 2:
            saved = optimizer.state_dict()
            give(EVERYTHING)
            optimizer.load_state_dict(saved)
            moved += give(EVERYTHING)
    assert (moved > 0) == offload
    assert any(map(memory.holds, states(optimizer))) == offload
    return [*net.parameters(), *states_of(optimizer)]


def states_of(optimizer: Any) -> list[Tensor]:
    """Return the states as a checkpoint saves them."""
    saved = optimizer.state_dict()["state"].values()
    return [value for state in saved for value in state.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same_bit_for_bit(name: str, dtype: Any) -> None:
    """Parameters and checkpoints do not depend on offloading, through load_state_dict too."""
    plain = train(OPTIMIZERS[name], dtype, offload=False)
    offloaded = train(OPTIMIZERS[name], dtype, offload=True)

    assert len(plain) == len(offloaded) > 0
    assert all(map(torch.equal, plain, offloaded))


def test_sparse_gradients_train_the_same() -> None:
    """SparseAdam keeps dense states, which move; a sparse tensor in a state stays."""

    def run(*, offload: bool) -> Tensor:
        torch.manual_seed(0)
        table = torch.nn.Embedding(16, 8, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        give = OptimizerOffload(optimizer, OtherMemory())
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 3])).square().sum().backward()
            optimizer.step()
            optimizer.state[table.weight]["own"] = table.weight.detach().to_sparse()
            assert not offload or give(EVERYTHING) >= 2 * 16 * 8 * 4
        return table.weight

    assert torch.equal(run(offload=False), run(offload=True))


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A process group of one rank on the CPU."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_the_states_of_fully_sharded_parameters_move(mesh: Any) -> None:
    """FSDP2 has only DTensor: their local tensors move, and training is the same bit for bit."""
    from torch.distributed.fsdp import fully_shard

    def run(*, offload: bool) -> list[Tensor]:
        net = network(torch.float32)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        give = OptimizerOffload(optimizer, OtherMemory())
        for _ in range(3):
            net(torch.arange(16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert not offload or give(EVERYTHING) > 2 * 16 * 8 * 4
        return [each.full_tensor() for each in net.parameters()]

    assert all(map(torch.equal, run(offload=False), run(offload=True)))


def reference() -> Any:
    """Return an idle module with a buffer."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()


def test_a_module_answers_as_before() -> None:
    """After a round trip its outputs and checkpoint are the same, and those of its submodules."""
    module, memory = reference(), OtherMemory()
    give, inputs = ModuleOffload(module, memory), torch.ones(4, 8)
    outputs, part = module(inputs), module[0](inputs)
    saved = {name: value.clone() for name, value in module.state_dict().items()}

    for use in (lambda: module(inputs), lambda: module[0](inputs), module.state_dict):
        assert give(EVERYTHING) > 0
        assert memory.holds(module[0].weight)
        use()
        assert not memory.holds(module[0].weight)
    assert torch.equal(outputs, module(inputs))
    assert torch.equal(part, module[0](inputs))
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_what_is_loaded_into_an_offloaded_module_counts() -> None:
    """`load_state_dict` writes to the host copy, and the module comes back with it."""
    module = reference()
    give = ModuleOffload(module, OtherMemory())
    loaded = {name: torch.ones_like(value) for name, value in reference().state_dict().items()}
    give(EVERYTHING)
    module.load_state_dict(loaded)
    module(torch.ones(4, 8))

    assert torch.equal(torch.ones(8, 8), module[0].weight)


def test_data_that_the_script_replaced_is_not_overwritten() -> None:
    """A module that is converted while it is on the host keeps the new data and its type."""
    module, memory = reference(), OtherMemory()
    give = ModuleOffload(module, memory)
    weight = module[0].weight.detach().clone()
    give(EVERYTHING)
    module.to(torch.bfloat16)
    module(torch.ones(4, 8, dtype=torch.bfloat16))
    give(EVERYTHING)
    module(torch.ones(4, 8, dtype=torch.bfloat16))

    assert torch.equal(weight.to(torch.bfloat16), module[0].weight)


def test_a_replaced_state_is_not_kept() -> None:
    """What `load_state_dict` replaced on the host neither comes back nor stays alive."""
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([parameter])
    memory = OtherMemory()
    give = OptimizerOffload(optimizer, memory)
    parameter.grad = torch.ones(64)
    optimizer.step()
    old = optimizer.state[parameter]["exp_avg"]
    saved = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    give(EVERYTHING)
    optimizer.load_state_dict(saved)
    optimizer.step()

    assert memory.holds(old)


def base(tensor: Tensor) -> dict[str, Tensor]:
    """Return a tensor that another one shares its storage with."""
    return {"tensor": tensor, "alias": tensor.view(-1)}


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(lambda: base(torch.ones(4, 4)), id="alias of the whole storage"),
        pytest.param(lambda: {"tensor": torch.ones(8, 8)[:4]}, id="part of a storage"),
        pytest.param(lambda: {"tensor": torch.ones(4).to_sparse()}, id="sparse"),
        pytest.param(lambda: {"tensor": torch.empty(0)}, id="empty"),
        pytest.param(lambda: {"tensor": 3.0, "other": None}, id="no tensor"),
    ],
)
def test_what_cannot_move_stays(value: Callable[[], dict[str, Any]]) -> None:
    """Nothing is moved that another tensor would keep alive or diverge from."""
    held = value()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    give = OptimizerOffload(optimizer, OtherMemory())
    optimizer.state[optimizer.param_groups[0]["params"][0]]["own"] = held["tensor"]

    assert give(EVERYTHING) == 0


def test_the_largest_move_first_until_enough_is_free() -> None:
    """No more is moved than was wanted."""
    module, memory = reference(), OtherMemory()

    assert ModuleOffload(module, memory)(1) == 8 * 8 * 4
    assert memory.holds(module[0].weight)
    assert not memory.holds(module[0].bias)
