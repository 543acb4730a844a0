"""`retrain import-gguf`: a small GGUF file becomes a folder with the same function, and mistakes are one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.cli import run

HIDDEN, HEADS, LAYERS, MIDDLE = 32, 2, 2, 64


def write_gguf(path: Path) -> dict[str, object]:
    """A little Llama with random weights and a byte-level tokenizer; returns its tensors by GGUF name."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    words = ["<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "ab", "cd"]
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(words), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}.weight": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        shapes |= {f"blk.{layer}.{name}.weight": (MIDDLE, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down.weight": (HIDDEN, MIDDLE)}
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    tensors = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, *[1] * (len(words) - 1)])
    # transformers 5.17 takes a list of one for its element.
    writer.add_token_merges(["a b", "c d"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id, writer.add_unk_token_id):
        add(0)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(tensors)


@pytest.mark.filterwarnings("ignore")
def test_a_gguf_file_becomes_a_folder_that_transformers_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_gguf(tmp_path / "small.gguf")
    folder = tmp_path / "small"
    assert run(["import-gguf", str(tmp_path / "small.gguf"), str(folder), "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "LlamaForCausalLM" in printed and "no chat template" in printed
    settings = json.loads((folder / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["rope_theta"] == 10000.0
    assert "quantization_config" not in settings
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.model.embed_tokens.weight, torch.tensor(tensors["token_embd.weight"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("ab c").input_ids) == "ab c"


def test_what_is_not_a_gguf_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.gguf"
    assert run(["import-gguf", str(other), str(tmp_path / "out")]) == 2
    assert "other.gguf cannot be read: No such file" in capsys.readouterr().err
    other.write_bytes(b"PK\x03\x04 and more")
    assert run(["import-gguf", str(other), str(tmp_path / "out")]) == 2
    assert "is not a GGUF file: it begins with b'PK" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF....")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert run(["import-gguf", str(tmp_path / "small.gguf"), str(tmp_path / "out")]) == 2
    assert "out exists and was not changed" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_reported_before_the_conversion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF....")
    assert run(["import-gguf", str(tmp_path / "small.gguf"), str(tmp_path / "small.gguf" / "out")]) == 2
    assert f"{tmp_path / 'small.gguf'} cannot be written to.  Try: another folder" in capsys.readouterr().err


def test_a_missing_package_is_named_with_the_line_that_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF....")
    monkeypatch.setattr("retrain.cli.import_gguf.find_spec", lambda name: None)
    assert run(["import-gguf", str(tmp_path / "small.gguf"), str(tmp_path / "out")]) == 2
    assert '[gguf]"' in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "small.gguf").write_bytes(b"GGUF" + bytes(64))
    assert run(["import-gguf", str(tmp_path / "small.gguf"), str(tmp_path / "out")]) == 2
    assert "transformers cannot read" in capsys.readouterr().err
