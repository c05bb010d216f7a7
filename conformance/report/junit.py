"""A report as JUnit XML, for the test pages of CI: one test for each property under the faults of each family."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from .document import Cell, Document

#: Characters that XML 1.0 cannot hold, escaped or not.
_ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(document: Document) -> str:
    """The XML text. Test ids are those of the pytest plugin: class ``deltaproof.FAMILY``, name PROPERTY."""
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name=f"deltaproof {document.target}", time=f"{document.wall_s:g}")
    if document.diagnoses:
        properties = ElementTree.SubElement(suite, "properties")
        for each in document.diagnoses:
            value = _clean(f"{each.seen}: {each.meaning}")
            ElementTree.SubElement(properties, "property", name=each.name, value=value)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for cell in document.cells:
        counts["tests"] += 1
        test = ElementTree.SubElement(suite, "testcase", classname=f"deltaproof.{cell.family}", name=cell.property)
        test.set("time", f"{_seconds(document, cell):.3f}")
        if cell.verdict == "held":
            continue
        kind, count = {"broken": ("failure", "failures"), "kit error": ("error", "errors")}.get(
            cell.verdict, ("skipped", "skipped")
        )
        counts[count] += 1
        child = ElementTree.SubElement(test, kind, message=_clean(f"{cell.verdict}: {cell.reason}"))
        child.text = _clean(_details(document, cell))
    for name, number in counts.items():
        suite.set(name, str(number))
    suite.set("timestamp", document.began.removesuffix("Z"))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _seconds(document: Document, cell: Cell) -> float:
    """A family's runs are shared by its properties: each test carries its share of their time."""
    runs = sum(run.wall_s for run in document.runs if cell.family in run.families)
    return runs / max(1, len(document.properties))


def _details(document: Document, cell: Cell) -> str:
    if cell.verdict != "broken":
        return cell.reason
    lines: list[str] = []
    for failure in document.failures:
        names = {failure.run.name, failure.shrunk_from, *failure.also}
        mine = any(run.name in names and cell.family in run.families for run in document.runs)
        finding = failure.run.finding(cell.property) if failure.property == cell.property and mine else None
        if finding is not None:
            lines += [*failure.in_words, *(line for v in finding.violations[:1] for line in v.text)]
            lines += [f"repeat with: {failure.replay}"] if failure.replay else []
    return "\n".join(lines) or cell.reason


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
