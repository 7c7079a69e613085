"""The `outcore` command.

Each command is imported when it is called: torch takes seconds, and a version, a list of commands or a typing error
need none of it.

Exit codes: 0 done; 1 outcore refused, with a message on standard error that says why and what to type instead, or the
job's own code failed, with its traceback; 2 the command line itself was wrong; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
import warnings
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outcore.cli.common.help_text import fitting, flowing, plain_usage, worded

__all__ = ["COMMANDS", "app", "main"]

COMMANDS = {
    "graph": "Show a network: its blocks, how they connect, what flows between them.",
    "profile": "Show what a training step takes: time and memory, by block and by kind of layer.",
    "plan": "Decide how to share a network among devices: stages, schedule, micro-batches, replicas.",
    "simulate": "Show what a training step by a plan would look like, rank by rank.",
    "verify": "Train a few steps under a plan and in plain PyTorch, and compare every parameter.",
    "sweep": "Train many configurations of a job together, one row per configuration.",
    "whatif": "Say what a step would take with another technique, on other GPUs or on more of them; and try it.",
    "bench": "Train eight model families for some steps: throughput, use of the device, memory by what it holds.",
    "machine": "Probe this machine and show it; or show one from the catalogue.",
    "train": "Train a network: within a budget, on one device or many, to be stopped and continued at any time.",
    "infer": "Run a network on whole slides, tile by tile, within a budget.",
    "report": "Show a run as one page: curves, plan, predicted beside measured. It may still be going on.",
    "explore": "Show a network, its costs and its plans on a page in the browser, which follows the job's file.",
    "lsp": "Show what lines take in any editor: a language server.",
    "demo": "A slide too large for the budget: looked at, planned, trained on and reported, in about a minute.",
}
"""Every command with a line of help; each is the function of its name, in the file of its name."""
_OPTIONS = ("--version", "--help")
_WHOLE = "OUTCORE_TRACEBACK"
_FILES = {"simulate": "plan"}
_STYLE: dict[str, Any] = {"add_completion": False, "rich_markup_mode": "rich", "pretty_exceptions_enable": False}


_FOLDERS = {"sweep", "infer", "train", "demo"}
"""Commands whose output may be a folder, which they make."""


class _Command(TyperCommand):
    """A command whose flags are shown without a type, and which looks where it is to write before it works."""

    def invoke(self, ctx: Any) -> Any:
        from outcore.cli.common.places import check_files, check_folder

        if self.name not in _FOLDERS:
            check_files(ctx.params)
        for name, option in (("out", "--out"), ("output", "--output"), ("folder", "--out")):
            if self.name in _FOLDERS and ctx.params.get(name) is not None:
                check_folder(Path(ctx.params[name]), option)
        if (memory := ctx.params.get("memory")) is not None:
            from outcore.machine.units import parse_budget

            parse_budget(memory, 1)  # what is no size is said before the job is loaded
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, fitting(self, formatter))

    def get_params(self, ctx: Any) -> Any:
        return worded(super().get_params(ctx), self.callback)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return plain_usage(super().collect_usage_pieces(ctx))


class _Commands(TyperGroup):
    """Commands that are imported when they are called, so that what needs none of them does not wait for torch."""

    _listing = False

    def get_params(self, ctx: Any) -> Any:
        return worded(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._listing:
            said = COMMANDS[cmd_name]
            return TyperCommand(cmd_name, help=said, short_help=said, rich_markup_mode="rich")
        made = typer.Typer(**_STYLE)
        module = import_module(f"outcore.cli.{_FILES.get(cmd_name, cmd_name)}")
        made.command(cmd_name, cls=_Command)(getattr(module, cmd_name))
        command = typer.main.get_command(made)
        command.help = flowing(command.help or "")
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, fitting(self, formatter))
        finally:
            self._listing = False


app = typer.Typer(
    name="outcore",
    cls=_Commands,
    help="Train networks that do not fit, and fill the GPU with the ones that do.",
    epilog="JOB is a Python file with model() and batch(size), or package.module:Class with --input 1x3x512x512.",
    no_args_is_help=True,
    **_STYLE,
)


def _version(wanted: bool) -> None:
    if wanted:
        from outcore import __version__

        typer.echo(f"outcore {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it and leave."),
) -> None:
    pass


def main() -> None:
    """Run the command; every `OutcoreError` becomes one message and an exit code."""
    from outcore.cli.common.streams import finish_streams, plain_warnings, readable_streams

    readable_streams()
    with warnings.catch_warnings():
        plain_warnings()
        try:
            _refuse_a_typing_error(sys.argv[1:2])
            _run()
        finally:
            finish_streams()


def _refuse_a_typing_error(words: list[str]) -> None:
    """Answer a first word that is no command at once: what typer needs for that takes longer than all the rest."""
    known = [*COMMANDS, *_OPTIONS]
    for word in words:
        if word not in known:
            close = get_close_matches(word, known, 1)
            kind = "option" if word.startswith("-") else "command"
            typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
            typer.echo(
                f"no {kind} {word!r}; {f'did you mean {close[0]}?' if close else 'see outcore --help'}", err=True
            )
            sys.exit(2)


def _run() -> None:
    from outcore.cli.common.wording import typed
    from outcore.errors import OutcoreError

    try:
        app(prog_name="outcore")
    except OutcoreError as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo("; ".join([typed(str(error)), *_hints(error)]), err=True)
        sys.exit(1)
    except OSError as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        refused = f"{error.filename or 'what was to be written'}: {error.strerror or error}"
        elsewhere = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC)
        typer.echo(refused + ("; name a place that takes it: --out or -o" if elsewhere else ""), err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except SystemExit as leaving:
        if _is_interruption(leaving):  # typer leaves without a word
            typer.echo("interrupted", err=True)
        raise
    except Exception as error:
        if type(error).__name__ == "SafetensorError" and "os error" in str(error):  # a full disk, seen by safetensors
            typer.echo(f"error: weights cannot be written: {str(error).rpartition(': ')[2]}", err=True)
            sys.exit(1)
        said = _hints(error)
        if words := _of_the_job(error):
            typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
            typer.echo("; ".join([words, *said, f"{_WHOLE}=1 before the command shows every line of it"]), err=True)
            sys.exit(1)
        traceback.print_exception(error.with_traceback(_below_the_command(error.__traceback__)))
        for hint in said:
            typer.echo(hint, err=True)
        sys.exit(1)


def _of_the_job(error: Exception) -> str:
    """What failed in the user's own code, in a sentence; empty where the fault may be outcore's."""
    from outcore.cli.common.blame import block_of, line_of_the_user

    if os.environ.get(_WHOLE):
        return ""
    try:
        line, block = line_of_the_user(error), block_of(error)
    except Exception:  # whatever a user's objects do when they are looked at
        return ""
    if not line and not block:
        return ""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" + (f" at {line}" if line else "")


def _is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl-C is what an exit came from, and no command has said so (it leaves ``from None`` then)."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error is not None


def _hints(error: BaseException) -> list[str]:
    """Hints from the frames of an error; a failure to find any is ignored."""
    from outcore.cli.common.blame import hints

    try:
        return hints(error) if "torch" in sys.modules else []
    except Exception:
        return []


def _below_the_command(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that read the command line, which mean nothing to the author of the job."""
    at = frames
    while at is not None:
        module = str(at.tb_frame.f_globals.get("__name__"))
        if module.startswith("outcore.") and not module.startswith("outcore.cli"):
            return at
        at = at.tb_next
    return frames
