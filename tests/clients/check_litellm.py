"""The litellm package over each of the three APIs."""

import sys

import litellm

base, model = sys.argv[1:3]
messages = [{"role": "user", "content": "Hi"}]
for name, address in ((f"openai/{model}", f"{base}/v1"), (f"anthropic/{model}", base), (f"ollama_chat/{model}", base)):
    given = {"model": name, "messages": messages, "api_base": address, "api_key": "none", "max_tokens": 5}
    assert litellm.completion(**given).choices[0].message.content, name
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(**given, stream=True)]
    assert "".join(parts), name
