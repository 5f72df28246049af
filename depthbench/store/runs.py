"""What a run is called, and which run a user means."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

from depthbench.errors import UserError, unknown
from depthbench.store.folder import is_run_folder, run_folders

# Exactly what decides the result of a run. ``options`` (of the design) and ``recipe`` (optimizer, schedule, clipping, peak learning
# rate, ...) are dicts of their own. Where, how fast and with which code it runs is not among them: a repeated command finds its run.
DECIDES = (
    *("arch", "options"),
    *("n_layer", "d_model", "n_head", "n_kv_head", "head_dim", "d_ff", "vocab_size", "seq_len"),
    "corpus_fingerprint",
    *("recipe", "lr", "batch_tokens", "tokens_planned", "max_steps"),
    *("seed", "precision"),
)


def run_id(facts: Mapping) -> str:
    """The name of the run these facts lead to, e.g. ``pre_ln-nano-L5-d160-lr4e-3-s42-1f0c9a3e``: readable, and the same every time.

    ``facts`` holds everything in ``DECIDES`` (as JSON would hold it) and ``size`` (None where the shape belongs to no size), which is
    shown but decides nothing that the shape does not; anything else in it is left aside. Raises ValueError for a missing fact.
    """
    missing = [name for name in (*DECIDES, "size") if name not in facts]
    if missing:
        raise ValueError(f"a run id needs {', '.join(missing)}")
    arch = re.sub(r"[^\w.]+", "_", facts["arch"])  # a user's own design may have any name; a folder may not
    parts = [arch, facts["size"], f"L{facts['n_layer']}", f"d{facts['d_model']}", f"lr{_short(facts['lr'])}", f"s{facts['seed']}"]
    decided = json.dumps({name: _plain(facts[name]) for name in DECIDES}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "-".join([*filter(None, parts), hashlib.sha256(decided.encode()).hexdigest()[:8]])


def find_run(runs_dir: Path | str, ref: str) -> Path:
    """The folder of the run that ``ref`` means: a run id, the unique beginning of one, or a run folder anywhere.

    Raises UserError where there is none or more than one, and for a folder that is there and holds no rows.
    """
    runs_dir = Path(runs_dir)
    places = [named(folder) for folder in (runs_dir / ref, Path(ref))] if ref else []
    for folder in places:
        if is_run_folder(folder):
            return folder
    found = [folder for folder in run_folders(runs_dir) if folder.name.startswith(ref)] if ref else []
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(folder.name for folder in found[:5]) + (", ..." if len(found) > 5 else "")
        raise UserError(f"run '{ref}' means {len(found)} runs ({shown}): give more of the id")
    for folder in places:
        if folder.is_dir() and folder != runs_dir:
            raise UserError(f"{folder} holds no rows of a run: its metrics.duckdb and segments are missing or were never written")
    raise unknown_run(runs_dir, ref)


def named(folder: Path) -> Path:
    """The folder by a path that ends in its name, as `.` does not: a run goes by it."""
    return folder if folder.name not in ("", "..") else folder.resolve()


def unknown_run(runs_dir: Path, ref: str) -> UserError:
    """The error for a run that is not there: names the nearest ones, however many there are."""
    known = [folder.name for folder in run_folders(runs_dir)]
    if not known:
        return UserError(f"no run '{ref}': {runs_dir} holds no runs yet; make one with `depthbench fit --arch pre_ln --ratio 32`")
    if len(known) > 10:
        known = difflib.get_close_matches(ref, known, n=5, cutoff=0.0)
        return UserError(f"no run '{ref}' in {runs_dir}; the nearest: {', '.join(known)}")
    return unknown("run", ref, known)


def _short(number: float) -> str:
    """4e-3 for 0.004, 3.5e-3 for 0.0035: the fewest digits that say the number, as people write learning rates."""
    mantissa, exponent = f"{Decimal(repr(float(number))).normalize():e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _plain(value):
    """The value as JSON holds it, the same for all ways to write it: 1.0 and 1, a tuple and a list, NumPy's numbers and Python's."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
