"""Filled memory moves to huge pages, untouched memory does not."""

import contextlib
import mmap
import re
from pathlib import Path

from mfs_trt.engine.huge_pages import HUGE_PAGE_NBYTES, use_huge_pages

MADV_COLLAPSE = 25


def region(filled_nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, 8 * HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:filled_nbytes] = b"x" * filled_nbytes
    return memory


def figures(memory: mmap.mmap) -> dict[str, int]:
    """Bytes resident and on huge pages of the mapping that `memory` lies in."""
    import numpy as np

    address = np.frombuffer(memory, np.uint8).ctypes.data
    found: dict[str, int] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            is_inside = int(head[1], 16) <= address < int(head[2], 16)
        elif is_inside and line.startswith(("Rss:", "AnonHugePages:")):
            name, value = line.split(":")
            found[name] = int(value.split()[0]) * 1024
    return found


def most_on_huge_pages() -> int:
    """Bytes that this kernel moves when it is asked by hand: 0 where it does not."""
    memory = region(8 * HUGE_PAGE_NBYTES)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_COLLAPSE)
    return figures(memory)["AnonHugePages"]


def test_filled_memory_moves_to_huge_pages_as_far_as_the_kernel_lets_it_with_its_content():
    possible = most_on_huge_pages()
    memory = region(8 * HUGE_PAGE_NBYTES)
    use_huge_pages()
    assert figures(memory)["AnonHugePages"] >= possible - 2 * HUGE_PAGE_NBYTES
    assert memory[:] == b"x" * 8 * HUGE_PAGE_NBYTES


def test_memory_that_is_mostly_untouched_stays_so():
    memory = region(HUGE_PAGE_NBYTES)
    before = figures(memory)["Rss"]
    use_huge_pages()
    assert figures(memory)["Rss"] <= before + HUGE_PAGE_NBYTES // 2
