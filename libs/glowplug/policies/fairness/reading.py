"""The prompts that engines have not read yet, of one model: how much of them may be there at once.

An engine reads prompts in the order in which they came and answers nobody else meanwhile, or only between two pieces of
a prompt. A slot that is free is of no use to a short request behind three long prompts. So a router that shares a model
among tenants sends an instance at most `unread_tokens` of one tenant's prompts at once, or one longer prompt, and that
one only while fewer prompts of the model are unread than it has instances. Nothing is lost by that: what is held back
would only have waited inside the engine.

A prompt is read when the first token of its answer comes. An answer that is not streamed shows no first token: its
prompt counts as read after twice the time that reading takes, as measured of other prompts of the model, or at its end
where none was. Engines differ a hundredfold in that time, so none is assumed before it is measured.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

_NEWEST = 0.2  # weight of the newest prompt in the mean
_LEAST_TOKENS = 64  # of a prompt whose reading time is measured
_SLACK_S = 0.2


@dataclass(slots=True)
class _Prompt:
    tenant: str
    tokens: int
    sent_at: float
    until: float  # it counts as read from then on


class Reading:
    """The unread prompts of one model by ticket, in the order in which they were sent. Times are seconds."""

    def __init__(self, unread_tokens: int) -> None:
        self.most = unread_tokens or math.inf
        self.prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._tokens = 0
        self.num_long = 0  # of the unread prompts: more than one tenant may have unread
        self._due_at = math.inf  # no prompt counts as read before
        self._token_s = 0.0  # 0: not measured
        self._read_at = 0.0

    @property
    def token_s(self) -> float:
        """Seconds in which an engine reads a token of a prompt; 0: not measured."""
        return self._token_s

    def sent(self, ticket: int, tenant: str, tokens: int, now_s: float) -> None:
        """Add the prompt of a dispatched request. One of unknown length counts as read."""
        if not tokens:
            return
        unread = self._tokens = (self.tokens(now_s) if now_s >= self._due_at else self._tokens) + tokens
        if tokens > self.most:
            self.num_long += 1
        until = now_s + 2 * unread * self._token_s + _SLACK_S if self._token_s else math.inf
        if until < self._due_at:
            self._due_at = until
        self.prompts[ticket] = _Prompt(tenant, tokens, now_s, until)

    def read(self, ticket: int, now_s: float) -> None:
        """Note that a prompt was read."""
        prompt = self._drop(ticket)
        if prompt is not None and prompt.tokens >= _LEAST_TOKENS and now_s < prompt.until:
            token_s = (now_s - max(prompt.sent_at, self._read_at)) / prompt.tokens
            self._token_s += (_NEWEST if self._token_s else 1.0) * (token_s - self._token_s)
        self._read_at = now_s

    def left(self, ticket: int, now_s: float, *, is_over: bool) -> None:
        """Forget the prompt of a request that has left its instance. `is_over`: with a whole answer."""
        prompt = self._drop(ticket)
        if is_over and prompt is not None and prompt.tokens >= _LEAST_TOKENS and not self._token_s:
            self._token_s = (now_s - prompt.sent_at) / prompt.tokens  # at most

    def _drop(self, ticket: int) -> _Prompt | None:
        prompt = self.prompts.pop(ticket, None)
        if prompt is not None:
            self._tokens -= prompt.tokens
            if prompt.tokens > self.most:
                self.num_long -= 1
        return prompt

    def tokens(self, now_s: float) -> int:
        """The tokens of all unread prompts."""
        if now_s >= self._due_at:
            for ticket in [ticket for ticket, prompt in self.prompts.items() if prompt.until <= now_s]:
                self._drop(ticket)
            self._due_at = min((prompt.until for prompt in self.prompts.values()), default=math.inf)
        return self._tokens

    def is_long(self, tokens: int) -> bool:
        """Return whether a prompt alone is more than one tenant may have unread."""
        return tokens > self.most

    def is_full(self, tenant: str, tokens: int, num_instances: int, now_s: float) -> bool:
        """Return whether a prompt of a tenant has to wait until others of the same tenant were read."""
        most = self.most * num_instances
        if self._tokens + tokens <= most or not self.tokens(now_s):
            return False
        own = [prompt.tokens for prompt in self.prompts.values() if prompt.tenant == tenant]
        return len(own) >= num_instances and sum(own) + tokens > most

    def is_young(self, ticket: int, now_s: float) -> bool:
        """Return whether less than half of a prompt was read, if prompts are read one after the other, or it is not
        known."""
        began, ahead = math.inf, 0
        for other, prompt in self.prompts.items():
            began = min(began, prompt.sent_at)
            if other == ticket:
                break
            ahead += prompt.tokens
        half_s = (ahead + self.prompts[ticket].tokens / 2) * self._token_s
        return not half_s or now_s - max(began, self._read_at) < half_s

    def tickets(self, now_s: float) -> list[int]:
        """The requests whose prompts are unread, in the order in which they were sent."""
        self.tokens(now_s)
        return list(self.prompts)
