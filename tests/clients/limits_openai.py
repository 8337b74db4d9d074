"""The openai package at limits and refusals: typed exceptions, headers and waits."""

import json
import sys
import time

import openai

base, model, keys = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
asked = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def client(key, retries=0):
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=retries)


def refused(kind, key, retries=0, **over):
    began = time.monotonic()
    try:
        while True:
            client(key, retries).chat.completions.create(**asked | over)
    except kind as error:
        return error, time.monotonic() - began


error, _ = refused(openai.RateLimitError, keys["quick"])
headers = error.response.headers
assert error.code == "rate_limit_exceeded" and error.type == "requests", error.body
assert int(headers["retry-after"]) >= 1 and headers["x-ratelimit-limit-requests"] == "20", headers
assert headers["x-ratelimit-remaining-requests"] == "0" and headers["x-ratelimit-reset-requests"], headers
patient, told_s = client(keys["quick"], retries=3), 0
while told_s < 2:
    told_s = int(refused(openai.RateLimitError, keys["quick"])[0].response.headers["retry-after"])
began = time.monotonic()
assert patient.chat.completions.create(**asked).choices
assert time.monotonic() - began > told_s - 1.5, "it did not wait as told"
client(keys["daily"]).chat.completions.create(**asked)
error, took_s = refused(openai.RateLimitError, keys["daily"], retries=5)
assert error.code == "insufficient_quota" and took_s < 5, (error.body, took_s)
assert refused(openai.AuthenticationError, "gp-wrongkey-" + 43 * "x")[0].code == "invalid_api_key"
assert refused(openai.PermissionDeniedError, keys["reads"])[0].status_code == 403
assert refused(openai.NotFoundError, keys["other"])[0].code == "model_not_found"
