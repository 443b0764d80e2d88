"""How a process ends: out of memory in PyTorch or in a library, another exception, or an exit."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from torchmem.explain.oom_report import decode
from torchmem.sample.run_directory import REPORT_SUFFIX
from torchmem.sdk.oom.ending import ending_of, library_oom
from torchmem.sdk.safety.exit_calls import ExitCalls

Run = Callable[..., subprocess.CompletedProcess[str]]
Published = Callable[[], list[dict[str, Any]]]

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled cuda error, NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Failed to CUDA calloc 6291456 bytes"
)
# Texts from the issue threads of pytorch, torchtitan, NCCL, slime, Triton and CuPy.
LIBRARY_TEXTS = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    NCCL,
    "NCCL WARN Cuda failure 'out of memory'",
    "NCCL WARN Cuda failure 2 'out of memory'",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cudaErrorMemoryAllocation: out of memory",
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
]
# Of engines that refuse to start, and of PyTorch where it fails before it calls its observer.
CAUSES = {
    "No available memory for the cache blocks.": "limit",
    "Free memory on device cuda:0 (12.60/79.10 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 71.19 GiB).": "external",
    "Error in memory profiling. Initial free memory 8.46 GiB, current free memory 9.10 GiB.": (
        "external"
    ),
    "Not enough memory. Please try to increase --mem-fraction-static.": "limit",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":1': None,
    "CUDA driver error: device not ready": None,
    "CUDA Error: out of memory at /src/csrc/cumem_allocator.cpp:163": "library",
    NCCL: "library",
}
OTHER_TEXTS = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "CUDA error: device-side assert triggered",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376",
    "DefaultCPUAllocator: can't allocate memory",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Failed to CUDA host alloc 512 bytes",
]


@pytest.mark.parametrize("text", LIBRARY_TEXTS)
def test_a_librarys_oom_is_recognized(text: str) -> None:
    """A library's text means a failed allocation, also as the reason of another exception."""
    wrapper = ValueError("training failed")
    wrapper.__cause__ = RuntimeError(text)

    assert library_oom(RuntimeError(text)) is not None
    assert library_oom(wrapper) is not None
    assert ending_of(wrapper, oom_pending=False) == "oom"


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_errors_are_no_librarys_oom(text: str) -> None:
    """Errors of PyTorch's allocator, of kernels, and of host memory are not a library's OOM."""
    assert library_oom(RuntimeError(text)) is None
    assert ending_of(RuntimeError(text), oom_pending=False) == "failed"


@pytest.mark.parametrize("text", CAUSES)
def test_the_text_tells_the_cause(text: str) -> None:
    """The cause is that of the text, as `torchmem why` reads it; None leaves it to the numbers."""
    oom = library_oom(RuntimeError(text))

    assert oom is not None
    assert oom.cause == CAUSES[text]
    assert ending_of(RuntimeError(text), oom_pending=False) == "oom"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("No available memory for the cache blocks.", "limit"),
        ("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp", "capacity"),
    ],
)
def test_an_oom_that_no_observer_saw(
    run_script: Run, published: Published, text: str, cause: str
) -> None:
    """The process ends as oom, with the cause of the text, or else by the allocator's state."""
    done = run_script(
        "sdk.instrument(backend=backend); allocator.malloc(30 << 20); backend.step()\n"
        f"raise RuntimeError({text!r})"
    )

    (sample,) = published()
    assert (done.returncode, sample["ended"]) == (1, "oom")
    assert sample["devices"][0]["last_oom"]["cause"] == cause


def test_the_size_is_read_from_the_text() -> None:
    """NCCL names the size of its request."""
    oom = library_oom(RuntimeError(NCCL))

    assert oom is not None
    assert oom.requested == 6291456


def test_an_exception_whose_text_fails_is_a_failure() -> None:
    """An exception that raises in `__str__` ends the process like any other."""

    class UnprintableError(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    assert ending_of(UnprintableError(), oom_pending=False) == "failed"


def test_a_librarys_oom_that_ends_the_script(
    run_script: Run, published: Published, tmp_path: Any
) -> None:
    """It is counted with the cause library, leaves a report, and the state is oom."""
    done = run_script(
        "sdk.instrument(backend=backend); allocator.malloc(30 << 20); backend.step()\n"
        f"raise RuntimeError({NCCL!r})"
    )

    (sample,) = published()
    (device,) = sample["devices"]
    assert (done.returncode, sample["ended"]) == (1, "oom")
    assert done.stderr.count("Traceback") == 1
    assert device["counters"]["ooms"] == {"library": 1}
    assert (
        device["last_oom"]["cause"],
        device["last_oom"]["requested_bytes"],
    ) == ("library", 6291456)
    (report,) = tmp_path.rglob(f"*{REPORT_SUFFIX}")
    assert decode(report.read_bytes()).oom.cause == "library"


def test_a_librarys_oom_in_a_thread_is_counted(run_script: Run, published: Published) -> None:
    """A thread that dies of it does not end the process."""
    done = run_script("""
sdk.instrument(backend=backend); backend.step()
def work(): raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
thread = threading.Thread(target=work); thread.start(); thread.join()
backend.step()
""")

    (sample,) = published()
    assert (done.returncode, sample["ended"]) == (0, "exited")
    assert sample["devices"][0]["counters"]["ooms"] == {"library": 1}
    assert done.stderr.count("CUBLAS_STATUS_ALLOC_FAILED\n") == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_scripts_own_hook_is_called(run_script: Run, published: Published, moment: str) -> None:
    """A hook of the script runs once, whether it was set before or after, chained or not."""
    hook = "sys.excepthook = lambda kind, error, tb: print('own hook', error)\n"
    start = "sdk.instrument(backend=backend); backend.step()\n"
    script = hook + start if moment == "before" else start + hook
    done = run_script(script + "raise RuntimeError('CUDA error: out of memory')")

    (sample,) = published()
    assert done.stdout == "own hook CUDA error: out of memory\n"
    assert "Traceback" not in done.stderr
    assert sample["devices"][0]["counters"]["ooms"] == {"library": 1}
    assert sample["ended"] == "oom"


def test_the_hooks_are_as_before_after_the_end(run_script: Run) -> None:
    """A session that is closed leaves no hook, and none is set before CUDA starts."""
    done = run_script("""
before = sys.excepthook, threading.excepthook, sys.exit
waiting = SimulatedBackend([allocator], initialized=False)
session = sdk.instrument(backend=waiting)
assert before == (sys.excepthook, threading.excepthook, sys.exit)
waiting.init()
assert before[0] != sys.excepthook and before[2] != sys.exit
session.close()
assert before == (sys.excepthook, threading.excepthook, sys.exit)
""")

    assert (done.returncode, done.stderr) == (0, "")


CAUGHT = """
sdk.instrument(backend=backend); backend.step()
try:
    allocator.malloc(2 << 30)
except OutOfMemoryError:
    {handler}
{after}
"""


@pytest.mark.parametrize(
    ("handler", "after", "expected"),
    [
        ("sys.exit()", "", ("oom", 0)),
        ("sys.exit(3)", "", ("oom", 3)),
        ("pass", "sys.exit(3)", ("oom", 3)),
        ("pass", "sys.exit(0)", ("exited", 0)),
        ("pass", "backend.step(); sys.exit(3)", ("failed", 3)),
        ("raise ValueError", "", ("oom", 1)),
        ("backend.step()", "raise ValueError", ("failed", 1)),
        ("backend.step()", "raise KeyboardInterrupt", ("exited", -2)),
    ],
)
def test_the_ending_after_a_caught_oom(
    run_script: Run, published: Published, handler: str, after: str, expected: tuple[str, int]
) -> None:
    """It is the OOM if the process exits while it handles the OOM or with an error after it."""
    done = run_script(CAUGHT.format(handler=handler, after=after))

    assert [(sample["ended"], done.returncode) for sample in published()] == [expected]


@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ("raise ValueError", "failed"),
        pytest.param(
            "raise RuntimeError('CUDA error: out of memory')",
            "oom",
            marks=pytest.mark.skipif(
                sys.version_info >= (3, 13), reason="Python tells only the exit code"
            ),
        ),
        ("allocator.malloc(2 << 30)", "oom"),
        ("sys.exit(0)", "exited"),
        ("sys.exit(3)", "failed"),
        ("raise SystemExit('no')", "failed"),
        ("pass", "exited"),
    ],
)
def test_the_ending_of_a_multiprocessing_child(
    run_script: Run, published: Published, body: str, ending: str
) -> None:
    """A child of multiprocessing, which catches every exception itself, ends alike."""
    run_script(f"""
import multiprocessing
def work():
    sdk.instrument(backend=backend); backend.step()
    {body}
process = multiprocessing.get_context("fork").Process(target=work)
process.start(); process.join()
""")

    assert [ending] == [sample["ended"] for sample in published()]


PARSER = "import argparse\nparser = argparse.ArgumentParser()\n"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sys.exit(3)", ("failed", 3)),
        ("sys.exit('no data')", ("failed", 1)),
        ("sys.exit([1])", ("failed", 1)),
        ("sys.exit(256)", ("exited", 0)),
        ("sys.exit()", ("exited", 0)),
        ("sys.exit(False)", ("exited", 0)),
        ("def main(): return 4\nsys.exit(main())", ("failed", 4)),
        (PARSER + "parser.parse_args(['--unknown'])", ("failed", 2)),
        (PARSER + "parser.parse_args(['--help'])", ("exited", 0)),
        (
            "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nsignal.raise_signal(15)",
            ("failed", 5),
        ),
        ("try: raise KeyError\nfinally: sys.exit(6)", ("failed", 6)),
        ("try: raise KeyboardInterrupt\nexcept KeyboardInterrupt: sys.exit(130)", ("exited", 130)),
        ("try: sys.exit(3)\nexcept SystemExit: pass", ("exited", 0)),
        ("try: sys.exit(3)\nexcept SystemExit as error: kept = error", ("exited", 0)),
        ("try: sys.exit(3)\nfinally: sys.exit(0)", ("exited", 0)),
        ("try: sys.exit(0)\nfinally: sys.exit(3)", ("failed", 3)),
        ("try: sys.exit(3)\nexcept SystemExit: raise ValueError", ("failed", 1)),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", ("exited", 0)),
        ("try: sys.exit(1, 2)\nexcept TypeError: sys.exit(7)", ("failed", 7)),
    ],
)
def test_an_exit_with_an_error_code_is_a_failure(
    run_script: Run, published: Published, script: str, expected: tuple[str, int]
) -> None:
    """Only the call of `sys.exit` that ends the process counts, and its status is unchanged."""
    done = run_script(f"sdk.instrument(backend=backend); backend.step()\n{script}")

    assert [(sample["ended"], done.returncode) for sample in published()] == [expected]


def test_an_error_in_a_with_block_is_a_failure(run_script: Run, published: Published) -> None:
    """The end of the block sees every SystemExit, also one that is raised without `sys.exit`."""
    run_script("with sdk.instrument(backend=backend): backend.step(); raise SystemExit(3)")

    assert [sample["ended"] for sample in published()] == ["failed"]


def test_sys_exit_is_pickled_by_name(run_script: Run) -> None:
    """A function that names `sys.exit` can be sent to another process."""
    done = run_script("""
import pickle
sdk.instrument(backend=backend); backend.step()
assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
assert (sys.exit.__module__, sys.exit.__qualname__) == ("sys", "exit")
""")

    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_in_the_hook_is_not_lost(run_script: Run) -> None:
    """What a signal handler raises while the error is recorded reaches the interpreter."""
    done = run_script("""
class Interrupting(SimulatedBackend):
    asked = False
    def memory_snapshot(self):
        if self.asked:
            signal.raise_signal(signal.SIGINT)
        return super().memory_snapshot()
backend = Interrupting([allocator])
sdk.instrument(backend=backend, interval=3600.0); backend.step(); backend.asked = True
raise RuntimeError("CUDA error: out of memory")
""")

    assert done.returncode in {1, -signal.SIGINT}  # the latter since Python 3.14
    assert "KeyboardInterrupt" in done.stderr
    assert "RuntimeError: CUDA error: out of memory" in done.stderr


def test_an_exit_close_to_the_recursion_limit_is_still_an_exit() -> None:
    """What the SDK notes about a call may not fit on the stack; the script gets its SystemExit."""

    def exhausted(_: BaseException | None) -> bool:
        raise RecursionError("maximum recursion depth exceeded")

    calls = ExitCalls(exhausted)
    calls.install()
    try:
        with pytest.raises(SystemExit) as raised:
            sys.exit(3)
    finally:
        calls.remove()
    assert raised.value.code == 3
