"""`depthbench doctor`: what it says of a machine, and that nothing missing makes it fail."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from depthbench.verbs import doctor

Usage = namedtuple("Usage", "total used free")


def to_mend(out: str) -> list[str]:
    """The lines on what is to be mended, without their dash."""
    return [line.removeprefix("- ") for line in out.splitlines() if line.startswith("- ")]


def test_every_part_of_the_machine_has_its_line(says, tmp_path):
    code, out, err = says("doctor", "--runs", tmp_path / "runs")
    assert (code, err) == (0, "")
    named = [line.split("  ")[0] for line in out.partition("\n\n")[0].splitlines()]
    parts = ["python", "depthbench", *doctor.PACKAGES, "cores", "shared memory", "runs", "corpora", "kaleido", "browser"]
    assert [name for name in named if name in parts] == parts
    assert f"{tmp_path / 'runs'}: " in out and "free (not made yet)" in out and not (tmp_path / "runs").exists()
    assert "to mend" in out


def test_arguments_are_refused_in_one_line(says):
    code, _, err = says("doctor", "now")
    assert code == 2 and err.count("\n") == 1


def test_nothing_heavy_is_imported_before_it_runs():
    code = "import sys, depthbench.verbs.doctor; print({'torch', 'duckdb', 'pandas', 'litdata'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_what_is_missing_is_a_line_that_says_how_to_mend_it(says, tmp_path, monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    code, out, _ = says("doctor", "--runs", tmp_path)
    assert code == 0
    lines = to_mend(out)
    for start in (*(f"{name}: not installed: run `pip install {name}`" for name in doctor.PACKAGES), "devices: torch cannot be imported",
                  "kaleido: not installed, so reports come without PNG"):  # fmt: skip
        assert [line for line in lines if line.startswith(start)], start


def test_a_check_that_breaks_hides_none_of_the_others(says, tmp_path, monkeypatch):
    def broken(name):
        raise RuntimeError("a broken\ninstallation")

    monkeypatch.setattr(doctor, "find_spec", broken)
    code, out, _ = says("doctor", "--runs", tmp_path)
    assert code == 0 and "pictures: could not be asked (a broken installation)" in to_mend(out) and "cores" in out


def test_little_disk_and_little_shared_memory_are_problems(says, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: Usage(64 * 2**20, 0, 10 * 2**20))
    lines = to_mend(says("doctor", "--runs", tmp_path)[1])
    assert "runs: only 10 MiB are free: free some, or choose another place with --runs DIR" in lines
    assert "corpora: only 10 MiB are free: free some, or choose another place with DEPTHBENCH_DATA=DIR" in lines
    assert [line for line in lines if line.startswith("shared memory:") and "--shm-size" in line]


def test_a_file_where_runs_should_lie_is_a_problem(says, tmp_path):
    (tmp_path / "file").write_text("")
    assert f"runs: {tmp_path / 'file'} cannot be written" in says("doctor", "--runs", tmp_path / "file" / "runs")[1]


def test_threads_beyond_the_containers_share_are_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "CPU_LIMIT", tmp_path / "cpu.max")
    monkeypatch.setattr(doctor, "schedulable_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for limit, cores, mend in (("max 100000", 8, ""), ("200000 100000", 2, "set OMP_NUM_THREADS=2"), ("50000 100000", 1, "THREADS=1")):
        (tmp_path / "cpu.max").write_text(limit)
        (finding,) = doctor.threads()
        assert finding.text == f"{cores}, OMP_NUM_THREADS not set" and mend in finding.mend and bool(mend) == bool(finding.mend)
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    (tmp_path / "cpu.max").write_text("max 100000")
    assert "16 threads on 8 cores" in next(doctor.threads()).mend


@pytest.mark.parametrize(
    ("toolkit", "visible", "said"),
    [(None, None, "built for the CPU"), ("12.8", "", "CUDA_VISIBLE_DEVICES='' hides"), ("12.8", None, "cannot use the driver")],
)
def test_a_driver_without_a_gpu_is_explained(monkeypatch, toolkit, visible, said):
    cuda = SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda=toolkit)))
    monkeypatch.setattr(doctor, "driver_version", lambda: "570.1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    driver, found = doctor.devices()
    assert driver.text == "NVIDIA 570.1" and found.text == "no GPU: trains on the CPU" and said in found.mend


def test_gpus_are_described_and_old_ones_told_from_new(monkeypatch):
    cards = [SimpleNamespace(name="New", major=9, minor=0, total_memory=80 * 2**30),
             SimpleNamespace(name="Old", major=7, minor=5, total_memory=16 * 2**30)]  # fmt: skip
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_properties=cards.__getitem__)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="12.8")))
    monkeypatch.setattr(doctor, "driver_version", lambda: "")
    new, old = doctor.devices()
    assert new == ("cuda:0", "New, compute capability 9.0, 80.0 GiB, CUDA 12.8", "")
    assert "--trainer.precision 32-true" in old.mend
