"""The command line: the command table, `main`, and the mapping of errors to exit codes."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from types import TracebackType

import click
from click.shell_completion import CompletionItem

from retrain.errors import ConfigError, RetrainError
from retrain.isolation.redaction import redact, redacted_output
from retrain.runtime.interrupts import INTERRUPTED
from retrain.runtime.threads import limit_openmp_spinning

__all__ = ["limit_openmp_spinning", "main", "run", "suggest_command"]

# Name -> (module that holds the click command `command`, one line for --help). Modules load only when chosen.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("retrain.cli.demo", "Train the built-in model on the CPU, offline, in 2 to 4 minutes."),
    "init": ("retrain.cli.init", "Write a starter configuration."),
    "init-plugin": ("retrain.cli.init_plugin", "Write a plugin skeleton."),
    "plugins": ("retrain.cli.plugins", "List built-in components and installed plugins."),
    "explain": ("retrain.cli.explain", "Show what a configuration would do."),
    "plan": ("retrain.cli.plan", "Estimate the memory, time and cost of a run."),
    "launch": ("retrain.cli.launch", "Train with several processes on this machine."),
    "distributed": ("retrain.cli.distributed", "Write configuration files for accelerate, torchrun and Slurm."),
    "replay": ("retrain.cli.replay", "Recompute the advantages of recorded rollouts with a different method."),
    "status": ("retrain.cli.status", "List runs and campaigns with their status."),
    "top": ("retrain.cli.top", "Watch live runs and campaigns."),
    "compare": ("retrain.cli.compare", "Compare conditions, paired by seed."),
    "diff": ("retrain.cli.diff", "Show where two runs or conditions diverge."),
    "report": ("retrain.cli.report", "Write an HTML report on runs and campaigns."),
    "card": ("retrain.cli.card", "Write a Markdown card for runs and campaigns, with plots."),
    "ui": ("retrain.cli.ui", "Serve the HTML report locally, with live updates."),
    "doctor": ("retrain.cli.doctor", "Check this machine and show how to fix any problems."),
    "import-gguf": ("retrain.cli.import_gguf", "Convert a GGUF file to a model folder that can be trained."),
    "schema": ("retrain.cli.schema", "Print the JSON schema of the configuration."),
    "grpo": ("retrain.cli.grpo", "Train with TRL from Hydra YAML files (`retrain grpo init` writes a starter set)."),
    "man": ("retrain.cli.man", "Read the manual."),
    "help": ("retrain.cli.help", "Print the reference for all commands and options."),
    "completion": ("retrain.cli.completion", "Print the shell completion script for bash, zsh or fish."),
}
_TRAIN = "train"
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_SUMMARY = """Train a language model with verifiable rewards.

\b
  retrain [CONFIG.toml] [--flags]   train, or run the campaign or squeeze defined in the file
  retrain COMMAND ...               one of the commands below

Without CONFIG, ./retrain.toml is used. Every option of the file is also a flag, e.g. --lr 1e-4 or --training.lr 1e-4;
`retrain help` lists them all."""


class _Commands(click.Group):
    """Dispatches to a command, or to training when the first argument is not one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == _TRAIN:
            return _load("retrain.cli.train")
        return _load(COMMANDS[cmd_name][0]) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands from the table, so that --help imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the first argument: a command, or a file or flag for training."""
        if incomplete.startswith("-"):
            flags = _load("retrain.cli.train").shell_complete(ctx, incomplete)
            return [*flags, *(CompletionItem(name) for name in ("--version",) if name.startswith(incomplete))]
        # The file item comes first: bash drops items that precede one.
        commands = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items()]
        return [CompletionItem(incomplete, type="file"), *(c for c in commands if c.value.startswith(incomplete))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and not args:
            return super().parse_args(ctx, args)
        first = args[0] if args else ""
        if first not in (*COMMANDS, _TRAIN) and first not in ("--help", "-h", "--version"):
            if len(args) > 1 and not first.startswith("-") and not os.path.lexists(first):
                hint = suggest_command(first, args[1])
                if hint or not args[1].startswith("-"):
                    raise ConfigError(f"there is no file or command {first!r}.  {hint or 'Try: retrain --help'}")
            args = [_TRAIN, *args]
        return super().parse_args(ctx, args)


def _load(module: str) -> click.Command:
    command = importlib.import_module(module).command
    assert isinstance(command, click.Command)
    return command


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from retrain.runtime.version import version  # noqa: PLC0415  (reading package metadata costs start-up time)

        click.echo(f"retrain {version()}")
        ctx.exit()


app = _Commands(
    name="retrain",
    help=_SUMMARY,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version.",
        )
    ],
)


def suggest_command(word: str, argument: str = "") -> str:
    """A sentence that suggests the closest command, or the closest file for a word with a suffix, or ""."""
    if os.path.splitext(word)[1]:
        return _suggest_file(word)
    if word in ("eval", "evaluate"):
        folder = argument if os.path.isdir(argument) else "logs/train"
        return f"To evaluate a trained run: retrain --resume {folder} --eval-every 1"
    close = get_close_matches(word, [*COMMANDS, _TRAIN], n=1)
    if close == [_TRAIN]:
        return "Did you mean train? It needs no command.  Try: retrain my_run.toml"
    return f"Did you mean `retrain {close[0]}`?" if close else ""


def _suggest_file(word: str) -> str:
    folder, name = os.path.split(word)
    try:
        files = [file for file in os.listdir(folder or ".") if file.endswith(".toml")]
    except (OSError, ValueError):
        return ""
    close = get_close_matches(name[:100], files, n=1, cutoff=0.8)
    return f"Did you mean {os.path.join(folder, close[0])}?" if close else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 success, 1 the run failed, 2 invalid input, 130 interrupted."""
    sys.excepthook = _show_bug
    limit_openmp_spinning()
    if sys.stdout is None:  # started with it closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (for as long as the program lives)
    try:
        with redacted_output():
            code = run(arguments)
    finally:
        _drop_unread()
    sys.exit(code)


def _drop_unread() -> None:
    """Without the reader of our output, such as `head`, Python would complain as it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # told already


def _show_bug(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print a traceback with secrets redacted; exceptions of third-party code may contain some."""
    click.echo(redact("".join(traceback.format_exception(kind, error, frames))), err=True, nl=False)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = app.main(
            args=list(arguments) if arguments is not None else None, prog_name="retrain", standalone_mode=False
        )
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort:
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except click.NoSuchOption as error:
        from retrain.config.synonyms import find_meant_flags  # noqa: PLC0415  (only a wrong flag needs it)

        given, name = sys.argv[1:] if arguments is None else arguments, error.option_name
        # click reads -lr as -l and -r
        typed = next((word for word in given if word.startswith(name)), name) if len(name) == 2 else name
        meant = " or ".join(f"'{flag}'" for flag in find_meant_flags(typed))
        if not meant:
            error.show()
        else:
            click.UsageError(f"No such option '{typed}'. Did you mean {meant}?", error.ctx).show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except RetrainError as error:
        click.echo(redact(f"error: {error}\n{error.next_step}".rstrip()), err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output, such as `head`, has exited; this is not a failure.
        sys.stderr.close()
        return 0
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            hint = "Try: check the permissions of it and of its folder"
            click.echo(redact(f"error: {error.filename}: permission denied.  {hint}"), err=True)
            return 1
        if error.errno not in _DISK_IS_FULL:
            raise
        what = error.filename or "the output"
        click.echo(f"error: {what} cannot be written: {error.strerror}.  Try: free some space", err=True)
        # Otherwise Python tries to write the rest as it exits, and reports that as well.
        with suppress(OSError):
            sys.stdout.close()
        return 1
