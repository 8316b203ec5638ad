"""Gives memory back to the system that was freed.

glibc keeps what is freed for the next allocation, and returns only what lies at the end of its heap. Its own `malloc_trim` returns
every whole page that is free.
"""

import ctypes


def give_back() -> None:
    """Takes milliseconds. Without effect where the C library is another."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
