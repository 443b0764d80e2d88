"""Which allocator settings PyTorch refuses, so that nobody is told to set them.

Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h, PyTorch 2.13; each refusal was seen there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torchmem.core.alloc_conf import parse_alloc_conf
from torchmem.core.sizes import LARGE_BUFFER, MIB, MIN_LARGE_ALLOC

_LARGE_MB = LARGE_BUFFER // MIB
_SMALLEST_LARGE_MB = MIN_LARGE_ALLOC // MIB
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


def refusal(text: str) -> str | None:
    """Why PyTorch 2.13 would refuse settings as in PYTORCH_CUDA_ALLOC_CONF, in one sentence; None if it takes them.

    Only the settings that decide which request succeeds are looked at; a key that is none of those is refused.
    """
    stripped = re.sub(r"\s", "", text)
    conf = parse_alloc_conf(stripped)
    if ",".join(f"{key}:{value}" for key, value in conf.items()) != stripped.rstrip(","):
        return f"{text!r} is not a list of key:value with commas between, each key once."
    for key, value in conf.items():
        check = _CHECKS.get(key)
        if check is None:
            return f"{key} is not one of {', '.join(_CHECKS)}."
        reason = check(value, conf)
        if reason is not None:
            return f"{key} {reason}."
    return None


def _switch(value: str, _: Mapping[str, str]) -> str | None:
    return None if value in {"True", "False"} else "must be True or False"


def _at_least_a_segment(value: str, conf: Mapping[str, str]) -> str | None:
    large = conf.get("large_segment_size_mb", "")
    least = int(large) if large.isdecimal() else _LARGE_MB
    return None if value.isdecimal() and int(value) >= least else f"must be {least} or more"


def _segment(value: str, _: Mapping[str, str]) -> str | None:
    return None if value.isdecimal() and int(value) > _SMALLEST_LARGE_MB else f"must be over {_SMALLEST_LARGE_MB}"


def _threshold(value: str, _: Mapping[str, str]) -> str | None:
    return None if _NUMBER.fullmatch(value) and 0 < float(value) < 1 else "must be between 0 and 1, without these"


def _share(value: str, _: Mapping[str, str]) -> str | None:
    return None if _NUMBER.fullmatch(value) and 0 <= float(value) <= 1 else "must be between 0 and 1"


def _divisions(value: str, _: Mapping[str, str]) -> str | None:
    counts, sizes = [value], list[str]()
    if value.startswith("["):
        named = parse_alloc_conf(value[1:-1])
        counts, sizes = list(named.values()), [size for size in named if size != ">"]
    return None if counts and all(map(_is_power_of_2, (*counts, *sizes))) else "must be powers of 2"


def _is_power_of_2(text: str) -> bool:
    return text.isdecimal() and int(text).bit_count() == 1


_CHECKS: dict[str, Callable[[str, Mapping[str, str]], str | None]] = {
    "expandable_segments": _switch,
    "max_split_size_mb": _at_least_a_segment,
    "max_non_split_rounding_mb": _at_least_a_segment,
    "large_segment_size_mb": _segment,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _threshold,
    "per_process_memory_fraction": _share,
    "throw_on_cudamalloc_oom": _switch,
}
