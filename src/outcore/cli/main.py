"""The `outcore` command.

Exit codes: 0 done; 1 outcore refused, with a message on standard error that says why and what to type instead, or the
job's own code failed, with its traceback; 2 the command line itself was wrong; 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

import typer

from outcore.cli.demo import demo
from outcore.cli.graph import graph
from outcore.cli.infer import infer
from outcore.cli.machine import machine
from outcore.cli.plan import plan, simulate
from outcore.cli.profile import profile
from outcore.cli.report import report
from outcore.cli.sweep import sweep
from outcore.cli.train import train
from outcore.cli.verify import verify

__all__ = ["app", "main"]

app = typer.Typer(
    name="outcore",
    help="Train networks that do not fit, and fill the GPU with the ones that do.",
    epilog="JOB is a Python file with model() and batch(size), or package.module:Class with --input 1x3x512x512.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command()(graph)
app.command()(profile)
app.command()(plan)
app.command()(simulate)
app.command()(verify)
app.command()(sweep)
app.command()(machine)
app.command()(train)
app.command()(infer)
app.command()(report)
app.command()(demo)


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
    """Run the command; every refusal becomes one message and an exit code."""
    from outcore.errors import OutcoreError

    try:
        app()
    except OutcoreError as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(str(error), err=True)
        sys.exit(1)
    except OSError as error:
        typer.secho("error: ", fg=typer.colors.RED, bold=True, nl=False, err=True)
        typer.echo(f"{error.filename or 'file'}: {error.strerror or error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        traceback.print_exception(error.with_traceback(_below_the_command(error.__traceback__)))
        sys.exit(1)


def _below_the_command(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that read the command line: whoever wrote the job knows none of them."""
    at = frames
    while at is not None:
        module = str(at.tb_frame.f_globals.get("__name__"))
        if module.startswith("outcore.") and not module.startswith("outcore.cli"):
            return at
        at = at.tb_next
    return frames
