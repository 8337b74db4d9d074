"""The two steps of an OpenID Connect login: to the issuer, and back with a code. After a failure the login page says
why; the log says more."""

import logging
import re
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse

from glowplug.services.console.login import ConsoleAccess, is_https, open_session, own_url
from glowplug.services.console.oidc import ATTEMPT_S, LoginFailed, Oidc
from glowplug.services.console.roles import Who

log = logging.getLogger(__name__)
START: Final = "/login/oidc"
BACK: Final = "/login/oidc/callback"
_VIEW: Final = re.compile(r"#/[\x21-\x7e]{0,500}")
_NOT_KEPT: Final = {"Cache-Control": "no-store"}


def routes(access: ConsoleAccess, cookie: str, oidc: Oidc) -> APIRouter:
    router = APIRouter(tags=["login"])
    under_way = f"{cookie}-login"

    @router.get(START, response_class=RedirectResponse, status_code=303)
    async def begin(request: Request, view: str = Query("", max_length=512)) -> RedirectResponse:
        """Go to the issuer; `view` is shown after the login."""
        try:
            url, attempt = await oidc.begin(own_url(request, BACK), view if _VIEW.fullmatch(view) else "")
        except LoginFailed as error:
            return failed(error)
        answer = RedirectResponse(url, 303, _NOT_KEPT)
        answer.set_cookie(
            under_way, attempt, int(ATTEMPT_S), path=START, httponly=True, samesite="lax", secure=is_https(request)
        )
        return answer

    @router.get(BACK, response_class=RedirectResponse, status_code=303)
    async def back(
        request: Request,
        code: str = Query("", max_length=4096),
        state: str = Query("", max_length=256),
        error: str = Query("", max_length=100),
    ) -> RedirectResponse:
        """Come back from the issuer with a code, and open a session."""
        try:
            attempt = oidc.attempt(request.cookies.get(under_way, ""), state)
            if error or not code:
                raise LoginFailed("refused", f"the issuer answered {error!r}")
            person = await oidc.finish(attempt, code, own_url(request, BACK))
        except LoginFailed as why:
            return failed(why)
        # From a page of the issuer the browser does not send the new cookie along: the login page goes on.
        answer = RedirectResponse(f"/login{attempt.view}", 303, _NOT_KEPT)
        open_session(answer, request, access, cookie, Who(name=person.name, role=person.role), person.id_token)
        answer.delete_cookie(under_way, path=START, httponly=True, samesite="lax")
        return answer

    def failed(error: LoginFailed) -> RedirectResponse:
        log.warning("a login by OpenID Connect failed: %s", error.message)
        answer = RedirectResponse(f"/login?failed={quote(error.code)}", 303, _NOT_KEPT)
        answer.delete_cookie(under_way, path=START, httponly=True, samesite="lax")
        return answer

    return router
