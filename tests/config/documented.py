"""The documented keys, defaults and flags, written out by hand: the schema is held against them."""

from __future__ import annotations

DEFAULTS: dict[str, dict[str, object]] = {
    "backend": {"backend": "local", "devices": "gpu:0", "adapter_path": "/tmp/retrain_adapter"},
    "model": {"model": "Qwen/Qwen3-4B-Instruct-2507", "base_url": "", "lora_rank": 32},
    "algorithm": {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
    "training": {
        "seed": -1,
        "max_steps": 500,
        "batch_size": 8,
        "group_size": 16,
        "max_tokens": 2048,
        "temperature": 0.7,
        "lr": 4e-5,
        "weight_decay": 0.0,
        "max_examples": 0,
        "save_every": 20,
    },
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    "lora": {"alpha": 0, "dropout": 0.0},
    "data": {"source": "math"},
    "environment": {"provider": "", "id": "", "args": {}, "max_turns": -1, "auto_install": False},
    "planning": {"detector": "regex", "model": "all-MiniLM-L6-v2", "threshold": 0.02},
    "gtpo": {"beta": 0.1},
    "hicra": {"alpha": 0.2},
    "sepa": {"steps": 500, "schedule": "linear", "delay_steps": 50, "correct_rate_gate": 0.1},
    "inference": {
        "engine": "pytorch",
        "url": "",
        "attention_kernel": "default",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "prefix_caching": True,
    },
    "reward": {"type": "match", "judge_model": "", "custom_module": "", "custom_function": "score"},
    "backpressure": {
        "enabled": False,
        "warmup_steps": 10,
        "ema_decay": 0.9,
        "throttle_margin": 0.85,
        "increase_margin": 0.5,
        "min_batch_size": 1,
        "max_batch_size": 64,
        "peak_gflops": 0.0,
        "peak_bw_gb_s": 0.0,
    },
    "squeeze": {
        "min_variance_retention": 0.95,
        "adapter_path": "",
        "source_rank": 0,
        "target_ranks": (),
        "output_path": "",
        "compress_to": 0,
        "device": "cpu",
    },
    "resume": {"from": ""},
    "logging": {
        "log_dir": "logs/train",
        "wandb_project": "",
        "wandb_run_name": "",
        "wandb_entity": "",
        "wandb_group": "",
        "wandb_tags": "",
        "strategic_grams": "",
    },
}

# Flag, a value for it, the option it sets, and that value as the option holds it.
FLAGS: tuple[tuple[str, str, str, object], ...] = (
    ("--advantage-mode", "grpo", "algorithm.advantage_mode", "grpo"),
    ("--transform-mode", "none", "algorithm.transform_mode", "none"),
    ("--seed", "42", "training.seed", 42),
    ("--lr", "1e-4", "training.lr", 1e-4),
    ("--batch-size", "4", "training.batch_size", 4),
    ("--group-size", "2", "training.group_size", 2),
    ("--max-steps", "3", "training.max_steps", 3),
    ("--lora-rank", "8", "model.lora_rank", 8),
    ("--log-dir", "out", "logging.log_dir", "out"),
    ("--wandb-project", "my-run", "logging.wandb_project", "my-run"),
    ("--wandb-entity", "us", "logging.wandb_entity", "us"),
    ("--wandb-group", "7", "logging.wandb_group", "7"),
    ("--wandb-tags", "a,b", "logging.wandb_tags", "a,b"),
    ("--wandb-run-name", "true", "logging.wandb_run_name", "true"),
    ("--resume", "logs/old", "resume.from", "logs/old"),
)

ANNOTATED = """
[backend]
backend = "local"          # local | tinker
devices = "gpu:0"
adapter_path = "/tmp/retrain_adapter"

[model]
model = "Qwen/Qwen3-4B-Instruct-2507"
base_url = ""
lora_rank = 32

[algorithm]
advantage_mode = "maxrl"
transform_mode = "gtpo_sepa"

[training]
seed = -1
max_steps = 500
batch_size = 8
group_size = 16
max_tokens = 2048
temperature = 0.7
lr = 4e-5
weight_decay = 0.0
max_examples = 0           # 0 = use all examples
save_every = 20

[gtpo]
beta = 0.1

[hicra]
alpha = 0.2

[sepa]
steps = 500
schedule = "linear"        # linear | auto
delay_steps = 50
correct_rate_gate = 0.1

[inference]
engine = "pytorch"
url = ""
attention_kernel = "default"
dtype = "auto"
kv_cache_dtype = "auto"
prefix_caching = true

[data]
source = "math"

[environment]
provider = ""
id = ""
args = {}
max_turns = -1
auto_install = false

[reward]
type = "match"
judge_model = ""
custom_module = ""
custom_function = "score"

[backpressure]
enabled = false
warmup_steps = 10
ema_decay = 0.9
throttle_margin = 0.85
increase_margin = 0.5
min_batch_size = 1
max_batch_size = 64
peak_gflops = 0.0
peak_bw_gb_s = 0.0

[squeeze]
min_variance_retention = 0.95

[resume]
from = ""

[logging]
log_dir = "logs/train"
wandb_project = ""
wandb_run_name = ""
wandb_entity = ""
wandb_group = ""
wandb_tags = ""
strategic_grams = ""
"""
