"""A program of docs/protocol.md that takes its deltas as Arrow. Run by tests, as another process."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import pyarrow as pa


def main() -> None:
    start: dict[str, Any] = {}
    while line := sys.stdin.buffer.readline():
        call = json.loads(line)
        ok: Any = None
        if call["call"] == "hello":
            ok = {"protocol": 1, "name": "arrow", "deltas": "arrow", "capabilities": ["feature-store", "int8"]}
        elif call["call"] == "start":
            start = call
        elif call["call"] == "submit":
            rows = pa.ipc.open_stream(sys.stdin.buffer.read(call["bytes"])).read_all()
            assert rows.num_rows == call["rows"]
            write(start, rows)
            print(json.dumps({"event": "acknowledged", "step": call["step"]}), flush=True)
        print(json.dumps({"reply": call["id"], "ok": ok}), flush=True)


def write(start: dict[str, Any], rows: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    renamed = rows.rename_columns(["pk", "sk", "embedding"])
    with pa.ipc.new_stream(sink, renamed.schema) as writer:
        writer.write_table(renamed.combine_chunks())
    query = f"version={start['version']}&write_mode=MERGE&ts={int(time.time() * 1000)}"
    url = f"{start['store']['url']}/write_arrow?{query}"
    request = urllib.request.Request(url, sink.getvalue().to_pybytes(), start["store"]["headers"], method="POST")
    with urllib.request.urlopen(request, timeout=30) as reply:
        assert reply.status == 200


if __name__ == "__main__":
    main()
