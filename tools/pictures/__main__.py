"""`python -m tools.pictures`: run the command on a terminal and draw its screen."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lockfast
from tests.cli.harness import LOCKFAST, Target
from tests.support.terminal import ESCAPES, Pty
from tests.support.waiting import until
from tools.pictures.screen import Screen
from tools.pictures.svg import drawn

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT = 100, 16
PROMPT = "\x1b[2m$\x1b[0m "


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockfast-pictures-") as folder:
        target = Target(f"sqlite:///{folder}/locks.db", Path(folder))
        try:
            _stage(target)
            _picture(target, "ls", ["ls"], "lockfast ls lists locks with their holders and numbers of waiters")
            _picture(target, "show", ["show", "report:nightly"], "lockfast show shows one lock with its queue")
            _waiting(target)
            _top(target)
        finally:
            target.close()
    return 0


def _stage(target: Target) -> None:
    """Create some held locks and some waiters."""
    target.held("invoice:7311", "--label", "billing")
    target.held("report:nightly", "--label", "nightly report")
    target.held("deploy:web", "--label", "ada")
    target.held("cache:rebuild", "--label", "cache", "--ttl", "10")
    target.held("gpu", "--limit", "4", "--permits", "2", "--label", "train")
    target.held("gpu", "--limit", "4", "--label", "evaluate")
    for number, label in enumerate(["report on web2", "report on web3", "month's end"], 1):
        target.start("run", "report:nightly", "--label", label, "--", "true")
        target.await_waiting("report:nightly", number)
        time.sleep(0.4)  # so that the waiting times differ
    time.sleep(2.0)


def _screen(target: Target, words: list[str]) -> Pty:
    return Pty([*LOCKFAST, *words], target.environment(), (HEIGHT, WIDTH))


def _save(name: str, typed: str, text: str, title: str) -> None:
    screen = Screen(WIDTH)
    screen.feed(f"{PROMPT}\x1b[1m{typed}\x1b[0m\r\n" + text)
    path = FOLDER / f"command-{name}.svg"
    path.write_text(drawn(screen.rows(), title, WIDTH), encoding="utf-8")
    print(path)


def _picture(target: Target, name: str, words: list[str], title: str) -> None:
    shown = _screen(target, words)
    shown.end()
    _save(name, f"lockfast {' '.join(words)}", shown.text, title)
    shown.close()


def _waiting(target: Target) -> None:
    shown = _screen(target, ["run", "deploy:web", "--", "make", "deploy"])
    until(lambda: "position 1 of 1" in shown.plain, "the line", 20)
    time.sleep(2.2)
    text = shown.read()
    shown.type("\x03")
    shown.end()
    shown.close()
    _save(
        "run",
        "lockfast run deploy:web -- make deploy",
        text,
        "lockfast run shows the holder and its position in the queue",
    )


def _top(target: Target) -> None:
    stop = threading.Event()
    worker = threading.Thread(target=_busy, args=(target.url, stop), daemon=True)
    worker.start()
    shown = _screen(target, ["top", "--every", "0.5"])
    frames: Callable[[], list[str]] = lambda: shown.read().split("\x1b[H")  # noqa: E731
    until(lambda: len(frames()) > 8 and "import:customers" in ESCAPES.sub("", frames()[-2]), "a full frame", 20)
    text = "\x1b[?1049h\x1b[H" + frames()[-2]
    shown.type("q")
    shown.end()
    shown.close()
    stop.set()
    worker.join(10)
    screen = Screen(WIDTH)
    screen.feed(text)
    path = FOLDER / "command-top.svg"
    title = "lockfast top shows locks and their hand-offs"
    path.write_text(drawn(screen.rows(), title, WIDTH), encoding="utf-8")
    print(path)


def _busy(url: str, stop: threading.Event) -> None:
    """Acquire and release two locks in a loop."""
    with lockfast.connect(url, label="importer") as locks:
        while not stop.is_set():
            for name in ("import:orders", "import:customers"):
                with locks.lock(name):
                    stop.wait(0.05)


sys.exit(main())
