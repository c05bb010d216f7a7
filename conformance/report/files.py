"""Writes a report in every form that is a file."""

from __future__ import annotations

from pathlib import Path

from .document import Document, to_json
from .html import to_html
from .junit import to_junit

NAMES = {"html": "report.html", "json": "report.json", "junit": "junit.xml"}


def write(document: Document, folder: Path) -> dict[str, Path]:
    """Write ``report.html``, ``report.json`` and ``junit.xml`` into ``folder`` and return where each is. Raises
    OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"html": to_html(document), "json": to_json(document), "junit": to_junit(document)}
    paths = {form: folder / NAMES[form] for form in texts}
    for form, path in paths.items():
        path.write_text(texts[form], encoding="utf-8")
    return paths
