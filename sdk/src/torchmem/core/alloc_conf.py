"""PyTorch's allocator settings as they are written in the environment, and which of them were not obeyed.

Format: c10/core/AllocatorConfig.h, `ConfigTokenizer` (PyTorch 2.13), the same since 2.1: `key:value,key:[a:b,c:d]`,
white space ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchmem.core.sizes import MIB

# The order in which PyTorch looks for them; the second one in ROCm builds, the third since 2.9.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LAST_PARSED = "pytorch_cuda_alloc_conf"
"""Key under which the effective settings hold the string that the allocator parsed last, as PyTorch's snapshot does."""

_SWITCHES = {"expandable_segments", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"}
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)(?:,|$)")


def parse_alloc_conf(text: str) -> dict[str, str]:
    """Settings by key, a list with its brackets; what PyTorch itself would refuse is left out."""
    return dict(_PAIR.findall(re.sub(r"\s", "", text)))


def requested_settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Every setting that any of the variables asks for, with its value; one may be there twice."""
    texts = [environment.get(variable, "") for variable in VARIABLES]
    return [setting for text in texts for setting in parse_alloc_conf(text).items()]


def ignored_settings(environment: Mapping[str, str], effective: Mapping[str, str]) -> dict[str, bool]:
    """For each setting of the environment whether the allocator ignored it; without those for which nobody can tell.

    `effective` holds what PyTorch's snapshot calls `allocator_settings`, as text under lower-case names, and the
    `backend`. Once the script has set something else at run time only the backend can be told.
    """
    verdicts: dict[str, bool] = {}
    for name, value in requested_settings(environment):
        ignored = _is_ignored(name, value, environment, effective)
        if ignored is not None:
            verdicts[name] = verdicts.get(name, False) or ignored
    return verdicts


def _is_ignored(name: str, value: str, environment: Mapping[str, str], effective: Mapping[str, str]) -> bool | None:
    backend = effective.get("backend")
    if name == "backend":
        return value != backend if backend in {"native", "cudaMallocAsync"} else None
    if "expandable_segments" not in effective:
        return None
    parsed = effective.get(LAST_PARSED, "")
    if parsed and parsed not in {environment.get(variable) for variable in VARIABLES}:
        return None
    return parse_alloc_conf(parsed).get(name) != value or _is_ineffective(name, value, effective)


def _is_ineffective(name: str, value: str, effective: Mapping[str, str]) -> bool:
    """Whether a value that was parsed is not what the allocator says it uses, as for features this build lacks."""
    if name == "max_split_size_mb" and value.isdecimal():
        return effective.get("max_split_size") != str(int(value) * MIB)
    return name in _SWITCHES and effective.get(name, value) != value
