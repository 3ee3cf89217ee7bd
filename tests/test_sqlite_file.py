"""The file of the embedded store: where it may lie, who may touch it, and what is said when it cannot work."""

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockfast.errors import (
    ConfigurationError,
    LockError,
    Outcome,
    StoreProtocolError,
    StoreRefused,
    StoreUnavailable,
)
from lockfast.runtime.runner import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.sqlite import SqliteStore, default_path, location
from lockfast.stores.sqlite.boot import boot_id
from lockfast.stores.sqlite.database import lock_error
from lockfast.values import Granted, Renewal, Taken
from tests.test_sqlite_kit import FLAVOURS, LONG, Bed, Waiter, claim

Attempt = Callable[[], object]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with Bed("threads", tmp_path, real_time=True) as bed:
        yield bed


def take(store: SqliteStore, holder: str = "one") -> object:
    return run(store.acquire(claim(holder), None, LONG))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_the_users_alone_whatever_the_umask(bed: Bed) -> None:
    before = os.umask(0)
    try:
        store = bed.store()
        take(store)
        run(store.mailbox("two").open(LONG))
    finally:
        os.umask(before)
    folder = bed.path.parent
    assert mode(folder) == 0o700
    assert {entry.name: mode(entry) for entry in folder.iterdir()} == {
        "locks.db": 0o600,
        "locks.db-wal": 0o600,
        "locks.db-shm": 0o600,
        "locks.db-inbox": 0o700,
    }


@pytest.mark.parametrize("wide", [0o720, 0o702, 0o777])
def test_a_folder_that_others_write_in_is_refused(bed: Bed, wide: int) -> None:
    bed.path.parent.mkdir()
    bed.path.parent.chmod(wide)
    with pytest.raises(ConfigurationError, match="Other users can write"):
        take(bed.store())
    assert not bed.path.exists()


def test_a_file_that_others_can_open_is_refused(bed: Bed) -> None:
    take(bed.store())
    bed.path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        take(bed.store())


def test_another_users_folder_or_file_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    take(bed.store())
    stranger = bed.path.stat().st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(ConfigurationError, match=r"(belongs to another user|Other users can write)"):
        take(bed.store())


def test_a_folder_without_the_right_to_write_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    monkeypatch.setattr(os, "supports_effective_ids", set())
    with pytest.raises(StoreRefused, match="right to write"):
        take(bed.store())


def test_a_file_where_the_folder_should_be_is_refused(bed: Bed) -> None:
    bed.path.parent.write_text("in the way")
    with pytest.raises(LockError, match="not a folder"):
        take(bed.store())


def test_what_is_no_database_is_refused_and_left_alone(bed: Bed) -> None:
    bed.path.parent.mkdir(mode=0o700)
    bed.path.touch(mode=0o600)
    bed.path.write_text("a diary, not a database; " * 100)
    with pytest.raises(ConfigurationError, match="not an SQLite database"):
        take(bed.store())
    assert bed.path.read_text().startswith("a diary")


def test_the_database_of_another_program_is_refused_and_left_alone(bed: Bed) -> None:
    bed.path.parent.mkdir(mode=0o700)
    bed.path.touch(mode=0o600)
    other = sqlite3.connect(bed.path)
    other.execute("CREATE TABLE lock (name)")
    other.close()
    before = bed.path.read_bytes()
    with pytest.raises(ConfigurationError, match="another program"):
        take(bed.store())
    assert bed.path.read_bytes() == before


def test_a_file_of_another_release_is_refused(bed: Bed) -> None:
    take(bed.store())
    other = sqlite3.connect(bed.path, isolation_level=None)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(ConfigurationError, match="another release"):
        take(bed.store())


def test_a_damaged_file_says_how_to_start_anew(bed: Bed) -> None:
    store = bed.store()
    take(store)
    run(store.close())
    with bed.path.open("r+b") as file:
        file.seek(1024)
        file.write(b"\xff" * 8192)
    with pytest.raises(StoreProtocolError, match="damaged"):
        take(bed.store())


def test_a_full_disk_is_no_change_and_passes(bed: Bed) -> None:
    store = bed.store()
    take(store)
    connection = store._database._connection
    assert connection is not None
    connection.execute("PRAGMA max_page_count = 1")

    def fill() -> None:
        for number in range(200):
            run(store.acquire(claim("one", name=f"lock{number}" + "x" * 900), None, LONG))

    with pytest.raises(StoreUnavailable, match="full") as caught:
        fill()
    assert caught.value.outcome is Outcome.NOT_DONE
    connection.execute("PRAGMA max_page_count = 1000000")
    fill()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_READONLY, StoreRefused),
        (sqlite3.SQLITE_CANTOPEN, StoreUnavailable),
        (sqlite3.SQLITE_IOERR_WRITE, StoreUnavailable),
        (sqlite3.SQLITE_MISUSE, LockError),
    ],
)
def test_each_error_of_sqlite_becomes_one_of_ours(code: int, kind: type[LockError]) -> None:
    error = sqlite3.OperationalError("some reason")
    error.sqlite_errorcode = code
    ours = lock_error(error, "/state/locks.db")
    assert isinstance(ours, kind)
    assert "/state/locks.db" in str(ours)
    unknown = isinstance(ours, StoreUnavailable) and ours.outcome is Outcome.UNKNOWN
    assert unknown == (code == sqlite3.SQLITE_IOERR_WRITE)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_file_means_that_its_locks_are_gone(
    bed: Bed, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = bed.store()
    take(store)
    for entry in bed.path.parent.glob("locks.db*"):
        entry.unlink()
    newcomer = bed.store()
    if replaced:
        assert isinstance(take(newcomer, "two"), Granted)
    assert run(store.renew([Renewal("report", "one", 10.0)], LONG)) == [False]
    assert "its locks are gone" in caplog.text
    # Both see the same file from now on.
    answer = take(store, "three")
    assert isinstance(answer, Taken if replaced else Granted)
    assert isinstance(take(newcomer, "four"), Taken)


def test_a_symbolic_link_leads_to_the_same_locks(bed: Bed, tmp_path: Path) -> None:
    take(bed.store())
    waiter = Waiter(bed, bed.store(), "two")
    waiter.request()
    link = tmp_path / "alias.db"
    link.symlink_to(bed.path)
    through_link = SqliteStore(link, ThreadRuntime(), boot_id=lambda: bed.boot)
    assert run(through_link.release("report", "one", LONG)) is True
    run(through_link.close())
    assert waiter.pushed() is not None


def test_a_later_chdir_changes_nothing(bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("relative.db", ThreadRuntime())
    monkeypatch.chdir("/")
    take(store)
    run(store.close())
    assert (tmp_path / "relative.db").exists()


@pytest.mark.parametrize("path", ["", "folder/", "nul\0.db", ":memory:"])
def test_paths_that_name_no_file_are_refused_at_once(path: str) -> None:
    with pytest.raises(ConfigurationError):
        SqliteStore(path, ThreadRuntime())


def test_a_system_without_named_pipes_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "mkfifo")
    with pytest.raises(ConfigurationError, match="Windows"):
        SqliteStore("locks.db", ThreadRuntime())


def test_a_colour_must_be_one_of_two(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="threads or asyncio"):
        SqliteStore(tmp_path / "locks.db", ThreadRuntime(), flavour="green")


def test_the_default_place_is_the_users_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_path() == "/state/lockfast/locks.db"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_path() == "/home/ada/.local/state/lockfast/locks.db"


TABLE = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:30 / /home rw,relatime shared:1 - nfs4 filer:/home rw
23 22 0:31 / /home/ada/local\\040disk rw - xfs /dev/vdb rw
24 21 0:32 / /mnt/far rw - fuse.sshfs ada@far:/ rw
25 21 0:33 / /mnt/covered rw - cifs //filer/share rw
26 21 0:34 / /mnt/covered rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize("folder", ["/home/ada", "/home", "/mnt/far/away"])
def test_a_file_system_that_machines_share_is_refused(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="other machines share"):
        location.refuse_shared(folder, TABLE)


@pytest.mark.parametrize("folder", ["/", "/homestead", "/home/ada/local disk/x", "/mnt/covered", "/var/lib"])
def test_a_local_file_system_is_accepted(folder: str) -> None:
    location.refuse_shared(folder, TABLE)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.glusterfs", "virtiofs"])
def test_kinds_that_are_shared(kind: str) -> None:
    assert location.is_shared(kind)


def test_the_store_looks_at_the_table_of_mounts(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 0:1 / {tmp_path} rw - nfs4 filer:/ rw\n")
    monkeypatch.setattr(location, "MOUNT_TABLE", table)
    with pytest.raises(ConfigurationError, match="nfs4"):
        take(bed.store())


def test_this_boot_has_a_name_that_stays() -> None:
    assert boot_id() == boot_id() != ""


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_file_that_stays_busy_is_reported_in_time_and_nothing_is_done(flavour: str, tmp_path: Path) -> None:
    with Bed(flavour, tmp_path, real_time=True) as bed:
        store = bed.store()
        bed.run(store.inspect("report", LONG))
        other = sqlite3.connect(bed.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        started = bed.runtime.now()
        with pytest.raises(StoreUnavailable, match="busy") as caught:
            bed.run(store.acquire(claim("one"), None, started + 0.05))
        assert caught.value.outcome is Outcome.NOT_DONE
        assert 0.05 <= bed.runtime.now() - started < 5
        # Reading is not kept waiting by a writer.
        assert not bed.run(store.inspect("report", LONG)).locked
        other.execute("ROLLBACK")
        other.close()
        assert isinstance(bed.run(store.acquire(claim("one"), None, LONG)), Granted)


def test_a_busy_file_is_asked_again_until_it_is_free(bed: Bed) -> None:
    store = bed.store()
    run(store.inspect("report", LONG))
    other = sqlite3.connect(bed.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    answers: list[object] = []
    asker = threading.Thread(target=lambda: answers.append(take(store)))
    asker.start()
    other.execute("COMMIT")
    asker.join()
    other.close()
    assert isinstance(answers[0], Granted)
