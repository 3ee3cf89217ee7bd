"""What is shown while an act is on: a line for each worker, what the file says, and what has happened."""

from __future__ import annotations

import time

from lockfast.cli.demo.scene import AT_WORK, FINISHED, HOLDING, KILLED, WAITING, Scene
from lockfast.cli.terminal import Line, Terminal

STATE_STYLES = {AT_WORK: "cyan", WAITING: "dim", HOLDING: "green", FINISHED: "", KILLED: "red"}
WIDEST_BAR = 48
AROUND_BAR = 34
"""Columns of a worker's line that are not its bar."""


def drawing(terminal: Terminal, scene: Scene, found: int) -> list[Line]:
    """The scene as lines. When it is over, only the workers remain: the rest is said in full sentences."""
    workers = [_worker(terminal, scene, index) for index in range(scene.size)]
    return workers if scene.over else [*workers, _file(scene, found), _news(scene)]


def _worker(terminal: Terminal, scene: Scene, index: int) -> Line:
    state, did = scene.states[index], scene.did(index)
    width = max(4, min(WIDEST_BAR, terminal.width - AROUND_BAR))
    full = round(width * did / scene.times)
    ink, paper = ("█", "░") if terminal.symbols else ("#", ".")
    style = STATE_STYLES[state]
    return [
        (f"  worker {index + 1}  ", ""),
        (f"{state:<9}", style),
        (ink * full, style if state in (HOLDING, KILLED) else "cyan"),
        (paper * (width - full), "dim"),
        (f"  {did:>3}/{scene.times}", ""),
    ]


def _file(scene: Scene, found: int) -> Line:
    made = max(len(scene.turns), found)  # the file may be a turn ahead of the reports
    missing = made - found
    line = [
        (f"  {made} updates made, {found} in the file, ", ""),
        (f"{missing} missing", "red" if missing else "green"),
    ]
    if scene.locked:
        line.append((f", fence {scene.fence}", "dim"))
    return line


def _news(scene: Scene) -> Line:
    if scene.victim is None:
        return []
    victim = f"  worker {scene.victim + 1}"
    if scene.killed_at is None:
        return [(f"{victim} holds the lock and is about to be killed.", "yellow")]
    if scene.followed_at is None or scene.follower is None:
        return [(f"{victim} was killed {time.monotonic() - scene.killed_at:.1f} s ago; the others wait.", "yellow")]
    after = scene.followed_at - scene.killed_at
    return [(f"{victim} was killed; worker {scene.follower + 1} held the lock {after:.2f} s later.", "green")]
