"""Run by an interpreter that has DeepSpeed: steps and whole runs under ZeRO, compared with a single process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.distributed.programs import Break, metrics_in, run_program
from tests.distributed.steps import VARIANTS, VARIANTS_OF_STAGE_3, check_steps
from tests.e2e.tiny import write_model, write_tokenizer

OFFLOADED = {"distributed__offload_optimizer": True, "distributed__offload_parameters": True}


def check_run(folder: Path, **options: Any) -> None:
    """Two ranks begin, a single process goes on; the steps are those of a run that had one process all along."""
    options |= {"optimizer__eps": 1e-3, "training__lr": 1e-4}
    for name in ("alone", "two"):
        (folder / name).mkdir(parents=True)
    plain = {key: value for key, value in options.items() if not key.startswith("distributed")}
    assert run_program(1, folder / "alone", training__max_steps=3, **plain)[0] == 0
    code, printed, _ = run_program(2, folder / "two", training__max_steps=2, **options)
    assert code == 0, printed
    code, printed, _ = run_program(
        1, folder / "two", training__max_steps=3, resume__from=str(folder / "two" / "log"), **plain
    )
    assert code == 0, printed
    for ours, theirs in zip(metrics_in(folder / "two"), metrics_in(folder / "alone"), strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5
        assert ours["correct_rate"] == theirs["correct_rate"]


def main(folder: Path) -> None:
    model = write_tokenizer(write_model(folder / "model", gain=2.0))
    for name, more, variants in (
        ("one", {"distributed__zero_stage": 1}, list(VARIANTS)),
        ("one offloaded", {"distributed__zero_stage": 1, "distributed__offload_optimizer": True}, ["small batches"]),
        ("three", {"distributed__zero_stage": 3}, list(VARIANTS_OF_STAGE_3)),
        ("three offloaded", {"distributed__zero_stage": 3, **OFFLOADED}, list(VARIANTS_OF_STAGE_3)),
    ):
        (folder / name).mkdir()
        check_steps(2, model, folder / name, more, variants)
        print("SAME STEPS", name, flush=True)
    check_run(folder / "run one", distributed__zero_stage=1)
    check_run(folder / "run three", distributed__zero_stage=3, **OFFLOADED)
    print("SAME RUNS", flush=True)
    (folder / "dead").mkdir()
    code, printed, seconds = run_program(2, folder / "dead", Break(1, "Train", "kill"), distributed__zero_stage=3)
    assert code == 1 and seconds < 60 and "ended without a word" in printed
    print("NO HANG", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
