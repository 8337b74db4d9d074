"""The `llm` command with a model of its extra-openai-models.yaml."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

base, model = sys.argv[1:3]
with tempfile.TemporaryDirectory() as folder:
    listed = f"- model_id: here\n  model_name: {model}\n  api_base: {base}/v1\n  api_key_name: none\n"
    (Path(folder) / "extra-openai-models.yaml").write_text(listed)
    env = {**os.environ, "LLM_USER_PATH": folder}
    command = [sys.executable, "-m", "llm", "prompt", "-m", "here", "--key", "none", "-o", "max_tokens", "5", "Hi"]
    for more in ([], ["--no-stream"]):
        done = subprocess.run([*command, *more], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
