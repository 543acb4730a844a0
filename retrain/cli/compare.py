"""`retrain compare`: paired statistics of conditions across seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from retrain.cli.console import FiniteRange, print_json, print_line, print_table, terminal_width
from retrain.errors import ConfigError

if TYPE_CHECKING:
    from retrain.analysis.comparison import ComparisonReport


@click.command("compare", context_settings={"max_content_width": 110})
@click.argument("folders", nargs=-1, required=True, type=click.Path())
@click.option(
    "--metric", default=None, help="Metric; by default eval_pass_at_1 where all runs have it, else correct_rate."
)
@click.option("--baseline", default=None, help="Condition to compare against; by default the first.")
@click.option(
    "--alpha",
    type=FiniteRange(0.0001, 0.5),
    default=0.05,
    show_default=True,
    help="Significance level of the test.",
)
@click.option(
    "--last",
    metavar="N",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Average a training metric over the last N steps.",
)
@click.option(
    "--higher-is-better/--lower-is-better",
    default=None,
    help="Which values are improvements; by default known for rates, rewards, losses, errors and times only.",
)
@click.option("--allow-different-models", is_flag=True, help="Allow comparing runs of different models.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", is_flag=True, help="Print a Markdown table.")
def command(
    folders: tuple[str, ...],
    metric: str | None,
    baseline: str | None,
    alpha: float,
    last: int,
    higher_is_better: bool | None,
    allow_different_models: bool,
    as_json: bool,
    markdown: bool,
) -> int:
    """Compare the conditions of campaigns or of several runs, paired by seed.

    FOLDERS are campaigns, runs, or folders of runs. Example: retrain compare logs/campaign_20261115_120000

    \b
    The JSON has these keys:
      metric            the metric compared
      step              the step at which it is compared
      higher_is_better  whether higher values are improvements; null if neither
                        direction is better
      alpha             significance level
      level             significance level of each test and interval: lower
                        than alpha if the campaign could stop early
      notes             what limits the comparison
      noise_floor       how much runs that differ only in the seed differ
      values            by condition and seed
      comparisons       each with verdict and sentence
    A verdict is statistically_significant_improvement,
    significant_degradation, significant_difference (where neither direction
    is better) or insufficient_evidence.
    """
    if as_json and markdown:
        raise ConfigError("--json and --markdown are mutually exclusive.")
    from retrain.analysis.comparison import compare_runs, markdown_lines  # noqa: PLC0415  (loads scipy)
    from retrain.analysis.measure import require_same_model  # noqa: PLC0415
    from retrain.analysis.runs import find_runs  # noqa: PLC0415

    runs = find_runs(folders)
    if not allow_different_models:
        require_same_model(runs)
    data = compare_runs(runs, metric, last, higher_is_better, baseline, alpha)
    if as_json:
        print_json(data.as_json())
    elif markdown:
        click.echo("\n".join(markdown_lines(data)))
    else:
        _print(data)
    return 0


def _print(data: ComparisonReport) -> None:
    from retrain.analysis.comparison import explanation_lines, fit_table  # noqa: PLC0415

    directions = {True: ", higher is better", False: ", lower is better", None: ""}
    click.echo(f"{data.metric} at step {data.step}{directions[data.higher_is_better]}, paired by seed\n")
    columns, *rows = fit_table(data, terminal_width())
    print_table(columns, rows, header=True)
    click.echo()
    for line in explanation_lines(data):
        print_line(line)
