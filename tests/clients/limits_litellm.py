"""The litellm package at limits and refusals, as a client of OpenAI's and of Anthropic's API."""

import json
import sys
import time

import litellm

base, model, keys = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])


def headers(error):
    """For Anthropic's API, LiteLLM keeps them on the exception only."""
    return error.litellm_response_headers or error.response.headers


for name, address in ((f"openai/{model}", f"{base}/v1"), (f"anthropic/{model}", base)):
    given = {"model": name, "api_base": address, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}

    def refused(kind, key, given=given):
        try:
            while True:
                litellm.completion(**given, api_key=key, max_retries=0)
        except kind as found:
            return found

    error = refused(litellm.RateLimitError, keys["quick"])
    assert error.status_code == 429 and int(headers(error)["retry-after"]) >= 1, error
    deployed = {"model_name": model, "litellm_params": given | {"api_key": keys["quick"], "max_retries": 0}}
    patient, told_s = litellm.Router([deployed], num_retries=3), 0
    while told_s < 2:
        told_s = int(headers(refused(litellm.RateLimitError, keys["quick"]))["retry-after"])
    began = time.monotonic()
    assert patient.completion(model, given["messages"]).choices
    assert time.monotonic() - began > told_s - 1.5, "it did not wait as told"
    assert refused(litellm.RateLimitError, keys["daily"]).status_code == 429
    assert refused(litellm.AuthenticationError, "gp-wrongkey-" + 43 * "x").status_code == 401
    # LiteLLM maps a 403 of OpenAI's API to a plain APIError.
    assert refused((litellm.PermissionDeniedError, litellm.APIError), keys["reads"]).status_code == 403
    assert refused(litellm.NotFoundError, keys["other"]).status_code == 404
