"""The command `mfs-trt`: errors that a person can act on are one line, without a traceback."""

import sys

from mfs_trt.engine.threads import wait_passively
from mfs_trt.errors import MfsError


def main() -> None:
    """Run the command line; exit status 1 with one line on standard error for a `MfsError`."""
    wait_passively()  # before torch, which the commands bring, loads OpenMP
    from mfs_trt.cli.app import app

    try:
        app()
    except MfsError as error:
        print(f"mfs-trt: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
