"""A real browser for tests: Debian's chromium, headless, spoken to over the DevTools pipe (no socket, no driver)."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "no chromium on this machine (apt-get install chromium)"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
PATIENCE_S = 20.0
MESSAGE_LIMIT = 64 << 20


class ScriptFailed(AssertionError):
    """A script in the page threw."""


class Page:
    """One tab. `complaints` collects what the console, the security policy or an uncaught error said."""

    def __init__(self, reader: asyncio.StreamReader, write_fd: int) -> None:
        self.complaints: list[str] = []
        self._reader, self._write_fd = reader, write_fd
        self._session = ""
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._task = asyncio.create_task(self._listen())

    async def attach(self) -> None:
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.size(1440, 900)

    async def call(self, method: str, **params: Any) -> Any:
        """One DevTools command."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(PATIENCE_S):
            return await self._waiting[number]

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def scheme(self, name: str) -> None:
        """Prefer "dark" or "light"."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page. Raises ScriptFailed."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise ScriptFailed(answer["exceptionDetails"].get("exception", {}).get("description", script))
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true in the page, and return it."""
        last: Any = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ScriptFailed):
                        last = await self.run(script)
                        if last:
                            return last
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise AssertionError(f"never true: {script}\nthe page says:\n{text[:3000]}\n{self.complaints}") from None

    async def key(self, name: str) -> None:
        """Press and release one key."""
        codes = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "End": 35, "Home": 36, "Enter": 13}
        keys = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, ord(name[0].upper()))}
        text = {"text": name} if len(name) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **keys, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """A PNG, in base64."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return str(answer["data"]).encode()

    async def _listen(self) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if "id" in message:
                    future = self._waiting.pop(message["id"])
                    if "error" in message:
                        future.set_exception(RuntimeError(message["error"]["message"]))
                    else:
                        future.set_result(message.get("result", {}))
                else:
                    self._note(message["method"], message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))

    def stop(self) -> None:
        self._task.cancel()


def _spawn(argv: list[str], log_path: Path, pipes: list[int]) -> subprocess.Popen[bytes]:
    """The browser with its DevTools pipes where it expects them: it reads commands from 3 and answers on 4."""

    def place_pipes() -> None:
        os.dup2(pipes[0], 3)
        os.dup2(pipes[1], 4)

    with log_path.open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, pass_fds=(3, 4), preexec_fn=place_pipes)


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A fresh browser with a fresh profile and one open tab."""
    assert BINARY, MISSING
    commands, answers = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (commands[0], answers[1])]
    for fd in (commands[0], answers[1]):
        os.close(fd)

    with tempfile.TemporaryDirectory(prefix="gp-chromium-", ignore_cleanup_errors=True) as profile:
        process = _spawn([BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank"], Path(profile) / "log", theirs)
        for fd in theirs:
            os.close(fd)
        reader = asyncio.StreamReader(limit=MESSAGE_LIMIT)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(answers[0], "rb", 0)
        )
        page = Page(reader, commands[1])
        try:
            await page.attach()
            yield page
        finally:
            page.stop()
            pipe.close()
            os.close(commands[1])
            process.kill()
            await asyncio.to_thread(process.wait)
