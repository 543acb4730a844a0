"""`retrain completion`: shell completion of commands, flags and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from retrain.cli import app


@click.command("completion", short_help="Print the shell completion script.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for bash, zsh or fish.

    \b
    bash   retrain completion bash >> ~/.bashrc        (bash 4.4 or newer)
    zsh    retrain completion zsh >> ~/.zshrc          (after compinit)
    fish   retrain completion fish > ~/.config/fish/completions/retrain.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    # The variable that click derives from the program's name and reads at every start.
    script = completion(app, {}, "retrain", "_RETRAIN_COMPLETE")
    # Not `source()`: for bash it starts a bash to ask for its version, which may not be installed here.
    click.echo(script.source_template % script.source_vars())
