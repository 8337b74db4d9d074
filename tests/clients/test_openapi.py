"""The data port answers as its OpenAPI document says, tried with schemathesis.

In the long lane; about a minute. `make clients-env` installs schemathesis.
"""

import asyncio
import json
from pathlib import Path

import pytest

from tests.clients.test_clients import PYTHON
from tests.contract.data_port_rig import get
from tests.contract.test_fields import EMBEDDING, RERANK, a_port

PROGRAM = PYTHON.with_name("schemathesis")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CONFIG = '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "4xx", "501"]\n'  # 501: not by this engine
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PROGRAM.exists(), reason="schemathesis is not installed: make clients-env"),
]


@pytest.mark.parametrize(
    ("engine", "phases"),
    [("emulated", "coverage,fuzzing"), pytest.param("llamacpp", "examples", marks=pytest.mark.llamacpp)],
)
async def test_the_port_answers_as_its_document_says(engine: str, phases: str, tmp_path: Path) -> None:
    config, file, records = tmp_path / "schemathesis.toml", tmp_path / "openapi.json", tmp_path / "records.har"
    config.write_text(CONFIG)
    async with a_port(engine) as rig, rig.ticking():
        document = (await rig.ask(get("/openapi.json"), "GET")).json()
        for path, name in ((EMBEDDING, "e"), ("/api/embed", "e"), (RERANK, "r")):
            document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]["model"] = name
        for shape in document["components"]["schemas"].values():
            if "model" in shape["properties"] and shape["title"].endswith("Asked") and engine == "emulated":
                shape["properties"]["model"] = {"const": "m"}
        file.write_text(json.dumps(document).replace("smol-chat", "m"))
        given = f"--phases {phases} --checks {CHECKS} -n 5 --seed 1 --no-color --suppress-health-check all --report har"
        url = "http://{}:{}".format(*rig.host_port)
        ran = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--config-file", config, "run", file, "--url", url, "--report-har-path", records),
            *given.split(),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await ran.communicate()
    assert ran.returncode == 0, said.decode()[-6000:]
    statuses = [entry["response"]["status"] for entry in json.loads(records.read_text())["log"]["entries"]]
    assert statuses and (phases != "examples" or set(statuses) == {200})
