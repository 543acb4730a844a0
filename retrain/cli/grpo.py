"""`retrain grpo RUN.yaml key=value …` trains from Hydra YAML files; `retrain grpo init` writes a starter set."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from retrain.cli.train import load_environment
from retrain.errors import ConfigError

STARTER = Path(__file__).parents[1] / "grpo" / "starter"


@click.command("grpo", context_settings={"max_content_width": 110})
@click.argument("config")
@click.argument("settings", nargs=-1)
def command(config: str, settings: tuple[str, ...]) -> int:
    """Train from CONFIG, a YAML file in run/ next to model/, data/ and trainer/, composed by Hydra.

    \b
      retrain grpo init                                    write a starter tree into ./configs
      retrain grpo configs/run/tiny.yaml                   run it
      retrain grpo configs/run/tiny.yaml learning_rate=1e-3 model=qwen3_4b

    A setting is a parameter of retrain.grpo.GRPOConfig, of the model or of the data.
    """
    if config == "init":
        return write_starter(settings)
    load_environment()
    from retrain.grpo.compose import compose_settings  # noqa: PLC0415  (an optional extra)
    from retrain.grpo.settings import run_settings  # noqa: PLC0415  (loads PyTorch)

    run_settings(compose_settings(Path(config), settings), click.echo)
    return 0


def write_starter(words: tuple[str, ...]) -> int:
    """Write the starter tree, unless the folder exists."""
    if len(words) > 1:
        raise ConfigError(f"retrain grpo init takes one folder, got {len(words)}.")
    folder = Path(words[0] if words else "configs")
    if folder.exists():
        raise ConfigError(f"{folder} exists already.  Try: retrain grpo init another_folder")
    shutil.copytree(STARTER, folder)
    click.echo(f"Wrote {folder}. Next:")
    click.echo(f"  retrain grpo {folder}/run/tiny.yaml")
    return 0
