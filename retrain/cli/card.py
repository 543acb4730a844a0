"""`retrain card DIR`: a run or campaign as a Markdown card with plots."""

from __future__ import annotations

from pathlib import Path

import click

from retrain.errors import ConfigError
from retrain.storage.checkpoint import explain_write_error
from retrain.storage.logs import CARD


@click.command("card", context_settings={"max_content_width": 110})
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path), metavar="[DIR]...")
@click.option("--output", type=click.Path(path_type=Path), help="Output folder; by default card in the first DIR.")
@click.option("--no-plots", is_flag=True, help="Skip the plots, which need matplotlib (the `plots` extra).")
@click.option("--hub", is_flag=True, help="Add the metadata of a Hugging Face Hub model card.")
def command(folders: tuple[Path, ...], output: Path | None, no_plots: bool, hub: bool) -> int:
    """Write a Markdown card for the runs in DIR (default: ./logs).

    The card contains the verdict, curves, checks, configuration, versions, tokens and time. The output folder holds
    README.md and its plots, for a paper, a pull request or a model card.
    """
    folders = folders or (Path("logs"),)
    from retrain.report import collect  # noqa: PLC0415  (slow to import)
    from retrain.report.card import CREATED, is_blank, write_card  # noqa: PLC0415

    target = output or folders[0] / CARD
    card = target / "README.md"
    earlier = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    if earlier and CREATED not in earlier and not is_blank(earlier):
        raise ConfigError(f"{card} is not a card, and is not replaced.  Try: --output {target / CARD}")
    data = collect(folders)
    if not data["runs"]:
        raise ConfigError(f"{folders[0]} has no runs with logged steps yet.")
    try:
        plots = []
        if not no_plots:
            from retrain.report.plots import write_plots, write_verdict_plot  # noqa: PLC0415  (matplotlib is an extra)

            plots = write_plots(data, target, ", or --no-plots", replace=CREATED in earlier and "![" in earlier)
            plots += write_verdict_plot(data, target)
        target.mkdir(parents=True, exist_ok=True)
        card.write_text(write_card(data, plots, hub), encoding="utf-8")
    except OSError as error:
        raise explain_write_error(error, target, is_of_run=False) from error
    click.echo(f"Wrote {card}" + (f" and {len(plots)} plots" if plots else ""))
    return 0
