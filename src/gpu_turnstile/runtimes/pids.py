"""Which processes an engine is, so that nobody takes it for a stranger on the card.

A number of a process means something only in one place: a Docker that runs in a virtual machine, or a gate in a
container, count anew. So a number is believed when the process that has it here is the engine's, or when none has it
here; and never 1, from which everything on a machine descends. What cannot be told is left out: then an engine shows as
a stranger and spoils a certificate that it need not, which is the safe way to be wrong.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from gpu_turnstile.runtimes.base import Runtime

LIMIT = 2.0  # seconds that all runtimes together may take to tell
MOST = 4096  # processes of one engine
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


async def pids_of(runtimes: Iterable[Runtime], limit: float = LIMIT) -> frozenset[int]:
    """What all of them tell within `limit` seconds. Never raises."""
    asked = [asyncio.ensure_future(runtime.pids()) for runtime in runtimes]
    if not asked:
        return frozenset()
    done, late = await asyncio.wait(asked, timeout=limit)
    for task in late:
        task.cancel()
    told = [task.result() for task in done if not task.cancelled() and task.exception() is None]
    return frozenset(pid for pids in told for pid in pids if pid > 1)


def of_container(pids: Iterable[int], id: str) -> tuple[int, ...]:
    """Those that may be the container's: the kernel says so, or nothing here has the number."""
    return tuple(pid for pid in pids if (groups := _read(_PROC / str(pid) / "cgroup")) is None or id in groups)


def of_group(group: str) -> tuple[int, ...]:
    """Who is in a control group now, by systemd's name for it."""
    for root in (_CGROUP, _CGROUP / "systemd"):
        told = _read(root / group.strip("/") / "cgroup.procs") if group.strip("/") else None
        if told is not None:
            return tuple(int(line) for line in told.split()[:MOST] if line.isdecimal())
    return ()


def _read(file: Path) -> str | None:
    """None also where there is no such place, as on other systems."""
    try:
        return file.read_text()
    except OSError:
        return None


class Listener:
    """The processes that listen where an engine is said to be; they are somebody else's, and may be exchanged.

    Found once, they are looked at again and not searched for: searching reads the open files of every process.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or {"https": 443}.get(parts.scheme, 80)
        self._known: tuple[psutil.Process, ...] = ()

    def pids(self) -> tuple[int, ...]:
        """() where it is not on this machine, or belongs to somebody whose processes may not be seen. Blocks."""
        if not self._known or not all(map(self._listens, self._known)):
            self._known = self._search() if self._is_here() else ()
        return tuple(process.pid for process in self._known)

    def _is_here(self) -> bool:
        if self._host == "localhost":
            return True
        try:
            if ipaddress.ip_address(self._host).is_loopback:
                return True
        except ValueError:
            return False  # a name: of a container, or of another machine
        return any(self._host == a.address for addresses in psutil.net_if_addrs().values() for a in addresses)

    def _listens(self, process: psutil.Process) -> bool:
        try:
            return process.is_running() and any(map(self._is_it, process.net_connections("tcp")))
        except psutil.Error:
            return False

    def _search(self) -> tuple[psutil.Process, ...]:
        found: tuple[psutil.Process, ...] = ()
        with suppress(psutil.Error, OSError):
            pids = {c.pid for c in psutil.net_connections("tcp") if c.pid and c.pid > 1 and self._is_it(c)}
            for pid in sorted(pids)[:MOST]:
                with suppress(psutil.Error):
                    found = (*found, psutil.Process(pid))
        return found

    def _is_it(self, connection: object) -> bool:
        """Whether it is a socket that takes calls to the engine's address."""
        if getattr(connection, "status", None) != psutil.CONN_LISTEN:
            return False
        address = getattr(connection, "laddr", None)
        if not address or address.port != self._port:
            return False
        listening = ipaddress.ip_address(address.ip.partition("%")[0])
        return listening.is_unspecified or (
            listening.is_loopback if self._host == "localhost" else listening == ipaddress.ip_address(self._host)
        )
