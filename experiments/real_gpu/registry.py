"""What only a real driver can show, most important first, with the seconds that each may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Subject:
    """One thing to find out.

    Attributes:
        name: for `--only`.
        title: what it shows.
        seconds: its share of the nine minutes. What a subject leaves is there for later ones.
        module: in this package; its function of the subject's name runs it.
        left_out: why it is not part of the run; "" if it is.
    """

    name: str
    title: str
    seconds: float
    module: str = ""
    left_out: str = ""

    @property
    def function(self) -> str:
        """The function that runs it."""
        return self.name.replace("-", "_")


SUBJECTS = (
    Subject("series", "The exporter's series beside PyTorch and nvidia-smi", 30, "series"),
    Subject("outside", "Memory outside the allocator, in parts", 40, "outside"),
    Subject("ooms", "OutOfMemoryErrors by cause, and their first advice followed", 135, "ooms"),
    Subject("processes", "Two processes' contexts, and a killed process", 35, "processes"),
    Subject("step-time", "Step time with and without torchmem", 75, "cost"),
    Subject("whatif", "A capture, and what-if followed", 40, "recordings"),
    Subject("preflight", "Preflight beside the peaks of five public models", 80, "peaks"),
    Subject("allocators", "Expandable segments, CUDA graphs and MemPool", 25, "allocators"),
    Subject("exporter", "CPU time of the exporter beside nvitop-exporter", 35, "cost"),
    Subject("events", "XID errors and other events of the driver", 5, "series"),
    Subject("mps", "Processes that share the GPU through MPS", 15, "processes"),
    Subject(
        "vllm",
        "vLLM's sleep mode",
        0,
        left_out="an engine takes a minute to start; `make test-serving` has it on the phantom",
    ),
    Subject("loops", "gevent and torch.compile", 25, "loops"),
)
TOTAL_SECONDS = sum(subject.seconds for subject in SUBJECTS)
