"""Huge pages for memory that is read from end to end in every step.

A compiled plan keeps its weights in memory of its own, in pages of 4 KiB: reading hundreds of
megabytes a step then waits for address translation as well. Linux collapses such memory into pages
of 2 MiB on request (since 6.1), where `transparent_hugepage` is not `never`.
"""

import ctypes
import re
from pathlib import Path

HUGE_PAGE_NBYTES = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_REGION = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p \S+ \S+ 0\s*(\[heap\])?$")


def use_huge_pages() -> None:
    """Ask for huge pages in every private region that is mostly filled; without them, nothing.

    Regions that are mostly untouched, as stacks and arenas before their first use, stay as they
    are: a huge page would fill them.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first, last in _filled_regions():
        start = -(-first // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
        nbytes = (last - start) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
        if nbytes > 0 and libc.madvise(start, nbytes, _MADV_HUGEPAGE) == 0:
            libc.madvise(start, nbytes, _MADV_COLLAPSE)


def _filled_regions() -> list[tuple[int, int]]:
    """Anonymous private regions of at least a huge page, three quarters of them resident."""
    found: list[tuple[int, int]] = []
    region: tuple[int, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        match = _REGION.match(line)
        if match:
            region = int(match[1], 16), int(match[2], 16)
        elif "-" in line.split(" ", 1)[0]:
            region = None  # the head of a region that is not ours to change
        elif region is not None and line.startswith("Rss:"):
            resident = int(line.split()[1]) * 1024
            size = region[1] - region[0]
            if size >= HUGE_PAGE_NBYTES and resident * 4 >= size * 3:
                found.append(region)
    return found
