"""Filled memory moves to huge pages, untouched memory does not."""

import mmap
import re
from pathlib import Path

import pytest

from mfs_trt.engine.huge_pages import HUGE_PAGE_NBYTES, use_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

needs_huge_pages = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(),
    reason="this kernel gives no huge pages on request",
)


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


@needs_huge_pages
def test_filled_memory_moves_to_huge_pages_with_its_content():
    memory = region(8 * HUGE_PAGE_NBYTES)
    use_huge_pages()
    assert figures(memory)["AnonHugePages"] >= 6 * HUGE_PAGE_NBYTES
    assert memory[:] == b"x" * 8 * HUGE_PAGE_NBYTES


def test_memory_that_is_mostly_untouched_stays_so():
    memory = region(HUGE_PAGE_NBYTES)
    before = figures(memory)["Rss"]
    use_huge_pages()
    assert figures(memory)["Rss"] <= before + HUGE_PAGE_NBYTES // 2
