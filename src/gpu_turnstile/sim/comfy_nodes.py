"""The node classes of the simulated ComfyUI and the validation of a graph.

A dozen stock nodes, enough for the usual text-to-image workflow, and two test nodes: `SleepImage` takes
`seconds`, `RaiseNode` fails by `kind` (`value` or `oom`). The error shapes are those recorded from ComfyUI 0.33.
Invariant: a graph is refused only if none of its outputs is valid; otherwise the valid ones are kept.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Graph = dict[str, Json]

CHECKPOINTS = ["sim-xl.safetensors"]


@dataclass(frozen=True, slots=True)
class NodeClass:
    """`inputs`: name -> what `/object_info` says of it. `output_node`: its result is an output of the job.

    `seconds`: what it takes to run, where that is not the job's.
    """

    inputs: dict[str, list[Any]]
    outputs: tuple[str, ...] = ()
    output_node: bool = False
    module: str = "nodes"
    optional: frozenset[str] = frozenset()
    seconds: float = 0.0


@dataclass(slots=True)
class Checked:
    """`error`: why nothing can run (None = something can); `outputs`: the output nodes that can run."""

    error: Json | None
    node_errors: Json = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


def _int(default: int, low: int = 0, high: int = 2**63) -> list[Any]:
    return ["INT", {"default": default, "min": low, "max": high, "step": 1}]


def _float(default: float) -> list[Any]:
    return ["FLOAT", {"default": default, "min": 0.0, "max": 10000.0}]


def _choice(*values: str) -> list[Any]:
    return [list(values), {}]


_STRING: list[Any] = ["STRING", {"multiline": True}]
_TEST = "custom_nodes.turnstile_test_nodes"

NODES: dict[str, NodeClass] = {
    "EmptyImage": NodeClass(
        {
            "width": _int(512, 1, 16384),
            "height": _int(512, 1, 16384),
            "batch_size": _int(1, 1, 4096),
            "color": _int(0, 0, 0xFFFFFF),
        },
        ("IMAGE",),
    ),
    "ImageScale": NodeClass(
        {
            "image": ["IMAGE"],
            "upscale_method": [["nearest-exact", "bilinear", "area", "bicubic", "lanczos"]],
            "width": _int(512, 0, 16384),
            "height": _int(512, 0, 16384),
            "crop": [["disabled", "center"]],
        },
        ("IMAGE",),
        seconds=0.05,
    ),
    "LoadImage": NodeClass({"image": ["IMAGEUPLOAD", {}]}, ("IMAGE", "MASK")),
    "CheckpointLoaderSimple": NodeClass({"ckpt_name": [CHECKPOINTS, {}]}, ("MODEL", "CLIP", "VAE")),
    "CLIPTextEncode": NodeClass({"text": _STRING, "clip": ["CLIP"]}, ("CONDITIONING",)),
    "EmptyLatentImage": NodeClass({"width": _int(512), "height": _int(512), "batch_size": _int(1)}, ("LATENT",)),
    "KSampler": NodeClass(
        {
            "model": ["MODEL"],
            "seed": _int(0),
            "steps": _int(20, 1),
            "cfg": _float(8.0),
            "sampler_name": _choice("euler", "dpmpp_2m", "ddim"),
            "scheduler": _choice("normal", "karras", "simple"),
            "positive": ["CONDITIONING"],
            "negative": ["CONDITIONING"],
            "latent_image": ["LATENT"],
            "denoise": _float(1.0),
        },
        ("LATENT",),
    ),
    "VAEDecode": NodeClass({"samples": ["LATENT"], "vae": ["VAE"]}, ("IMAGE",)),
    "SaveImage": NodeClass({"images": ["IMAGE"], "filename_prefix": ["STRING", {"default": "ComfyUI"}]}, (), True),
    "PreviewImage": NodeClass({"images": ["IMAGE"]}, (), True),
    "SleepImage": NodeClass(
        {"image": ["IMAGE"], "seconds": _float(1.0), "steps": _int(4, 1), "seed": _int(0)},
        ("IMAGE",),
        module=_TEST,
        optional=frozenset({"steps", "seed"}),
    ),
    "RaiseNode": NodeClass({"image": ["IMAGE"], "kind": _choice("value", "oom")}, ("IMAGE",), module=_TEST),
}


def object_info(name: str) -> Json:
    node = NODES[name]
    required = {key: spec for key, spec in node.inputs.items() if key not in node.optional}
    optional = {key: spec for key, spec in node.inputs.items() if key in node.optional}
    inputs = {"required": required} | ({"optional": optional} if optional else {})
    return {
        "input": inputs,
        "input_order": {kind: list(specs) for kind, specs in inputs.items()},
        "is_input_list": False,
        "output": list(node.outputs),
        "output_is_list": [False] * len(node.outputs),
        "output_name": list(node.outputs),
        "name": name,
        "display_name": name,
        "description": "",
        "python_module": node.module,
        "category": "image",
        "output_node": node.output_node,
        "has_intermediate_output": False,
        "search_aliases": [],
    }


def links(node: Json) -> Iterator[str]:
    """The ids of the nodes this one reads from."""
    for value in node.get("inputs", {}).values():
        if is_link(value):
            yield value[0]


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def run_order(graph: Graph, outputs: list[str]) -> list[str]:
    """The nodes the outputs need, each after those it reads from."""
    order: list[str] = []

    def visit(node_id: str) -> None:
        if node_id not in order:
            for source in links(graph[node_id]):
                visit(source)
            order.append(node_id)

    for output in outputs:
        visit(output)
    return order


# ---------------------------------------------------------------------------------------------- validation


def check(graph: Graph, uploads: Container[str]) -> Checked:
    for node_id, node in graph.items():
        kind = node.get("class_type")
        if kind not in NODES:
            return Checked(_missing_type(node_id, node, kind))
    outputs = [node_id for node_id, node in graph.items() if NODES[node["class_type"]].output_node]
    if not outputs:
        return Checked(error("prompt_no_outputs", "Prompt has no outputs"))
    return _check_outputs(graph, outputs, uploads)


def error(kind: str, message: str, details: str = "", extra: Json | None = None) -> Json:
    return {"type": kind, "message": message, "details": details, "extra_info": extra or {}}


def _check_outputs(graph: Graph, outputs: list[str], uploads: Container[str]) -> Checked:
    good: list[str] = []
    node_errors: Json = {}
    details: list[str] = []
    for output in outputs:
        found = _errors_of(graph, output, uploads)
        if not found:
            good.append(output)
        for node_id, errors in found.items():
            told = {"errors": errors, "dependent_outputs": [], "class_type": graph[node_id]["class_type"]}
            node_errors.setdefault(node_id, told)["dependent_outputs"].append(output)
        details += [f"{e['message']}: {e['details']}" for e in found.get(output, [])]
    if good:
        return Checked(None, node_errors, good)
    message = "Prompt outputs failed validation"
    return Checked(error("prompt_outputs_failed_validation", message, "\n".join(details)), node_errors)


def _errors_of(graph: Graph, output: str, uploads: Container[str]) -> dict[str, list[Json]]:
    """What is wrong with the nodes an output needs; empty = nothing."""
    cycle = _cycle(graph, output)
    if cycle:
        names = [f"{node_id} ({graph[node_id]['class_type']})" for node_id in (*cycle, cycle[0])]
        extra = {"node_id": cycle[0], "cycle_nodes": cycle}
        return {output: [error("dependency_cycle", "Dependency cycle detected", " -> ".join(names), extra)]}
    below = [*_errors_below(graph, output, uploads)]
    return {node_id: errors for node_id, errors in reversed(below) if errors}


def _cycle(graph: Graph, start: str) -> list[str]:
    """The nodes of a circle that is reached from `start`; empty = there is none."""
    path: list[str] = []
    clean: set[str] = set()

    def visit(node_id: str) -> list[str]:
        if node_id in path:
            return path[path.index(node_id) :]
        if node_id in clean or node_id not in graph:
            return []
        path.append(node_id)
        for source in links(graph[node_id]):
            found = visit(source)
            if found:
                return found
        clean.add(path.pop())
        return []

    return visit(start)


def _errors_below(graph: Graph, output: str, uploads: Container[str]) -> Iterator[tuple[str, list[Json]]]:
    """Every node the output needs, with its own errors."""
    seen: set[str] = set()
    todo = [output]
    while todo:
        node_id = todo.pop()
        if node_id in seen:
            continue
        seen.add(node_id)
        node = graph[node_id]
        yield node_id, [*_node_errors(graph, node, uploads)]
        todo += [source for source in links(node) if source in graph]


def _node_errors(graph: Graph, node: Json, uploads: Container[str]) -> Iterator[Json]:
    if "inputs" not in node:
        yield _exception("inputs")
        return
    known, given = NODES[node["class_type"]], node["inputs"]
    for name, spec in known.inputs.items():
        if name in given:
            yield from _input_errors(graph, name, spec, given[name], uploads)
        elif name not in known.optional:
            yield error("required_input_missing", "Required input is missing", name, {"input_name": name})


def _input_errors(graph: Graph, name: str, spec: list[Any], value: Any, uploads: Container[str]) -> Iterator[Json]:
    kind, extra = spec[0], {"input_name": name, "input_config": spec, "received_value": value}
    if is_link(value):
        yield from _link_errors(graph, name, spec, value)
    elif isinstance(kind, list):
        if value not in kind:
            yield error("value_not_in_list", "Value not in list", f"{name}: '{value}' not in {kind}", extra)
    elif kind in ("INT", "FLOAT"):
        yield from _number_errors(name, spec, value, extra)
    elif kind == "IMAGEUPLOAD" and value not in uploads:
        details = f"{name} - Invalid image file: {value}"
        yield error("custom_validation_failed", "Custom validation failed for node", details, {"input_name": name})


def _link_errors(graph: Graph, name: str, spec: list[Any], link: list[Any]) -> Iterator[Json]:
    source = graph.get(link[0])
    if source is None:
        yield _exception(link[0])
        return
    outputs = NODES[source["class_type"]].outputs
    if link[1] >= len(outputs):
        message = "Exception when validating node"
        extra = {"exception_type": "IndexError", "traceback": [""]}
        yield error("exception_during_validation", message, "tuple index out of range", extra)
    elif isinstance(spec[0], str) and spec[0] != outputs[link[1]]:
        extra = {"input_name": name, "input_config": spec, "received_type": outputs[link[1]], "linked_node": link}
        details = f"{name}, received_type({outputs[link[1]]}) mismatch input_type({spec[0]})"
        yield error("return_type_mismatch", "Return type mismatch between linked nodes", details, extra)


def _number_errors(name: str, spec: list[Any], value: Any, extra: Json) -> Iterator[Json]:
    kind, limits = spec
    try:
        number = (int if kind == "INT" else float)(value)
    except (TypeError, ValueError) as problem:
        message = f"Failed to convert an input value to a {kind} value"
        told = {**extra, "exception_message": str(problem)}
        yield error("invalid_input_type", message, f"{name}, {value}, {problem}", told)
        return
    if number < limits["min"]:
        yield error("value_smaller_than_min", f"Value {value} smaller than min of {limits['min']}", name, extra)
    if number > limits["max"]:
        yield error("value_bigger_than_max", f"Value {value} bigger than max of {limits['max']}", name, extra)


def _exception(key: str) -> Json:
    extra = {"exception_type": "KeyError", "traceback": [""]}
    return error("exception_during_validation", "Exception when validating node", f"'{key}'", extra)


def _missing_type(node_id: str, node: Json, kind: Any) -> Json:
    title = node.get("_meta", {}).get("title", kind)
    extra = {"node_id": node_id, "class_type": kind, "node_title": title}
    name, why = title or f"ID #{node_id}", "not found. The custom node may not be installed."
    if kind is None:
        why = "has no class_type. The workflow may be corrupted or a custom node is missing."
    return error("missing_node_type", f"Node '{name}' {why}", f"Node ID '#{node_id}'", extra)
