"""Logins by OpenID Connect: the authorization code flow, with PKCE, state and nonce.

Specifications: OpenID Connect Core 1.0 (sections 3.1.2 and 3.1.3.7: checks of an ID token), Discovery 1.0, RFC 7636
(PKCE), RP-Initiated Logout 1.0. The issuer's document and keys are kept for an hour; a token of an unknown key has
them read again, at most every KEYS_EVERY_S. State, nonce and verifier are in a cookie, signed with a key of this
process."""

import base64
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec

from glowplug.domain.access import Role
from glowplug.domain.errors import GlowplugError
from glowplug.services.console.settings import ConsoleSettings

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

log = logging.getLogger(__name__)
ALGORITHMS: Final = (*("RS256", "RS384", "RS512"), *("PS256", "PS384", "PS512"), *("ES256", "ES384", "ES512"), "EdDSA")
KEPT_S: Final = 3600.0
KEYS_EVERY_S: Final = 10.0
ATTEMPT_S: Final = 600.0
LEEWAY_S: Final = 60
TIMEOUT_S: Final = 10.0
MAX_NAME_CHARS: Final = 100
_ROLES: Final = (Role.ADMIN, Role.OPERATOR, Role.VIEWER)


class LoginFailed(GlowplugError):
    """`code`: the failed step."""

    status, type = 403, "permission_error"

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LoginAttempt(msgspec.Struct, frozen=True):
    """An open login. `view`: to return to."""

    state: str
    nonce: str
    verifier: str
    began_at: float
    view: str = ""


class Person(msgspec.Struct, frozen=True):
    """`name`: the e-mail address or else the subject; `role` is never NONE."""

    name: str
    role: Role
    id_token: str


class _Issuer(msgspec.Struct):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    end_session_endpoint: str = ""
    token_endpoint_auth_methods_supported: list[str] = []


class _Token(msgspec.Struct):
    id_token: str = ""
    error: str = ""


class Oidc:
    """`clock`: epoch seconds."""

    def __init__(self, settings: ConsoleSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings, self._clock = settings, clock
        self.host = urlsplit(settings.oidc_issuer).netloc
        self._secret = secrets.token_bytes(32)
        given = (settings.oidc_admins, settings.oidc_operators, settings.oidc_viewers)
        self._values = [frozenset(v.strip() for v in text.split(",") if v.strip()) for text in given]
        self._issuer: tuple[float, _Issuer] | None = None
        self._keys: tuple[float, KeySet] | None = None

    # -- one login -----------------------------------------------------------------------------------------------

    async def begin(self, redirect_uri: str, view: str) -> tuple[str, str]:
        """Return the browser's next address, and its cookie. Raises LoginFailed."""
        from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
        from authlib.oauth2.rfc7636 import create_s256_code_challenge

        issuer = await self._read_issuer()
        token = secrets.token_urlsafe
        attempt = LoginAttempt(token(24), token(24), token(48), self._clock(), view)
        url = prepare_grant_uri(
            issuer.authorization_endpoint,
            self._settings.oidc_client_id,
            "code",
            redirect_uri=redirect_uri,
            scope=self._settings.oidc_scope,
            state=attempt.state,
            nonce=attempt.nonce,
            code_challenge=create_s256_code_challenge(attempt.verifier),
            code_challenge_method="S256",
        )
        return url, self._signed(attempt)

    def attempt(self, cookie: str, state: str) -> LoginAttempt:
        """Raises LoginFailed if this browser began no login, or another one."""
        body, _, mac = cookie.partition(".")
        if not body or not hmac.compare_digest(mac.encode(), self._mac(body)):
            raise LoginFailed("stale", "no login was started in this browser, or the console has restarted since")
        attempt = msgspec.json.decode(base64.urlsafe_b64decode(body), type=LoginAttempt)
        if not hmac.compare_digest(state.encode(), attempt.state.encode()):
            raise LoginFailed("stale", "the answer belongs to another login")
        if self._clock() - attempt.began_at > ATTEMPT_S:
            raise LoginFailed("stale", f"the login took longer than {ATTEMPT_S:g} s")
        return attempt

    async def finish(self, attempt: LoginAttempt, code: str, redirect_uri: str) -> Person:
        """Redeem the issuer's code. Raises LoginFailed."""
        issuer = await self._read_issuer()
        id_token = await self._id_token(issuer, attempt, code, redirect_uri)
        claims = await self._claims(id_token, issuer, attempt.nonce)
        name = self._name(claims)
        role = self.role_of(claims)
        if role is Role.NONE:
            raise LoginFailed("no_role", f"no value of {self._settings.oidc_role_claim!r} gives {name} a role")
        return Person(name, role, id_token)

    async def logout_url(self, id_token: str, return_to: str) -> str:
        """ "" if the issuer offers no logout, or no login is open."""
        if not id_token:
            return ""
        try:
            end = (await self._read_issuer()).end_session_endpoint
        except LoginFailed:
            return ""
        if not end:
            return ""
        given = {"id_token_hint": id_token, "post_logout_redirect_uri": return_to}
        query = urlencode(given | {"client_id": self._settings.oidc_client_id})
        return f"{end}{'&' if '?' in end else '?'}{query}"

    # -- checks -----------------------------------------------------------------------------------------

    def role_of(self, claims: Mapping[str, Any]) -> Role:
        found: Any = claims.get(self._settings.oidc_role_claim)  # a name may contain dots: https://a.example/r
        if found is None:
            found = claims
            for part in self._settings.oidc_role_claim.split("."):
                found = found.get(part) if isinstance(found, Mapping) else None
        given = [found] if isinstance(found, str) else found if isinstance(found, list) else []
        values = {value for value in given if isinstance(value, str)} | {"*"}
        return next((role for role, names in zip(_ROLES, self._values, strict=True) if names & values), Role.NONE)

    async def _claims(self, id_token: str, issuer: _Issuer, nonce: str) -> dict[str, Any]:
        """Validate an ID token: issuer, client, login, time."""
        from joserfc import jwt
        from joserfc.errors import JoseError

        client_id = self._settings.oidc_client_id
        rules = jwt.JWTClaimsRegistry(
            now=int(self._clock()),
            leeway=LEEWAY_S,
            iss={"essential": True, "value": issuer.issuer},
            sub={"essential": True},
            aud={"essential": True, "value": client_id},
            exp={"essential": True},
            iat={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            try:
                token = jwt.decode(id_token, await self._read_keys(issuer), algorithms=list(ALGORITHMS))
            except JoseError:
                token = jwt.decode(id_token, await self._read_keys(issuer, again=True), algorithms=list(ALGORITHMS))
            rules.validate(token.claims)
        except (JoseError, ValueError, TypeError) as error:
            raise LoginFailed("failed", f"the ID token is not valid: {type(error).__name__}: {error}") from error
        claims: dict[str, Any] = token.claims
        others = [one for one in claims["aud"] if one != client_id] if isinstance(claims["aud"], list) else []
        if claims.get("azp", client_id) != client_id or (others and "azp" not in claims):
            raise LoginFailed("failed", "the ID token was issued for another client")
        return claims

    def _name(self, claims: Mapping[str, Any]) -> str:
        email, subject = claims.get("email"), str(claims["sub"])
        is_own = isinstance(email, str) and email and claims.get("email_verified", True) is True
        return str(email if is_own else subject)[:MAX_NAME_CHARS]

    # -- the issuer ----------------------------------------------------------------------------------------------

    async def _id_token(self, issuer: _Issuer, attempt: LoginAttempt, code: str, redirect_uri: str) -> str:
        """Raises LoginFailed."""
        from authlib.oauth2.auth import ClientAuth

        settings, methods = self._settings, issuer.token_endpoint_auth_methods_supported
        by = "client_secret_basic" if not methods or "client_secret_basic" in methods else "client_secret_post"
        given = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri}
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        auth = ClientAuth(
            settings.oidc_client_id, settings.oidc_client_secret, by if settings.oidc_client_secret else "none"
        )
        body = urlencode(given | {"code_verifier": attempt.verifier})
        url, headers, body = auth.prepare("POST", issuer.token_endpoint, headers, body)
        answer = await self._ask("POST", url, headers, body)
        try:
            found = msgspec.json.decode(answer.content, type=_Token)
        except msgspec.MsgspecError as error:
            raise LoginFailed("failed", f"{url} answers {answer.status_code}, and no token") from error
        if answer.status_code != 200 or not found.id_token:
            raise LoginFailed("failed", f"{url} answers {answer.status_code} {found.error!r}, and no ID token")
        return found.id_token

    async def _read_issuer(self) -> _Issuer:
        if self._issuer is not None and self._clock() - self._issuer[0] < KEPT_S:
            return self._issuer[1]
        wanted = self._settings.oidc_issuer
        url = f"{wanted.rstrip('/')}/.well-known/openid-configuration"
        try:
            found = msgspec.json.decode(await self._get(url), type=_Issuer)
        except msgspec.MsgspecError as error:
            raise LoginFailed("unreachable", f"{url} is not an OpenID configuration: {error}") from error
        if found.issuer != wanted:
            raise LoginFailed("unreachable", f"{url} is of the issuer {found.issuer[:200]!r}, not {wanted!r}")
        for endpoint in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
            if not endpoint.startswith("https://" if wanted.startswith("https://") else ("http://", "https://")):
                raise LoginFailed("unreachable", f"{url} names an endpoint without https: {endpoint[:200]!r}")
        self._issuer = self._clock(), found
        return found

    async def _read_keys(self, issuer: _Issuer, *, again: bool = False) -> "KeySet":
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        if self._keys is not None and self._clock() - self._keys[0] < (KEYS_EVERY_S if again else KEPT_S):
            return self._keys[1]
        try:
            keys = KeySet.import_key_set(msgspec.json.decode(await self._get(issuer.jwks_uri)))
        except (JoseError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise LoginFailed("unreachable", f"{issuer.jwks_uri} has no keys: {error}") from error
        self._keys = self._clock(), keys
        return keys

    async def _get(self, url: str) -> bytes:
        answer = await self._ask("GET", url, {"Accept": "application/json"})
        if answer.status_code != 200:
            raise LoginFailed("unreachable", f"{url} answers {answer.status_code}")
        return answer.content

    async def _ask(self, method: str, url: str, headers: dict[str, str], body: str = "") -> httpx.Response:
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
                return await client.request(method, url, headers=headers, content=body or None)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise LoginFailed("unreachable", f"{url} does not answer: {type(error).__name__}") from error

    # -- the cookie ----------------------------------------------------------------------------------------------

    def _signed(self, attempt: LoginAttempt) -> str:
        body = base64.urlsafe_b64encode(msgspec.json.encode(attempt)).decode()
        return f"{body}.{self._mac(body).decode()}"

    def _mac(self, body: str) -> bytes:
        return base64.urlsafe_b64encode(hmac.digest(self._secret, body.encode(), hashlib.sha256))
