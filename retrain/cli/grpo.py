"""`retrain grpo RUN.yaml key=value …` trains from Hydra YAML files; `retrain grpo init` writes a starter tree."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from retrain.builtin import resolve_model
from retrain.cli.train import load_environment
from retrain.errors import ConfigError, RetrainError
from retrain.runtime.text import plural

STARTER = Path(__file__).parents[1] / "grpo" / "starter"


class _Grpo(click.Command):
    """Shows the help of `init` for `retrain grpo init --help`; `init` is not a YAML file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["init"] and set(ctx.help_option_names).intersection(args):
            click.echo(init.get_help(click.Context(init, ctx.parent, info_name="grpo init")))
            ctx.exit()
        return super().parse_args(ctx, args)


@click.command("init")
@click.argument("folder", default=".", type=click.Path())
def init(folder: str) -> int:
    """Write a starter tree to FOLDER (default: here): accelerate/, configs/, scripts/ and trainers/.

    If one of these files exists already, nothing is written and the exit code is 2.
    """
    return write_starter((folder,))


@click.command("grpo", cls=_Grpo, context_settings={"max_content_width": 110, "ignore_unknown_options": True})
@click.option("--show", metavar="KEY,…", help="Print these composed settings, one per line, without training.")
@click.argument("config")
@click.argument("settings", nargs=-1)
def command(config: str, settings: tuple[str, ...], show: str | None) -> int:
    """Train with TRL from CONFIG, a YAML file in configs/run/ that Hydra composes with files from configs/model/,
    configs/data/ and configs/trainer/.

    \b
      retrain grpo init [FOLDER]                           write a starter tree (default: here)
      retrain grpo configs/run/tiny.yaml                   train
      retrain grpo configs/run/tiny.yaml learning_rate=1e-3 model=qwen3_4b
      scripts/launch.sh 2 configs/run/teacher_sft.yaml     train with two processes

    A setting is an argument of retrain.grpo.GRPOConfig (or trl.SFTConfig), of the model or of the data.
    """
    if config == "init":
        return write_starter(settings)
    load_environment()
    from retrain.grpo.compose import compose_settings  # noqa: PLC0415  (an optional extra)

    composed = compose_settings(Path(config), settings)
    if show is not None:
        composed["model_name_or_path"] = resolve_model(str(composed.get("model_name_or_path", "")))
        values = [composed.get(key) for key in show.split(",")]
        click.echo("\n".join("" if value is None else str(value) for value in values))
        return 0
    from retrain.grpo.checks import OUTPUT, check_before_loading, is_first_process, locked, steps_if_finished  # noqa: PLC0415
    from retrain.grpo.rewards import load_rewards  # noqa: PLC0415  (with the extra as well)
    from retrain.grpo.settings import find_unused, name_settings, read_settings  # noqa: PLC0415

    try:
        # Errors are reported before TRL is imported.
        run, arguments = read_settings(composed)
        load_rewards(run.reward_funcs)
        say = click.echo if is_first_process() else lambda line: None
        checkpoint = check_before_loading(run, arguments, say)
        with locked(arguments.get("output_dir") or OUTPUT):
            steps = steps_if_finished(checkpoint, run, arguments) if checkpoint is not None else 0
            if steps:
                say(
                    f"Nothing is left to train: the model in {checkpoint} has {plural(steps, 'step')}.  "
                    "To train longer: a larger max_steps, or num_train_epochs"
                )
                return 0
            for line in find_unused(run, arguments):
                say(f"Note: {line}")
            from retrain.grpo.run import run_settings  # noqa: PLC0415  (loads PyTorch)

            run_settings(composed, click.echo)
    except RetrainError as error:
        raise type(error)(name_settings(str(error))) from error
    return 0


def write_starter(words: tuple[str, ...]) -> int:
    """Write the starter tree; an existing file is an error, and then nothing is written."""
    if len(words) > 1:
        raise ConfigError(f"retrain grpo init takes one folder, got {len(words)}.")
    folder = Path(words[0] if words else ".")
    files = [path.relative_to(STARTER) for path in sorted(STARTER.rglob("*")) if path.suffix in (".yaml", ".sh", ".py")]
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} exists already and is not a folder.  Try: retrain grpo init another_folder")
    existing = [str(folder / path) for path in files if os.path.lexists(folder / path)]
    if existing:
        others = f" (and {len(existing) - 1} more)" if existing[1:] else ""
        raise ConfigError(f"{existing[0]}{others} exists already.  Try: retrain grpo init another_folder")
    for path in files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(STARTER / path, folder / path)
        if path.suffix == ".sh":
            (folder / path).chmod(0o755)
    click.echo(f"Wrote {len(files)} files to {folder.resolve()}. Next:")
    click.echo(f"  retrain grpo {folder / 'configs' / 'run' / 'tiny.yaml'}")
    return 0
