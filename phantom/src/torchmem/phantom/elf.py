"""Reads which symbols a shared library takes from others: 64-bit ELF, little endian.

Layout: System V ABI, "Object files" (Elf64_Ehdr, Elf64_Shdr, Elf64_Sym).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_IDENT = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<40xQ10xHH2x")  # e_shoff, e_shentsize, e_shnum
_SECTION = struct.Struct("<4xI16xQQI20x")  # sh_type, sh_offset, sh_size, sh_link
_SYMBOL = struct.Struct("<IBxH16x")  # st_name, st_info, st_shndx
_DYNSYM = 11


class ElfError(ValueError):
    """The file is no 64-bit little-endian ELF file, or it is cut off."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One dynamic symbol. defined: the library has it; otherwise another one must. weak: another definition wins."""

    name: str
    defined: bool
    weak: bool


def dynamic_symbols(path: Path) -> tuple[Symbol, ...]:
    """The dynamic symbols of a shared library, without versions.

    Raises:
        ElfError: the file is none of this kind.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if path.stat().st_size < _HEADER.size:
            raise ElfError(f"{path} is not a shared library")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            if image[:6] != _IDENT:
                raise ElfError(f"{path} is not a shared library for a 64-bit little-endian machine")
            try:
                return tuple(_symbols(image))
            except (struct.error, IndexError, ValueError, OverflowError) as error:
                raise ElfError(f"{path} is cut off or damaged: {error}") from error


def _symbols(image: mmap.mmap) -> Iterator[Symbol]:
    start, width, count = _HEADER.unpack_from(image)
    sections = [_SECTION.unpack_from(image, start + index * width) for index in range(count)]
    for kind, offset, size, link in sections:
        if kind == _DYNSYM:
            names = image[sections[link][1] : sections[link][1] + sections[link][2]]
            table = image[offset : offset + size]
            for name, info, section in _SYMBOL.iter_unpack(table):
                text = names[name : names.index(b"\0", name)].decode("ascii", "replace")
                yield Symbol(text, section != 0, info >> 4 == 2)
