"""A stand-in for the `vllm` command: serves a model of the tests as vLLM would, and writes down how it was called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from inference_engine.loopback import Loopback


def main() -> None:
    env = {name: os.environ.get(name) for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "CUDA_VISIBLE_DEVICES")}
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(json.dumps({"flags": sys.argv[1:], "env": env, "pids": [os.getpid(), worker.pid]}), flush=True)
    with Loopback(Path(sys.argv[2]), port=int(sys.argv[sys.argv.index("--port") + 1])):
        time.sleep(600)


if __name__ == "__main__":
    main()
