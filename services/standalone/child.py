"""One process that the supervisor started, with every process it started in turn."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from services.standalone import leash
from services.standalone.logs import ProcessLog
from services.standalone.processes import ProcessSpec
from shared.configuration import ADDRESS_VARIABLES

READ_BYTES: Final = 64 * 1024
DRAIN_TIMEOUT_S: Final = 5.0
"""For the last output of a process that has ended."""
KILL_TIMEOUT_S: Final = 10.0


class Child:
    """RUNNING → EXITED. It leads a session and process group of its own, so that Ctrl-C reaches only the supervisor."""

    def __init__(self, spec: ProcessSpec, process: asyncio.subprocess.Process, log: ProcessLog) -> None:
        self.spec = spec
        self.log = log
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self._process = process
        self.life: asyncio.Task[int]
        """Ends with the exit status, when the process and its whole group are gone; its owner awaits it."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status, the negative signal number if one ended it, None while it runs."""
        return self._process.returncode

    @classmethod
    async def start(cls, spec: ProcessSpec, log: ProcessLog, *, inherited: Collection[int] = ()) -> "Child":
        """`inherited` are file descriptors that the process keeps open."""
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(Path(leash.__file__)), str(os.getpid()), *spec.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**_inherited_environment(), **spec.environment},
                start_new_session=True,
                pass_fds=tuple(inherited),
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        child = cls(spec, process, log)
        child.life = asyncio.create_task(child._live(read_end), name=spec.name)
        return child

    async def stop(self, *, hurry: asyncio.Event) -> None:
        """SIGTERM, and SIGKILL to the whole group when the deadline passes or the user is in a hurry."""
        if self.life.done():
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        hurrying = asyncio.create_task(hurry.wait())
        try:
            await asyncio.wait((self.life, hurrying), timeout=self.spec.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurrying.cancel()
            if not self.life.done():
                self._kill_group()
        await asyncio.wait((self.life,), timeout=KILL_TIMEOUT_S)

    async def _live(self, output: int) -> int:
        reading = asyncio.create_task(self._read(output))
        try:
            status = await self._process.wait()
            self.ended_at = time.monotonic()
            self._kill_group()
            await asyncio.wait((reading,), timeout=DRAIN_TIMEOUT_S)
        finally:
            if self.status is None:
                self._kill_group()
            reading.cancel()
            await asyncio.wait((reading,))
            self.log.close()
        return status

    async def _read(self, output: int) -> None:
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", 0))
        try:
            while chunk := await reader.read(READ_BYTES):
                self.log.write(chunk)
        finally:
            transport.close()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """An exit status in words. The trainer's launcher reports a rank's signal as shells do, 128 and its number."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    if status - 128 in set(signal.Signals):
        return f"exited with status {status} (killed by {signal.Signals(status - 128).name})"
    return f"exited with status {status}"


def _inherited_environment() -> dict[str, str]:
    """This process's, without the addresses: the run file that children read is resolved, and must not be overridden again."""
    return {name: value for name, value in os.environ.items() if name not in ADDRESS_VARIABLES}
