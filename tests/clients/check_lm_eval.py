"""lm-eval's local-completions: the texts of four prompts, stopped at a line's end."""

import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

base, model = sys.argv[1:3]
api = LocalCompletionsAPI(
    model=model, base_url=f"{base}/v1/completions", tokenizer_backend=None, tokenized_requests=False, max_length=512
)
asked = [
    Instance(request_type="generate_until", doc={}, arguments=(text, {"until": ["\n"], "max_gen_toks": 5}), idx=number)
    for number, text in enumerate(["The sea", "A dog", "One, two,", "Paris is"])
]
assert len(api.generate_until(asked)) == 4
