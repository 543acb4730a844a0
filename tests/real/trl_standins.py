"""Small local models and datasets under the names that TRL's tests load from the Hub.

They are folders named like the repositories on the Hub: a process that starts in their parent finds them, whether
transformers, peft or datasets asks.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import trl
from datasets import DatasetDict
from tokenizers import AddedToken, ByteLevelBPETokenizer, Tokenizer, decoders, models, pre_tokenizers
from torch import nn

OWNER = "trl-internal-testing"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
# The tests contain completions as token ids of Qwen's vocabulary; single bytes have the ids 0 to 255 in both.
QWEN = {
    293: " b", 314: " {", 330: ' "', 397: ">\n", 411: "out", 450: "de", 497: '",', 522: "</", 606: "name", 788: '":',
    894: " any", 927: "sh", 944: "'t", 1318: "text", 1414: " know", 1513: " don", 2765: " won", 4913: '{"',
    5212: ' {"', 5392: " tool", 6023: "hi", 6659: "call", 7692: "async", 9520: "step", 11248: "}}\n",
    13477: "crement", 14172: "tool", 16252: " increment", 16370: "arguments", 17453: "Done", 22785: "_tool",
    35744: "increment", 64648: "multiply", 93054: "_multiply", 95642: '"}}\n',
}  # fmt: skip
SPECIAL = {
    151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>", 151657: "<tool_call>",
    151658: "</tool_call>", 151665: "<tool_response>", 151666: "</tool_response>", 151667: "<think>",
    151668: "</think>", 151669: "<|begin_of_text|>", 151670: "<|start_header_id|>", 151671: "<|end_header_id|>",
    151672: "<|eot_id|>", 151673: "<|finetune_right_pad_id|>",
}  # fmt: skip
# A part of the text, so that decoding keeps them.
PLAIN = ("tool", "think")
# Tokens of Qwen's vocabulary. Most tests do not need them, and are several times as fast with fewer.
WHOLE = 151_936
# What Qwen's repositories have: a trainer must not take the filters from there.
QWEN_GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
REMOTE = {
    "configuration_remote.py": """\
from transformers import LlamaConfig


class RemoteConfig(LlamaConfig):
    model_type = "remote"
""",
    "modeling_remote.py": """\
from transformers import LlamaForCausalLM

from .configuration_remote import RemoteConfig


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
""",
}


@dataclass(frozen=True)
class Kind:
    """How the models of one architecture are made."""

    template: str
    settings: dict[str, Any] = field(default_factory=dict)
    eos: str = "<|im_end|>"
    pad: str | None = "<|endoftext|>"
    generation: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "Cohere2": Kind("cohere2", {"head_dim": 2, "logit_scale": 1.0}),
    "Gemma2": Kind("gemma", {"head_dim": 2}),
    "Glm4Moe": Kind(
        "glm4moe",
        {
            "head_dim": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "GptOss": Kind("gptoss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Llama": Kind("llama3_2", eos="<|eot_id|>", pad=None),
    "NemotronH": Kind(
        "nemotron_3_nano",
        {
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 4,
            "mamba_n_groups": 1,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "Qwen2": Kind("qwen2_5", generation=QWEN_GENERATION),
    "Qwen3": Kind("qwen3", generation=QWEN_GENERATION),
    "Qwen3Moe": Kind(
        "qwen3", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 128}, generation=QWEN_GENERATION
    ),
}
NAMES = (
    "tiny-Cohere2ForCausalLM",
    "tiny-Gemma2ForCausalLM",
    "tiny-Glm4MoeForCausalLM",
    "tiny-GptOssForCausalLM",
    "tiny-LlamaForSequenceClassification-3.2",
    "tiny-NemotronHForCausalLM-nano",
    "tiny-Qwen2ForCausalLM-2.5",
    "tiny-Qwen2ForSequenceClassification-2.5",
    "tiny-Qwen3ForCausalLM",
    "tiny-Qwen3ForSequenceClassification",
    "tiny-Qwen3MoeForCausalLM",
)


def write_standins(folder: Path, checkout: Path, names: Sequence[str], vocabulary: int, rows: int) -> None:
    """Write them into the folder. The rows of the datasets are the first ones that a script in TRL's checkout makes."""
    home = folder / OWNER
    tokenizer = build_tokenizer(vocabulary)
    for name in names:
        _write_model(home / name, name.split("-")[1], tokenizer)
    _write_remote(home / "tiny-RemoteForCausalLM", tokenizer)
    _write_dataset(home / "zen", checkout / "scripts" / "generate_zen_dataset.py", rows)


def build_tokenizer(vocabulary: int) -> Tokenizer:
    """A byte-level tokenizer with Qwen's ids where the tests have them, and a made-up word at every other one."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))], vocab_size=2000)
    learned = json.loads(trained.to_str())["model"]
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # In the order of their letters, the bytes have the ids they have at Qwen.
    ids = {letter: at for at, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    # Special tokens are at the end.
    ids |= {text: at - WHOLE + vocabulary for at, text in SPECIAL.items()}
    ids |= {
        "".join(part for part, _ in spell.pre_tokenize_str(text)): at
        for at, text in QWEN.items()
        if at < vocabulary - 300
    }
    words, taken = _list_words(learned["vocab"], set(ids)), set(ids.values())
    ids |= {next(words): at for at in range(vocabulary) if at not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[tuple(pair) for pair in learned["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in SPECIAL.values():
        is_special = not any(part in text for part in PLAIN)
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False)])
    return tokenizer


def _list_words(learned: dict[str, int], others: set[str]) -> Iterator[str]:
    """The tokens that were learned, and then words of different lengths without end."""
    yield from (token for token in learned if token not in others)
    number = 0
    while True:
        number += 1
        yield f"Ġ{number:x}z"


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, kind: Kind) -> transformers.PreTrainedTokenizerFast:
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=kind.eos, pad_token=kind.pad)
    fast.chat_template = (TEMPLATES / f"{kind.template}.jinja").read_text()
    fast.save_pretrained(folder)
    return fast


def _write_model(folder: Path, architecture: str, tokenizer: Tokenizer) -> None:
    kind = KINDS[architecture.partition("For")[0]]
    fast = _write_tokenizer(folder, tokenizer, kind)
    ends = {"bos_token_id": None, "eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    is_classifier = architecture.endswith("Classification")
    settings = SIZES | kind.settings | ends | {"vocab_size": tokenizer.get_vocab_size()}
    if is_classifier:
        settings |= {"hidden_size": 16, "num_labels": 1}
    made = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).to(torch.bfloat16)
    for module in model.modules():
        # Large enough that a step at the tests' learning rate moves every parameter.
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    if not is_classifier:
        model.generation_config = transformers.GenerationConfig(**kind.generation, **ends)
    model.save_pretrained(folder)


def _write_remote(folder: Path, tokenizer: Tokenizer) -> None:
    """A model whose code is in its folder."""
    _write_model(folder, "LlamaForCausalLM", tokenizer)
    for name, text in REMOTE.items():
        (folder / name).write_text(text)
    path = folder / "config.json"
    names = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    own = {"model_type": "remote", "architectures": ["RemoteForCausalLM"], "auto_map": names}
    path.write_text(json.dumps(json.loads(path.read_text()) | own, indent=1))


def _write_dataset(folder: Path, script: Path, rows: int) -> None:
    """The dataset that a script of TRL would upload, as files."""
    lines = []

    def write(parts: DatasetDict, _: str, config_name: str) -> None:
        lines.extend([f"- config_name: {config_name}", "  data_files:"])
        for split, part in parts.items():
            part.select(range(min(rows, len(part)))).to_parquet(folder / config_name / f"{split}.parquet")
            lines.extend([f"  - split: {split}", f"    path: {config_name}/{split}.parquet"])

    folder.mkdir(parents=True)
    with mock.patch.object(DatasetDict, "push_to_hub", write):
        runpy.run_path(str(script))["main"](0.1, True, folder.name)
    (folder / "README.md").write_text("\n".join(["---", "configs:", *lines, "---", ""]))
