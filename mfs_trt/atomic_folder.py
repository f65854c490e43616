"""A folder that is written beside its place and renamed into it: there whole, or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mfs_trt.errors import ConfigError


@contextmanager
def atomic_folder(folder: Path, marker: str | None, force: bool) -> Iterator[Path]:
    """Yield an empty sibling folder that becomes `folder` when the block ends without an error.

    An existing folder is replaced only when it holds the file `marker` and `force` is set; anything
    else that is there raises `ConfigError` and is left alone. With `marker` None nothing is ever
    replaced. After an error inside the block, `folder` is as it was.
    """
    folder = folder.absolute()
    _check_target(folder, marker, force)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        draft = scratch / "new"
        draft.mkdir()  # unlike mkdtemp's own folder, with the permissions that the umask gives
        yield draft
        _check_target(folder, marker, force)
        if folder.exists():
            os.rename(folder, scratch / "old")
        try:
            os.rename(draft, folder)
        except OSError:
            if (scratch / "old").exists():
                os.rename(scratch / "old", folder)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_target(folder: Path, marker: str | None, force: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if marker is None or not (folder / marker).is_file():
        allowed = "a new or empty folder" + (f" or one with {marker}" if marker else "")
        raise ConfigError(
            f"{folder}: expected {allowed}, got something else, which is never overwritten"
        )
    if not force:
        raise ConfigError(f"{folder}: exists already; --force replaces it")
