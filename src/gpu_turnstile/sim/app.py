"""`turnstile sim …`: simulated engines as processes of their own, and a look at the card they share.

They share a card when they are given the same file (`--card` or TURNSTILE_SIM_CARD); without one each has its
own. Only the chosen simulator is imported, so that a start takes a fraction of a second.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gpu_turnstile.sim.faults import F
    from gpu_turnstile.sim.ollama_runners import SimModel

app = typer.Typer(help="Simulated engines: real HTTP servers without a GPU.", no_args_is_help=True)

Host = Annotated[str, typer.Option(help="Address to listen on.")]
CardFile = Annotated[
    Path | None, typer.Option("--card", envvar="TURNSTILE_SIM_CARD", help="File of the card the simulators share.")
]
CardGb = Annotated[float, typer.Option("--card-gb", help="Size of the card, if this makes it.")]
FaultList = Annotated[
    list[str] | None, typer.Option("--fault", metavar="NAME[=VALUE]", help="A fault to start with; repeatable.")
]


@app.command()
def ollama(
    port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = 11434,
    host: Host = "127.0.0.1",
    model: Annotated[list[str] | None, typer.Option(metavar="NAME[=GB]", help="An installed model.")] = None,
    embedding: Annotated[list[str] | None, typer.Option(metavar="NAME[=GB]", help="An embedding-only model.")] = None,
    load_s: Annotated[float, typer.Option(help="Seconds a model takes to load.")] = 1.0,
    tokens_per_s: Annotated[float, typer.Option(help="Speed of an answer; 0 = at once.")] = 40.0,
    prompt_tokens_per_s: Annotated[float, typer.Option(help="Speed of reading a prompt; 0 = at once.")] = 0.0,
    answer_tokens: Annotated[int, typer.Option(help="Length of an answer nobody limits.")] = 40,
    keep_alive_s: Annotated[float, typer.Option(help="Seconds an idle model stays; -1 = for ever.")] = 300.0,
    max_loaded: Annotated[int, typer.Option(help="Models in memory at once.")] = 1,
    parallel: Annotated[int, typer.Option(help="Answers of one model at once.")] = 4,
    card: CardFile = None,
    card_gb: CardGb = 24.0,
    fault: FaultList = None,
) -> None:
    """Ollama: native, OpenAI and Anthropic API, models that load, expire and unload."""
    from gpu_turnstile.sim.faults import OllamaFaults
    from gpu_turnstile.sim.ollama import DEFAULT_MODELS, OllamaSim
    from gpu_turnstile.sim.runner import run

    models = [_model(text, False) for text in model or []] + [_model(text, True) for text in embedding or []]
    faults = _faults(OllamaFaults, fault)
    run(
        lambda: OllamaSim(
            models or DEFAULT_MODELS,
            card=_card(card, card_gb),
            load_s=load_s,
            tokens_per_s=tokens_per_s,
            prompt_tokens_per_s=prompt_tokens_per_s,
            answer_tokens=answer_tokens,
            keep_alive_s=keep_alive_s,
            max_loaded=max_loaded,
            parallel=parallel,
            faults=faults,
        ),
        host=host,
        port=port,
    )


@app.command()
def comfyui(
    port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = 8188,
    host: Host = "127.0.0.1",
    vram_gb: Annotated[float, typer.Option(help="What a job takes and keeps until /free.")] = 10.0,
    residual_gb: Annotated[float, typer.Option(help="What stays after /free.")] = 0.5,
    context_gb: Annotated[float, typer.Option(help="What its process takes at the start.")] = 0.0,
    job_s: Annotated[float, typer.Option(help="Seconds of a job without a SleepImage node.")] = 3.0,
    card: CardFile = None,
    card_gb: CardGb = 24.0,
    fault: FaultList = None,
) -> None:
    """ComfyUI: queue, history, websocket, /free."""
    from gpu_turnstile.sim.comfy import ComfySim
    from gpu_turnstile.sim.faults import ComfyFaults
    from gpu_turnstile.sim.runner import run

    faults = _faults(ComfyFaults, fault)
    run(
        lambda: ComfySim(
            card=_card(card, card_gb),
            vram_gb=vram_gb,
            residual_gb=residual_gb,
            context_gb=context_gb,
            job_s=job_s,
            faults=faults,
        ),
        host=host,
        port=port,
    )


@app.command(
    "llama-server",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def llama_server(
    flags: Annotated[list[str] | None, typer.Argument(metavar="[llama-server flags] [--sim-…]")] = None,
) -> None:
    """llama-server: one model, held while the process lives.

    Takes llama-server's flags (-m, --host, --port, -c, -np, --alias, --slot-save-path, --embeddings; others are
    passed over) and --sim-vram-gb 8, --sim-load-s 1, --sim-tokens-per-s 40, --sim-prompt-tokens-per-s 0 (at
    once), --sim-answer-tokens 40, --sim-card FILE, --sim-card-name NAME, --sim-fault NAME[=VALUE].
    """
    from gpu_turnstile.sim import llama_flags
    from gpu_turnstile.sim.faults import LlamaFaults
    from gpu_turnstile.sim.llama import LlamaSim
    from gpu_turnstile.sim.runner import run

    try:
        given = llama_flags.parse(flags or [])
    except llama_flags.FlagError as error:
        raise _usage(str(error)) from None
    if given.unknown:
        print(f"not simulated, passed over: {' '.join(given.unknown)}", file=sys.stderr)
    faults = _faults(LlamaFaults, given.faults)
    get = given.values.get
    run(
        lambda: LlamaSim(
            get("model", "sim.gguf"),
            card=_card(get("sim-card"), 24.0),
            name=get("sim-card-name"),
            alias=get("alias"),
            vram_gb=get("sim-vram-gb", 8.0),
            ctx_size=get("ctx-size", 0) or 4096,
            parallel=max(get("parallel", 1), 1),
            slot_save_path=get("slot-save-path"),
            embeddings=get("embeddings", False),
            load_s=get("sim-load-s", 1.0),
            tokens_per_s=get("sim-tokens-per-s", 40.0),
            prompt_tokens_per_s=get("sim-prompt-tokens-per-s", 0.0),
            answer_tokens=get("sim-answer-tokens", 40),
            faults=faults,
        ),
        host=get("host", "127.0.0.1"),
        port=get("port", 8080),
    )


def _add_sleeper(kind: str, sim_class: str) -> None:
    """A command for vLLM or SGLang: the flags that matter here, all others are passed over."""

    @app.command(
        kind,
        help=f"{kind}: one model that can sleep. Flags that are not listed are passed over.",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def sleeper(
        port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = 8000,
        host: Host = "127.0.0.1",
        served_model_name: Annotated[str, typer.Option(help="What its model is called.")] = "m",
        enable_sleep_mode: Annotated[bool, typer.Option("--enable-sleep-mode", "--enable-memory-saver")] = False,
        sim_vram_gb: Annotated[float, typer.Option(help="What it holds while it serves.")] = 8.0,
        sim_load_s: Annotated[float, typer.Option(help="Seconds it takes to load.")] = 1.0,
        sim_wake_s: Annotated[float, typer.Option(help="Seconds it takes to wake.")] = 0.1,
        sim_tokens_per_s: Annotated[float, typer.Option(help="Speed of an answer; 0 = at once.")] = 40.0,
        card: CardFile = None,
        card_gb: CardGb = 24.0,
        fault: FaultList = None,
    ) -> None:
        from gpu_turnstile import sim
        from gpu_turnstile.sim.faults import SleepFaults
        from gpu_turnstile.sim.runner import run

        faults = _faults(SleepFaults, fault)
        run(
            lambda: getattr(sim, sim_class)(
                served_model_name,
                card=_card(card, card_gb),
                can_sleep=enable_sleep_mode,
                vram_gb=sim_vram_gb,
                load_s=sim_load_s,
                wake_s=sim_wake_s,
                tokens_per_s=sim_tokens_per_s,
                faults=faults,
            ),
            host=host,
            port=port,
        )


_add_sleeper("vllm", "VLLMSim")
_add_sleeper("sglang", "SGLangSim")


def _add_server(kind: str, sim_class: str, usual_port: int, about: str) -> None:
    """A command for a server of `servers.py`: they all take the same options."""

    @app.command(kind, help=about)
    def server(
        port: Annotated[int, typer.Option(help="Port; 0 = any free one.")] = usual_port,
        host: Host = "127.0.0.1",
        model: Annotated[list[str] | None, typer.Option(metavar="NAME[=GB]", help="An installed model.")] = None,
        loaded: Annotated[int, typer.Option(help="How many of them are loaded at the start.")] = 0,
        load_s: Annotated[float, typer.Option(help="Seconds a model takes to load.")] = 1.0,
        work_s: Annotated[float, typer.Option(help="Seconds of one answer or picture.")] = 2.0,
        api_key: Annotated[str | None, typer.Option(help="The key it asks for; none = it asks for none.")] = None,
        card: CardFile = None,
        card_gb: CardGb = 24.0,
        fault: FaultList = None,
    ) -> None:
        from gpu_turnstile import sim
        from gpu_turnstile.sim.runner import run
        from gpu_turnstile.sim.servers import ServerFaults

        models = [_model(text, False) for text in model or []]
        faults = _faults(ServerFaults, fault)
        run(
            lambda: getattr(sim, sim_class)(
                models,
                loaded=loaded,
                card=_card(card, card_gb),
                api_key=api_key,
                load_s=load_s,
                work_s=work_s,
                faults=faults,
            ),
            host=host,
            port=port,
        )


_add_server("a1111", "A1111Sim", 7860, "AUTOMATIC1111: one checkpoint that is unloaded and reloaded.")
_add_server("invokeai", "InvokeAISim", 9090, "InvokeAI: a queue that can be paused, a model cache.")
_add_server("koboldcpp", "KoboldCppSim", 5001, "koboldcpp in admin mode: a model goes and comes by a restart.")
_add_server("lm-studio", "LMStudioSim", 1234, "LM Studio: models that load on demand and unload by instance.")
_add_server("localai", "LocalAISim", 8080, "LocalAI: a backend for each model, shut down by name.")
_add_server("tabbyapi", "TabbyAPISim", 5000, "TabbyAPI: one model, unloaded at once.")


@app.command()
def card(
    file: CardFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    reset: Annotated[bool, typer.Option(help="Forget alarms; late and leaked memory comes back.")] = False,
) -> None:
    """Show the simulated card: who holds it, and every alarm."""
    from gpu_turnstile.sim.card import SimCard

    if file is None:
        raise _usage("which card? give --card FILE or set TURNSTILE_SIM_CARD")
    if not file.exists():
        raise _usage(f"there is no card at {file}; a simulator makes it when it starts with --card {file}")
    shown = SimCard(file)
    if reset:
        shown.reset()
    print(json.dumps(shown.snapshot(), indent=2) if as_json else _picture(shown.snapshot()))


# ---------------------------------------------------------------------------------------------- helpers


def _card(file: str | Path | None, size_gb: float) -> Any:
    from gpu_turnstile.sim.card import GB, SimCard

    return SimCard.from_env(file, total=int(size_gb * GB))


def _model(text: str, embedding: bool) -> SimModel:
    from gpu_turnstile.sim.ollama_runners import SimModel

    name, _, size = text.partition("=")
    try:
        return SimModel(name, float(size or (1.2 if embedding else 8.0)), embedding)
    except ValueError:
        raise _usage(f"{text!r}: the size of a model is a number of GB, as in {name}=8") from None


def _faults(kind: type[F], switches: list[str] | None) -> F:
    from gpu_turnstile.sim.faults import FaultError, parse

    try:
        return parse(kind, switches or [])
    except FaultError as error:
        raise _usage(str(error)) from None


def _usage(message: str) -> typer.Exit:
    print(message, file=sys.stderr)
    return typer.Exit(2)


def _picture(book: dict[str, Any]) -> str:
    from gpu_turnstile.sim.ledger import GB

    used = sum(piece["bytes"] for piece in book["pieces"])
    lines = [f"simulated card: {used / GB:.1f} of {book['total'] / GB:.1f} GB in use"]
    for piece in book["pieces"]:
        what = f"{piece['name']} (pid {piece['pid']}) {piece['part']}".rstrip()
        note = "  leaked" if piece["leaked"] else "  on its way back" if piece["back_at"] else ""
        lines.append(f"  {piece['bytes'] / GB:6.1f} GB  {what}{note}")
    lines.append(f"alarms: {len(book['alarms']) or 'none'}")
    for alarm in book["alarms"]:
        moment = time.strftime("%H:%M:%S", time.localtime(alarm["time"]))
        lines.append(f"  {moment}  {alarm['kind']}  {alarm['detail']}")
    return "\n".join(lines)
