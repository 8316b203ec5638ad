"""Identifiers that sort by the time they were made."""

import os
import time
import uuid


def uuid7() -> str:
    """A version 7 UUID (RFC 9562): 48 bits of Unix milliseconds, then random ones. Python has its own from 3.14 on."""
    milliseconds = time.time_ns() // 1_000_000
    random_a, random_b = (value := int.from_bytes(os.urandom(10))) >> 68, value & ((1 << 62) - 1)
    return str(uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | random_a << 64 | 0b10 << 62 | random_b))
