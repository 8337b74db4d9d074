"""The anthropic package at limits and refusals: typed exceptions, headers and waits."""

import json
import sys
import time

import anthropic

base, model, keys = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
asked = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}


def client(key, retries=0):
    return anthropic.Anthropic(base_url=base, api_key=key, max_retries=retries)


def refused(kind, key, retries=0):
    began = time.monotonic()
    try:
        while True:
            client(key, retries).messages.create(**asked)
    except kind as error:
        return error, time.monotonic() - began


error, _ = refused(anthropic.RateLimitError, keys["quick"])
headers = error.response.headers
assert error.body["error"]["type"] == "rate_limit_error", error.body
assert int(headers["retry-after"]) >= 1 and headers["anthropic-ratelimit-requests-limit"] == "20", headers
assert headers["anthropic-ratelimit-requests-remaining"] == "0", headers
assert headers["anthropic-ratelimit-requests-reset"].endswith("Z"), headers
patient, told_s = client(keys["quick"], retries=3), 0
while told_s < 2:
    told_s = int(refused(anthropic.RateLimitError, keys["quick"])[0].response.headers["retry-after"])
began = time.monotonic()
assert patient.messages.create(**asked).content
assert time.monotonic() - began > told_s - 1.5, "it did not wait as told"
error, took_s = refused(anthropic.RateLimitError, keys["daily"], retries=5)
assert took_s < 5, (error.body, took_s)
for kind, key in (
    (anthropic.AuthenticationError, "gp-wrongkey-" + 43 * "x"),
    (anthropic.PermissionDeniedError, keys["reads"]),
    (anthropic.NotFoundError, keys["other"]),
):
    assert refused(kind, key)[0].body["type"] == "error"
