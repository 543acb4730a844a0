"""`retrain init`: write a starter configuration from a template or interactively."""

from __future__ import annotations

from pathlib import Path

import click

from retrain.cli.console import confirm_overwrite, print_table
from retrain.config.load import build_config
from retrain.config.options import Option, options_by_path
from retrain.config.reference import SCHEMA_FILE, TEMPLATES, starter, write_with_schema
from retrain.config.toml import parse_toml
from retrain.errors import ConfigError

# What --interactive asks after the template.
_COMMON_QUESTIONS = (
    ("model.model", "Model (Hugging Face id, folder, or builtin:tiny)"),
    ("backend.devices", "Devices (auto, gpu:0, cpu, ...)"),
    ("data.source", "Data (math, gsm8k, arithmetic, or a dotted path)"),
)
_QUESTIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (*_COMMON_QUESTIONS, ("training.max_steps", "Training steps")),
    "campaign": (*_COMMON_QUESTIONS, ("campaign.max_steps", "Training steps per run")),
    "squeeze": (
        ("squeeze.adapter_path", "Adapter folder"),
        ("squeeze.min_variance_retention", "Share of variance to keep"),
        ("squeeze.output_path", "Folder for the compressed adapter (empty: analyze only)"),
    ),
}


@click.command("init", short_help="Write a starter configuration.")
@click.argument("output", required=False, default="retrain.toml", type=click.Path(path_type=Path))
@click.option("--template", type=click.Choice(list(TEMPLATES)), help="Template (default: quickstart).")
@click.option("--list", "list_templates", is_flag=True, help="List the templates.")
@click.option("--interactive", is_flag=True, help="Ask for the main options, show the file, then write it.")
@click.option("--force", is_flag=True, help="Overwrite an existing file without asking.")
def command(output: Path, template: str | None, list_templates: bool, interactive: bool, force: bool) -> None:
    """Write a starter configuration to OUTPUT (default: ./retrain.toml)."""
    if list_templates:
        print_table(("template", "what it is for"), [(name, one.summary) for name, one in TEMPLATES.items()])
        return
    if str(output) in TEMPLATES and template is None:
        raise ConfigError(
            f"{output} is the name of a template; OUTPUT is a file.  "
            f"Try: retrain init --template {output}, or retrain init {output}.toml"
        )
    if interactive:
        text = _ask_for_configuration(template)
        click.echo(f"\n{text}")
        replaces = " This replaces the existing file." if output.exists() else ""
        if not click.confirm(f"Write this to {output}?{replaces}", default=not replaces):
            click.echo("Nothing was written.")
            return
    else:
        text = starter(template or "quickstart")
    confirm_overwrite(output, force or interactive)
    try:
        write_with_schema(output, text)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.") from error
    _print_next_steps(output)


def _ask_for_configuration(template: str | None) -> str:
    """Ask for the main options and return the file's text; an invalid answer is asked for again."""
    chosen: str = template or click.prompt("Start from", type=click.Choice(list(TEMPLATES)), default="quickstart")
    changes: dict[str, object] = {}
    kind = chosen if chosen in _QUESTIONS else "train"
    for path, question in _QUESTIONS[kind]:
        changes[path] = _ask(chosen, options_by_path()[path], question, changes)
    return starter(chosen, changes)


def _ask(template: str, option: Option, question: str, changes: dict[str, object]) -> object:
    current = TEMPLATES[template].values.get(option.path, option.default)
    while True:
        answer: object = click.prompt(question, default=current, type=str if option.type_name == "str" else None)
        try:
            build_config(parse_toml(starter(template, changes | {option.path: answer}), "this"), {}, source="this")
        except ConfigError as error:
            click.echo("\n".join(str(problem) for problem in error.issues) or str(error), err=True)
        else:
            return answer


def _print_next_steps(path: Path) -> None:
    name = "" if str(path) == "retrain.toml" else f" {path}"
    click.echo(f"Wrote {path} and, for editors, {path.parent / SCHEMA_FILE}. Next:")
    print_table(
        ("command", "what it does"),
        [
            (f"  retrain explain{name}", "show what it will do"),
            (f"  retrain doctor{name}", "check this machine for what it needs"),
            (f"  retrain{name}", "run it"),
        ],
    )
