"""`torchmem manifests completion`: print the script that completes `torchmem` in a shell.

`make generate` renders the scripts with shtab (deploy/completion.py), so the base install and a
shell's startup only read a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchmem.output.terminal import write_out

HELP = "print the completion script of a shell"
EPILOG = """\
Write the script to where the shell looks for it, and start a new shell:
  bash  ~/.local/share/bash-completion/completions/torchmem
  zsh   _torchmem in a folder of $fpath
  fish  ~/.config/fish/completions/torchmem.fish

Examples:
  torchmem manifests completion zsh > ~/.zfunc/_torchmem
  torchmem manifests completion fish > ~/.config/fish/completions/torchmem.fish
"""
SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    write_out(script(arguments.shell).read_text(encoding="utf-8"))
    return 0


def script(shell: str) -> Path:
    """Return the file that completes `torchmem` in a shell."""
    return Path(__file__).with_name(f"torchmem.{shell}")
