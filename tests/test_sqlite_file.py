"""The file of the embedded store: its location, its permissions, and the errors if it cannot be used."""

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
from lockfast.runtime.base import run
from lockfast.runtime.threads import ThreadRuntime
from lockfast.stores.sqlite import location
from lockfast.stores.sqlite.location import boot_id, default_path
from lockfast.stores.sqlite.store import SqliteStore, lock_error
from lockfast.values import Granted, Renewal, Taken
from tests.sqlite_kit import FLAVOURS, LONG, Bed, Waiter, claim

Attempt = Callable[[], object]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with Bed("threads", tmp_path, real_time=True) as bed:
        yield bed


def take(store: SqliteStore, holder: str = "one") -> object:
    return run(store.acquire(claim(holder), None, LONG))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_private_under_any_umask(bed: Bed) -> None:
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
def test_folder_writable_by_others_is_refused(bed: Bed, wide: int) -> None:
    bed.path.parent.mkdir()
    bed.path.parent.chmod(wide)
    with pytest.raises(ConfigurationError, match="Other users can write"):
        take(bed.store())
    assert not bed.path.exists()


def test_file_readable_by_others_is_refused(bed: Bed) -> None:
    take(bed.store())
    bed.path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        take(bed.store())


def test_folder_or_file_of_another_user_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    take(bed.store())
    stranger = bed.path.stat().st_uid + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.raises(ConfigurationError, match=r"(belongs to another user|Other users can write)"):
        take(bed.store())


def test_folder_without_write_permission_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args, **kwargs: False)
    monkeypatch.setattr(os, "supports_effective_ids", set())
    with pytest.raises(StoreRefused, match="right to write"):
        take(bed.store())


def test_file_in_place_of_the_folder_is_refused(bed: Bed) -> None:
    bed.path.parent.write_text("not a folder")
    with pytest.raises(LockError, match="not a folder"):
        take(bed.store())


def test_file_that_is_no_database_is_refused_and_unchanged(bed: Bed) -> None:
    bed.path.parent.mkdir(mode=0o700)
    bed.path.touch(mode=0o600)
    bed.path.write_text("a diary, not a database; " * 100)
    with pytest.raises(ConfigurationError, match="not an SQLite database"):
        take(bed.store())
    assert bed.path.read_text().startswith("a diary")


def test_database_of_another_program_is_refused_and_unchanged(bed: Bed) -> None:
    bed.path.parent.mkdir(mode=0o700)
    bed.path.touch(mode=0o600)
    other = sqlite3.connect(bed.path)
    other.execute("CREATE TABLE lock (name)")
    other.close()
    before = bed.path.read_bytes()
    with pytest.raises(ConfigurationError, match="another program"):
        take(bed.store())
    assert bed.path.read_bytes() == before


def test_file_of_another_release_is_refused(bed: Bed) -> None:
    take(bed.store())
    other = sqlite3.connect(bed.path, isolation_level=None)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(ConfigurationError, match="another release"):
        take(bed.store())


def test_damaged_file_is_reported(bed: Bed) -> None:
    store = bed.store()
    take(store)
    run(store.close())
    with bed.path.open("r+b") as file:
        file.seek(1024)
        file.write(b"\xff" * 8192)
    with pytest.raises(StoreProtocolError, match="damaged"):
        take(bed.store())


def test_full_disk_changes_nothing_and_recovers(bed: Bed) -> None:
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
def test_sqlite_errors_are_translated(code: int, kind: type[LockError]) -> None:
    error = sqlite3.OperationalError("some reason")
    error.sqlite_errorcode = code
    ours = lock_error(error, "/state/locks.db")
    assert isinstance(ours, kind)
    assert "/state/locks.db" in str(ours)
    unknown = isinstance(ours, StoreUnavailable) and ours.outcome is Outcome.UNKNOWN
    assert unknown == (code == sqlite3.SQLITE_IOERR_WRITE)


@pytest.mark.parametrize("replaced", [False, True])
def test_removed_file_loses_its_locks(bed: Bed, replaced: bool, caplog: pytest.LogCaptureFixture) -> None:
    store = bed.store()
    take(store)
    for entry in bed.path.parent.glob("locks.db*"):
        entry.unlink()
    newcomer = bed.store()
    if replaced:
        assert isinstance(take(newcomer, "two"), Granted)
    assert run(store.renew([Renewal("report", "one", 10.0)], LONG)) == [False]
    assert "its locks are gone" in caplog.text
    # Both stores use the same file from now on.
    answer = take(store, "three")
    assert isinstance(answer, Taken if replaced else Granted)
    assert isinstance(take(newcomer, "four"), Taken)


def test_symbolic_link_names_the_same_locks(bed: Bed, tmp_path: Path) -> None:
    take(bed.store())
    waiter = Waiter(bed, bed.store(), "two")
    waiter.request()
    link = tmp_path / "alias.db"
    link.symlink_to(bed.path)
    through_link = SqliteStore(link, ThreadRuntime(), boot_id=lambda: bed.boot)
    assert run(through_link.release("report", "one", LONG)) is True
    run(through_link.close())
    assert waiter.notification() is not None


def test_chdir_after_connecting_has_no_effect(bed: Bed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_system_without_named_pipes_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "mkfifo")
    with pytest.raises(ConfigurationError, match="Windows"):
        SqliteStore("locks.db", ThreadRuntime())


def test_unknown_flavour_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="threads or asyncio"):
        SqliteStore(tmp_path / "locks.db", ThreadRuntime(), flavour="green")


def test_default_path_is_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
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
an invalid line
"""


@pytest.mark.parametrize("folder", ["/home/ada", "/home", "/mnt/far/away"])
def test_shared_file_system_is_refused(folder: str) -> None:
    with pytest.raises(ConfigurationError, match="other machines share"):
        location.refuse_shared(folder, TABLE)


@pytest.mark.parametrize("folder", ["/", "/homestead", "/home/ada/local disk/x", "/mnt/covered", "/var/lib"])
def test_local_file_system_is_accepted(folder: str) -> None:
    location.refuse_shared(folder, TABLE)


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "fuse.glusterfs", "virtiofs"])
def test_shared_kinds_of_file_system(kind: str) -> None:
    assert location.is_shared(kind)


def test_store_checks_the_mount_table(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    mount_point = str(tmp_path).replace(" ", r"\040")
    table.write_text(f"1 0 0:1 / {mount_point} rw - nfs4 filer:/ rw\n")
    monkeypatch.setattr(location, "MOUNT_TABLE", table)
    with pytest.raises(ConfigurationError, match="nfs4"):
        take(bed.store())


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_file_in_use_under_another_boot_id_is_refused(flavour: str, tmp_path: Path) -> None:
    """A container may have its own boot id. Its live grants are not those of an earlier boot."""
    with Bed(flavour, tmp_path, real_time=True) as bed:
        store = bed.store()
        bed.run(store.acquire(claim("one"), None, LONG))
        bed.boot = "another container"
        other = bed.store()
        with pytest.raises(ConfigurationError, match="another boot id"):
            bed.run(other.acquire(claim("two"), None, bed.runtime.now() + 0.1))
        assert bed.run(store.inspect("report", LONG)).holder == "one"
        bed.run(store.close())
        assert isinstance(bed.run(other.acquire(claim("two"), None, LONG)), Granted)


def test_boot_id_is_stable() -> None:
    assert boot_id() == boot_id() != ""


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_busy_file_times_out_without_a_change(flavour: str, tmp_path: Path) -> None:
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
        # A writer does not block readers.
        assert not bed.run(store.inspect("report", LONG)).locked
        other.execute("ROLLBACK")
        other.close()
        assert isinstance(bed.run(store.acquire(claim("one"), None, LONG)), Granted)


def test_busy_file_is_retried_until_it_is_free(bed: Bed) -> None:
    store = bed.store()
    run(store.inspect("report", LONG))
    other = sqlite3.connect(bed.path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    answers: list[object] = []
    claimant = threading.Thread(target=lambda: answers.append(take(store)))
    claimant.start()
    other.execute("COMMIT")
    claimant.join()
    other.close()
    assert isinstance(answers[0], Granted)
