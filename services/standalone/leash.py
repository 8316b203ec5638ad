"""Runs a command that ends with the process that started it: `python leash.py <parent's pid> <command> …`.

A supervisor that is killed cannot stop its children; the kernel can, with a signal at the parent's death that an exec keeps.
SIGTERM, so that each child ends its own children first. Standard library only: this starts in a few milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent_pid):  # It died before the kernel was told.
        sys.exit(f"the process {parent_pid} that asked for {command[0]} is gone")
    try:
        os.execvp(command[0], command)  # noqa: S606 - the point of this file
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
