"""guidellm's run on the chat path: four prompts of a file, two at a time, none with an error."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

base, model = sys.argv[1:3]
with tempfile.TemporaryDirectory() as folder:
    data, report = Path(folder) / "data.jsonl", Path(folder) / "report.json"
    data.write_text("".join(f'{{"prompt": "Say {number}."}}\n' for number in range(4)))
    command = [Path(sys.executable).with_name("guidellm"), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={base},model={model}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"]
    command += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    assert len(benchmark["requests"]["successful"]) == 4 and not benchmark["requests"]["errored"]
