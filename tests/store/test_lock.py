import os
import signal
import socket
import subprocess
import sys

import pytest

from depthbench.errors import UserError
from depthbench.store.lock import run_lock
from depthbench.store.writer import RunWriter

HOLD = """
import sys, time
from pathlib import Path
from depthbench.store.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_another_process_is_refused_and_the_holder_named(tmp_path, holder):
    with pytest.raises(UserError) as refused, run_lock(tmp_path / "run"):
        pass
    assert f"process {holder.pid} on {socket.gethostname()}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_lock_of_a_killed_process_is_free(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with run_lock(tmp_path / "run"):
        assert f"process {os.getpid()}" in (tmp_path / "run" / ".lock").read_text()


@pytest.mark.parametrize("text", ["process {dead} on {host}", "process 1 on another-machine", ""])
def test_what_a_dead_holder_left_in_the_file_keeps_nobody_out(tmp_path, text):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / ".lock").write_text(text.format(dead=dead.pid, host=socket.gethostname()))
    with run_lock(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}"


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path, holder):
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(UserError, match=f"run run is being written by process {holder.pid} on {socket.gethostname()}: wait"):
        RunWriter(tmp_path / "run", {"arch": "pre_ln"})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_process_may_hold_it_twice_and_lets_go_at_the_end(tmp_path):
    with run_lock(tmp_path), run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        with run_lock(tmp_path):
            pass
        assert _refused(tmp_path)
    assert not _refused(tmp_path)


def _refused(folder):
    """Whether another process, a forked child of this one included, is refused."""
    code = "import sys; from pathlib import Path; from depthbench.store.lock import run_lock\nwith run_lock(Path(sys.argv[1])): pass"
    return subprocess.run([sys.executable, "-c", code, folder], stderr=subprocess.DEVNULL).returncode != 0


def test_a_place_that_cannot_be_written_is_the_users_error(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"cannot write to .*file/run: Not a directory; choose another place with --runs DIR"),
        run_lock(tmp_path / "file" / "run"),
    ):
        pass
