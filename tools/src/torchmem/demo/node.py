"""A simulated node of H100s; its values follow from what its ranks do.

    node = SimulatedNode(gpus=8)
    node.activities[0].change(at=10.0, level=1.0)  # from second 10 on, a rank keeps GPU 0 busy
    node.gpus(at=60.0)  # what NVML reports one minute after the start

Everything is a function of the time, the activities and the seed: equal arguments return equal
values, in any order of the calls. Names and the driver version contain "simulated".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torchmem.demo.activity import Activity
from torchmem.demo.h100 import GpuMoment, Traits
from torchmem.demo.simulated_nvml import FakeGpu
from torchmem.exporter.gpus import GpuEvent, GpuIdentity, GpuValue, Versions
from torchmem.exporter.subjects.clocks import Clocks
from torchmem.exporter.subjects.ecc import Ecc, Repairs
from torchmem.exporter.subjects.memory import Bar1, MemoryInfo
from torchmem.exporter.subjects.mig import Mig, MigInstance
from torchmem.exporter.subjects.pcie import Pcie
from torchmem.exporter.subjects.power import Power
from torchmem.exporter.subjects.processes import Processes, ProcessMemory, ProcessUtilization
from torchmem.exporter.subjects.temperature import Temperatures

GIB = 1 << 30
VERSIONS = Versions(driver="simulated", nvml="simulated", cuda="13.0")
# The driver keeps 1/128 of a GPU for itself (640 MiB of 80 GiB): used + free + reserved = total.
DRIVER_SHARE = 128
ROW_REMAPPED = 63
"""The XID that the driver reports when a row of memory is remapped."""
EVENT_KINDS = ("xid", "double_bit_ecc_error", "non_fatal_poison_error", "fatal_poison_error")

# The GPU in MIG mode is an H100 of 80 GB, whatever the ranks have, because these profiles are its
# own: GPU instance, profile, and the bytes of the process on it; the eighths of the memory that a
# profile has. Linux assigns no pid from PID_MAX_LIMIT on.
_MIG_BYTES = 80 * GIB
_INSTANCES = ((1, "3g.40gb", 21 * GIB), (5, "2g.20gb", 6 * GIB), (9, "1g.10gb", 0))
_SLICES = {"3g.40gb": 4, "2g.20gb": 2, "1g.10gb": 1}
_FIRST_PID = (1 << 22) + 1000
_INSTANCE_ACTIVITY = Activity([(-3600.0, 0.35)])
# What NVML reports for a GPU in MIG mode. It has no utilization, GPM or NVLink.
_OF_MIG_GPUS = (Bar1, Power, Temperatures, Clocks, Ecc, Repairs, Pcie)


def uuid(index: int, host: int = 0) -> str:
    """Return the UUID of a simulated GPU of the node with the number `host`."""
    return f"GPU-51e0de70-0000-4000-8000-{host:06d}{index:06d}"


def product_name(total_bytes: int) -> str:
    """Return the product name of a simulated GPU with this memory."""
    return f"Simulated H100 {round(total_bytes / GIB)}GB"


def cuda_bytes(total_bytes: int) -> int:
    """Return how many bytes of a GPU CUDA can allocate."""
    return total_bytes - total_bytes // DRIVER_SHARE


class SimulatedNode:
    """GPUs of `total_bytes` each, with an `Activity` for each, and one more in MIG mode if `mig`.

    The one in MIG mode has 80 GiB. Some GPUs have a defect, see `Traits.of`, unless the node is
    `healthy`. `host` numbers the node.
    """

    def __init__(  # noqa: PLR0913 - what a node is made of
        self,
        gpus: int,
        seed: int = 0,
        *,
        total_bytes: int = 80 * GIB,
        mig: bool = False,
        healthy: bool = False,
        host: int = 0,
    ) -> None:
        traits_of = Traits.healthy if healthy else Traits.of
        self.activities = [Activity() for _ in range(gpus)]
        self._traits = [traits_of(index, seed) for index in range(gpus)]
        self._host = host
        self._mig_traits = Traits.healthy(gpus, seed) if mig else None
        self._total = total_bytes

    def gpus(self, at: float, processes: Sequence[Mapping[int, int]] = ()) -> list[FakeGpu]:
        """Return the GPUs at a time in seconds.

        `processes`: for each GPU in order, the bytes of each process by pid; by default none.
        Raises ValueError if they do not fit on the GPU.
        """
        used = [*processes, *[{}] * (len(self.activities) - len(processes))]
        gpus = [self._gpu(index, at, used[index]) for index in range(len(self.activities))]
        if self._mig_traits is not None:
            gpus.append(self._mig_gpu(self._mig_traits, len(gpus), at))
        return gpus

    def events(self, since: float, until: float) -> list[GpuEvent]:
        """Return the events from `since` to before `until`, in seconds."""
        return [
            GpuEvent(uuid(index, self._host), "xid", ROW_REMAPPED)
            for index, traits in enumerate(self._traits)
            if since <= traits.remapped_at < until
        ]

    def _gpu(self, index: int, at: float, used: Mapping[int, int]) -> FakeGpu:
        moment = GpuMoment(
            self._traits[index], self.activities[index], at, peers=len(self.activities) - 1
        )
        memory = _memory(self._total, sum(used.values()))
        rows = [ProcessMemory(pid, size) for pid, size in used.items()]
        # The first process is the rank; the others only hold memory.
        busy = {pid: ProcessUtilization(moment.busy, moment.busy / 2) for pid in list(used)[:1]}
        processes = Processes(rows, busy, memory, {None: memory.free})
        values = [*moment.values(), Mig(False), memory, processes]
        return self._fake(index, self._total, values)

    def _mig_gpu(self, traits: Traits, index: int, at: float) -> FakeGpu:
        of_gpu = [
            value
            for value in GpuMoment(traits, _INSTANCE_ACTIVITY, at, peers=0).values()
            if isinstance(value, _OF_MIG_GPUS)
        ]
        rows = [
            ProcessMemory(_FIRST_PID + gpu_instance, size, _mig_uuid(gpu_instance, self._host))
            for gpu_instance, _, size in _INSTANCES
            if size
        ]
        memory = _memory(_MIG_BYTES, sum(size for _, _, size in _INSTANCES))
        mig = Mig(True, [self._instance(*facts) for facts in _INSTANCES])
        values = [*of_gpu, mig, memory, Processes(rows, memory=memory)]
        return self._fake(index, _MIG_BYTES, values)

    def _instance(self, gpu_instance: int, profile: str, used: int) -> MigInstance:
        memory = _memory(_MIG_BYTES * _SLICES[profile] // 8, used)
        return MigInstance(_mig_uuid(gpu_instance, self._host), gpu_instance, 0, profile, memory)

    def _fake(self, index: int, total: int, values: Iterable[GpuValue]) -> FakeGpu:
        identity = GpuIdentity(
            index,
            uuid(index, self._host),
            name=product_name(total),
            pci_bus_id=f"00000000:{index + 1:02X}:00.0",
            driver_version=VERSIONS.driver,
            compute_mode="default",
            persistence_mode="enabled",
        )
        return FakeGpu(identity, *values, event_kinds=EVENT_KINDS)


def _memory(total: int, used: int) -> MemoryInfo:
    capacity = cuda_bytes(total)
    return MemoryInfo(total, used, capacity - used, total - capacity)


def _mig_uuid(gpu_instance: int, host: int) -> str:
    return f"MIG-51e0de70-0000-5000-8000-{host:06d}{gpu_instance:06d}"
