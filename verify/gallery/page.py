"""Writes docs/gallery.md: `make gallery`, or `python -m verify.gallery` from the root of the project."""

import inspect
import sys
import time
from importlib import import_module
from pathlib import Path

from verify.explorer import Explorer, Report
from verify.gallery.broken import exhibits
from verify.gallery.exhibit import Exhibit

PAGE = Path(__file__).parents[2] / "docs" / "gallery.md"
MOST_SECONDS = 10.0

INTRODUCTION = """\
# The gallery of broken locks

<!-- Written by `make gallery`; change the exhibits in verify/gallery/broken instead. -->

Each lock on this page has been used somewhere, and each looks right at first sight. The explorer that searches
lockfast's own core for errors (see [how it is shown](verification.md)) has searched these as well, and found in
every one the shortest way to break it. `me` is a client; `me.command` sends one command to the server; `me.enters()`
tells the checker that the client now takes the lock for its own (`until` a moment on its clock), `me.leaves()` that it
no longer does; `me.work()` lasts as long as the checker likes. The ttl is 3 s.

The rules that break:

| | rule |
|---|---|
| ME | at most one client at a time takes the lock for its own |
| FT | each grant has a greater fence than all before it |
| OW | no request changes another's lease |
| NL | "not acquired" is never said to the one whom the store has as the holder |
| LW | nobody sleeps on while the lock is free |
| CL, CF | nothing is left behind |
| ST | the lock never stays taken for ever |
"""


def find(shown: Exhibit) -> Report:
    """Search the exhibit's model for the shortest way to break it."""
    return Explorer(shown.model).run(most_seconds=MOST_SECONDS)


def section(name: str, shown: Exhibit, report: Report) -> str:
    if report.trace is None:
        raise RuntimeError(f"{name} was not caught: {report.verdict}")
    module = import_module(f"verify.gallery.broken.{name}")
    code = "\n\n\n".join(inspect.getsource(part).rstrip() for part in shown.code)
    parts = [
        f"## {shown.title}",
        shown.wrong,
        f"**The rule that cures it.** {shown.cure}",
        _block("python3", code),
    ]
    parts += [_block("lua", text.strip()) for text in getattr(module, "SCRIPTS", {}).values()]
    parts += [
        f"The shortest way to break {report.violation.rule if report.violation else ''}:",
        _block("mermaid", report.trace.mermaid()),
        '??? note "The same as text"\n\n' + _indented(_block("text", str(report.trace))),
    ]
    return "\n\n".join(parts)


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


def page() -> str:
    """The whole page; the same on every run."""
    sections = [section(name, shown, find(shown)) for name, shown in exhibits().items()]
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def main() -> None:
    started = time.monotonic()
    PAGE.write_text(page(), "utf-8")
    print(f"{len(exhibits())} broken locks caught in {time.monotonic() - started:.1f} s: {PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
