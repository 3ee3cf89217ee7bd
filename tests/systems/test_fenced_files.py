"""Read, change and write a file under the lock; late writes are refused."""

import fcntl
import os
import threading
from pathlib import Path

import pytest

import lockfast
from lockfast import StaleFence
from lockfast.fenced.file import FencedFile

pytestmark = pytest.mark.system("C4")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "9527.txt"


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.iterdir())


def test_read_change_write(path: Path) -> None:
    with lockfast.connect("memory://files") as locks:
        for line in ("one", "two"):
            with locks.lock("file:9527") as lease:
                page = FencedFile(path, lease)
                page.write_text(page.read_text(missing="") + line + "\n")
    assert path.read_text("utf-8") == "one\ntwo\n"
    assert names(path) == ["9527.txt", "9527.txt.fence"]
    assert FencedFile(path, lease).change(lambda data: data + b"three\n") == b"one\ntwo\nthree\n"


def test_smaller_fence_may_not_write(path: Path) -> None:
    FencedFile(path, 8).write_text("new")
    with pytest.raises(StaleFence, match=r"refused: it has fence 7, but fence 8 was here before") as caught:
        FencedFile(path, 7).write_text("late")
    assert (caught.value.fence, caught.value.newest) == (7, 8)
    assert path.read_text("utf-8") == "new"
    assert names(path) == ["9527.txt", "9527.txt.fence"], "no draft remains"


def test_smaller_fence_may_not_read(path: Path) -> None:
    FencedFile(path, 8).write_text("new")
    with pytest.raises(StaleFence):
        FencedFile(path, 7).read_text()


def test_read_blocks_older_writers(path: Path) -> None:
    """Otherwise an older holder could write between our read and our write, and its update would be lost."""
    path.write_text("old", "utf-8")
    assert FencedFile(path, 8).read_text() == "old"
    with pytest.raises(StaleFence):
        FencedFile(path, 7).write_text("late")
    assert path.read_text("utf-8") == "old"


def test_same_fence_may_write_again(path: Path) -> None:
    page = FencedFile(path, 8)
    for text in ("first", "second"):
        page.write_text(text)
    assert page.read_text() == "second"


def test_missing_file(path: Path) -> None:
    page = FencedFile(path, 8)
    with pytest.raises(FileNotFoundError):
        page.read_text()
    assert page.read_text(missing="nothing") == "nothing"
    assert page.read_bytes(missing=b"") == b""


def test_reader_sees_the_old_file_or_the_new_one(path: Path) -> None:
    """A reader that has the old file open continues to read it."""
    FencedFile(path, 8).write_text("old")
    with path.open(encoding="utf-8") as reader:
        FencedFile(path, 8).write_text("new and longer")
        assert reader.read() == "old"


def test_file_mode_is_kept(path: Path) -> None:
    path.write_text("old", "utf-8")
    path.chmod(0o640)
    FencedFile(path, 8).write_text("new")
    assert path.stat().st_mode & 0o777 == 0o640


def test_link_shares_the_fence_of_its_file(path: Path) -> None:
    link = path.with_name("link.txt")
    link.symlink_to(path)
    FencedFile(path, 8).write_text("new")
    with pytest.raises(StaleFence):
        FencedFile(link, 7).write_text("late")
    FencedFile(link, 9).write_text("newer")
    assert link.is_symlink()
    assert path.read_text("utf-8") == "newer"


def test_damaged_fence_file_is_an_error(path: Path) -> None:
    path.write_text("old", "utf-8")
    path.with_name("9527.txt.fence").write_text("surprise", "utf-8")
    with pytest.raises(lockfast.StoreProtocolError, match="should contain a fence"):
        FencedFile(path, 8).write_text("new")
    assert path.read_text("utf-8") == "old"


def test_fence_file_locked_by_a_stopped_process_blocks_writes(path: Path) -> None:
    FencedFile(path, 8).write_text("old")
    number = os.open(path.with_name("9527.txt.fence"), os.O_RDWR)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        with pytest.raises(lockfast.StoreUnavailable, match="may be stopped"):
            FencedFile(path, 9, patience=0.05).write_text("new")
    finally:
        os.close(number)
    assert path.read_text("utf-8") == "old"
    FencedFile(path, 9, patience=0.05).write_text("new")


def test_greatest_fence_of_many_writers_wins(path: Path) -> None:
    order = [(number * 7) % 40 + 1 for number in range(40)]  # a permutation of 1 to 40
    refused: list[tuple[int, int]] = []

    def write(fence: int) -> None:
        try:
            FencedFile(path, fence).write_text(f"by {fence}")
        except StaleFence as error:
            refused.append((fence, error.newest or 0))

    threads = [threading.Thread(target=write, args=(fence,)) for fence in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert path.read_text("utf-8") == "by 40"
    assert all(newest > fence for fence, newest in refused)
    assert names(path) == ["9527.txt", "9527.txt.fence"]


@pytest.mark.parametrize("bad", [0, -1, True, None, "7", 1.5, 2**53, b"7"], ids=repr)
def test_invalid_fences_are_rejected(path: Path, bad: object) -> None:
    with pytest.raises(lockfast.ConfigurationError, match="A fence is"):
        FencedFile(path, bad)  # type: ignore[arg-type]
