"""A Docker Engine of the tests' own, in a temporary folder: nothing of the machine's own Docker is seen or touched.

Its containers are on a bridge of its own, reached through Docker's user-land proxy: the firewall is left alone. The
one image is busybox, imported from a tar made here: no registry is needed. The GPU is a hook that does nothing, which
is all this daemon wants to see to believe in an NVIDIA driver.

Debian: docker.io, busybox-static, iproute2. `TURNSTILE_DOCKERD` names a folder with another `dockerd` and its parts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

IMAGE = "turnstile-test:1"
TOOLS = ("sh", "httpd", "sleep", "cat", "echo", "tail", "touch", "env", "kill", "seq")
UP = 20.0  # seconds until a daemon must answer
DOWN = 20.0
HOOK = "#!/bin/sh\ncat > /dev/null\n"
CDI = {
    "cdiVersion": "0.6.0",
    "kind": "nvidia.com/gpu",
    "devices": [{"name": "0", "containerEdits": {"env": ["CDI_GPU=0"]}}],
}


class NoDaemon(Exception):
    """Why there is no Docker for the tests here."""


class Daemon:
    def __init__(self, *, live_restore: bool = False) -> None:
        """Raises NoDaemon."""
        self.live_restore = live_restore
        self._process: subprocess.Popen[bytes] | None = None
        self.path = os.pathsep.join(filter(None, (os.environ.get("TURNSTILE_DOCKERD"), os.environ["PATH"])))
        _check(self.path)
        self._dockerd = shutil.which("dockerd", path=self.path) or "dockerd"
        self.folder = Path(tempfile.mkdtemp(prefix="tsd-", dir="/tmp"))  # short: sockets go into it
        self.socket = self.folder / "run" / "docker.sock"
        self.socket.parent.mkdir()
        self._bridge = f"tsd{os.getpid()}"
        self._containerd_socket = self.folder / "c" / "containerd.sock"
        self._containerd: subprocess.Popen[bytes] | None = None
        self._make_hook()
        try:
            self._make_bridge()
            self._start_containerd()
            self.start()
            self._import_busybox()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------------------------------- the daemon

    def start(self) -> None:
        """Returns when it answers. Raises NoDaemon."""
        command = [
            self._dockerd,
            *("--host", f"unix://{self.socket}", "--data-root", str(self.folder / "data")),
            *("--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "pid")),
            *("--containerd", str(self._containerd_socket)),
            *("--bridge", self._bridge, "--iptables=false", "--ip-forward=false", "--ip-masq=false"),
            *("--config-file", str(self._config_file()), "--log-level", "warn"),
            *(("--live-restore",) if self.live_restore else ()),
        ]
        path = f"{self.folder / 'hook'}{os.pathsep}{self.path}"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": path})
        deadline = time.monotonic() + UP
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NoDaemon(f"dockerd does not start: {self._last_error()}")
            time.sleep(0.02)

    def end(self, number: signal.Signals) -> None:
        """Returns when the process is gone. SIGKILL leaves its socket behind."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(DOWN)
            self._process = None

    def restart(self, number: signal.Signals, *, live_restore: bool) -> None:
        self.end(number)
        self.live_restore = live_restore
        self.start()

    def close(self) -> None:
        """End everything this daemon started, and remove what it made."""
        with contextlib.suppress(Exception):
            self.remove_all()
        self.live_restore = False
        if self.is_up:
            with contextlib.suppress(Exception):
                self.end(signal.SIGTERM)
        if self._containerd is not None:
            self._containerd.terminate()
            self._containerd.wait(DOWN)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, check=False)
        for mounted in _mounts_below(self.folder):
            subprocess.run(["umount", "--lazy", mounted], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---------------------------------------------------------------------------- a plain client, for the tests' eyes

    def call(self, method: str, path: str, **more: Any) -> httpx.Response:
        transport = httpx.HTTPTransport(uds=str(self.socket), verify=False)  # reading certificates takes 20 ms
        with httpx.Client(transport=transport, base_url="http://d", timeout=15, trust_env=False) as http:
            return http.request(method, path, **more)

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def answers(self) -> bool:
        try:
            return self.call("GET", "/_ping").status_code == 200
        except httpx.TransportError:
            return False

    def inspect(self, name: str) -> dict[str, Any] | None:
        response = self.call("GET", f"/containers/{name}/json")
        return response.json() if response.status_code == 200 else None

    def names(self) -> set[str]:
        found = self.call("GET", "/containers/json", params={"all": "1"}).json()
        return {container["Names"][0].removeprefix("/") for container in found}

    def make(self, name: str, *, start: bool, **body: Any) -> str:
        """A container somebody else made; its id."""
        body = {"Image": IMAGE, "Cmd": ["sleep", "600"], **body}
        response = self.call("POST", "/containers/create", params={"name": name}, json=body)
        assert response.status_code == 201, response.text
        id = response.json()["Id"]
        if start:
            assert self.call("POST", f"/containers/{id}/start").status_code == 204
        return id

    def remove_all(self) -> None:
        for container in self.call("GET", "/containers/json", params={"all": "1"}).json():
            self.call("DELETE", f"/containers/{container['Id']}", params={"force": "1", "v": "1"})

    # ------------------------------------------------------------------------------------------------- parts

    def _config_file(self) -> Path:
        """The machine's own is not to be read. Engines that know CDI are shown one device, which is a variable."""
        file = self.folder / "daemon.json"
        said = subprocess.run([self._dockerd, "--version"], capture_output=True, text=True, check=True).stdout
        self.knows_cdi = int(said.split()[2].split(".")[0]) >= 25
        (self.folder / "cdi").mkdir(exist_ok=True)
        (self.folder / "cdi" / "fake.json").write_text(json.dumps(CDI))
        config = {"features": {"cdi": True}, "cdi-spec-dirs": [str(self.folder / "cdi")]} if self.knows_cdi else {}
        file.write_text(json.dumps(config))
        return file

    def _make_hook(self) -> None:
        hook = self.folder / "hook" / "nvidia-container-runtime-hook"
        hook.parent.mkdir()
        hook.write_text(HOOK)
        hook.chmod(0o755)

    def _make_bridge(self) -> None:
        net = f"10.213.{os.getpid() % 250}.1/24"
        for words in (("add", self._bridge, "type", "bridge"), ("set", self._bridge, "up")):
            _run("ip", "link", *words)
        _run("ip", "address", "add", net, "dev", self._bridge)

    def _start_containerd(self) -> None:
        """By itself, as most machines have it: it lives on when dockerd is killed."""
        folder = self._containerd_socket.parent
        folder.mkdir()
        places = f'root = "{folder}/root"\nstate = "{folder}/state"\n[grpc]\naddress = "{self._containerd_socket}"\n'
        config = folder / "config.toml"
        config.write_text(f"version = 2\n{places}")
        command = [shutil.which("containerd", path=self.path) or "containerd", "--config", str(config)]
        with (self.folder / "containerd.log").open("ab") as log:
            self._containerd = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": self.path})
        deadline = time.monotonic() + UP
        while not self._containerd_socket.exists():
            if self._containerd.poll() is not None or time.monotonic() > deadline:
                raise NoDaemon("containerd does not start")
            time.sleep(0.02)

    def _import_busybox(self) -> None:
        repository, tag = IMAGE.split(":")
        params = {"fromSrc": "-", "repo": repository, "tag": tag}
        response = self.call("POST", "/images/create", params=params, content=_busybox_tar(self.path))
        if response.status_code != 200 or "errorDetail" in response.text:
            raise NoDaemon(f"dockerd takes no image: {response.text}")

    def _last_error(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return lines[-1][:300] if lines else "it said nothing"


def _check(path: str) -> None:
    if os.name != "posix" or os.geteuid() != 0:
        raise NoDaemon("only root can start dockerd")
    for program in ("dockerd", "containerd", "runc", "busybox", "ip"):
        if shutil.which(program, path=path) is None:
            raise NoDaemon(f"there is no {program} (Debian: docker.io busybox-static iproute2)")


def _mounts_below(folder: Path) -> list[str]:
    """What a killed daemon leaves mounted, the innermost first."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((point for point in points if point.startswith(f"{folder}/")), key=len, reverse=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDaemon(f"{' '.join(command)}: {done.stderr.strip()}")


def _busybox_tar(path: str) -> bytes:
    """A root file system: one program under the names of its tools."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for folder in ("bin", "tmp", "www"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(os.path.realpath(shutil.which("busybox", path=path) or "busybox"), "bin/busybox")
        for tool in TOOLS:
            entry = tarfile.TarInfo(f"bin/{tool}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return content.getvalue()
