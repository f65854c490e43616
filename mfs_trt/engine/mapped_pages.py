"""Giving back the resident pages of a mapped file that is not needed any more but stays mapped."""

import ctypes
import os
from pathlib import Path


def release_pages(path: Path) -> None:
    """Drop this process's pages of every private mapping of `path`; a later touch reads them again.

    Linux: `madvise(MADV_DONTNEED)` on the ranges that `/proc/self/maps` names.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5)
        if name != str(path) or "w" in permissions:
            continue  # a written page would lose its content
        begin, end = (int(a, 16) for a in addresses.split("-"))
        size = ctypes.c_size_t(end - begin)
        if libc.madvise(ctypes.c_void_p(begin), size, _MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))


_MADV_DONTNEED = 4
