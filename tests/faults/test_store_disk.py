"""A disk that takes no more: one line for the user, nothing lost, no half file; and the record goes on once there is room."""

import errno
import json
import os
import random
import resource
import subprocess
import sys
from contextlib import suppress

import duckdb
import pytest

from depthbench.errors import UserError
from depthbench.store.disk import replacing, write_error
from depthbench.store.reader import Store
from depthbench.store.writer import RunWriter

# A limit on the size of files stands in for the full disk: the kernel refuses the write in the same place and in the same way.
FILLED = """
import json, os, random, resource, sys
from pathlib import Path
from depthbench.errors import UserError
from depthbench.store.reader import Store
from depthbench.store.seal import seal_run
from depthbench.store.writer import RunWriter

folder = Path(sys.argv[1])
errors = []

def room(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

def refused(action):
    try:
        action()
    except UserError as error:
        errors.append(str(error))

def rows(n, start):
    return [{"step": start + i, "name": "x", "value": random.random()} for i in range(n)]

def there():
    return len(Store(folder.parent).rows("scalars", [folder.name]))

writer = RunWriter(folder, {"arch": "pre_ln"}, flush_every_s=3600)
writer.add("scalars", rows(10, 0))
writer.drain()
room(50_000)
writer.add("scalars", rows(20_000, 10))
refused(writer.drain)                        # a flush meets the full disk ...
half = there()
refused(lambda: writer.seal("failed"))       # ... and again: the rows are still buffered
files = os.listdir(folder / "segments")
room(resource.RLIM_INFINITY)
writer.add("scalars", rows(5, 20_010))
writer.drain()                               # now there is room: they go to disk
whole = there()
room(50_000)
refused(lambda: writer.seal("finished"))     # sealing meets the full disk: the segments stay
unsealed = (there(), sorted(path.name for path in folder.iterdir()))
room(resource.RLIM_INFINITY)
seal_run(folder)
print(json.dumps([errors, half, files, whole, unsealed, there(), Store(folder.parent).runs()["status"].tolist()]))
"""


def test_a_full_disk_loses_nothing(tmp_path):
    ended = subprocess.run([sys.executable, "-c", FILLED, tmp_path / "r"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    errors, half, files, whole, unsealed, sealed, status = json.loads(ended.stdout)
    assert len(errors) == 3
    for message in errors:
        assert str(tmp_path / "r") in message and "file size limit" in message and "repeat the same command" in message
        assert "\n" not in message
    assert half == 10 and all(name.endswith(".parquet") and not name.startswith(".") for name in files)
    assert whole == sealed == unsealed[0] == 20_015
    assert unsealed[1] == [".lock", "heartbeat", "segments"]
    assert status == ["finished"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB, and ``fill(full)``, which fills it and frees it again; where none may be mounted, a limit on files' sizes."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], stderr=subprocess.DEVNULL).returncode
    )
    ballast, limits = place / "ballast", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(full):
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if full else limits[0], limits[1]))
        elif full:
            with suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        else:
            ballast.unlink()

    yield place, fill
    if mounted:
        subprocess.run(["umount", place], check=True)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up_keeps_every_flushed_row_and_goes_on_with_room(small_disk):
    place, fill = small_disk
    store, step = Store(place), 0

    def add(n):
        nonlocal step
        writer.add("scalars", [{"step": step + i, "name": "x", "value": random.random()} for i in range(n)])
        step += n

    def steps():
        return store.rows("scalars", ["r"])["step"].tolist()

    writer = RunWriter(place / "r", {"arch": "pre_ln"}, flush_every_s=3600)
    for _ in range(2):  # it may happen more than once
        for _ in range(5):
            add(100)
            writer.drain()
        flushed = step
        fill(True)
        for _ in range(2):
            add(1000)
            with pytest.raises(UserError, match=f"cannot write to {place / 'r'}: .*repeat the same command") as refused:
                writer.drain()
            assert "\n" not in str(refused.value)
            assert steps() == list(range(flushed))
        fill(False)
        writer.drain()
        assert steps() == list(range(step))
    fill(True)
    with pytest.raises(UserError, match="cannot write to"):
        writer.seal("finished")
    assert steps() == list(range(step))
    fill(False)
    writer.seal("finished")
    assert steps() == list(range(step)) and store.runs()[["status", "problem"]].values.tolist() == [["finished", None]]


def test_a_background_flush_that_fails_is_told_to_the_next_caller(tmp_path):
    """Nobody waits for the flush; the row that was added with the bad news is buffered all the same."""
    writer = RunWriter(tmp_path / "r", {"arch": "pre_ln"}, flush_every_s=0.01)
    (tmp_path / "r").rename(tmp_path / "moved")
    added = 0
    with pytest.raises(UserError, match=f"cannot write to {tmp_path / 'r'}: .*; make it writable"):
        while True:  # the test's time limit is the limit
            added += 1
            writer.add("scalars", [{"step": added, "name": "x", "value": 0.0}])
    (tmp_path / "moved").rename(tmp_path / "r")
    writer.seal("finished")
    assert Store(tmp_path).rows("scalars", ["r"])["step"].tolist() == list(range(1, added + 1))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        duckdb.IOException('Could not write file "/x/.scalars-000001.parquet.tmp": No space left on device\nmore'),
        duckdb.TransactionException("TransactionContext Error: Failed to commit: Could not write file: No space left on device"),
    ],
)
def test_a_full_disk_is_recognised_however_it_is_told(tmp_path, error):
    message = str(write_error(tmp_path, error))
    assert message.startswith(f"cannot write to {tmp_path}: no space left on the disk; free some") and "\n" not in message


def test_a_write_that_fails_leaves_the_old_file_and_no_new_one(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "a") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


def test_a_runs_folder_that_cannot_be_written_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to .*Not a directory; choose another place with --runs DIR"):
        RunWriter(tmp_path / "file" / "r", {"arch": "pre_ln"})
