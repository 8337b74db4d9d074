"""LlamaIndex's OpenAILike: completions, chats, streams."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

base, model = sys.argv[1:3]
llm = OpenAILike(model=model, api_base=f"{base}/v1", api_key="none", is_chat_model=True, max_tokens=5)
assert llm.chat([ChatMessage(role="user", content="Hi")]).message.content
assert "".join(part.delta for part in llm.stream_chat([ChatMessage(role="user", content="Hi")]))
text = OpenAILike(model=model, api_base=f"{base}/v1", api_key="none", is_chat_model=False, max_tokens=5)
assert text.complete("The sea").text
