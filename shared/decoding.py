"""What msgspec raises of bytes that somebody else wrote."""

from typing import Final

import msgspec

UNDECODABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Not of the type, not text, or nested deeper than the interpreter goes."""
