"""Bodies of answers from servers that are not ours: read up to a bound, however long they go on."""

import aiohttp

from shared.errors import EpisodeError

_CHUNK_BYTES = 2**16


class AnswerTooLargeError(EpisodeError):
    """A body that is longer than any that means something."""


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, decompressed. Raises: AnswerTooLargeError as soon as there is more; the caller has the deadline."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > max_bytes:
            raise AnswerTooLargeError(f"an answer of {response.url} must have at most {max_bytes} bytes, got more; shorten it")
    return bytes(body)
