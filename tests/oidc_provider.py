"""A small OpenID Connect provider on loopback: discovery, keys, tokens and logout, with faults on demand."""

import asyncio
import base64
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from glowplug.runtime.service import listen

CLIENT_ID, SECRET = "glowplug-console", "secret-of-the-console"


@cache
def _first_key() -> RSAKey:
    """A tenth of a second each."""
    return RSAKey.generate_key(2048, parameters={"kid": "first"})


@dataclass
class Provider:
    """Logs everybody in, with `claims`. `spoil` replaces claims of the ID token (None removes one), `alg` and `key` its
    signature."""

    url: str = ""
    claims: dict[str, Any] = field(default_factory=lambda: {"email": "ann@example.org", "groups": ["staff", "ops"]})
    spoil: dict[str, Any] = field(default_factory=dict)
    alg: str = "RS256"
    key: Any = field(default_factory=_first_key)
    published: list[Any] = field(default_factory=list)  # keys; empty: `key`
    document: dict[str, Any] = field(default_factory=dict)  # replaces discovery fields
    has_logout: bool = True
    error: str = ""  # the login's error
    codes: dict[str, dict[str, str]] = field(default_factory=dict)  # authorization request by code
    asked: list[str] = field(default_factory=list)  # paths

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/.well-known/openid-configuration")(self.discovery)
        app.get("/keys")(self.keys)
        app.get("/authorize")(self.authorize)
        app.post("/token")(self.token)
        app.get("/logout")(self.logout)
        return app

    async def discovery(self) -> dict[str, Any]:
        self.asked.append("discovery")
        found = {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
        }
        if self.has_logout:
            found["end_session_endpoint"] = f"{self.url}/logout"
        return found | self.document

    async def keys(self) -> dict[str, Any]:
        self.asked.append("keys")
        return KeySet(self.published or [self.key]).as_dict(private=False)

    async def authorize(self, request: Request) -> Response:
        query = dict(request.query_params)
        assert (query["response_type"], query["client_id"], query["code_challenge_method"]) == (
            "code",
            CLIENT_ID,
            "S256",
        )
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        answer = {"error": self.error} if self.error else {"code": code}
        return RedirectResponse(f"{query['redirect_uri']}?{urlencode(answer | {'state': query['state']})}", 303)

    async def token(self, request: Request) -> Response:
        given = dict(parse_qsl((await request.body()).decode()))
        basic = base64.b64encode(f"{CLIENT_ID}:{SECRET}".encode()).decode()
        asked = self.codes.pop(given["code"], None)
        if request.headers.get("authorization") != f"Basic {basic}":
            return JSONResponse({"error": "invalid_client"}, status_code=401)
        digest = hashlib.sha256(given["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if asked is None or (asked["code_challenge"], asked["redirect_uri"]) != (challenge, given["redirect_uri"]):
            return JSONResponse({"error": "invalid_grant"}, status_code=400)
        return JSONResponse({"access_token": "at", "token_type": "Bearer", "id_token": self.id_token(asked["nonce"])})

    def id_token(self, nonce: str) -> str:
        now_s = int(time.time())
        claims = {"iss": self.url, "sub": "42", "aud": CLIENT_ID, "iat": now_s, "exp": now_s + 300, "nonce": nonce}
        claims = {name: value for name, value in (claims | self.claims | self.spoil).items() if value is not None}
        if self.alg == "none":
            parts = (b'{"alg":"none"}', json.dumps(claims).encode())
            return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."
        return jwt.encode({"alg": self.alg, "kid": self.key.kid}, claims, self.key, algorithms=[self.alg])

    async def logout(self, request: Request) -> Response:
        self.asked.append("logout")
        return RedirectResponse(request.query_params["post_logout_redirect_uri"], 303)

    def settings(self, **more: Any) -> dict[str, Any]:
        own = {"oidc_issuer": self.url, "oidc_client_id": CLIENT_ID, "oidc_client_secret": SECRET}
        return own | {"oidc_viewers": "staff", "oidc_operators": "ops,oncall", "oidc_admins": "root"} | more


@contextlib.asynccontextmanager
async def providing() -> AsyncIterator[Provider]:
    """It accepts forms, unlike this fleet's services."""
    provider, sock = Provider(), listen("127.0.0.1", 0)
    provider.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(provider.app(), log_config=None, access_log=False, lifespan="off"))
    task = asyncio.create_task(server._serve([sock]))
    try:
        yield provider
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
