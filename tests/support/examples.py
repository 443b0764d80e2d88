"""What the examples of the help texts and of the documentation need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.publishing import own_process, own_sample, publish
from support.recordings import varying_lengths, write
from support.reports import STRANDED
from support.samples import full_sample

from torchmem.explain import run_summary
from torchmem.explain.oom_report import encode
from torchmem.explain.run_summary import SUMMARY_SUFFIX, summarize
from torchmem.sample.run_directory import REPORT_SUFFIX


def prepare(folder: Path) -> dict[str, str]:
    """Write the files that examples name, and return the environment of the commands."""
    run_dir = folder / "run"
    publish(run_dir, own_sample(process=own_process(run="nightly", rank=3)))
    publish(run_dir, encode(STRANDED), f"4242-1-1-1{REPORT_SUFFIX}")
    write(varying_lengths(steps=30).snapshot(), folder / "snapshot.pickle")
    for name in ("before", "after"):
        summary = summarize(own_sample(devices=(full_sample().devices[0],)), "exited")
        (folder / f"{name}{SUMMARY_SUFFIX}").write_bytes(run_summary.encode(summary))
    (folder / "train.py").write_text("")
    for place in (".zfunc", ".config/fish/completions"):
        (folder / place).mkdir(parents=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "HOME": str(folder), "TORCHMEM_RUN_DIR": str(run_dir)}
