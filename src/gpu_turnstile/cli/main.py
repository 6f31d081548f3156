"""`turnstile` (and `llmc`, the same program): start the gate, look at it, change what is on the card.

Start-up is kept short: this module imports nothing heavier than typer, every command imports what it needs.

Exit codes: 0 done · 1 it did not work · 2 the command, a setting or a preset is wrong · 3 no gate answers ·
4 others hold the lock · 5 your lock is gone. `run`: the command's own, 128 + signal, or 125 to 127 if it never ran.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpu_turnstile.cli import commands
from gpu_turnstile.cli.commands import Json, Url
from gpu_turnstile.cli.completion import mend_zsh, presets

LEVELS = ("debug", "info", "warn", "error")

app = typer.Typer(
    help="One GPU, many workloads, one gate: who may use the card now?",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 it did not work, 2 wrong usage, setting or preset, 3 no gate answers, 4 others hold "
    "the lock, 5 your lock is gone. run: the command's own, 128 + signal, 125 to 127 if it never ran.",
)
presets_app = typer.Typer(help="Presets: what can hold the card.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(presets_app, name="presets")
context_app = typer.Typer(
    help="Conversations saved over swaps (files that are transcripts).", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(context_app, name="context")

Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The .env file with settings.")]
PresetsDir = Annotated[
    Path | None, typer.Option("--presets", metavar="DIR", help="[default: ./presets, else your configuration folder]")
]


@app.command()
def serve(
    config: Config = None,
    presets: PresetsDir = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="[default: your state folder]")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="|".join(LEVELS), help="Overrides LOGLEVEL.")
    ] = None,
) -> None:
    """Start the gate; Ctrl-C stops it."""
    from gpu_turnstile.cli.serve import serve as start

    raise typer.Exit(start(config, presets, state_dir, log_level))


@app.command()
def status(
    url: Url = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second.")] = False,
) -> None:
    """Who holds the card, who waits, what was swapped."""
    from gpu_turnstile.cli import look

    look.status(url, as_json, watch)


@app.command()
def mode(
    mode: Annotated[str | None, typer.Argument(help="llm, comfyui, train or idle; left out: show it.")] = None,
    model: Annotated[
        str | None, typer.Argument(help="The preset; left out: the mode's default.", autocompletion=presets)
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Bring a preset onto the card and wait until it is there."""
    from gpu_turnstile.cli import look

    look.mode(url, mode, model, as_json)


@app.command()
def unload(url: Url = None, as_json: Json = False) -> None:
    """Empty the card, after the requests in flight."""
    from gpu_turnstile.cli import look

    look.unload(url, as_json)


@app.command()
def events(
    url: Url = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens.")] = False,
    count: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the past.")] = 20,
    since: Annotated[int | None, typer.Option(min=0, help="Everything after this id instead.")] = None,
    as_json: Json = False,
) -> None:
    """What happened: decisions and steps of swaps."""
    from gpu_turnstile.cli import look

    look.events(url, follow, count, since, as_json)


commands.add(app)


@context_app.command("list")
def context_list(url: Url = None, as_json: Json = False) -> None:
    """What is saved, and what it has brought."""
    from gpu_turnstile.cli import contexts

    contexts.list_contexts(url, as_json)


@context_app.command("drop")
def context_drop(
    preset: Annotated[str | None, typer.Argument(help="Whose conversations.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everybody's.")] = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Remove saved conversations."""
    if (preset is None) != everything:
        raise typer.BadParameter("name a PRESET, or say --all")
    from gpu_turnstile.cli import contexts

    contexts.drop(url, preset, as_json)


@presets_app.command("check")
def presets_check(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="[default: as for serve]")] = None,
    as_json: Json = False,
) -> None:
    """Read the preset files as the gate would and say what is wrong with them."""
    from gpu_turnstile.cli import local

    local.check(folder, as_json)


@presets_app.command("list")
def presets_list(
    folder: Annotated[Path | None, typer.Argument(metavar="[DIR]", help="[default: as for serve]")] = None,
    as_json: Json = False,
) -> None:
    """The presets of a folder."""
    from gpu_turnstile.cli import local

    local.list_presets(folder, as_json)


@app.command()
def settings(config: Config = None, as_json: Json = False) -> None:
    """Every setting, its value and where it comes from."""
    from gpu_turnstile.cli import local

    local.settings(config, as_json)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    }
)
def sim(context: typer.Context) -> None:
    """Simulated engines, to try things out without a GPU."""
    from gpu_turnstile.sim.app import app as simulators

    simulators(context.args, prog_name=context.command_path)


@app.command()
def demo(
    real: Annotated[
        bool, typer.Option("--real", help="Two real llama.cpp servers (needs --engine and --model).")
    ] = False,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="COMMAND", help="What starts a llama-server.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", metavar="FILE", help="A small GGUF model.")] = None,
) -> None:
    """A scripted minute of mixed traffic through a real gate, on engines that need no GPU."""
    from gpu_turnstile.cli.demo import demo as play

    raise typer.Exit(play(real, engine, model))


@app.command()
def version() -> None:
    """The version."""
    _version(True)


def _version(wanted: bool) -> None:
    if wanted:
        from gpu_turnstile import __version__

        typer.echo(f"gpu-turnstile {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    pass


def main() -> None:
    """The entry point of `turnstile` and `llmc`."""
    mend_zsh(sys.argv)
    name = Path(sys.argv[0]).stem
    app(prog_name="turnstile" if name in ("__main__", "-c", "") else name)
