"""Which processes of a job with PyTorch are its ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.allocator

Run = Callable[..., subprocess.CompletedProcess[str]]
Series = Callable[[str], list[tuple[dict[str, str], float]]]

# As `torchmem run` does it for all processes that the command starts.
MONITORED = 'os.environ |= {"TORCHMEM": "1", "RANK": "0"}\n'


def test_compile_workers_are_no_ranks(run: Run, series: Series) -> None:
    """The processes that torch.compile keeps are not published, though they inherit the rank."""
    done = run(
        MONITORED
        + """
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
config.compile_threads, config.worker_start_method = 2, "subprocess"
session = sdk.instrument()
held = torch.zeros(1, device="cuda")
AsyncCompile.warm_pool()
AsyncCompile.process_pool().submit(os.getpid).result()
time.sleep(0.5)
session.close()
"""
    )

    assert done.returncode == 0, done.stderr
    assert [labels["rank"] for labels, _ in series("torchmem_process_info")] == ["0"]


BY_HAND = """
session = sdk.instrument()
weight = torch.ones(1024, device="cuda", requires_grad=True)
for _ in range(9):
    weight.sum().backward()
    with torch.no_grad(): weight -= 0.1 * weight.grad
    weight.grad = None
    {step}
session.close()
"""


@pytest.mark.parametrize(("step", "counted"), [("", []), ("session.step()", [9.0])])
def test_steps_of_an_optimizer_by_hand(
    step: str, counted: list[float], run: Run, series: Series
) -> None:
    """They are absent, and not 0, until the script reports them."""
    done = run(BY_HAND.format(step=step))

    assert (done.returncode, done.stderr) == (0, "")
    assert [count for _, count in series("torchmem_steps_total")] == counted


HELPER = """
import torch
torch.cuda.init()
torch.cuda.get_device_name()
torch.cuda.mem_get_info()
time.sleep(0.5)
"""


def test_a_helper_that_asks_for_the_gpu_is_no_rank(run: Run, series: Series) -> None:
    """Tools such as torch.utils.collect_env initialize CUDA, and are not published either."""
    done = run(
        MONITORED
        + f"""
import subprocess
session = sdk.instrument()
held = torch.zeros(1, device="cuda")
subprocess.run([sys.executable, "-c", "import time\\n" + {HELPER!r}], check=True)
session.close()
"""
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert [labels["rank"] for labels, _ in series("torchmem_process_info")] == ["0"]


def test_a_rank_that_is_killed_after_its_first_allocation_is_known(
    run: Run, series: Series
) -> None:
    """It was published within an interval, and is shown as killed."""
    done = run("""
import signal
sdk.instrument()
torch.cuda.init()
time.sleep(0.2)
held = torch.zeros(1, device="cuda")
while not published(): time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
""")

    assert done.returncode == -9
    states = series("torchmem_process_state")
    assert [labels["state"] for labels, value in states if value] == ["killed"]
