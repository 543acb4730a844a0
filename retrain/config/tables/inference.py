"""The table about sampling."""

from typing import ClassVar, Literal

from retrain.config import reasons
from retrain.config.declare import IGNORED, BoundedInt, Facets, Section, option

_SOURCES = "are C++ sources, built for one generation of GPUs where they run"


class Inference(Section):
    """Where completions are sampled."""

    facets: ClassVar[Facets] = Facets(prefixed=True, on_tinker=IGNORED, shared_model=True, step_time=True)

    engine: str = option("pytorch", "Sampling engine: {names} or a dotted path.", kind="engine", synonyms=("engine",))
    url: str = option(
        "",
        "Server URL, or several comma-separated, for engines that are servers.",
        on_resume="free",
        unused=reasons.needs_server,
    )
    attention_kernel: Literal["default", "flash", "triton", "tk", "cutlass"] = option(
        "default",
        "Attention implementation.",
        unsupported={"tk": f"ThunderKittens {_SOURCES}", "cutlass": f"CUTLASS kernels {_SOURCES}"},
        unused=reasons.not_on_servers("attention_kernel"),
    )
    dtype: Literal["auto", "bf16", "fp8", "fp4"] = option(
        "auto",
        "Precision of the sampling weights.",
        unsupported={"fp4": "only Blackwell GPUs have 4-bit matmul, which is not implemented"},
        unused=reasons.not_on_servers("dtype", launched="launch_dtype"),
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = option(
        "auto", "Precision of the KV cache.", unused=reasons.not_on_servers("kv_cache_dtype")
    )
    merge_adapter: Literal["auto", "always", "never"] = option(
        "auto",
        "Sample with a merged adapter: faster, but rounded. auto: fp32, and bf16 from 1B parameters.",
        unused=reasons.not_on_servers("merge_adapter"),
    )
    prefix_caching: bool = option(
        True, "Compute the KV cache of a prompt once for its group.", unused=reasons.not_on_servers("prefix_caching")
    )
    adapter_dir: str = option(
        "",
        "Folder from which servers load each step's adapter; it must be shared with their machine. "
        "Empty uses a temporary one.",
        path="as_given",
        step_time=False,
        unused=reasons.needs_server,
    )
    timeout_s: float = option(
        600.0,
        "Timeout for one request to a server, in seconds.",
        gt=0,
        le=86400,
        step_time=False,
        unused=reasons.needs_server,
    )
    wait_s: float = option(
        300.0,
        "Seconds to wait for a server that does not answer.",
        ge=0,
        le=86400,
        step_time=False,
        unused=reasons.needs_server,
    )
    launch: bool = option(
        False,
        "Start a vLLM server for the duration of the run, with the options below.",
        on_resume="free",
        unused=reasons.can_launch_server,
    )
    launch_device: str = option(
        "auto",
        "Device of the started server: cpu, cuda:N, or auto for the first GPU not used for training.",
        min_length=1,
        on_resume="free",
        unused=reasons.launches_server,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "Fraction of GPU memory that the started server uses for model and KV cache.",
        gt=0,
        le=1,
        flag="--inference-gpu-memory",
        on_resume="free",
        unused=reasons.launches_server,
    )
    launch_dtype: Literal["auto", "float16", "bfloat16", "float32"] = option(
        "auto", "Compute precision of the started server.", on_resume="free", unused=reasons.launches_server
    )
    max_model_len: BoundedInt = option(
        0,
        "Context length of the started server; 0 uses the model's.",
        ge=0,
        on_resume="free",
        unused=reasons.launches_server,
        synonyms=("context_length",),
    )

    @property
    def starts_server(self) -> bool:
        """Whether the run starts its own server: only vLLM, and only if no URL is given."""
        return self.launch and self.engine == "vllm" and not self.url
