"""Mutated requests and answers through a real gateway, judged by two other parsers.

    python -m tests.gateway.fuzz_wire --seconds 60 --seed 1
    python -m tests.gateway.fuzz_wire --seed 1 --case 1234      (one case again, told in full)

The oracle, for requests: whatever the gate sends to an engine, h11 and llhttp (strict) frame alike, to the byte; and it
is one of the requests, in their order, that llhttp finds in what the client sent. For answers: what the client gets is
framed alike by both, and where the engine's answer was not a whole one for llhttp the client's is not one for anybody.
And nothing the gate does raises. Same seed, same bytes, same cuts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog
import uvloop

from gpu_turnstile.gateway.upstream import Upstream
from tests.aio import until
from tests.gateway.bench import Bench, Options, Rules
from tests.gateway.oracle import Message, Refused, h11_request, h11_response, llhttp_request, llhttp_response

CORPUS = Path(__file__).with_name("corpus")
SPLICES = [b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b"\x0b", b"\x7f", b"\xff", b":", b",", b";", b"0", b"1", b"-"]
SPLICES += [
    b"\r\n\r\n",
    b"0\r\n\r\n",
    b"chunked",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"\r\n ",
]
SPLICES += [b"Transfer-Encoding : chunked\r\n", b"Connection: close\r\n", b"Connection: host\r\n", b"Host: h\r\n"]
SPLICES += [b"GET /api/ps HTTP/1.1\r\nHost: g\r\n\r\n", b"HTTP/1.0", b"Upgrade: websocket\r\nConnection: upgrade\r\n"]
PLAIN = [b"POST /api/chat HTTP/1.1\r\nHost: g\r\nContent-Length: 13\r\n\r\n", b'{"model":"m"}']
PATIENCE = 5.0  # seconds until a case counts as hanging


def seeds(kind: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(CORPUS.glob(f"{kind}-*.http"))]


def mutate(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 | 1:
                out[at:at] = rng.choice(SPLICES)
            case 2:
                del out[at : at + rng.choice((1, 1, 2, 8))]
            case 3 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 4:
                out[at:at] = out[max(0, at - rng.randint(1, 60)) : at]
            case 5:
                lines = bytes(out).split(b"\r\n")
                first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
                lines[first], lines[second] = lines[second], lines[first]
                out[:] = b"\r\n".join(lines)
            case _:
                out[at : at + 1] = rng.choice((b"0", b"5", b"a", b"f", b"9", b"\n", b" "))
    return bytes(out)


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    places = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3, 9))))})
    return [data[start:end] for start, end in pairwise(places)]


@dataclass
class Case:
    number: int
    kind: str
    sent: list[bytes]
    forwarded: list[bytes] = field(default_factory=list)  # requests: what each connection to an engine got
    received: bytes = b""  # what the client got
    reset: bool = False
    faults: list[str] = field(default_factory=list)


class Recorder(asyncio.Protocol):
    """The engine's side of one connection: keeps every byte, answers once llhttp finds a request complete."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self.fuzzer = fuzzer
        self.data = b""
        self.answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.fuzzer.connections.append(self)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.answered:
            return
        try:
            complete = llhttp_request(self.data).complete
        except Refused:
            complete = True
        if complete:
            self.answered = True
            self.fuzzer.answer(self.transport)


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.requests, self.answers = seeds("request"), seeds("answer")
        self.connections: list[Recorder] = []
        self.reply: list[bytes] = []
        self.faults: list[str] = []

    async def __aenter__(self) -> Fuzzer:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: self.faults.append(str(about)[:2000]))
        self.bench = Bench(Options(backoff_initial=0.01, body_limit=1 << 20), Rules())
        await self.bench.start()
        loop = asyncio.get_running_loop()
        self.server = await loop.create_server(lambda: Recorder(self), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        self.bench.ollama_engine.url = self.bench.comfy_engine.url = url
        self.bench.gateway.control = Upstream("control", url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.bench.stop()

    def answer(self, transport: asyncio.Transport) -> None:
        for piece in self.reply:
            transport.write(piece)
        transport.close()

    async def run(self, number: int) -> Case:
        rng = random.Random(f"{self.seed}:{number}")
        if rng.random() < 0.7:
            case = Case(number, "request", pieces(mutate(rng.choice(self.requests), rng), rng))
            self.reply = [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"]
            await self._converse(case, case.sent)
            case.faults += judge_requests(b"".join(case.sent), case.forwarded)
        else:
            case = Case(number, "answer", pieces(mutate(rng.choice(self.answers), rng), rng))
            self.reply = case.sent
            await self._converse(
                case, [b"POST /api/chat HTTP/1.1\r\nHost: g\r\nContent-Length: 13\r\n\r\n", b'{"model":"m"}']
            )
            case.faults += judge_answer(b"".join(case.sent), case.received, case.reset)
        case.faults += self.faults
        self.faults = []
        return case

    async def _converse(self, case: Case, sending: list[bytes]) -> None:
        self.connections = []
        try:
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.bench.port)
                try:
                    for piece in sending:
                        if writer.transport.is_closing():
                            break
                        writer.write(piece)
                        await asyncio.sleep(0)
                    await self._read(case, reader, writer)
                finally:
                    writer.transport.abort()
        except TimeoutError:
            case.faults.append("the case hangs")
        await until(lambda: not self.bench.gateway.connections)
        case.forwarded = [connection.data for connection in self.connections if connection.data]

    async def _read(self, case: Case, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the gate has said all it has to say: it closes, or is silent with nothing to do."""
        gateway, quiet = self.bench.gateway, 0
        while quiet < 3:
            try:
                async with asyncio.timeout(0.002):
                    data = await reader.read(1 << 16)
            except TimeoutError:
                busy = any(c.exchange is not None and not c.exchange.wants_body for c in gateway.connections)
                quiet = 0 if busy else quiet + 1
                continue
            except ConnectionError:
                case.reset = True
                return
            if not data:
                return
            case.received, quiet = case.received + data, 0


def judge_requests(sent: bytes, forwarded: list[bytes]) -> list[str]:
    faults, meant = [], all_requests(sent)
    for data in forwarded:
        found: list[Message] = []
        for read in (h11_request, llhttp_request):
            try:
                found.append(read(data))
            except Refused as error:
                faults.append(f"{read.__name__} refuses what was forwarded ({error}): {data!r}")
        if len(found) < 2:
            continue
        ours, theirs = found
        if (ours.complete, ours.end, ours.complete and ours.body) != (
            theirs.complete,
            theirs.end,
            theirs.complete and theirs.body,
        ):
            faults.append(f"h11 and llhttp differ on what was forwarded: {data!r}")
        elif ours.complete and ours.end != len(data):
            faults.append(f"there is more after the request that was forwarded: {data!r}")
        elif ours.complete:
            while meant and not _same(meant[0], theirs):
                meant.pop(0)
            if not meant:
                faults.append(f"nobody sent what was forwarded: {data!r}")
            else:
                meant.pop(0)
    return faults


def _same(meant: Message, forwarded: Message) -> bool:
    same = (meant.method, meant.body) == (forwarded.method, forwarded.body)
    return same and (meant.target.endswith(forwarded.target) or _origin_form(meant.target) == forwarded.target)


def _origin_form(target: bytes) -> bytes:
    """Of a target that names its server and has no path, only a query."""
    server, mark, query = target.partition(b"?")
    return b"/" + mark + query if server.count(b"/") == 2 else target


def all_requests(data: bytes) -> list[Message]:
    """The requests llhttp finds, up to the first that it refuses."""
    found = []
    while data := data.lstrip(b"\r\n"):
        try:
            message = llhttp_request(data)
        except Refused:
            break
        if not message.complete:
            break
        if message.end is None:  # CONNECT: what follows is no HTTP
            break
        found.append(message)
        data = data[message.end :]
    return found


def judge_answer(sent: bytes, received: bytes, reset: bool) -> list[str]:
    received = skip_interim(received)
    if b"X-Turnstile-Error: " in received.partition(b"\r\n\r\n")[0]:
        return [] if llhttp_response(received).complete else [f"the gate's own answer is broken: {received!r}"]
    if reset:
        return []
    try:
        ours = h11_response(received, "POST", closed=True)
        theirs = llhttp_response(received)
    except Refused as error:
        return [f"what the client got is refused ({error}): {received!r}"]
    complete = theirs.complete or _until_close(received)
    if ours.complete != complete:
        return [f"h11 and llhttp differ on what the client got: {received!r}"]
    if ours.complete and not _until_close(received) and not whole(sent):
        return [f"the engine's answer was not whole, but the client's is: {sent!r} {received!r}"]
    return []


def skip_interim(data: bytes) -> bytes:
    while data.startswith(b"HTTP/1.1 1"):
        data = data.partition(b"\r\n\r\n")[2]
    return data


def _until_close(received: bytes) -> bool:
    head = received.partition(b"\r\n\r\n")[0].lower()
    framed = b"\r\ncontent-length:" in head or b"\r\ntransfer-encoding:" in head
    return bool(head) and not framed


def whole(sent: bytes) -> bool:
    try:
        return llhttp_response(skip_interim(sent)).complete or b" 204 " in sent or b" 304 " in sent
    except Refused:
        return False


async def fuzz(seed: int, cases: range, seconds: float) -> list[Case]:
    """The cases with faults; ends after `seconds` or the last case, whichever comes first."""
    bad, end, done = [], time.monotonic() + seconds, 0
    async with Fuzzer(seed) as fuzzer:
        for number in cases:
            if time.monotonic() > end:
                break
            case = await fuzzer.run(number)
            done += 1
            if case.faults:
                bad.append(case)
    print(f"seed {seed}: {done} cases, {len(bad)} with faults", file=sys.stderr)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run only this one and show it")
    given = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    cases = range(10**9) if given.case is None else range(given.case, given.case + 1)
    bad = uvloop.run(fuzz(given.seed, cases, given.seconds))
    for case in bad[:20]:
        print(f"\n--seed {given.seed} --case {case.number} ({case.kind})\n  sent      {b''.join(case.sent)!r}")
        print(f"  forwarded {case.forwarded!r}\n  received  {case.received!r}{' then a reset' if case.reset else ''}")
        for fault in case.faults:
            print(f"  FAULT     {fault}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
