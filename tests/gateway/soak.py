"""Load on the gate: engine, gate and clients in processes of their own, every byte of every stream checked.

    python -m tests.gateway.soak --streams 2000 --seconds 60 --rate 20 --drop 0.05

Each stream is a function of its number, so a client knows the next byte it must get and needs no memory of the others.
A part of the clients leaves at a random moment, half of them with a reset. What must hold: the others lose and reorder
nothing, in-flight and descriptors come back to what they were, and so does the gate's memory, within a tenth. "Before"
is after a short round of all streams: what the allocator keeps after its first crowd is not a leak, what it adds with
every further one is. The memory of a new gate is printed beside it.
Exit code 0 if all of that held, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field

import psutil
import uvloop

from tests.gateway.bench import SSE, bench, chunk

MODEL = "m%d-%d"  # number of the stream, number of its events
WARM_UP = 10  # events of every stream before the first measurement: a gate that has worked, not a new-born one
MEMORY_SLACK = 0.10
CLIENT_PROCESSES = 2
PHASES = 16  # the engine spreads its events over the interval
SLOW = 0.25  # seconds: a chunk that took longer is counted


@dataclass(frozen=True)
class Plan:
    streams: int = 2000
    seconds: float = 60.0
    rate: float = 20.0  # events per second and stream
    drop: float = 0.05  # part of the clients that leave

    @property
    def events(self) -> int:
        return max(1, int(self.seconds * self.rate))


@dataclass
class Figures:
    """What the gate's process says about itself."""

    leases: int
    waiting: int
    connections: int
    engine_connections: int
    descriptors: int
    memory: int  # bytes, after a collection
    cpu: float  # seconds


@dataclass
class Outcome:
    """What one process of clients saw."""

    complete: int = 0
    left: int = 0
    events: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    slow: int = 0


@dataclass
class Result:
    plan: Plan
    new: Figures
    before: Figures
    after: Figures
    outcomes: list[Outcome]
    seconds: float
    problems: list[str] = field(default_factory=list)

    def total(self, name: str) -> int:
        return sum(getattr(o, name) for o in self.outcomes)

    def table(self) -> str:
        before, after = self.before, self.after
        cpu = after.cpu - before.cpu
        events, slowest = self.total("events"), max(o.slowest for o in self.outcomes)
        rows = [
            ("streams", str(self.plan.streams), ""),
            ("  complete", str(self.total("complete")), ""),
            ("  left on purpose", str(self.total("left")), ""),
            ("  wrong", str(sum(len(o.wrong) for o in self.outcomes)), ""),
            ("events checked", f"{events}", f"{events / self.seconds:.0f}/s"),
            (
                "slowest event",
                f"{slowest * 1000:.0f} ms",
                f"> 250 ms: {self.total('slow')}",
            ),
            ("gate CPU", f"{cpu:.1f} s", f"{cpu / max(events, 1) * 1e6:.1f} µs/event"),
            ("leases", str(before.leases), str(after.leases)),
            ("waiting", str(before.waiting), str(after.waiting)),
            ("client connections", str(before.connections), str(after.connections)),
            ("engine connections", str(before.engine_connections), str(after.engine_connections)),
            ("descriptors", str(before.descriptors), str(after.descriptors)),
            ("memory of a new gate", f"{self.new.memory / 1e6:.1f} MB", ""),
            ("memory", f"{before.memory / 1e6:.1f} MB", f"{after.memory / 1e6:.1f} MB"),
        ]
        lines = [f"{name:<22}{one:>12}  {two:>16}" for name, one, two in rows]
        lines += [f"WRONG: {problem}" for problem in self.problems] or ["all held"]
        return "\n".join(lines)


def event(stream: int, number: int) -> bytes:
    """The n-th event of a stream, as a chunk. Its size changes from event to event."""
    return chunk(
        b'data: {"s":%d,"n":%d,"t":"%s"}\n\n' % (stream, number, b"\xe4\xb8\x96" * (1 + (stream + number) % 7))
    )


# ----------------------------------------------------------------------------------------------- the engine


class EngineStream(asyncio.Protocol):
    """Answers every request with the stream its model names."""

    def __init__(self, clock: EngineClock) -> None:
        self.clock = clock
        self.buffer = b""
        self.stream = self.number = self.events = 0
        self.full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.buffer.endswith(b"}"):
            model = json.loads(self.buffer.partition(b"\r\n\r\n")[2])["model"]
            self.buffer = b""
            stream, _, events = model[1:].partition("-")
            self.stream, self.number, self.events = int(stream), 0, int(events)
            self.transport.write(SSE)
            self.clock.add(self)

    def tick(self) -> bool:
        """Send the next event; returns whether there is one more."""
        if self.full:
            return True
        self.transport.write(event(self.stream, self.number))
        self.number += 1
        if self.number < self.events:
            return True
        self.transport.write(b"0\r\n\r\n")
        return False

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.clock.remove(self)


class EngineClock:
    """Ticks all streams, a part of them at a time. A tick that comes late is not made up for."""

    def __init__(self, rate: float) -> None:
        self.pause = 1 / rate / PHASES
        self.groups: list[set[EngineStream]] = [set() for _ in range(PHASES)]
        self.next = 0

    def add(self, stream: EngineStream) -> None:
        self.groups[stream.stream % PHASES].add(stream)

    def remove(self, stream: EngineStream) -> None:
        self.groups[stream.stream % PHASES].discard(stream)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.pause, loop.time() - self.pause)
            await asyncio.sleep(max(0.0, due - loop.time()))
            group = self.groups[self.next]
            self.next = (self.next + 1) % PHASES
            for stream in tuple(group):
                if not stream.tick():
                    group.discard(stream)


async def engine_process(rate: float) -> None:
    clock = EngineClock(rate)
    server = await asyncio.get_running_loop().create_server(lambda: EngineStream(clock), "127.0.0.1", 0, backlog=4096)
    say({"port": server.sockets[0].getsockname()[1]})
    ticking = asyncio.ensure_future(clock.run())
    await commands()
    ticking.cancel()


# ------------------------------------------------------------------------------------------------- the gate


def trim() -> None:
    """Give freed memory back to the system, so that what is measured is what is held."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def gate_process(engine: str) -> None:
    async with bench(quiet=False) as b:
        b.ollama_engine.url = engine
        say({"port": b.port})
        own = psutil.Process()

        def figures() -> dict[str, float]:
            trim()
            view, cpu = b.view, own.cpu_times()
            upstreams = b.gateway._upstreams.values()
            for upstream in upstreams:
                upstream.sweep()
            return asdict(
                Figures(
                    leases=len(view.leases),
                    waiting=len(view.waiting),
                    connections=len(b.gateway.connections),
                    engine_connections=sum(u.open for u in upstreams),
                    descriptors=own.num_fds(),
                    memory=own.memory_info().rss,
                    cpu=cpu.user + cpu.system,
                )
            )

        await commands(lambda line: say(figures()))


# ---------------------------------------------------------------------------------------------- the clients


class ClientStream(asyncio.Protocol):
    """One stream: compares every byte with what must come next."""

    def __init__(self, crowd: Crowd, stream: int, leaves_after: int | None) -> None:
        self.crowd = crowd
        self.stream = stream
        self.leaves_after = leaves_after
        self.number = -1  # of the next event; -1 = the head has not come
        self.buffer = b""
        self.ended = False
        self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        body = json.dumps({"model": MODEL % (self.stream, self.crowd.events), "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n"
        transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def data_received(self, data: bytes) -> None:
        data = self.buffer + data
        if self.number < 0:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self.buffer = head
                return
            if not head.startswith(b"HTTP/1.1 200 "):
                self.wrong(f"answer {head[:200]!r} {data[:200]!r}")
                return
            self.number, self.last = 0, time.monotonic()
        self.buffer = self.check(data)

    def check(self, data: bytes) -> bytes:
        """Go over all complete events in `data`; returns the rest."""
        crowd, position = self.crowd, 0
        while not self.ended:
            expected = event(self.stream, self.number) if self.number < crowd.events else b"0\r\n\r\n"
            got = data[position : position + len(expected)]
            if got != expected:
                if not expected.startswith(got):
                    self.wrong(f"event {self.number}: {got[:80]!r} instead of {expected[:80]!r}")
                break
            position += len(expected)
            if self.number == crowd.events:
                self.end("complete")
                break
            self.number += 1
            self.count()
        return data[position:]

    def count(self) -> None:
        now = time.monotonic()
        late = now - self.last - self.crowd.interval
        self.last = now
        outcome = self.crowd.outcome
        outcome.events += 1
        if self.number > 1:
            outcome.slowest = max(outcome.slowest, late)
            outcome.slow += late > SLOW
        if self.leaves_after is not None and self.number >= self.leaves_after:
            self.leave()

    def leave(self) -> None:
        self.end("left")
        if self.stream % 2:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()
        else:
            self.transport.close()

    def end(self, how: str) -> None:
        if not self.ended:
            self.ended = True
            setattr(self.crowd.outcome, how, getattr(self.crowd.outcome, how) + 1)
            self.crowd.one_less()

    def wrong(self, what: str) -> None:
        if not self.ended:
            self.ended = True
            self.crowd.outcome.wrong.append(f"stream {self.stream}: {what}")
            self.crowd.one_less()
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.wrong(f"the connection ended after {self.number} events ({exc})")
        self.crowd.connections.discard(self)


class Crowd:
    def __init__(self, port: int, streams: range, events: int, rate: float, drop: float) -> None:
        self.port = port
        self.streams = streams
        self.events = events
        self.interval = 1 / rate
        self.outcome = Outcome()
        self.connections: set[ClientStream] = set()
        self.left = len(streams)
        self.done = asyncio.Event()
        chance = random.Random(streams.start)
        leavers = chance.sample(streams, round(drop * len(streams)))
        self.leavers = {stream: chance.randrange(1, max(2, events)) for stream in leavers}

    def one_less(self) -> None:
        self.left -= 1
        if not self.left:
            self.done.set()

    async def run(self, limit: float) -> Outcome:
        loop = asyncio.get_running_loop()
        for stream in self.streams:
            protocol = ClientStream(self, stream, self.leavers.get(stream))
            await loop.create_connection(lambda p=protocol: p, "127.0.0.1", self.port)
            self.connections.add(protocol)
        try:
            async with asyncio.timeout(limit):
                await self.done.wait()
        except TimeoutError:
            for one in tuple(self.connections):
                one.wrong(f"not complete within {limit:g} s: {one.number} events")
        for one in tuple(self.connections):
            one.transport.close()
        return self.outcome


async def clients_process(port: int, first: int, end: int, events: int, rate: float, drop: float) -> None:
    crowd = Crowd(port, range(first, end), events, rate, drop)
    say(asdict(await crowd.run(events / rate * 3 + 30)))


# ------------------------------------------------------------------------------------------- the conductor


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


async def commands(answer=lambda line: None) -> None:
    """Do what each line of standard input asks; ends with it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(answer, line)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


class Part:
    """One process of the soak, spoken to line by line."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.soak", "--part", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a part of the soak ended early: {self.process.args}")
        return json.loads(line)

    def ask(self) -> dict:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def crowd(port: int, plan: Plan, events: int, streams: int) -> list[Outcome]:
    """All clients, in a few processes."""
    share = -(-streams // CLIENT_PROCESSES)
    bounds = [(n, min(n + share, streams)) for n in range(0, streams, share)]
    parts = [Part("clients", port, first, end, events, plan.rate, plan.drop) for first, end in bounds]
    try:
        return [Outcome(**part.hear()) for part in parts]
    finally:
        for part in parts:
            part.end()


def settle(gate: Part, seconds: float = 5.0) -> Figures:
    """The gate's figures once nothing is going on any more, or when the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        figures = Figures(**gate.ask())
        busy = figures.leases or figures.waiting or figures.connections or figures.engine_connections
        if not busy or time.monotonic() > deadline:
            return figures
        time.sleep(0.05)


def run(plan: Plan) -> Result:
    raise_descriptor_limit(plan.streams * 2 + 200)
    engine = Part("engine", plan.rate)
    gate = Part("gate", f"http://127.0.0.1:{engine.hear()['port']}")
    try:
        port = gate.hear()["port"]
        new = settle(gate)
        crowd(port, plan, WARM_UP, plan.streams)
        before = settle(gate)
        began = time.monotonic()
        outcomes = crowd(port, plan, plan.events, plan.streams)
        seconds = time.monotonic() - began
        result = Result(plan, new, before, settle(gate), outcomes, seconds)
    finally:
        gate.end()
        engine.end()
    result.problems = list(judge(result))
    return result


def judge(result: Result):
    before, after, plan = result.before, result.after, result.plan
    for outcome in result.outcomes:
        yield from outcome.wrong[:5]
    if result.total("complete") + result.total("left") != plan.streams:
        yield "not every stream came to its end"
    for name in ("leases", "waiting", "connections", "engine_connections"):
        if getattr(after, name):
            yield f"{name}: {getattr(after, name)} left over"
    if after.descriptors > before.descriptors:
        yield f"descriptors: {before.descriptors} before, {after.descriptors} after"
    if after.memory > before.memory * (1 + MEMORY_SLACK):
        yield f"memory: {before.memory / 1e6:.1f} MB before, {after.memory / 1e6:.1f} MB after"


def raise_descriptor_limit(need: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < need:
        wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        if wanted < need:
            print(f"only {wanted} descriptors are allowed, {need} are needed", file=sys.stderr)


def part(arguments: list[str]) -> None:
    match arguments:
        case ["engine", rate]:
            uvloop.run(engine_process(float(rate)))
        case ["gate", engine]:
            uvloop.run(gate_process(engine))
        case ["clients", port, first, end, events, rate, drop]:
            uvloop.run(clients_process(int(port), int(first), int(end), int(events), float(rate), float(drop)))
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.soak", description="Load on the gate, checked.")
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="events per second and stream")
    parser.add_argument("--drop", type=float, default=0.05, help="part of the clients that leave")
    given = parser.parse_args()
    result = run(Plan(given.streams, given.seconds, given.rate, given.drop))
    print(result.table())
    return 1 if result.problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        part(sys.argv[2:])
    sys.exit(main())
