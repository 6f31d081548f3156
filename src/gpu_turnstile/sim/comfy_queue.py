"""The queue, the worker and the history of the simulated ComfyUI.

One job at a time; the move from running to history is one step, so a job is never in neither. Everything is in
memory and gone after a restart. Invariant: the card is taken when the first node really runs, and is kept until
`/free` acts, which is never during a job.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpu_turnstile.sim.base import pause, until
from gpu_turnstile.sim.card import SimCard
from gpu_turnstile.sim.comfy_nodes import NODES, Graph, Json, is_link, run_order
from gpu_turnstile.sim.faults import ComfyFaults, JobFate

OOM = "torch.OutOfMemoryError"
_OOM_ADVICE = (
    "\nThis error means you ran out of memory on your GPU.\n\nTIPS: If the workflow worked before you might have "
    "accidentally set the batch_size to a large number."
)
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")  # how files begin that are pictures


class Sockets(Protocol):
    """`sid` None = to everybody."""

    def send(self, event: str, data: Json, sid: str | None) -> None: ...


class NodeError(Exception):
    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        self.message = message


class Interrupted(Exception):
    pass


@dataclass(slots=True)
class Job:
    number: float
    id: str
    graph: Graph
    extra: Json
    outputs: list[str]
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def client(self) -> str | None:
        return self.extra.get("client_id")

    def as_json(self) -> list[Any]:
        return [self.number, self.id, self.graph, self.extra, self.outputs]


@dataclass(frozen=True, slots=True)
class Settings:
    """`job_s`: seconds of a job whose graph has no SleepImage. Sizes in bytes: with models, and without."""

    name: str
    vram: int
    residual: int
    job_s: float


class Queue:
    def __init__(
        self, settings: Settings, card: SimCard, faults: ComfyFaults, sockets: Sockets, counters: Counter[str]
    ) -> None:
        self.settings = settings
        self.card = card
        self.faults = faults
        self.sockets = sockets
        self.counters = counters
        self.inputs: dict[str, bytes] = {}  # what was uploaded; it outlives the process
        self.wipe()

    def wipe(self) -> None:
        self.running: Job | None = None
        self.node: str | None = None  # the one that runs
        self.history: dict[str, Json] = {}
        self.files: dict[str, str] = {}  # what jobs wrote: name -> output or temp
        self.interrupted = False
        self.holding = False  # models are on the card
        self._heap: list[tuple[float, str, int, Job]] = []
        self._order = itertools.count()
        self._cache: dict[str, Json | None] = {}  # signature -> what the node showed
        self._saved: Counter[str] = Counter()
        self._unload = self._forget = False
        self._wake = asyncio.Event()

    @property
    def pending(self) -> list[Job]:
        """In heap order, as the real one lists them."""
        return [entry[-1] for entry in self._heap]

    @property
    def remaining(self) -> int:
        return len(self._heap) + (self.running is not None)

    # ------------------------------------------------------------------------------------ from outside

    def put(self, job: Job) -> None:
        heapq.heappush(self._heap, (job.number, job.id, next(self._order), job))
        self._tell_status()
        self._wake.set()

    def delete(self, job_id: str) -> bool:
        """The first pending one of this id; False = there is none."""
        for entry in self._heap:
            if entry[-1].id == job_id:
                self._heap.remove(entry)
                heapq.heapify(self._heap)
                self._tell_status()
                return True
        return False

    def clear(self) -> None:
        self._heap.clear()
        self._tell_status()

    def interrupt(self, job_id: str | None = None) -> bool:
        """Noticed at the next step of the running node, and forgotten when a job starts."""
        if job_id is not None and (self.running is None or self.running.id != job_id):
            return False
        self.interrupted = True
        return True

    def free(self, unload: bool, forget: bool) -> None:
        """Acts when no job runs. `forget`: the results of nodes too."""
        self._unload |= unload or forget
        self._forget |= forget
        self._wake.set()

    # ------------------------------------------------------------------------------------ the worker

    async def work(self) -> None:
        while True:
            if self._heap:
                await self._run_next()
            elif not self._unload:
                self._wake.clear()
                await self._wake.wait()
            self._act_on_free()

    def _act_on_free(self) -> None:
        if not self._unload:
            return
        self.counters["frees"] += 1
        if self._forget:
            self._cache.clear()
        self._unload = self._forget = False
        if self.holding:
            self.holding = False
            self.card.hold(self.settings.name, self.settings.residual)

    async def _run_next(self) -> None:
        job = heapq.heappop(self._heap)[-1]
        self.running = job
        self._tell_status()
        self.interrupted = False
        run = Run(self, job)
        await run.run()
        self.running = self.node = None
        self.history.pop(job.id, None)
        self.history[job.id] = run.as_history()
        self.counters[f"jobs_{run.end}"] += 1
        self._tell_status()
        job.ended.set()
        if job.client is not None:
            self.sockets.send("executing", {"node": None, "prompt_id": job.id}, job.client)

    def _tell_status(self) -> None:
        self.sockets.send("status", self.status(), None)

    def status(self) -> Json:
        return {"status": {"exec_info": {"queue_remaining": self.remaining}}}

    # ------------------------------------------------------------------------------------ for a run

    def take_card(self) -> None:
        if self.holding:
            return
        self.holding = True
        if self.card.hold(self.settings.name, self.settings.vram) < self.settings.vram:
            self.holding = False
            self.card.hold(self.settings.name, self.settings.residual)
            raise NodeError(OOM, "Allocation on device 0 would exceed allowed memory. (out of memory)")

    def is_picture(self, name: str) -> bool:
        return self.inputs.get(name, b"").startswith(_PICTURES)

    def cached(self, signature: str) -> bool:
        return signature in self._cache and self.faults.job_end is JobFate.NORMAL

    def shown(self, signature: str) -> Json | None:
        return self._cache[signature]

    def keep_only(self, results: dict[str, Json | None]) -> None:
        """The results of the last job replace those of the one before."""
        self._cache = results

    def new_file(self, node: Json) -> Json:
        saved = node["class_type"] == "SaveImage"
        prefix = str(node["inputs"].get("filename_prefix", "ComfyUI")) if saved else "ComfyUI_temp_sim"
        self._saved[prefix] += 1
        name = f"{prefix}_{self._saved[prefix]:05}_.png"
        self.files[name] = "output" if saved else "temp"
        return {"filename": name, "subfolder": "", "type": self.files[name]}


class Run:
    """One job from start to end: its events, its messages, its outputs. `end`: success, error, interrupted."""

    def __init__(self, queue: Queue, job: Job) -> None:
        self.queue = queue
        self.job = job
        self.end = "success"
        self.messages: list[tuple[str, Json]] = []
        self.outputs: Json = {}
        self.executed: list[str] = []
        self.progress: dict[str, Json] = {}
        self.results: dict[str, Json | None] = {}
        self._slept = any(_takes_its_own_time(node) for node in job.graph.values())

    async def run(self) -> None:
        order = run_order(self.job.graph, self.job.outputs)
        signatures = {node_id: _signature(self.job.graph, node_id) for node_id in order}
        cached = [node_id for node_id in order if self.queue.cached(signatures[node_id])]
        self._message("execution_start", {})
        self._message("execution_cached", {"nodes": cached})
        for node_id in order:
            if node_id in cached:
                self._show_again(node_id, signatures[node_id])
            elif not await self._run_node(node_id, signatures[node_id]):
                break
        else:
            self._message("execution_success", {})
        self.queue.keep_only(self.results)

    def as_history(self) -> Json:
        success = self.end == "success"
        return {
            "prompt": self.job.as_json(),
            "outputs": self.outputs,
            "status": {
                "status_str": "success" if success else "error",
                "completed": success,
                "messages": [list(message) for message in self.messages],
            },
            "meta": {node_id: _meta(node_id) for node_id in self.outputs},
        }

    # ------------------------------------------------------------------------------------ nodes

    def _show_again(self, node_id: str, signature: str) -> None:
        shown = self.results[signature] = self.queue.shown(signature)
        if shown is not None:
            self._executed(node_id, shown)
            self._progress(node_id, 1, 1, "finished")

    async def _run_node(self, node_id: str, signature: str) -> bool:
        node = self.job.graph[node_id]
        self.queue.node = node_id
        self._progress(node_id, 0.0, 1.0, "running")
        self._event("executing", {"node": node_id, "display_node": node_id})
        try:
            self.queue.take_card()
            await self._do(node_id, node)
        except Interrupted:
            self._stopped("interrupted", node_id, {})
            return False
        except NodeError as error:
            self._stopped("error", node_id, {**_error_details(error, node), "current_outputs": [*self.job.graph]})
            return False
        shown = None
        if NODES[node["class_type"]].output_node:
            shown = {"images": [self.queue.new_file(node)]}
            self._executed(node_id, shown)
        last = self.progress[node_id]
        self._progress(node_id, last["max"], last["max"], "finished")
        self.results[signature] = shown
        self.executed.append(node_id)
        return True

    async def _do(self, node_id: str, node: Json) -> None:
        await self._meet_fate()
        inputs = node.get("inputs", {})
        match node["class_type"]:
            case "SleepImage":
                await self._steps(node_id, float(inputs["seconds"]), int(inputs.get("steps", 4)))
            case "RaiseNode":
                raise _failure(JobFate.OOM if inputs["kind"] == "oom" else JobFate.ERROR)
            case "LoadImage" if not self.queue.is_picture(inputs["image"]):
                message = f"cannot identify image file '/comfyui/input/{inputs['image']}'"
                raise NodeError("PIL.UnidentifiedImageError", message)
            case kind if NODES[kind].seconds:
                await self._steps(node_id, NODES[kind].seconds, 1, told=False)
            case kind if not self._slept:
                self._slept = True
                await self._steps(node_id, self.queue.settings.job_s, 4, told=kind == "KSampler")

    async def _meet_fate(self) -> None:
        fate = self.queue.faults.job_end
        if fate is JobFate.NEVER:
            await until(lambda: self.queue.interrupted or self.queue.faults.job_end is not JobFate.NEVER)
            self._check_interrupt()
        elif fate is JobFate.INTERRUPTED:
            raise Interrupted
        elif fate is not JobFate.NORMAL:
            raise _failure(fate)

    async def _steps(self, node_id: str, seconds: float, steps: int, told: bool = True) -> None:
        """`told`: it is a node that reports its progress; few do."""
        for step in range(1, steps + 1):
            await pause(seconds / steps)
            self._check_interrupt()
            if not told:
                continue
            self._progress(node_id, step, steps, "running")
            data = {"value": step, "max": steps, "prompt_id": self.job.id, "node": node_id}
            self.queue.sockets.send("progress", data, self.job.client)

    def _check_interrupt(self) -> None:
        if self.queue.interrupted:
            self.queue.interrupted = False
            raise Interrupted

    def _stopped(self, end: str, node_id: str, details: Json) -> None:
        self.end = end
        where = {"node_id": node_id, "node_type": self.job.graph[node_id]["class_type"]}
        told = {**where, "executed": list(self.executed), **details}
        self._message(f"execution_{end}", told, broadcast=end == "interrupted")

    # ------------------------------------------------------------------------------------ telling

    def _message(self, event: str, data: Json, broadcast: bool = False) -> None:
        told = {"prompt_id": self.job.id, **data, "timestamp": int(time.time() * 1000)}
        if event == "execution_cached":
            told = {**data, "prompt_id": self.job.id, "timestamp": told["timestamp"]}
        self.messages.append((event, told))
        if self.job.client is not None or broadcast:
            self.queue.sockets.send(event, told, self.job.client)

    def _event(self, event: str, data: Json) -> None:
        if self.job.client is not None:
            self.queue.sockets.send(event, {**data, "prompt_id": self.job.id}, self.job.client)

    def _executed(self, node_id: str, shown: Json) -> None:
        self.outputs[node_id] = shown
        self._event("executed", {"node": node_id, "display_node": node_id, "output": shown})

    def _progress(self, node_id: str, value: float, top: float, state: str) -> None:
        self.progress[node_id] = {
            "value": value,
            "max": top,
            "state": state,
            "node_id": node_id,
            "prompt_id": self.job.id,
            "display_node_id": node_id,
            "parent_node_id": None,
            "real_node_id": node_id,
        }
        data = {"prompt_id": self.job.id, "nodes": dict(self.progress)}
        self.queue.sockets.send("progress_state", data, self.job.client)


def _takes_its_own_time(node: Json) -> bool:
    return node["class_type"] == "SleepImage" or NODES[node["class_type"]].seconds > 0


def _signature(graph: Graph, node_id: str) -> str:
    """What a node computes, its sources included: equal signatures give equal results."""
    node = graph[node_id]
    inputs = {
        name: [_signature(graph, value[0]), value[1]] if is_link(value) else value
        for name, value in node.get("inputs", {}).items()
    }
    return hashlib.sha256(json.dumps([node["class_type"], inputs], sort_keys=True).encode()).hexdigest()


def _failure(fate: JobFate) -> NodeError:
    if fate is JobFate.OOM:
        return NodeError(OOM, "deliberate out of memory")
    return NodeError("ValueError", "deliberate failure")


def _error_details(error: NodeError, node: Json) -> Json:
    return {
        "exception_message": error.message + (_OOM_ADVICE if error.kind == OOM else "\n"),
        "exception_type": error.kind,
        "traceback": [f"{error.kind}: {error.message}"],
        "current_inputs": {name: [str(value)] for name, value in node.get("inputs", {}).items()},
    }


def _meta(node_id: str) -> Json:
    return {"node_id": node_id, "display_node": node_id, "parent_node": None, "real_node_id": node_id}
