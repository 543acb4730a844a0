"""Training through mlx_lm.server on Linux: mlx-lm 0.32.2 with mlx 0.32.4 on the CPU."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.runs import rows, train_quietly

from retrain.errors import ConfigError, RolloutError

from .conftest import Prepare
from .models import widen_heads
from .servers import Served, free_port, run_on

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

INSTALLS = [["install", "mlx[cpu]==0.32.4", "mlx-lm==0.32.2"]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return widen_heads(tmp_path_factory.mktemp("tiny"))


def serve(python: Path, model: Path, folder: Path) -> Served:
    port = free_port()
    command = [python.parent / "mlx_lm.server", "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    return Served(command, folder / "mlx.log", port, {})


@pytest.fixture(scope="module")
def server(side_venv: Prepare, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(side_venv("mlx", INSTALLS), tiny, tmp_path_factory.mktemp("mlx")) as running:
        yield running


def test_five_steps_prove_the_policy_and_resume(server: Served, tiny: Path, tmp_path: Path) -> None:
    first, printed = train_quietly(run_on("mlx", server.url, tiny, tmp_path, training__max_steps=3))
    assert "recomputed here" in printed
    train_quietly(run_on("mlx", server.url, tiny, tmp_path, resume__from=first.log_dir))
    metrics = rows(first.log_dir)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert [row["policy_proof"] for row in metrics[1:]] == pytest.approx([1.0] * 4, abs=0.05)
    assert all(row["mismatch_max"] < 1e-3 for row in metrics)


def test_options_that_mlx_means_otherwise_are_rejected(server: Served, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_p = 0.9 is not supported by engine = .mlx."):
        train_quietly(run_on("mlx", server.url, tiny, tmp_path, training__top_p=0.9))


def test_a_model_that_mlx_reads_with_another_rope_is_rejected(side_venv: Prepare, tmp_path: Path) -> None:
    """mlx-lm 0.32.2 does not read rope_parameters; without a theta at the top level it cannot have the right one."""
    model = widen_heads(tmp_path / "model")
    settings = json.loads((model / "config.json").read_text())
    settings["rope_theta"] = 10.0
    served = tmp_path / "served"
    widen_heads(served)
    (served / "config.json").write_text(json.dumps(settings))
    with serve(side_venv("mlx", INSTALLS), served, tmp_path) as server:
        settings["rope_parameters"]["rope_theta"] = settings["rope_theta"] = 215443.46900318837
        (served / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match="which differs from the trainer"):
            train_quietly(run_on("mlx", server.url, served, tmp_path))


def test_a_killed_server_ends_the_run_with_a_checkpoint(server: Served, tiny: Path, tmp_path: Path) -> None:
    config = run_on("mlx", server.url, tiny, tmp_path)
    log = Path(config.logging.log_dir) / "metrics.jsonl"

    def kill_after_a_step() -> None:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and not (log.exists() and "\n" in log.read_text()):
            time.sleep(0.2)
        server.kill()

    thread = threading.Thread(target=kill_after_a_step)
    thread.start()
    with pytest.raises(RolloutError, match="no inference server is available"):
        train_quietly(config)
    thread.join()
    assert json.loads((Path(config.logging.log_dir) / "trainer_state.json").read_text())["status"] == "failed"
