"""Models that the real servers can take: the embedded one with wider heads, and a small public one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from retrain.builtin import resolve_model

WIDE = 32


def widen_heads(folder: Path) -> Path:
    """The built-in model with heads of 32 in place of 24 numbers: the same function, in a size that vLLM's CPU kernels
    have. Rotary frequencies stay by choosing theta, attention's scale and the norms' means by scaling the norms."""
    source = Path(resolve_model("builtin:tiny"))
    shutil.copytree(source, folder, dirs_exist_ok=True)
    settings = json.loads((source / "config.json").read_text())
    head, hidden = settings["head_dim"], settings["hidden_size"]
    theta = settings["rope_parameters"]["rope_theta"] ** (WIDE / head)
    # Both spellings: transformers 5 reads the table, mlx-lm the top level alone.
    settings |= {
        "head_dim": WIDE,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    # A rotary pair is a number of the first half and the one at the same place in the second.
    place = torch.cat([torch.arange(head // 2), WIDE // 2 + torch.arange(head // 2)])

    def spread(tensor: torch.Tensor, axis: int) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[axis] = WIDE
        return torch.zeros(shape, dtype=tensor.dtype).index_copy(axis, place, tensor)

    weights = {}
    for name, tensor in load_file(str(source / "model.safetensors")).items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = spread(tensor.view(-1, head, hidden), 1).reshape(-1, hidden)
        elif name.endswith("o_proj.weight"):
            tensor = spread(tensor.view(hidden, -1, head), 2).reshape(hidden, -1)
        elif name.endswith("q_norm.weight"):
            tensor = spread(tensor, 0)
        elif name.endswith("k_norm.weight"):
            tensor = spread(tensor * (head / WIDE) ** 0.5, 0)
        weights[name] = tensor.contiguous()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def write_llama(folder: Path) -> Path:
    """A little Llama with random weights and the built-in model's tokenizer: MAX 26.7 asks for a GPU for Qwen3."""
    source = Path(resolve_model("builtin:tiny"))
    shutil.copytree(source, folder, dirs_exist_ok=True)
    own = json.loads((source / "config.json").read_text())
    torch.manual_seed(0)
    shape = LlamaConfig(
        **{key: own[key] for key in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings")},
        bos_token_id=None,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"rope_theta": settings["rope_parameters"]["rope_theta"]}, indent=1))
    return folder
