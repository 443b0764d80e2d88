"""The messages by which programs say that memory ran out: the one table of them.

`torchmem why` reads texts with it, the SDK recognizes a library's error with it, the page has it as
JSON, and docs/messages.md lists it. The formats of PyTorch are those of
c10/cuda/CUDACachingAllocator.cpp (1.0 to 2.13), CUDAMallocAsyncAllocator.cpp,
xpu/XPUCachingAllocator.cpp and aten/src/ATen/mps/MPSAllocator.mm; those of engines are of vLLM's
v1/worker and SGLang's model_executor. Patterns use only what Python and JavaScript have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchmem.sample.sample import OomCause

TextCause = Literal[OomCause, "refused", "host_memory"]
"""The causes of a verdict, and two more: the driver refused memory that was free, and the host's
memory ran out, not the GPU's."""
Role = Literal["oom", "notice", "consequence", "other"]
"""oom: memory ran out. notice: it did not by this message alone. consequence: another rank was
first. other: a program without PyTorch, or not memory of the GPU."""

SIZE = r"\d{1,12}(?:\.\d{1,4})? ?(?:bytes|[KMGT]i?B|B)\b"
"""A size as c10::CachingAllocator's format_size writes it."""
_GIB = r"-?\d{1,9}(?:\.\d{1,20})?"
_COUNT = r"\d{1,20}"


@dataclass(frozen=True, slots=True)
class Clause:
    """A part of a message that begins where the part before it ends.

    The message is whole once a clause with `ends` was there.
    """

    pattern: str
    is_required: bool = True
    repeats: bool = False
    ends: bool = False


@dataclass(frozen=True, slots=True)
class TextFormat:
    """A message.

    Attributes:
        name: how JSON and tests call it.
        source: who writes it.
        triggers: every such message contains one of these.
        pattern: the regular expression by which it is known. Its groups are fields of `Numbers`:
            sizes with their unit, or by the suffixes _bytes, _kib, _mib and _gib.
        example: one, for the documentation.
        meaning: what it says, in one or two sentences.
        role: what it is.
        cause: what it always means; None if numbers decide, or if the message cannot tell.
        chains: what may follow the pattern: the chain counts of which most is there.
        in_process: whether it is the text of an exception that PyTorch's observer of OOMs does not
            see. The SDK counts such an exception as an OOM.
        summary: what it says of the cause, without a full stop; empty if that of the cause is
            enough.
    """

    name: str
    source: str
    triggers: tuple[str, ...]
    pattern: str
    example: str
    meaning: str
    role: Role = "oom"
    cause: TextCause | None = None
    chains: tuple[tuple[Clause, ...], ...] = ()
    in_process: bool = False
    summary: str = ""


_SINCE_2_1 = (
    Clause(
        rf"\.\s+GPU (?P<gpu>\d{{1,4}}) has a total capac(?:i)?ty of (?P<total>{SIZE})"
        rf"(?: of which (?P<free>{SIZE}) is free)?\."
    ),
    Clause(
        r"\s+(?:Process (?P<pid>\d{1,10})|Including non- ?PyTorch memory, this process) has "
        rf"(?P<holds>{SIZE}) memory in use\.",
        is_required=False,
        repeats=True,
    ),
    Clause(rf"\s+(?P<allowed>{SIZE}) allowed;", is_required=False),
    Clause(rf"\s+Of the allocated memory (?P<allocated>{SIZE}) is allocated by PyTorch,"),
    Clause(
        rf"\s+with (?P<private>{SIZE}) allocated in private pools \(e\.g\., CUDA Graphs\),",
        is_required=False,
    ),
    Clause(rf"\s+and (?P<unallocated>{SIZE}) is reserved by PyTorch but unallocated\b", ends=True),
)
_BEFORE_2_1 = (
    Clause(
        rf"\s+\(GPU (?P<gpu>\d{{1,4}}); (?P<total>{SIZE}) total capacity;"
        rf"\s+(?P<allocated>{SIZE}) already allocated;\s+(?P<free>{SIZE}) free;"
    ),
    Clause(rf"\s+(?P<allowed>{SIZE}) allowed;", is_required=False),
    Clause(
        rf"\s+(?:(?P<reserved>{SIZE}) reserved in total by PyTorch|(?P<unallocated>{SIZE}) cached)"
        r"\)",
        ends=True,
    ),
)
_MALLOC_ASYNC = (
    Clause(rf"\s+Currently allocated\s*: (?P<allocated>{SIZE})"),
    Clause(rf"\s+Requested\s*: (?P<requested>{SIZE})"),
    Clause(rf"\s+Device limit\s*: (?P<total>{SIZE})"),
    Clause(rf"\s+Free \(according to CUDA\)\s*: (?P<free>{SIZE})"),
    Clause(
        rf"\s+PyTorch limit \(set by user-supplied memory fraction\)\s*: (?P<allowed>{SIZE})",
        ends=True,
    ),
)

LIBRARY_MEANING = (
    "A library asked the driver for memory, outside PyTorch's allocator. PyTorch does not return "
    "its cache for that."
)

FORMATS: tuple[TextFormat, ...] = (
    TextFormat(
        "pytorch",
        "PyTorch's allocator",
        ("ut of memory",),
        r"(?P<backend>CUDA|HIP|XPU|MUSA) out of memory\.\s+Tried to allocate "
        rf"(?P<requested>{SIZE})",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 79.10 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this "
        "process has 77.90 GiB memory in use. Of the allocated memory 61.40 GiB is allocated by "
        "PyTorch, and 15.20 GiB is reserved by PyTorch but unallocated.",
        "PyTorch found no free block for a request, and the driver gave no memory, even after "
        "PyTorch had emptied its cache.",
        chains=(_SINCE_2_1, _BEFORE_2_1),
    ),
    TextFormat(
        "pytorch_fraction",
        "PyTorch's allocator",
        ("ut of memory",),
        r"(?P<backend>CUDA|HIP|XPU) out of memory\.\s+Allocation was preemptively rejected because "
        r"it would exceed per_process_memory_fraction limit\."
        rf"(?:\s+Requested size: (?P<requested>{SIZE}))?",
        "torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected because "
        "it would exceed per_process_memory_fraction limit. Requested size: 3.00 GiB",
        "PyTorch refused the request by itself, because of its memory fraction.",
        cause="limit",
    ),
    TextFormat(
        "pytorch_1eb",
        "PyTorch's allocator",
        ("ut of memory",),
        r"out of memory\.\s+Tried to allocate more than 1EB memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        "PyTorch rejected the request without asking the driver. The size of the tensor was "
        "computed wrongly.",
        cause="capacity",
        summary="The request is for more memory than any GPU has",
    ),
    TextFormat(
        "malloc_async",
        "PyTorch's allocator backend cudaMallocAsync",
        ("exceed allowed memory",),
        r"Allocation on device (?P<gpu>\d{1,4})? ?would exceed allowed memory\."
        r"(?: \(out of memory\))?",
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
        "memory) Currently allocated     : 44.10 GiB Requested               : 500.00 MiB Device "
        "limit            : 47.30 GiB Free (according to CUDA): 72.40 MiB PyTorch limit (set by "
        "user-supplied memory fraction)                         : 17179869184.00 GiB",
        "The driver's own pool had no memory for a request. 17179869184.00 GiB stands for no "
        "limit.",
        chains=(_MALLOC_ASYNC,),
    ),
    TextFormat(
        "mps",
        "PyTorch on Apple GPUs",
        ("ut of memory",),
        rf"MPS backend out of memory \(MPS allocated: (?P<allocated>{SIZE}), other allocations: "
        rf"(?P<other>{SIZE}), max allowed: (?P<allowed>{SIZE})\)\."
        rf"(?:\s+Tried to allocate (?P<requested>{SIZE}))?",
        "RuntimeError: MPS backend out of memory (MPS allocated: 17.10 GB, other allocations: "
        "610.00 MB, max allowed: 18.10 GB). Tried to allocate 512.00 MB on private pool.",
        "The watermark PYTORCH_MPS_HIGH_WATERMARK_RATIO was reached.",
        cause="limit",
    ),
    TextFormat(
        "host_allocator",
        "PyTorch's allocator for host memory",
        ("DefaultCPUAllocator",),
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate "
        r"(?P<requested_bytes>\d{1,18}) bytes",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate "
        "memory)",
        "The machine had no host memory for a tensor on the CPU.",
        cause="host_memory",
    ),
    TextFormat(
        "oom_killer",
        "the kernel's OOM killer",
        ("ut of memory", "oom-kill"),
        r"(?:Out of memory|[Mm]emory cgroup out of memory)[^\n]{0,80}?: Kill(?:ed)? process "
        r"(?P<pid>\d{1,10}) \((?P<program>[^)\n]{1,64})\)"
        r"(?:[^\n]{0,80}?anon-rss:(?P<resident_kib>\d{1,15})kB)?"
        r"|oom-kill:constraint=\w+,[^\n]{0,400}?task=(?P<task>[^,\n]{1,64}),"
        r"pid=(?P<task_pid>\d{1,10})",
        "kernel: Memory cgroup out of memory: Killed process 4321 (python) total-vm:91000000kB, "
        "anon-rss:62914560kB, file-rss:1000kB, shmem-rss:0kB, UID:1000",
        "The kernel killed a process because host memory, or the limit of its control group, was "
        "used up.",
        cause="host_memory",
    ),
    TextFormat(
        "oom_killed",
        "Kubernetes or Docker",
        ("OOM",),
        r"\bOOMKilled\b",
        "Last State: Terminated Reason: OOMKilled Exit Code: 137",
        "The container had used up its limit of host memory, and the kernel killed it.",
        cause="host_memory",
    ),
    TextFormat(
        "slurm_oom",
        "Slurm",
        ("oom_kill", "oom-kill", "ut Of Memory"),
        r"Detected \d+ oom[-_]kill event|task \d+: Out Of Memory",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7100.0. Some of the step tasks "
        "have been OOM Killed.",
        "The job had used up the host memory that it requested, and the kernel killed a task.",
        cause="host_memory",
    ),
    TextFormat(
        "ray_memory",
        "Ray's memory monitor",
        ("running low on memory", "OOM"),
        r"was killed due to the node running low on memory|killed due to memory pressure \(OOM\)",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "Ray killed a worker because the host memory of the node was nearly used up.",
        cause="host_memory",
    ),
    TextFormat(
        "worker_killed",
        "PyTorch's data loader",
        ("killed by signal", "shared memory (shm)"),
        r"Unexpected bus error encountered in worker"
        r"|DataLoader worker \(pid\(?s?\)? ?(?P<pid>\d{1,10})[^)]{0,60}\) (?:is killed by signal: "
        r"(?:Killed|Bus error)|exited unexpectedly)",
        "RuntimeError: DataLoader worker (pid 9876) is killed by signal: Killed.",
        "A data loader worker was killed: by the kernel's OOM killer, or (bus error) because "
        "/dev/shm was full. Both are host memory.",
        cause="host_memory",
    ),
    TextFormat(
        "python_memory",
        "Python and NumPy",
        ("Unable to allocate", "MemoryError", "Cannot allocate memory"),
        rf"Unable to allocate (?P<requested>{SIZE}) for an array"
        r"|\[Errno 12\] Cannot allocate memory|\bfork: Cannot allocate memory"
        r"|^(?:[\w.]{0,60}\.)?MemoryError\b(?!: std::bad_alloc: out_of_memory)",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 37.30 GiB for an array with "
        "shape (100000, 50000) and data type float64",
        "The process got no host memory.",
        cause="host_memory",
    ),
    TextFormat(
        "vllm_free_memory",
        "vLLM, at its start",
        ("emory on device",),
        rf"Free memory on device ?(?:\w+:\d+ ?)?\((?P<free_gib>{_GIB})/(?P<total_gib>{_GIB}) GiB\) "
        r"on startup\s+is less than desired GPU memory utilization \((?P<fraction>\d(?:\.\d+)?), "
        rf"(?P<requested_gib>{_GIB}) GiB\)",
        "ValueError: Free memory on device cuda:0 (12.60/79.10 GiB) on startup is less than "
        "desired GPU memory utilization (0.9, 71.19 GiB). Decrease GPU memory utilization or "
        "reduce GPU memory used by other processes.",
        "vLLM wanted this share of the GPU for itself, and less was free before it had loaded "
        "anything.",
        in_process=True,
    ),
    TextFormat(
        "vllm_no_cache",
        "vLLM, at its start",
        ("available memory for",),
        r"No available memory for the cache blocks",
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        "Within the share of the GPU that vLLM may use, model and activations left nothing for the "
        "KV cache.",
        cause="limit",
        in_process=True,
    ),
    TextFormat(
        "vllm_small_cache",
        "vLLM, at its start",
        ("KV cache memory",),
        r"\(?(?P<requested_gib>\d{1,6}(?:\.\d+)?) GiB KV cache is needed, which is larger than the "
        r"available KV cache memory \((?P<available_gib>-?\d{1,6}(?:\.\d+)?) GiB\)"
        r"(?:\. Based on the available memory, the estimated maximum model length is "
        r"(?P<tokens>\d{1,12}))?",
        "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 "
        "GiB KV cache is needed, which is larger than the available KV cache memory (9.05 GiB). "
        "Based on the available memory, the estimated maximum model length is 74128.",
        "Within the share of the GPU that vLLM may use, the KV cache is too small for one request "
        "of the longest length.",
        cause="limit",
        in_process=True,
    ),
    TextFormat(
        "vllm_profiling",
        "vLLM, at its start",
        ("memory profiling",),
        rf"Error in memory profiling\. Initial free memory (?P<before_gib>{_GIB}) GiB, "
        rf"current free memory (?P<free_gib>{_GIB}) GiB"
        r"|Error in memory profiling\. Initial free memory (?P<before_bytes>\d{1,18}), "
        r"current free memory (?P<free_bytes>\d{1,18})\b",
        "AssertionError: Error in memory profiling. Initial free memory 58.20 GiB, current free "
        "memory 61.90 GiB. This happens when other processes sharing the same container release "
        "GPU memory while vLLM is profiling.",
        "Free memory rose while vLLM measured what it needs: another process on the GPU released "
        "memory. Memory did not run out.",
        cause="external",
        in_process=True,
    ),
    TextFormat(
        "sglang_fraction",
        "SGLang, at its start",
        ("Not enough memory",),
        r"Not enough memory\. Please try to increase --mem-fraction-static"
        r"(?:\. Current value: mem_fraction_static=(?P<fraction>\d(?:\.\d+)?))?",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "Within the share of the GPU that SGLang may use for weights and KV cache, the weights "
        "left nothing for the cache.",
        cause="limit",
        in_process=True,
    ),
    TextFormat(
        "sglang_unbalanced",
        "SGLang, at its start",
        ("memory capacity is",),
        r"The memory capacity is unbalanced\. Some GPUs may be occupied by other processes",
        "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other "
        "processes.",
        "One of the GPUs had less free memory than the others: another process holds some.",
        cause="external",
        in_process=True,
    ),
    TextFormat(
        "sglang_cache_full",
        "SGLang",
        ("ut of memory",),
        r"(?:Prefill|Decode) out of memory\. Try to lower your batch size",
        "RuntimeError: Prefill out of memory. Try to lower your batch size. Try to allocate 8192 "
        "tokens.",
        "The KV cache, which SGLang reserved at its start, had no room for more tokens. The GPU "
        "may have free memory.",
        cause="limit",
        in_process=True,
    ),
    TextFormat(
        "wake_up",
        "an engine that wakes up (vLLM's sleep mode, torch_memory_saver)",
        ("CUresult error", "ut of memory"),
        r"\[torch_memory_saver\.cpp\] CUresult error:? +(?:result=)?2\b"
        r"|CUDA Error: out of memory at [^\n]{0,200}cumem_allocator\.cpp",
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/core.cpp "
        "func=cu_mem_create line=104",
        "An inference engine could not take back from the driver what it had given away while it "
        "slept: another process, or PyTorch's cache in the same process, has it now.",
        in_process=True,
    ),
    TextFormat(
        "nccl",
        "NCCL and RCCL",
        ("Failed to CUDA", "ut of memory"),
        r"Failed to CUDA (?:calloc|malloc)(?: async)? "
        r"(?P<requested_bytes>\d{1,18}) bytes"
        r"|C(?:uda|UDA) failure (?:\d+ )?'out of memory'",
        "torch.distributed.DistBackendError: NCCL error, ncclUnhandledCudaError: Call to CUDA "
        "function failed. Last error: Failed to CUDA calloc 6291456 bytes",
        f"{LIBRARY_MEANING} NCCL allocates at the first collective of a process group.",
        cause="library",
        in_process=True,
    ),
    TextFormat(
        "math_library",
        "cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT and their ROCm counterparts",
        ("_FAILED", "INSUFFICIENT_RES"),
        r"\b(?P<library>\w{2,20}?)_STATUS_ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED"
        r"|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        f"{LIBRARY_MEANING} cuBLAS does when a thread or stream first needs it.",
        cause="library",
        in_process=True,
    ),
    TextFormat(
        "triton",
        "Triton",
        ("ut of memory",),
        r"Triton Error \[\w+\]: out of memory",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        f"{LIBRARY_MEANING} Triton does when a kernel is loaded.",
        cause="library",
        in_process=True,
    ),
    TextFormat(
        "bitsandbytes",
        "bitsandbytes",
        ("ut of memory",),
        r"\bError out of memory at line \d{1,6} in file ",
        "Error out of memory at line 380 in file /src/csrc/ops.cu",
        f"{LIBRARY_MEANING} bitsandbytes ends the process.",
        cause="library",
        in_process=True,
    ),
    TextFormat(
        "cupy",
        "CuPy",
        ("ut of memory",),
        r"Out of memory allocating (?P<requested_bytes>\d[\d,]{0,22}) bytes",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 1,073,741,824 bytes "
        "(allocated so far: 34,359,738,368 bytes).",
        f"{LIBRARY_MEANING} CuPy has a pool of its own beside PyTorch's.",
        cause="library",
        in_process=True,
    ),
    TextFormat(
        "onnxruntime",
        "ONNX Runtime",
        ("memory for requested buffer",),
        r"Failed to allocate memory for requested buffer of size (?P<requested_bytes>\d{1,18})",
        "onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException: [ONNXRuntimeError] : 6 : "
        "RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Failed to "
        "allocate memory for requested buffer of size 268435456",
        "Memory of ONNX Runtime, which torchmem does not know. It has an arena for each GPU, which "
        "grows to powers of two up to gpu_mem_limit, and one in host memory.",
        role="other",
    ),
    TextFormat(
        "ggml",
        "llama.cpp and other programs on ggml",
        ("ut of memory",),
        r"\bggml_\w{1,60}: [^\n]{0,120}?(?:cuda|hip|musa)Malloc failed: out of memory",
        "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 18432.00 MiB on device 0: "
        "cudaMalloc failed: out of memory",
        "Memory of ggml, which torchmem does not know. It takes what the layers on the GPU need "
        "(--n-gpu-layers) and the context (--ctx-size), whatever is free.",
        role="other",
    ),
    TextFormat(
        "jax",
        "JAX or TensorFlow",
        ("RESOURCE_EXHAUSTED", "ResourceExhausted", "OOM"),
        r"RESOURCE_EXHAUSTED: |ResourceExhaustedError|OOM when allocating tensor with shape",
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "17179869184 bytes.",
        "Memory of JAX or TensorFlow, which torchmem does not know. By default JAX takes 75% of "
        "the GPU at its start, and TensorFlow all of it.",
        role="other",
    ),
    TextFormat(
        "shared_memory",
        "Triton",
        ("out of resource: shared",),
        r"out of resource: shared memory, Required: \d+",
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, "
        "Hardware limit: 101376.",
        "The shared memory of a multiprocessor is too small for this kernel. That is not the "
        "memory of the GPU: use smaller blocks or fewer stages.",
        role="other",
    ),
    TextFormat(
        "nvml_assert",
        "PyTorch, while it built the message",
        ("ASSERT FAILED",),
        r"NVML_SUCCESS == [^\n]{1,200}?INTERNAL ASSERT FAILED at \S{0,200}"
        r"CUDACachingAllocator\.cpp",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/'
        'CUDACachingAllocator.cpp":1154, please report a bug to PyTorch.',
        "Memory ran out, and PyTorch failed to ask NVML which processes hold it: no permission (as "
        "with MIG), or a driver that does not fit its library. The numbers are lost.",
        in_process=True,
    ),
    TextFormat(
        "expandable_assert",
        "PyTorch, with expandable segments",
        ("ASSERT FAILED",),
        r"(?:!handles_\.at\(i\)|!block->expandable_segment_) INTERNAL ASSERT FAILED at "
        r"\S{0,200}CUDACachingAllocator\.cpp",
        'RuntimeError: !handles_.at(i) INTERNAL ASSERT FAILED at "../c10/cuda/'
        'CUDACachingAllocator.cpp":419, please report a bug to PyTorch.',
        "An expandable segment could not grow under pressure, and PyTorch stumbled over it. The "
        "numbers are lost.",
        in_process=True,
    ),
    TextFormat(
        "not_ready",
        "the driver, mostly under WSL",
        ("device not ready",),
        r"CUDA (?:driver )?error: device not ready",
        "RuntimeError: CUDA driver error: device not ready",
        "The driver could not map memory: under WSL, expandable segments meet this when the GPU is "
        "nearly full.",
        in_process=True,
    ),
    TextFormat(
        "driver",
        "the driver, outside PyTorch's allocator",
        ("ut of memory", "MemoryAllocation", "OutOfMemory", "OUT_OF_MEMORY", "DEVICE_MEMORY"),
        r"(?:CUDA|HIP)(?: driver| runtime)? [eE]rror:? ?(?:in [^\n]{1,120}?: ?)?out of memory"
        r"|CUDA failure \d+: out of memory|cudaMalloc(?:Async)? failed: out of memory"
        r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        "torch.AcceleratorError: CUDA error: out of memory",
        f"{LIBRARY_MEANING} Contexts, modules, CUDA graphs and peer access need such memory, too. "
        "If a process gets none for its context, other processes fill the GPU.",
        cause="library",
        in_process=True,
        summary="The driver had no memory for a context or a library, outside PyTorch's allocator",
    ),
    TextFormat(
        "cut_off",
        "PyTorch's allocator",
        ("ut of memory", "OutOfMemory"),
        r"(?:CUDA|HIP|XPU) out of memory"
        r"|(?<!except )(?<!raise )\btorch\.(?:cuda\.)?OutOfMemoryError(?::|\s*$)",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "PyTorch found no memory for a request; the text has no numbers.",
    ),
    TextFormat(
        "warning",
        "PyTorch 2.13 and newer",
        ("OOM", "Preemptively rejecting"),
        r"memory (?:mapping|allocation) failed with OOM on device (?P<gpu>\d{1,4})"
        r"(?: while trying to (?:map|allocate) (?P<requested_bytes>\d{1,18}) bytes "
        r"\(free: (?P<free_bytes>\d{1,18}), total: (?P<total_bytes>\d{1,18})\))?"
        r"|Preemptively rejecting allocation: requested",
        "[W1128 10:00:00 CUDACachingAllocator.cpp:508] expandable_segments: memory mapping failed "
        "with OOM on device 0 while trying to map 20971520 bytes (free: 6553600, total: "
        "84934656000)",
        "A warning: the driver refused a request, and PyTorch empties its cache and tries again. "
        "Without an error after it, memory sufficed.",
        role="notice",
    ),
    TextFormat(
        "shared_tensors",
        "PyTorch's CUDA IPC",
        ("Producer process",),
        r"Producer process (?:tried to deallocate over \d{1,9}\s+memory blocks"
        r"|has been terminated before all shared CUDA tensors released)",
        "[W1128 10:00:00 CudaIPCTypes.cpp:60] Producer process tried to deallocate over 1000 "
        "memory blocks referred by consumer processes. Deallocation might be significantly slowed "
        "down.",
        "This process dropped tensors that it had sent to others through CUDA IPC, and these still "
        "use them. Their memory stays allocated here until the others drop them, too.",
        role="notice",
    ),
    TextFormat(
        "collective_timeout",
        "NCCL's watchdog",
        ("Watchdog caught",),
        r"Watchdog caught collective operation timeout",
        "[rank2]:[E ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE)",
        "This rank waited in a collective for a rank that was gone.",
        role="consequence",
    ),
    TextFormat(
        "lost_peer",
        "the network between ranks",
        ("Broken pipe", "by peer", "ncclRemote", "RendezvousC"),
        r"Broken pipe|Connection reset by peer|Connection closed by peer|ncclRemoteError"
        r"|Rendezvous(?:Connection|Closed|Graceful)\w*Error",
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "This rank lost its connection to a rank that was gone.",
        role="consequence",
    ),
    TextFormat(
        "stopped",
        "the launcher or the engine's front end",
        ("SIGTERM", "Engine core init", "ChildFailed"),
        r"Sending process \d+ closing signal SIGTERM|\(SIGTERM\)|Signals\.SIGTERM"
        r"|Engine core initialization failed|ChildFailedError",
        "torch.distributed.elastic.multiprocessing.api: Sending process 812 closing signal SIGTERM",
        "The launcher stopped what was left after one process had failed.",
        role="consequence",
    ),
)
"""In the order in which they are tried where one begins at the same place as another."""

BY_NAME = {each.name: each for each in FORMATS}
