"""`retrain completion`: the script that teaches a shell to complete commands, flags and their values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from retrain.cli import app


@click.command("completion", short_help="Print shell completion for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash   retrain completion bash >> ~/.bashrc        (bash 4.4 or newer)
    zsh    retrain completion zsh >> ~/.zshrc          (after compinit)
    fish   retrain completion fish > ~/.config/fish/completions/retrain.fish
    """
    completion = get_completion_class(shell)
    assert completion is not None
    # The variable is the one that click derives from the program's name and looks for at every start.
    script = completion(app, {}, "retrain", "_RETRAIN_COMPLETE")
    # Not `source()`: for bash that starts a bash to ask its version, which the reader may not even have here.
    click.echo(script.source_template % script.source_vars())
