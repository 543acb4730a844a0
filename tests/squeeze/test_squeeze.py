from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from retrain.cli import run
from retrain.config.schema import Squeeze
from retrain.errors import ConfigError, MissingExtraError
from retrain.squeeze import analyze_adapter, compress_adapter, squeeze
from retrain.squeeze.analyze import Analysis, RankVariance, choose_ranks, singular_values
from retrain.squeeze.compress import truncate
from retrain.storage.publishing import publish_folder, why_kept

from .adapters import products, random_factors, write_adapter


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", random_factors(8))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_singular_values_are_those_of_the_whole_product(rank: int, width: int, height: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, width, generator=generator), torch.randn(height, rank, generator=generator)
    whole = torch.linalg.svdvals(b.double() @ a.double())
    found = singular_values(a, b)
    assert len(found) == rank
    assert torch.allclose(found[: len(whole)], whole[:rank], rtol=1e-6, atol=1e-6 * float(whole[0]))
    assert (found[len(whole) :] < 1e-6 * float(whole[0]) + 1e-12).all()


def test_variance_equals_that_of_the_full_decomposition_within_1e_5(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {name: tensor.to(dtype) for name, tensor in random_factors(8, layers=3).items()}
        folder = write_adapter(tmp_path / str(dtype), tensors)
        analysis = analyze_adapter(folder, target_ranks=range(1, 9))
        squares = torch.stack([torch.linalg.svdvals(p)[:8] ** 2 for p in products(tensors).values()])
        kept = (squares.cumsum(1) / squares.sum(1, keepdim=True)).numpy()
        for index, row in enumerate(analysis.ranks):
            column = kept[:, index]
            assert np.allclose(
                [row.mean, row.minimum, row.maximum], [column.mean(), column.min(), column.max()], atol=1e-5
            )
        assert analysis.ranks[-1].mean == 1.0


def test_the_recommended_rank_is_the_smallest_that_keeps_enough(adapter: Path) -> None:
    analysis = analyze_adapter(adapter, min_variance_retention=0.9)
    assert [row.rank for row in analysis.ranks] == [1, 2, 4, 8]
    enough = [row.rank for row in analysis.ranks if row.mean >= 0.9]
    assert analysis.recommended_rank == enough[0] < 8
    assert analyze_adapter(adapter, (1,), 0.9999).recommended_rank == 8, "the adapter's own, where none is enough"


def test_ranks_to_evaluate() -> None:
    assert choose_ranks((), 12) == [1, 2, 4, 8, 12]
    assert choose_ranks((), 1) == [1]
    assert choose_ranks((4, 2, 4), 8) == [2, 4]
    with pytest.raises(ConfigError, match="target_ranks has 16, but the adapter has rank 8"):
        choose_ranks((4, 16), 8)


def test_the_table_has_its_columns_where_they_belong() -> None:
    rows = (RankVariance(16, 0.8, 0.7, 0.9), RankVariance(32, 0.9548, 0.9122, 0.9815), RankVariance(128, 1.0, 1.0, 1.0))
    lines = Analysis(128, 252, (), rows, 0.95, 32).table().splitlines()
    assert lines[0] == "  Rank  Mean Var%  Min Var%  Max Var%"
    assert lines[2] == "    32     95.48%    91.22%    98.15%  <--"
    assert lines[3] == "   128    100.00%   100.00%   100.00%"


@given(st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_truncated_factors_are_the_nearest_update_of_their_rank(rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(8, 11, generator=generator), torch.randn(13, 8, generator=generator)
    low_a, low_b = truncate(a, b, rank)
    whole = b.double() @ a.double()
    values = torch.linalg.svdvals(whole)
    # Eckart and Young: no matrix of that rank is nearer than the tail of the singular values.
    assert torch.linalg.norm(whole - low_b @ low_a) == pytest.approx(float((values[rank:] ** 2).sum().sqrt()), abs=1e-9)
    tail = float(values[rank]) if rank < len(values) else 0.0
    assert torch.linalg.matrix_norm(whole - low_b @ low_a, 2) == pytest.approx(tail, abs=1e-9)


class Small(nn.Module):
    """A model that PEFT can adapt."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 30), nn.Linear(30, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("pattern", [{}, {"second": 5}])
def test_a_compressed_adapter_loads_in_peft_and_is_off_by_what_the_tail_predicts(
    tmp_path: Path, rslora: bool, pattern: dict[str, int]
) -> None:
    lora = LoraConfig(r=8, lora_alpha=12, target_modules=["first", "second"], use_rslora=rslora, alpha_pattern=pattern)
    original = get_peft_model(Small(), lora)
    for name, parameter in original.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    original.save_pretrained(str(tmp_path / "full"))
    x = torch.randn(7, 20)
    for rank in (8, 3):
        compress_adapter(tmp_path / "full", tmp_path / f"rank_{rank}", rank)
        small = PeftModel.from_pretrained(Small(), str(tmp_path / f"rank_{rank}"))
        for name in ("first", "second"):
            old, new = (model.base_model.model.get_submodule(name) for model in (original, small))
            assert new.r["default"] == rank
            assert new.scaling["default"] == pytest.approx(old.scaling["default"])
            whole = (old.lora_B["default"].weight @ old.lora_A["default"].weight).detach()
            values = torch.linalg.svdvals(whole.double())
            tail = float(values[rank]) if rank < len(values) else 0.0
            inputs = torch.randn(50, whole.shape[1])
            off = (old(inputs) - new(inputs)).norm(dim=1)
            allowed = old.scaling["default"] * tail * inputs.norm(dim=1)
            assert (off <= allowed * (1 + 1e-4) + 1e-3).all()
        if rank == 8:
            assert torch.allclose(original(x), small(x), atol=1e-4)


def test_the_source_stays_and_the_precision_too(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in random_factors(8).items()}
    tensors["base_model.model.lm_head.weight"] = torch.randn(5, 5)
    adapter = write_adapter(tmp_path / "adapter", tensors, base_model_name_or_path="some/model")
    before = (adapter / "adapter_model.safetensors").read_bytes()
    compress_adapter(adapter, tmp_path / "small", 2)
    assert (adapter / "adapter_model.safetensors").read_bytes() == before
    small = load_file(tmp_path / "small" / "adapter_model.safetensors")
    assert small.keys() == tensors.keys()
    assert {t.dtype for name, t in small.items() if "lora" in name} == {torch.bfloat16}
    assert torch.equal(small["base_model.model.lm_head.weight"], tensors["base_model.model.lm_head.weight"])
    adapter_config = json.loads((tmp_path / "small" / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"], adapter_config["base_model_name_or_path"]) == (
        2,
        4,
        "some/model",
    )
    compress_adapter(adapter, tmp_path / "small", 4)
    assert json.loads((tmp_path / "small" / "adapter_config.json").read_text())["r"] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "small"]


def test_a_layer_without_update_is_left_out_and_named(tmp_path: Path) -> None:
    tensors = random_factors(8)
    layer = "base_model.model.model.layers.0.q_proj"
    tensors[f"{layer}.lora_B.weight"].zero_()
    logged: list[str] = []
    analysis = squeeze(Squeeze(adapter_path=str(write_adapter(tmp_path / "a", tensors))), logged.append)
    assert analysis.untrained == (layer,)
    assert any(layer in line for line in logged)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.zero_()
    with pytest.raises(ConfigError, match="never trained"):
        analyze_adapter(write_adapter(tmp_path / "zero", tensors))


def broken(kind: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, adapter_config = random_factors(8), {}
    layer = "base_model.model.model.layers.1.v_proj"
    if kind == "missing pair":
        del tensors[f"{layer}.lora_B.weight"]
    elif kind == "mixed ranks":
        tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"] = torch.randn(4, 24), torch.randn(12, 4)
    elif kind == "unfitting pair":
        tensors[f"{layer}.lora_B.weight"] = torch.randn(12, 4)
    elif kind == "nan":
        tensors[f"{layer}.lora_A.weight"][0, 0] = float("nan")
    elif kind == "dora flag":
        adapter_config["use_dora"] = True
    elif kind == "dora tensor":
        tensors[f"{layer}.lora_magnitude_vector"] = torch.ones(12)
    elif kind == "bias":
        tensors[f"{layer}.lora_B.bias"] = torch.ones(12)
    elif kind == "convolution":
        tensors[f"{layer}.lora_A.weight"] = torch.randn(8, 24, 1, 1)
    elif kind == "other rank":
        adapter_config["r"] = 16
    elif kind == "rank in quotes":
        adapter_config["r"] = "8"
    elif kind == "no alpha":
        adapter_config["lora_alpha"] = None
    elif kind == "other method":
        adapter_config["peft_type"] = "IA3"
    elif kind == "empty":
        tensors = {"x": torch.ones(1)}
    return tensors, adapter_config


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing pair", "v_proj has lora_A but no lora_B"),
        ("mixed ranks", "mixes ranks: 4 .*, 8 "),
        ("unfitting pair", "do not match"),
        ("nan", "v_proj.lora_A.weight contains NaN"),
        ("dora flag", "DoRA adapter"),
        ("dora tensor", "DoRA adapter"),
        ("bias", "not part of a plain LoRA adapter"),
        ("convolution", "not a linear layer"),
        ("other rank", "has r = 16, but its factors have rank 8"),
        ("rank in quotes", "has r = '8', but its factors have rank 8"),
        ("no alpha", "has lora_alpha = None, which is not a number"),
        ("other method", "not a LoRA adapter: .* has peft_type IA3"),
        ("empty", "has no LoRA factors"),
    ],
)
def test_a_bad_adapter_is_rejected_with_the_reason(tmp_path: Path, kind: str, message: str) -> None:
    tensors, adapter_config = broken(kind)
    folder = write_adapter(tmp_path / "bad", tensors, **adapter_config)
    with pytest.raises(ConfigError, match=message):
        analyze_adapter(folder)
    with pytest.raises(ConfigError, match=message):
        compress_adapter(folder, tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_or_not_readable_are_rejected(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no adapter folder"):
        analyze_adapter(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"it has no adapter_config.json"):
        analyze_adapter(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read"):
        analyze_adapter(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match="safe_serialization"):
        analyze_adapter(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        analyze_adapter(adapter)


def test_the_rank_of_the_file_is_compared_if_it_is_set(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([write_table(tmp_path, adapter_path=str(adapter)), "--lora-rank", "16"]) == 0
    assert "the adapter has rank 8, while [model] lora_rank is 16" in capsys.readouterr().out


def test_the_flag_of_an_adapter_is_that_of_the_analysis(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write_table(tmp_path, adapter_path=str(tmp_path / "another"))
    assert run([table, "--adapter-path", str(adapter), "--strict"]) == 0
    assert f"{adapter}: " in capsys.readouterr().out
    assert run([table, "--adapter-path", str(tmp_path / "none")]) == 2
    assert f"there is no adapter folder {tmp_path / 'none'}" in capsys.readouterr().err
    assert run([table, "--squeeze-adapter-path", str(adapter), "--adapter-path", "x", "--lr", "1e-4"]) == 0
    shown = capsys.readouterr().err
    assert shown.splitlines() == [
        "note: [backend] adapter_path is not used: [squeeze] adapter_path is set, so nothing is trained",
        "note: [training] lr is not used: [squeeze] adapter_path is set, so nothing is trained",
    ]


@pytest.mark.slow
def test_doctor_opens_the_adapter_and_asks_for_nothing_else(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # The file of a run on a GPU, with data that are gone.
    table = write_table(tmp_path, adapter_path=str(adapter), output_path=str(tmp_path / "small"))
    with Path(table).open("a") as file:
        file.write('[data]\nsource = "jsonl"\npath = "gone.jsonl"\n[logging]\nwandb_project = "p"\n')
    assert run(["doctor", table]) == 0
    text = capsys.readouterr().out
    assert re.search(r"adapter: \d+ layers, rank 8", text) and "[squeeze] output_path" in text
    assert "gpu:0" not in text and "[backend] adapter_path" not in text and "gone.jsonl" not in text
    for flag in ("--target-ranks=[99]", "--compress-to=99", "--source-rank=16"):
        assert (run(["doctor", table, flag]), run([table, flag])) == (1, 2)
        shown = capsys.readouterr()
        assert shown.out.count("Rank") == 0 and "[squeeze]" in shown.err
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "thesis.txt").touch()
    assert run(["doctor", table]) == 1
    assert "is not an adapter and is not overwritten" in capsys.readouterr().out
    assert run([table]) == 2
    assert "Rank" not in capsys.readouterr().out, "said before the analysis"
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    (tmp_path / "small" / "thesis.txt").unlink()
    assert run(["doctor", table]) == 1
    assert "adapter_model.safetensors cannot be read" in capsys.readouterr().out


def test_places_that_hold_something_else_are_not_overwritten(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the source adapter"):
        compress_adapter(adapter, adapter, 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not an adapter and is not overwritten"):
        compress_adapter(adapter, tmp_path / "mine", 2)
    with pytest.raises(ConfigError, match="is outside the adapter's rank, 1 to 8"):
        compress_adapter(adapter, tmp_path / "out", 9)
    shutil.copytree(adapter, tmp_path / "theirs")
    with pytest.raises(ConfigError, match="is an adapter without retrain's record"):
        compress_adapter(adapter, tmp_path / "theirs", 2)
    (tmp_path / "run").mkdir()
    publish_folder(
        tmp_path / "of_run", partial(shutil.copytree, adapter, dirs_exist_ok=True), run=str(tmp_path / "run")
    )
    with pytest.raises(ConfigError, match="is an adapter without retrain's record"):
        compress_adapter(adapter, tmp_path / "of_run", 2)


def test_a_compressed_adapter_is_replaced_by_another_but_not_by_a_run(adapter: Path, tmp_path: Path) -> None:
    for rank in (4, 2):
        small = compress_adapter(adapter, tmp_path / "small", rank)
    assert why_kept(small) == "holds an adapter that no run wrote"
    assert why_kept(tmp_path / "nothing") == ""
    publish_folder(tmp_path / "of_run", partial(shutil.copytree, adapter, dirs_exist_ok=True), run=str(tmp_path))
    assert why_kept(tmp_path / "of_run") == ""


def write_table(folder: Path, **options: Any) -> str:
    path = folder / "squeeze.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    path.write_text("\n".join(["[squeeze]", *lines, ""]))
    return str(path)


def test_the_command_prints_the_table_and_compresses(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    assert run([write_table(tmp_path, adapter_path=str(adapter), output_path=str(small))]) == 0
    text = capsys.readouterr().out
    assert "  Rank  Mean Var%  Min Var%  Max Var%\n" in text and "  <--\n" in text
    # The default of lora_rank says nothing about an adapter.
    assert "lora_rank" not in text
    rank = json.loads((small / "adapter_config.json").read_text())["r"]
    assert f"Recommended rank: {rank} " in text
    chosen = write_table(tmp_path, adapter_path=str(adapter), output_path=str(small), compress_to=1)
    assert run([chosen, "--target-ranks", "[1]", "--source-rank", "8"]) == 0
    assert "No evaluated rank keeps 95%" in capsys.readouterr().out
    assert json.loads((small / "adapter_config.json").read_text())["r"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adapter_path": "A", "source_rank": 4}, "source_rank = 4, but the adapter has rank 8"),
        ({"adapter_path": "A", "target_ranks": [2, 99]}, "target_ranks has 99, but the adapter has rank 8"),
        ({"adapter_path": "A", "output_path": "small", "compress_to": 9}, "compress_to = 9 is outside"),
        ({"adapter_path": "A", "device": "gpu:0"}, "device = 'gpu:0' cannot be used"),
        ({"adapter_path": "A", "device": "cuda:7"}, "cannot be used"),
        ({"adapter_path": "nowhere"}, "there is no adapter folder"),
    ],
)
def test_a_wrong_table_is_rejected(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    given_ = {key: str(adapter) if value == "A" else value for key, value in options.items()}
    assert run([write_table(tmp_path, **given_)]) == 2
    assert message in capsys.readouterr().err


def test_a_squeeze_cannot_be_resumed(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([write_table(tmp_path, adapter_path=str(adapter)), "--force-resume"]) == 2
    assert "no run to resume" in capsys.readouterr().err


def test_an_adapter_on_tinker_is_fetched_and_deleted_again(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path, str]] = []

    def fetch_adapter(tinker_path: str, folder: Path, base_url: str) -> Path:
        asked.append((tinker_path, folder, base_url))
        return write_adapter(folder / "adapter", random_factors(8))

    monkeypatch.setattr("retrain.squeeze.run.fetch_adapter", fetch_adapter)
    settings = Squeeze(adapter_path="tinker://run/weights/1", output_path=str(tmp_path / "out"))
    analysis = squeeze(settings, print, base_url="http://there")
    assert analysis.source_rank == 8
    ((path, folder, base_url),) = asked
    assert (path, base_url) == ("tinker://run/weights/1", "http://there") and not folder.exists()
    assert (tmp_path / "out" / "adapter_config.json").exists()


def test_without_the_tinker_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\[tinker\]"):
        squeeze(Squeeze(adapter_path="tinker://x/weights/1"), print)
