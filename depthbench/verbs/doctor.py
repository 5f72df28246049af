"""`depthbench doctor`: what this machine offers: versions, devices, memory, disk; and what is missing, with how to mend it.

Ends with exit code 0 whatever it finds.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from depthbench import __version__
from depthbench.corpora.places import corpora_root

PACKAGES = ("torch", "lightning", "litdata", "duckdb", "streamlit")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SHARED_MEMORY = Path("/dev/shm")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
LEAST_SHARED_BYTES = 256 * 2**20  # Docker gives 64 MiB unless told otherwise
LEAST_DISK_BYTES = 2 * 2**30
BF16_CAPABILITY = (8, 0)
DRIVER_TIMEOUT_S = 10


class Finding(NamedTuple):
    """One line of the report. ``mend``: what is wrong and how to mend it, where anything is."""

    name: str
    text: str
    mend: str = ""


def add_arguments(parser: ArgumentParser) -> None:
    """It has no flags of its own."""


def run(args: Namespace) -> int:
    """Print what was found, then the problems. Returns 0."""
    runs = Path(args.runs).expanduser()
    checks = {
        "versions": versions,
        "devices": devices,
        "threads": threads,
        "shared memory": shared_memory,
        "disk": lambda: [disk("runs", runs, "--runs DIR"), disk("corpora", corpora_root(), "DEPTHBENCH_DATA=DIR")],
        "pictures": pictures,
    }
    findings = [finding for name, check in checks.items() for finding in guarded(name, check)]
    width = max(len(finding.name) for finding in findings)
    for name, text, _ in findings:
        print(f"{name:<{width}}  {text}")
    problems = [f"{name}: {mend}" for name, _, mend in findings if mend]
    print(f"\n{len(problems)} to mend:" if problems else "\nnothing to mend")
    for problem in problems:
        print(f"- {problem}")
    return 0


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds; where it raises, as broken installations do in any way they like, that is a finding of its own."""
    findings = []
    try:
        for finding in check():
            findings.append(finding)  # one by one: those before the fault stay
    except Exception as error:
        findings.append(Finding(name, "could not be asked", f"could not be asked ({one_line(error)})"))
    return findings


def versions() -> Iterator[Finding]:
    """Python, this package, and the five that everything rests on; asked of their metadata, without importing them."""
    yield Finding("python", f"{platform.python_version()}, {platform.platform()}")
    yield Finding("depthbench", __version__)
    for package in PACKAGES:
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            yield Finding(package, "not installed", f"not installed: run `pip install {package}`, or install depthbench again with pip")


def devices() -> Iterator[Finding]:
    """Driver and GPUs as PyTorch sees them."""
    driver = driver_version()
    if driver:
        yield Finding("driver", f"NVIDIA {driver}")
    try:
        torch = import_module("torch")
    except Exception as error:  # a broken one raises more than ImportError: OSError for a library that is not there
        broken = one_line(error)
        yield Finding("devices", f"unknown: torch cannot be imported ({broken})", f"torch cannot be imported ({broken}): install it again")
        return
    if not torch.cuda.is_available():
        yield Finding("devices", "no GPU: trains on the CPU", why_no_gpu(torch.version.cuda) if driver else "")
        return
    for index in range(torch.cuda.device_count()):
        yield gpu(index, torch.cuda.get_device_properties(index), torch.version.cuda)


def gpu(index: int, properties, toolkit: str | None) -> Finding:
    """A GPU by its ``properties`` (torch's). Training on GPUs is in bf16, which old ones only emulate."""
    capability = (properties.major, properties.minor)
    text = f"{properties.name}, compute capability {capability[0]}.{capability[1]}, {size(properties.total_memory)}, CUDA {toolkit}"
    slow = "" if capability >= BF16_CAPABILITY else "it has no bf16 (compute capability 8.0): train with --trainer.precision 32-true"
    return Finding(f"cuda:{index}", text, slow)


def why_no_gpu(toolkit: str | None) -> str:
    """Why PyTorch sees none though a driver is there. ``toolkit``: the CUDA that it was built for."""
    if toolkit is None:
        return "the driver is there, but this PyTorch is built for the CPU: install the CUDA build (https://pytorch.org/get-started)"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES='{hidden}' hides the GPUs: unset it"
    return f"PyTorch (CUDA {toolkit}) cannot use the driver: update it; in a container, start that with --gpus all"


def driver_version() -> str:
    """The NVIDIA driver's version; empty where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.partition("\n")[0].strip() if asked.returncode == 0 else ""


def threads() -> Iterator[Finding]:
    """Cores that this process may use, and the threads that PyTorch will use; more of them than cores wait for each other."""
    cores = usable_cores()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    planned = int(asked) if asked.isdecimal() and int(asked) else schedulable_cores()
    mend = f"{planned} threads on {cores} cores wait for each other: set OMP_NUM_THREADS={cores}" if planned > cores else ""
    yield Finding("cores", f"{cores}, OMP_NUM_THREADS {asked or 'not set'}", mend)


def schedulable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_cores() -> int:
    """Cores as the scheduler and, in a container, its share of the machine's time allow; at least one."""
    try:
        quota, period = CPU_LIMIT.read_text().split()
        allowed = round(int(quota) / int(period))
    except (OSError, ValueError):  # no such limit ("max"), or no such system
        return schedulable_cores()
    return max(1, min(allowed, schedulable_cores()))


def shared_memory() -> Iterator[Finding]:
    """Where loader workers hand batches over."""
    try:
        total = shutil.disk_usage(SHARED_MEMORY).total
    except OSError:
        yield Finding("shared memory", f"no {SHARED_MEMORY} here")
        return
    small = "loader workers may die of it: start the container with --shm-size 2g (or --ipc host), or train with --workers 0"
    yield Finding("shared memory", f"{SHARED_MEMORY} {size(total)}", small if total < LEAST_SHARED_BYTES else "")


def disk(name: str, folder: Path, elsewhere: str) -> Finding:
    """Room where ``folder`` lies, or would be made. ``elsewhere``: how a user names another place."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(name, f"{folder}: {one_line(error)}", f"{folder} cannot be read: choose another place with {elsewhere}")
    mend = ""
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        mend = f"{place} cannot be written: make it a writable folder, or choose another place with {elsewhere}"
    elif free < LEAST_DISK_BYTES:
        mend = f"only {size(free)} are free: free some, or choose another place with {elsewhere}"
    return Finding(name, f"{folder}: {size(free)} free{'' if folder.exists() else ' (not made yet)'}", mend)


def pictures() -> Iterator[Finding]:
    """What the PNGs of `depthbench report` need; its page and tables need neither."""
    kaleido = version("kaleido") if find_spec("kaleido") else ""
    missing = "" if kaleido else "not installed, so reports come without PNG: run `pip install 'kaleido>=1'` if you want them"
    yield Finding("kaleido", kaleido or "not installed", missing)
    browser = os.environ.get("BROWSER_PATH") or next(filter(None, map(shutil.which, BROWSERS)), None)
    missing = "" if browser or not kaleido else "none found, and kaleido draws with one: install chromium, or set BROWSER_PATH"
    yield Finding("browser", browser or "no chromium or chrome", missing)


def size(n_bytes: int) -> str:
    """Bytes in binary units, as memory is sold and disks are reported."""
    return f"{n_bytes / 2**30:,.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:,.0f} MiB"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
