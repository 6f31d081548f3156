"""The commands about locks, and what explains them, as they are written on a command line; `main` adds them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpu_turnstile.cli.completion import presets

Url = Annotated[
    str | None,
    typer.Option("--url", envvar="TURNSTILE_URL", help="The gate. [default: this machine, LISTEN_OLLAMA's port]"),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
Owner = Annotated[
    str | None, typer.Option("--owner", help="Whose lock. [default: TURNSTILE_OWNER, else user@host:pid of your shell]")
]
Ttl = Annotated[
    float | None, typer.Option("--ttl", metavar="SECONDS", help="Silence after which it ends. [default: the gate's]")
]
Token = Annotated[int | None, typer.Option("--token", help="Only if the lock with this token still lives.")]


def lock(
    preset: Annotated[str | None, typer.Argument(help="The preset to pin.", autocompletion=presets)] = None,
    resident: Annotated[bool, typer.Option("--resident", help="Whatever is on the card instead.")] = False,
    owner: Owner = None,
    ttl: Ttl = None,
    wait: Annotated[bool, typer.Option("--wait", help="Queue until it is yours.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Queue no longer than that.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Pin a preset: nothing else takes the card. Exit code 4: others hold it."""
    if (preset is None) != resident:
        raise typer.BadParameter("name a PRESET, or say --resident")
    from gpu_turnstile.cli import hold

    hold.lock(url, preset, owner, ttl, wait if timeout is None else timeout, as_json)


def renew(owner: Owner = None, ttl: Ttl = None, token: Token = None, url: Url = None, as_json: Json = False) -> None:
    """The heartbeat, by hand. Exit code 5: it is not held any more."""
    from gpu_turnstile.cli import hold

    hold.renew(url, owner, ttl, token, as_json)


def unlock(
    owner: Owner = None,
    token: Token = None,
    force: Annotated[bool, typer.Option("--force", help="Others' too; without --owner everybody's.")] = False,
    leave: Annotated[bool, typer.Option("--leave", help="Only leave the queue; keep what is locked.")] = False,
    reason: Annotated[str | None, typer.Option("--reason", help="Told to those who lose their lock by it.")] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Let a lock go, and the place in the queue. Exit code 4: it takes --force."""
    from gpu_turnstile.cli import hold

    hold.unlock(url, owner, token, force, leave, reason, as_json)


def queue(url: Url = None, as_json: Json = False) -> None:
    """Who holds the lock and who waits for it."""
    from gpu_turnstile.cli import hold

    hold.queue(url, as_json)


def release(
    reason: Annotated[str, typer.Option("--reason", help="Why; everybody concerned is told.")],
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Break the glass: end every lock and cut all work on the card."""
    from gpu_turnstile.cli import hold

    hold.release(url, reason, as_json)


def run(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="What to run, after two dashes: run -- make test.")
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", "-p", help="The preset to pin. [default: the one on the card]", autocompletion=presets
        ),
    ] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Whose lock. [default: user@host:pid]")] = None,
    ttl: Ttl = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Queue for the lock, or fail at once.")] = True,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Queue no longer than that.")
    ] = None,
    on_lost: Annotated[
        str, typer.Option("--on-lost", metavar="warn|kill", help="What to do when the lock is lost meanwhile.")
    ] = "warn",
    url: Url = None,
) -> None:
    """Hold the lock while a command runs; its exit code. Exit code 125: the lock was not to be had."""
    if on_lost not in ("warn", "kill"):
        raise typer.BadParameter("is warn or kill", param_hint="--on-lost")
    from gpu_turnstile.cli.run import Wish
    from gpu_turnstile.cli.run import run as start

    wish = Wish(tuple(command), preset, owner, ttl, wait if timeout is None else timeout, on_lost == "kill")
    raise typer.Exit(start(url, wish))


def certify(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The measurement, after two dashes.")],
    owner: Annotated[
        list[str] | None,
        typer.Option(
            "--owner", help="Whose requests are the measurement's own; may be repeated. [default: TURNSTILE_OWNER]"
        ),
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", help="Clients that belong to it; may be repeated.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="A process that may be on the card; may be repeated.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Run a measurement and say whether it was alone on the card. Exit code 3: it was not, or nobody knows."""
    from gpu_turnstile.cli.certify import certify as start

    owner = owner or [name for name in [os.environ.get("TURNSTILE_OWNER")] if name]
    query = {"owner": owner, "client": client or [], "allow": allow or []}
    raise typer.Exit(start(url, command, query, as_json))


def why(
    client: Annotated[
        str | None, typer.Option("--client", metavar="NAME", help="An owner, or part of a client's name.")
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Why am I waiting? What holds the card, who is ahead, what would help."""
    from gpu_turnstile.cli.why import why as explain

    explain(url, client, as_json)


def top(url: Url = None, as_json: Json = False) -> None:
    """The card on a live screen; Ctrl-C ends it."""
    from gpu_turnstile.cli.top import top as show

    show(url, as_json)


def simulate(
    workload: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A workload in TOML. [default: a swap war of 6 hours]")
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="What this gate has recorded instead.")] = False,
    hours: Annotated[
        float | None, typer.Option(min=0.01, max=744.0, help="How long it plays, or how far the history reaches back.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of what the workload leaves to chance.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="arrival, llama-swap or amortised; may be repeated. [default: all]")
    ] = None,
    contexts: Annotated[str, typer.Option(metavar="lost|kept|both", help="What a swap does to contexts.")] = "both",
    context_s: Annotated[
        float, typer.Option("--context", metavar="SECONDS", min=0, help="--history: what a lost context costs.")
    ] = 0.0,
    max_wait: Annotated[
        float, typer.Option("--max-wait", metavar="SECONDS", min=0, help="As TURNSTILE_MAX_WAIT.")
    ] = 180.0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw a timeline.")] = None,
    bound: Annotated[bool, typer.Option("--bound", help="Also the best order there is, for a few requests.")] = False,
    state_dir: Annotated[Path | None, typer.Option("--state-dir", metavar="DIR", help="--history: whose.")] = None,
    as_json: Json = False,
) -> None:
    """What each way of sharing the card would do to a workload. Needs no gate."""
    from gpu_turnstile.simulate.compare import POLICIES
    from gpu_turnstile.simulate.world import KEPT, LOST

    chosen = tuple(policy or POLICIES)
    for name in chosen:
        if name not in POLICIES:
            raise typer.BadParameter(f"is one of {', '.join(POLICIES)}", param_hint="--policy")
    if contexts not in (LOST, KEPT, "both"):
        raise typer.BadParameter("is lost, kept or both", param_hint="--contexts")
    if history and workload is not None:
        raise typer.BadParameter("a FILE or --history, not both")
    from gpu_turnstile.cli.simulate import Wish
    from gpu_turnstile.cli.simulate import simulate as play

    kinds = (LOST, KEPT) if contexts == "both" else (contexts,)
    play(Wish(workload, history, state_dir, hours, seed, chosen, kinds, max_wait, context_s, plot, bound, as_json))


def add(app: typer.Typer) -> None:
    """All of them, in the order of `--help`."""
    for command in (lock, renew, unlock, queue, why, top, release, simulate):
        app.command()(command)
    app.command(context_settings={"allow_interspersed_args": False})(run)
    app.command(context_settings={"allow_interspersed_args": False})(certify)
