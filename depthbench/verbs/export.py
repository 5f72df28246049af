"""`depthbench export RUN`: the weights of a checkpoint as safetensors, a format that holds numbers and can run nothing.

The tensors are the checkpoint's, bit for bit; the file's metadata says which run they are of and how its model is built.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from depthbench import __version__
from depthbench.errors import UserError
from depthbench.verbs._text import counted, size

if TYPE_CHECKING:
    from torch import Tensor

    from depthbench.training.runs import Run

SUFFIX = ".safetensors"


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("run", metavar="RUN", help="a run id, a unique prefix of one, or a run folder")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the last)")
    parser.add_argument("--out", metavar=f"FILE{SUFFIX}", help="where the file goes (default: step-N.safetensors in the run's folder)")


def run(args: Namespace) -> int:
    """Write the file. Returns the exit code; raises UserError for what cannot be."""
    from depthbench.training import checkpoints
    from depthbench.training.fit import quieten
    from depthbench.training.runs import load_run

    quieten()
    loaded = load_run(args.run, runs=args.runs, step=args.step)
    out = place(args.out, loaded)
    weights = owned(checkpoints.weights(loaded.checkpoint))
    write(out, weights, metadata(loaded))
    values = sum(tensor.numel() for tensor in weights.values())
    print(f"{out}: {counted(len(weights), 'tensor')}, {values:,} numbers, {size(out.stat().st_size)}, of step {loaded.step:,}")
    return 0


def place(out: str | None, loaded: Run) -> Path:
    """The file's path. Raises UserError where it is no name of a safetensors file."""
    path = loaded.folder / f"{loaded.checkpoint.stem}{SUFFIX}" if out is None else Path(out).expanduser()
    if path.suffix != SUFFIX or path.is_dir():
        raise UserError(f"--out {out} is no safetensors file: give a name that ends in {SUFFIX}")
    return path


def metadata(loaded: Run) -> dict[str, str]:
    """Which run the weights are of, and what its model is built from; all values are text, as the format has it."""
    from depthbench.training.runs import SHAPE_COLUMNS

    facts = {
        "format": "pt",  # what other readers ask for: the layout of tensors is PyTorch's
        "run_id": loaded.run_id,
        "step": loaded.step,
        "arch": loaded.row["arch"],
        "options": json.dumps(loaded.config.get("options", {}), sort_keys=True),
        **{name: loaded.row[name] for name in SHAPE_COLUMNS},
        "norm_eps": loaded.config["recipe"]["norm_eps"],
        "seq_len": loaded.row["seq_len"],
        "tokenizer": loaded.row["tokenizer"],
        "depthbench": __version__,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def owned(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with memory of its own: the format knows no shared ones, as a design that ties weights has them."""
    from torch import contiguous_format

    seen, found = set(), {}
    for name, tensor in weights.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone(memory_format=contiguous_format) if memory in seen else tensor.contiguous()
        seen.add(memory)
    return found


def write(out: Path, weights: dict[str, Tensor], facts: dict[str, str]) -> None:
    """Write beside ``out`` and rename. Raises UserError where the disk refuses."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from depthbench.store.disk import replacing
    from depthbench.training.checkpoints import usual_mode

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as unfinished:
            save_file(weights, unfinished, metadata=facts)
            unfinished.chmod(usual_mode())  # the library leaves a temporary file's 0600
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {out}: {reason}; mend that, or choose another place with --out FILE{SUFFIX}") from None
