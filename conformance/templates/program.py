"""An uploader that is a program of its own, in plain Python, to be written again in your language: docs/protocol.md.

It reads one JSON message a line from stdin and answers on stdout; everything else goes to stderr. Run

    pytest
    deltaproof conform "exec:python3 uploader.py" --report report
"""

from __future__ import annotations

import json
import math
import sys
import time
import urllib.error
import urllib.request
from typing import Any

settings: dict[str, Any] = {}  # what `start` said
last_ts = 0


def hello(call: dict[str, Any]) -> dict[str, Any]:
    """Which version of the protocol, how deltas shall come (json or arrow), and what this uploader can do."""
    return {"protocol": 1, "name": "my-uploader", "deltas": "json", "capabilities": ["feature-store"]}


def start(call: dict[str, Any]) -> None:
    """Training is about to begin."""
    if call["version"] in ("", "default"):
        raise ValueError(f"rank {call['rank']}: serving reads version {call['version']!r}")
    settings.update(call)


def submit(call: dict[str, Any]) -> None:
    """Rows to send: (embedding_name, key as text, numbers). May answer before they are sent; this one sends at once."""
    step, rows = call["step"], call["delta"]
    for name, key, values in rows:
        if key == "-1" or not all(isinstance(value, float | int) and math.isfinite(value) for value in values):
            raise NotSent(f"step {step}: table {name}, key {key}: no such row may be published", step)
    for first in range(0, len(rows), settings["batch_size"]):
        batch = rows[first : first + settings["batch_size"]]
        for attempt in range(1, settings["retry_attempts_max"] + 1):
            error, retriable, wait_s = post(batch)
            if not error or not retriable:
                break
            backoff_ms = min(settings["retry_delay_ms_max"], settings["retry_delay_ms_min"] * 2 ** (attempt - 1))
            time.sleep(max(wait_s, backoff_ms / 1000))
        if error:
            raise NotSent(f"step {step}: {len(batch)} rows not acknowledged: {error}", step)


def check_error(call: dict[str, Any]) -> None:
    """Asked after each step: raise here what went wrong in the background since."""


def close(call: dict[str, Any]) -> None:
    """The last call: answer when everything is acknowledged. stdin ends behind it, and so shall the program."""


def post(rows: list[Any]) -> tuple[str, bool, float]:
    """One request: what went wrong ("": nothing), whether to try again, and the seconds that the store asked for."""
    global last_ts
    last_ts = max(last_ts + 1, int(time.time() * 1000))  # goes on when the wall clock goes back
    content = [{"embedding_name": name, "key_id": int(key), "embedding": values} for name, key, values in rows]
    body = {"content": content, "write_mode": "MERGE", "version": settings["version"], "ts": last_ts}
    url, headers = settings["store"]["url"] + "/write", settings["store"]["headers"]
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30
        ) as reply:
            return ("", True, 0.0) if reply.status == 200 else (f"{reply.status}: {reply.read(200)!r}", True, 0.0)
    except urllib.error.HTTPError as error:
        retriable = error.code >= 500 or error.code in (408, 429)
        return f"{error.code}: {error.read(200)!r}", retriable, float(error.headers.get("Retry-After") or 0)
    except OSError as error:
        return type(error).__name__, True, 0.0


class NotSent(RuntimeError):
    """Rows are not in the store; the steps they are of are shown in reports."""

    def __init__(self, what: str, step: int) -> None:
        super().__init__(what)
        self.unacknowledged = [step]


CALLS = {"hello": hello, "start": start, "submit": submit, "check_error": check_error, "close": close}

if __name__ == "__main__":
    for line in sys.stdin:
        call = json.loads(line)
        answer: dict[str, Any] = {"reply": call["id"]}
        try:
            answer["ok"] = CALLS[call["call"]](call)
        except Exception as error:
            answer["error"] = {"message": str(error), "unacknowledged": getattr(error, "unacknowledged", [])}
        print(json.dumps(answer), flush=True)
