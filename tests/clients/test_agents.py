"""Coding agents, unmodified, on an emulated fleet, whose context takes their prompts at once.

In the long lane; an agent that is not installed is skipped (`npm install -g` with the package's name).
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_runner import EMULATED, Fleet

PACKAGES = {"codex": "@openai/codex", "opencode": "opencode-ai", "claude": "@anthropic-ai/claude-code"}
ARGUMENTS = {"codex": ["exec", "--skip-git-repo-check"], "opencode": ["run"], "claude": ["-p"]}
TALKS = EMULATED.format(name="talks", keep_alive_s=600).replace("kv_bytes: 1GiB", "kv_bytes: 40GiB")
pytestmark = [pytest.mark.fleet, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    models = {"talks": TALKS + "context_tokens: 262144\n"}
    with Fleet.start(tmp_path_factory.mktemp("agents"), models, nodes=1) as made:
        yield made


def configured(home: Path, base: str) -> dict[str, str]:
    """Write each agent's settings; returns its environment."""
    (home / ".codex").mkdir()
    provider = f'[model_providers.g]\nname = "g"\nbase_url = "{base}/v1"\nwire_api = "responses"\n'
    (home / ".codex/config.toml").write_text(f'model = "talks"\nmodel_provider = "g"\n{provider}')
    (home / ".config/opencode").mkdir(parents=True)
    models = {"talks": {"limit": {"context": 262144, "output": 64}}}
    options = {"baseURL": f"{base}/v1", "apiKey": "none"}
    fleet = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": models}
    settings = {"autoupdate": False, "model": "g/talks", "small_model": "g/talks", "provider": {"g": fleet}}
    (home / ".config/opencode/opencode.json").write_text(json.dumps(settings))
    claude = {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": "talks"}
    claude |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_DEFAULT_HAIKU_MODEL": "talks"}
    return {"PATH": os.environ["PATH"], "HOME": f"{home}"} | claude


@pytest.mark.parametrize("name", PACKAGES)
def test_an_agent_prints_the_models_answer(fleet: Fleet, tmp_path: Path, name: str) -> None:
    if (program := shutil.which(name)) is None:
        pytest.skip(f"no {name} here: npm install -g {PACKAGES[name]}")
    done = subprocess.run(
        [program, *ARGUMENTS[name], "Say hello."],
        cwd=tmp_path,
        env=configured(tmp_path, fleet.url("data")),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0 and "[emulated]" in done.stdout, (done.stdout + done.stderr)[-4000:]
