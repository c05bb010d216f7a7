"""A headless Chromium, spoken to over its DevTools protocol: enough to look at a page as a person would."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

#: Seconds for Chromium to start, and for one answer of it.
START_S, ANSWER_S = 60.0, 30.0


def find_chromium() -> str | None:
    """Where Chromium is; None when there is none."""
    return next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)


class Page:
    """One page. ``problems``: what the browser complained about; ``requests``: every URL that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
                continue
            method, data = told["method"], told["params"]
            if method == "Page.loadEventFired":
                self._loaded.set()
            elif method == "Network.requestWillBeSent":
                self.requests.append(data["request"]["url"])
            elif method == "Runtime.exceptionThrown" or (
                method == "Log.entryAdded" and data["entry"]["level"] in ("error", "warning")
            ):
                self.problems.append(json.dumps(data))
            elif method == "Runtime.consoleAPICalled" and data["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(data["args"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; raises AssertionError when the browser refuses it."""
        self._number += 1
        self._answers[self._number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, ANSWER_S)
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    async def open(self, path: Path, *, width: int, dark: bool, height: int = 900) -> None:
        """Load a file at this width in CSS pixels, as somebody sees it who likes it light or dark."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded.clear()
        await self.call("Page.navigate", url=path.resolve().as_uri())
        await asyncio.wait_for(self._loaded.wait(), ANSWER_S)

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression comes to."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def point_at(self, selector: str, index: int = 0) -> None:
        """Move the mouse to the middle of an element, which is scrolled to."""
        x, y = await self.value(
            f"(() => {{ const e = document.querySelectorAll({json.dumps(selector)})[{index}]; e.scrollIntoView("
            "{block: 'center', inline: 'center', behavior: 'instant'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def picture(self, path: Path) -> None:
        """A PNG of the whole page."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._socket.close()


@contextlib.asynccontextmanager
async def chromium(program: str) -> AsyncIterator[Page]:
    """A page in a Chromium of its own, which is gone afterwards, with all that it wrote."""
    with tempfile.TemporaryDirectory(prefix="deltaproof-browser-", ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-background-networking"]
        process = await asyncio.create_subprocess_exec(
            program, *options, "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        drained: asyncio.Task[bytes] | None = None
        try:
            async with asyncio.timeout(START_S):
                while "DevTools listening on " not in (line := (await process.stderr.readline()).decode()):
                    assert line, f"Chromium ended with {await process.wait()} before it listened"
            drained = asyncio.create_task(process.stderr.read())
            authority = line.split("ws://")[1].split("/")[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{authority}/json/list") as answer:
                    pages = [target for target in await answer.json() if target["type"] == "page"]
                socket = await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), 10)
                except TimeoutError:
                    process.kill()
                    await process.wait()
            if drained is not None:
                await drained
