"""The node classes of the simulated ComfyUI and the validation of a graph.

A dozen stock nodes, enough for the usual text-to-image workflow, and two test nodes: `SleepImage` takes
`seconds`, `RaiseNode` fails by `kind` (`value` or `oom`). The error shapes are those recorded from ComfyUI 0.33.
Invariant: a graph is refused only if none of its outputs is valid; otherwise the valid ones are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Graph = dict[str, Json]

CHECKPOINTS = ["sim-xl.safetensors"]


@dataclass(frozen=True, slots=True)
class NodeClass:
    """`inputs`: name -> what `/object_info` says of it. `output_node`: its result is an output of the job."""

    inputs: dict[str, list[Any]]
    outputs: tuple[str, ...] = ()
    output_node: bool = False
    module: str = "nodes"
    optional: frozenset[str] = frozenset()


@dataclass(slots=True)
class Checked:
    """`error`: why nothing can run (None = something can); `outputs`: the output nodes that can run."""

    error: Json | None
    node_errors: Json = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


def _int(default: int, low: int = 0, high: int = 2**63) -> list[Any]:
    return ["INT", {"default": default, "min": low, "max": high}]


def _float(default: float) -> list[Any]:
    return ["FLOAT", {"default": default, "min": 0.0, "max": 10000.0}]


def _choice(*values: str) -> list[Any]:
    return [list(values), {}]


_STRING: list[Any] = ["STRING", {"multiline": True}]
_TEST = "custom_nodes.turnstile_test_nodes"

NODES: dict[str, NodeClass] = {
    "EmptyImage": NodeClass(
        {"width": _int(512, 1), "height": _int(512, 1), "batch_size": _int(1, 1), "color": _int(0)}, ("IMAGE",)
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


def check(graph: Any, uploads: set[str]) -> Checked:
    if not isinstance(graph, dict) or not graph:
        return Checked(error("prompt_no_outputs", "Prompt has no outputs"))
    for node_id, node in graph.items():
        kind = node.get("class_type") if isinstance(node, dict) else None
        if kind not in NODES:
            return Checked(_missing_type(node_id, node, kind))
    outputs = [node_id for node_id, node in graph.items() if NODES[node["class_type"]].output_node]
    if not outputs:
        return Checked(error("prompt_no_outputs", "Prompt has no outputs"))
    return _check_outputs(graph, outputs, uploads)


def error(kind: str, message: str, details: str = "", extra: Json | None = None) -> Json:
    return {"type": kind, "message": message, "details": details, "extra_info": extra or {}}


def _check_outputs(graph: Graph, outputs: list[str], uploads: set[str]) -> Checked:
    good: list[str] = []
    node_errors: Json = {}
    details: list[str] = []
    for output in outputs:
        found = {node_id: errors for node_id, errors in _errors_below(graph, output, uploads) if errors}
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


def _errors_below(graph: Graph, output: str, uploads: set[str]) -> Iterator[tuple[str, list[Json]]]:
    """Every node the output needs, with its own errors."""
    seen: set[str] = set()
    todo = [output]
    while todo:
        node_id = todo.pop()
        if node_id in seen:
            continue
        seen.add(node_id)
        node = graph[node_id]
        yield node_id, [*_input_errors(graph, node, uploads)]
        todo += [source for source in links(node) if source in graph]


def _input_errors(graph: Graph, node: Json, uploads: set[str]) -> Iterator[Json]:
    known, given = NODES[node["class_type"]], node.get("inputs", {})
    for name, spec in known.inputs.items():
        if name not in given:
            if name not in known.optional:
                yield error("required_input_missing", "Required input is missing", name, {"input_name": name})
            continue
        value = given[name]
        if is_link(value):
            if value[0] not in graph:
                extra = {"exception_type": "KeyError", "traceback": [""]}
                message = "Exception when validating node"
                yield error("exception_during_validation", message, f"'{value[0]}'", extra)
        elif isinstance(spec[0], list) and value not in spec[0]:
            extra = {"input_name": name, "input_config": spec, "received_value": value}
            yield error("value_not_in_list", "Value not in list", f"{name}: '{value}' not in {spec[0]}", extra)
        elif spec[0] == "IMAGEUPLOAD" and value not in uploads:
            details = f"{name} - Invalid image file: {value}"
            message = "Custom validation failed for node"
            yield error("custom_validation_failed", message, details, {"input_name": name})


def _missing_type(node_id: str, node: Any, kind: Any) -> Json:
    title = node.get("_meta", {}).get("title", kind) if isinstance(node, dict) else kind
    extra = {"node_id": node_id, "class_type": kind, "node_title": title}
    message = f"Node '{title or f'ID #{node_id}'}' not found. The custom node may not be installed."
    return error("missing_node_type", message, f"Node ID '#{node_id}'", extra)
