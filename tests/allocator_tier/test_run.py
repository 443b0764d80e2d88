"""`torchmem run` with real launchers, on PyTorch's real allocator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.phantom import torch_server

pytestmark = pytest.mark.allocator

TRAIN = """
import os, sys
import torch
{before}
weight = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
for _ in range(3):
    weight(torch.ones(4, 256, device="cuda")).sum().backward()
    optimizer.step()
{after}
"""
# Without an optimizer, whose first step imports torch._dynamo, half of a script's CPU time.
COMPUTE = """
import os, sys
import torch
{before}
torch.ones(256, 256, device="cuda")
{after}
"""


def job(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command under `torchmem run` on two phantom GPUs."""
    phantom = ["-m", "torchmem.phantom", "--memory", "4GiB", "--gpus", "2"]
    return subprocess.run(
        [
            *(sys.executable, *phantom, "--state", str(folder / "gpus"), "--"),
            *(sys.executable, "-m", "torchmem.cli", "run", "--run-dir", str(folder / "run"), "--"),
            *command,
        ],
        env=os.environ | {"PYTHONWARNINGS": "ignore"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def samples(folder: Path) -> list[dict[str, Any]]:
    """Return what the processes of a job published, by rank."""
    files = (folder / "run").glob("*/*.sample.json")
    return sorted((json.loads(file.read_text()) for file in files), key=_rank)


def _rank(sample: dict[str, Any]) -> int:
    return int(sample["process"]["rank"])


def script(folder: Path, body: str = COMPUTE, before: str = "", after: str = "") -> str:
    """Write the script, which does not know torchmem."""
    path = folder / "train.py"
    path.write_text(body.format(before=before, after=after))
    return str(path)


def check(done: subprocess.CompletedProcess[str]) -> None:
    """Check that the job succeeded."""
    assert done.returncode == 0, done.stderr[-4000:]


def test_an_unchanged_script_is_monitored(tmp_path: Path) -> None:
    """Its peak, each step of its optimizer, and how it ended are published."""
    check(job(tmp_path, sys.executable, script(tmp_path, TRAIN)))
    [sample] = samples(tmp_path)

    assert (sample["steps"]["count"], sample["ended"]) == (3, "exited")
    assert sample["devices"][0]["allocator"]["allocated_peak_bytes"] > 4 * 256 * 256


@pytest.mark.parametrize("how", ["module", "code"])
def test_modules_and_code_are_monitored(tmp_path: Path, how: str) -> None:
    """`python -m` and `python -c` publish their peak and how they ended."""
    path = script(tmp_path)
    command = {"module": ("-m", "train"), "code": ("-c", Path(path).read_text())}[how]
    check(job(tmp_path, sys.executable, *command, PYTHONPATH=str(tmp_path)))
    [sample] = samples(tmp_path)

    assert sample["ended"] == "exited"
    assert sample["devices"][0]["allocator"]["allocated_peak_bytes"] == 4 * 256 * 256


def test_every_rank_of_torchrun_is_monitored(tmp_path: Path) -> None:
    """Of a torchrun with two ranks, the ranks publish, each on its GPU, and the agent does not."""
    path = script(tmp_path, before='torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    check(job(tmp_path, *launcher, "--nproc-per-node", "2", path))
    found = samples(tmp_path)

    assert list(map(_rank, found)) == [0, 1]
    assert {sample["process"]["run"] for sample in found} == {"train"}
    assert len({sample["devices"][0]["uuid"] for sample in found}) == 2


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_are_monitored_if_they_use_cuda(method: str, tmp_path: Path) -> None:
    """Children that use CUDA publish, however they start; workers of a data loader do not."""
    path = tmp_path / "parent.py"
    path.write_text(
        """
import multiprocessing, sys, torch
def child(): torch.ones(9, device="cuda")
def items(): return torch.utils.data.TensorDataset(torch.ones(8, 2))
if __name__ == "__main__":
    for batch in torch.utils.data.DataLoader(items(), num_workers=2): pass
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start(); process.join()
    sys.exit(process.exitcode)
"""
    )
    check(job(tmp_path, *torch_server().python(), str(path), method))
    assert len(samples(tmp_path)) == 1


NOTEBOOK = """
import sys
import nbclient, nbformat
code = open(sys.argv[1]).read()
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
nbclient.NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
"""


def test_a_notebook_is_monitored(tmp_path: Path) -> None:
    """The kernel of a notebook publishes under the notebook's name, and its server does not."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package)
    # As `python -m ipykernel install` writes it, and as a server names the notebook.
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": command, "display_name": "", "language": "python"}))
    named = {"JUPYTER_PATH": str(tmp_path), "JPY_SESSION_NAME": "work/finetune.ipynb"}
    runtime = {"JUPYTER_RUNTIME_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    path = script(tmp_path)
    check(job(tmp_path, sys.executable, "-c", NOTEBOOK, path, **named, **runtime))
    [sample] = samples(tmp_path)

    assert sample["process"]["run"] == "finetune"


def test_a_profiler_of_the_first_cuda_call_records_no_import(tmp_path: Path) -> None:
    """With stacks, the start of the monitoring is some thousand Python calls, not 45,000.

    Scalene 2.4.0 profiles PyTorch in this way, mostly from before the first CUDA call.
    """
    profiled = """
import sys
import torch
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU], with_stack=True):
    pass  # imports what the profiler itself needs
before = set(sys.modules)
with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
    torch.ones(1, device="cuda")
print(sorted(sys.modules.keys() - before), len(profiler.profiler.kineto_results.events()) < 10_000)
"""
    done = job(tmp_path, sys.executable, "-c", profiled)

    check(done)
    assert done.stdout == "[] True\n"
    assert len(samples(tmp_path)) == 1


def test_a_crash_is_the_scripts_own(tmp_path: Path) -> None:
    """The traceback and the exit code of an uncaught exception are unchanged."""
    path = script(tmp_path, after='raise ValueError("mine")')
    done = job(tmp_path, sys.executable, path)
    [sample] = samples(tmp_path)

    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: mine\n")
    assert "torchmem" not in done.stderr
    assert sample["ended"] == "failed"


def test_instrument_in_the_script_has_its_own_settings(tmp_path: Path) -> None:
    """A script that calls instrument() before CUDA is up gets its settings, and one session."""
    before = 'from torchmem import sdk\nsession = sdk.instrument(run="mine", interval=2.5)'
    check(job(tmp_path, *torch_server().python(), script(tmp_path, before=before)))
    [sample] = samples(tmp_path)

    assert sample["process"]["run"] == "mine"


def test_a_misspelled_setting_is_one_line_and_the_job_is_monitored(tmp_path: Path) -> None:
    """An unknown TORCHMEM_ variable costs one line on stderr, and nothing else."""
    done = job(tmp_path, *torch_server().python(), script(tmp_path), TORCHMEM_INTERVALL="3")

    check(done)
    assert [line for line in done.stderr.splitlines() if "TORCHMEM" in line] == [
        "TORCHMEM_INTERVALL is not a setting and is ignored; did you mean TORCHMEM_INTERVAL?"
    ]
    assert len(samples(tmp_path)) == 1
