"""Writes adapters for servers: one folder per version, in the server's layout."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine.http.spec import Adapter
from retrain.modeling.policy import Policy
from retrain.runtime.permissions import share_weights
from retrain.storage.publishing import make_temporary


class AdapterFolder:
    """Writes and deletes adapter versions. Servers must be able to read `root`; empty means a temporary folder."""

    def __init__(self, root: str, for_mlx: bool) -> None:
        try:
            if root:
                # Possibly a shared disk: leftovers of other runs cannot be told from live folders.
                Path(root).mkdir(parents=True, exist_ok=True)
                self.path = Path(tempfile.mkdtemp(prefix="retrain-adapters-", dir=root)).resolve()
            else:
                self.path = make_temporary("retrain-adapters").resolve()
        except OSError as error:
            raise ConfigError(f"[inference] adapter_dir = {root!r} cannot be written to: {error.strerror}.") from error
        # Servers may run under another user.
        self.path.chmod(0o755)
        self.for_mlx = for_mlx
        self.run = secrets.token_hex(3)
        self.versions = 0

    def write(self, policy: Policy) -> Adapter:
        """Write the current adapter under a new name."""
        self.versions += 1
        name = f"retrain-{self.run}-{self.versions}"
        path = self.path / name
        try:
            policy.save_adapter(path)
            if self.for_mlx:
                convert_to_mlx(path, policy.layers)
        except OSError as error:
            raise RolloutError(f"the adapter could not be written to {path}: {error.strerror or error}.") from error
        return Adapter(name, path)

    def delete(self, adapter: Adapter) -> None:
        """Delete a version that no server uses."""
        shutil.rmtree(adapter.path, ignore_errors=True)

    def close(self) -> None:
        """Delete all versions."""
        shutil.rmtree(self.path, ignore_errors=True)


def convert_to_mlx(folder: Path, layers: int) -> None:
    """Convert a PEFT adapter in place to mlx-lm's layout: transposed factors, named by layer."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank, alpha = config["r"], config["lora_alpha"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(str(folder / "adapter_model.safetensors")).items():
        own = name.removeprefix("base_model.model.")
        for theirs, ours in ((".lora_A.weight", ".lora_a"), (".lora_B.weight", ".lora_b")):
            if own.endswith(theirs):
                tensors[own.removesuffix(theirs) + ours] = tensor.T.contiguous()
    modules = {name.rpartition(".")[0].split(".layers.")[-1].partition(".")[2] for name in tensors}
    parameters = {"rank": rank, "scale": alpha / rank, "dropout": 0.0, "keys": sorted(modules)}
    settings = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": parameters}
    save_file(tensors, str(folder / "adapters.safetensors"))
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
    share_weights(folder)
