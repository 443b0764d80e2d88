"""What SGLang needs on a phantom GPU, in each of its processes: a plugin of `sglang.srt.plugins`.

FlashInfer's kernels are compiled with a CUDA runtime of their own, which is not the phantom's.
"""

from __future__ import annotations


def install() -> None:
    """Use SGLang's own kernels for the norms."""
    from sgl_kernel import elementwise

    elementwise._has_flashinfer = False
