"""What goes wrong between the gate and Docker, and how it is told to a person: what happened and what can be done.

Docker's own messages are the raw material: their wording is the only thing that tells a missing driver from a taken
port (both are a 500). What no line of the table knows is passed on as Docker said it.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
from pathlib import Path


class DockerAway(Exception):
    """Docker cannot be reached. The text says why, and what to do."""


class DockerSlow(DockerAway):
    """Docker took the call and did not answer in time: whether it did what was asked is unknown."""


class DockerError(Exception):
    """Docker answered with an error: its HTTP status and its message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"Docker answered {status}: {message}")
        self.status = status
        self.message = message


def away(socket: Path, error: BaseException, seconds: float) -> DockerAway:
    """The failure of one call that allowed `seconds`. `error` is the client's; the system's is somewhere behind it."""
    cause = _system_error(error)
    number = None if cause is None else cause.errno
    if number == errno.ENOENT:
        return DockerAway(f"Docker is not running: there is no {socket} (DOCKER_HOST can name another socket)")
    if number == errno.ECONNREFUSED:
        return DockerAway(
            f"Docker is not running: nobody listens on {socket}; where the gate runs in a container of its own, mount "
            "the folder of the socket, not the socket"
        )
    if number in (errno.EACCES, errno.EPERM):
        return DockerAway(_denied(socket))
    if "Timeout" in type(error).__name__:
        return DockerSlow(f"Docker did not answer within {seconds:g} s on {socket}")
    return DockerAway(f"Docker on {socket} broke off: {cause or error or type(error).__name__}")


def _system_error(error: BaseException | None) -> OSError | None:
    while error is not None and not (isinstance(error, OSError) and error.errno):
        error = error.__cause__ or error.__context__
    return error


def _denied(socket: Path) -> str:
    """Permission denied: who may use the socket, and how the gate's user becomes one of them."""
    user = _user()
    try:
        group = socket.group()
    except (OSError, KeyError, NotImplementedError):
        group = "docker"
    cure = "run Docker rootless" if group == "root" else f"add it to the group {group} (usermod -aG {group} {user})"
    return f"permission denied on {socket}: the user {user} may not use Docker; {cure} and start the gate again"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a number without a name
        return str(os.getuid())


NO_DRIVER = (
    "Docker has no GPU driver: install the NVIDIA Container Toolkit (or name a CDI device such as "
    '"nvidia.com/gpu=0" in `gpus`) and restart Docker'
)
# A pattern in Docker's message, and what is said for it; {0} is the whole message, {1} its group.
_START = (
    (r"could not select device driver", f"{NO_DRIVER}; it says: {{0}}"),
    (r"unresolvable CDI devices (\S+)", "Docker knows no CDI device {1}: `gpus` must name what a CDI file declares"),
    (r"nvidia-container-cli: (.*?)(?:: unknown)?$", "the GPU driver refused: {1}"),
    (r"[Bb]ind for (\S+) failed: port is already allocated", "the port {1} is taken by another container"),
    (
        r"failed to bind host port (?:for )?([\d.]+:\d+)\S* address already in use",
        "the port {1} is taken by another program",
    ),
    (r"listen tcp\d? (\S+): bind: address already in use", "the port {1} is taken by another program"),
    (r"bind source path does not exist: (\S+)", "there is no {1} on the machine Docker runs on (a mount or the model)"),
    (r'exec: \\?"([^"\\]*)\\?": (.*?)(?:: unknown)?$', "the image cannot run {1}: {2}"),
    (r"docker-init", "Docker's init program is missing (package tini or docker-init): {0}"),
)


def start_text(error: DockerError) -> str:
    """One line for a person about a create or start that failed."""
    message = " ".join(error.message.split())
    for pattern, text in _START:
        if found := re.search(pattern, message):
            return text.format(message, *found.groups())
    return f"Docker refused: {message} ({error.status})"
