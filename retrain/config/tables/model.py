"""Tables about the model and the hardware it is trained on."""

from typing import ClassVar, Literal

from retrain.config import reasons
from retrain.config.declare import IGNORED, BoundedInt, Facets, Section, Table, option


class Backend(Section):
    """Where the weights are trained."""

    facets: ClassVar[Facets] = Facets(on_resume="free")

    backend: str = option(
        "local",
        "Training backend: local (PyTorch and PEFT) or tinker (a remote service).",
        kind="backend",
        on_resume="fixed",
        shared_model=True,
        step_time=True,
    )
    devices: str = option(
        "gpu:0",
        "auto (first GPU, else CPU), cpu, gpu:N, or a comma-separated list: the first samples, the last trains.",
        on_tinker=IGNORED,
        shared_model=True,
        step_time=True,
        synonyms=("device",),
    )
    adapter_path: str = option(
        "/tmp/retrain_adapter",
        "Folder for the newest adapter, in PEFT format.",
        min_length=1,
        flag="--adapter-path",
        path="absolute",
        identity=True,
        on_tinker=IGNORED,
        per_condition=False,
        in_campaign=reasons.always("every run of a campaign has an adapter folder of its own"),
    )
    max_concurrent: BoundedInt = option(
        4,
        "Maximum concurrent Tinker calls over all runs that share throttle_dir.",
        ge=1,
        unused=reasons.needs_remote_backend,
    )
    throttle_dir: str = option(
        "",
        "Folder of the semaphore shared by parallel Tinker runs; empty uses the system's temporary folder.",
        path="absolute",
        unused=reasons.needs_remote_backend,
    )


class Model(Section):
    """The model to train."""

    facets: ClassVar[Facets] = Facets(shared_model=True, step_time=True)

    model: str = option(
        "Qwen/Qwen3-4B-Instruct-2507",
        "Hugging Face id, a local folder, or builtin:tiny.",
        min_length=1,
        flag="--model",
        path="or_id",
        synonyms=("model_name", "model_name_or_path", "model.name", "pretrain"),
    )
    base_url: str = option(
        "",
        "Tinker service URL (tinker backend only).",
        on_resume="free",
        step_time=False,
        unused=reasons.needs_tinker_service,
    )
    lora_rank: BoundedInt = option(32, "LoRA rank; 0 trains the full model.", ge=0, synonyms=("lora_r", "r", "rank"))
    dtype: Literal["auto", "fp32", "bf16"] = option(
        "auto", "Training precision; auto is bf16 on a GPU and fp32 on the CPU.", on_tinker=IGNORED
    )
    quantization: Literal["none", "int8", "nf4"] = option(
        "none",
        "Store the frozen weights in 8 or 4 bits and train a full-precision adapter on top (QLoRA).",
        on_tinker="The service loads the model by itself.",
        package={"nf4": "bitsandbytes"},
        synonyms=("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type"),
    )
    init_kwargs: Table = option(
        {},
        "Additional keyword arguments for transformers' from_pretrained.",
        on_tinker="The service loads the model by itself.",
    )


class Lora(Section):
    """The LoRA adapter."""

    facets: ClassVar[Facets] = Facets(shared_model=True, unused=reasons.needs_adapter)

    alpha: BoundedInt = option(
        0, "LoRA alpha; 0 means twice the rank.", ge=0, on_tinker="The service chooses LoRA's alpha."
    )
    dropout: float = option(
        0.0, "LoRA dropout.", ge=0, lt=1, on_tinker="The service trains without dropout.", synonyms=("lora_dropout",)
    )
    target_modules: str = option(
        "all-linear",
        "Layers that get an adapter: all-linear, or comma-separated module names.",
        min_length=1,
        step_time=True,
        on_tinker="The service adapts all attention and MLP layers.",
    )


class Memory(Section):
    """Micro-batches and GPU memory."""

    facets: ClassVar[Facets] = Facets(on_resume="free", on_tinker=IGNORED, step_time=True)

    micro_batch_tokens: BoundedInt = option(
        0, "Maximum tokens per forward and backward pass; 0 chooses automatically.", ge=0
    )
    micro_batches: BoundedInt = option(
        0,
        "Minimum number of forward and backward passes per step; 0 chooses automatically.",
        ge=0,
        synonyms=("gradient_accumulation_steps",),
    )
    micro_batch_rows: BoundedInt = option(
        0,
        "Maximum completions per forward and backward pass; 0 chooses automatically.",
        ge=0,
        synonyms=("micro_batch_size", "micro_train_batch_size"),
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute the activations of all layers in the backward pass; false recomputes only if memory requires it.",
        shared_model=True,
    )
    offload_untrained_models: bool = option(
        False,
        "Keep a frozen reference and a frozen student in CPU memory between uses.",
        unused=reasons.needs_frozen_model,
    )


class Distributed(Section):
    """Training with several processes."""

    facets: ClassVar[Facets] = Facets(on_resume="free", step_time=True)

    fsdp: bool = option(False, "Shard the weights over the processes with FSDP2.", unused=reasons.needs_local_backend)
    gather_for_generation: bool = option(
        True,
        "Gather sharded weights before sampling; false requires a server engine.",
        unused=reasons.used_if("distributed.fsdp", bool),
    )
