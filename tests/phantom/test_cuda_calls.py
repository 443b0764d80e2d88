"""The symbols of shared libraries, of this machine and damaged ones."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.needs import compiler, skip_without

from torchmem.phantom.cuda_calls import ElfError, dynamic_symbols

SOURCE = """
int missing(void);
__attribute__((weak)) int optional(void) { return 1; }
int present(void) { return missing() + optional(); }
static int hidden(void) { return 2; }
int uses_hidden(void) { return hidden(); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a small library."""
    folder = tmp_path_factory.mktemp("elf")
    (folder / "small.c").write_text(SOURCE)
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-o", folder / "small.so", folder / "small.c"], check=True
    )
    return folder / "small.so"


def test_defined_undefined_and_weak_symbols(library: Path) -> None:
    """Calls to other libraries are undefined, its own are defined, static ones are missing."""
    symbols = {symbol.name: (symbol.defined, symbol.weak) for symbol in dynamic_symbols(library)}

    assert symbols["missing"] == (False, False)
    assert symbols["optional"] == (True, True)
    assert symbols["present"] == (True, False)
    assert "hidden" not in symbols


def test_symbols_agree_with_nm() -> None:
    """The symbols of this system's C library are those that nm prints."""
    skip_without("nm")
    linked = subprocess.run(
        ["ldd", sys.executable], capture_output=True, text=True, check=True
    ).stdout
    libc = next(Path(word) for word in linked.split() if word.startswith("/") and "libc.so" in word)
    lines = subprocess.run(
        ["nm", "-D", libc], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {
        (line.split()[-1].split("@")[0], " U " not in line and " w " not in line) for line in lines
    }

    assert {
        (symbol.name, symbol.defined) for symbol in dynamic_symbols(libc) if symbol.name
    } == expected


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_library_is_an_elf_error_or_readable(
    library: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A truncated or altered file gives symbols or an ElfError, never another error."""
    image = bytearray(library.read_bytes())
    del image[data.draw(st.integers(0, len(image))) :]
    for place in (
        data.draw(st.lists(st.integers(0, max(len(image) - 1, 0)), max_size=8)) if image else []
    ):
        image[place] = data.draw(st.integers(0, 255))
    damaged = tmp_path_factory.getbasetemp() / "damaged.so"
    damaged.write_bytes(image)

    with suppress(ElfError):
        dynamic_symbols(damaged)


def test_a_text_file_is_an_elf_error(tmp_path: Path) -> None:
    """The message names the file."""
    (tmp_path / "libtorch.so").write_text("/* GNU ld script */ " * 10)

    with pytest.raises(ElfError, match=r"libtorch\.so is not a shared library"):
        dynamic_symbols(tmp_path / "libtorch.so")
