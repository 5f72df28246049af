"""`depthbench probe RUN`: what does each layer do? Runs the layer probes on a checkpoint and keeps what they give.

What is there already is not measured again; interrupted, the same command goes on with what is missing. Probes, cheap ones first:
norms, angular, logit_lens, collapse, paths, transport, causal, pruning, jacobian, usefulness, permutation.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from depthbench.errors import UserError, unknown
from depthbench.shapes import positive

DEVICES = ("auto", "cpu", "cuda")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("run", metavar="RUN", help="a run id, a unique prefix of one, or a run folder")
    parser.add_argument("--probes", default="all", metavar="NAME[,NAME]", help="these alone (default: all)")
    parser.add_argument("--windows", type=int, default=128, metavar="N", help="held-out windows, fewer where there are not as many (128)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens per window (default: those of training, at most 512)")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the last)")
    parser.add_argument("--skip-rule", metavar="RULE", help="how a block is left out (default: by each of the design's rules)")
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto (a GPU where there is one), cpu or cuda")
    parser.add_argument("--micro-batch", type=int, default=8, metavar="N", help="windows in one forward pass (8)")
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")


def run(args: Namespace) -> int:
    """Measure what is asked for and missing, print a summary. Returns the exit code; raises UserError for what cannot be."""
    from depthbench.store.lock import run_lock
    from depthbench.store.runs import find_run
    from depthbench.training.fit import quieten

    quieten()
    folder = find_run(Path(args.runs), args.run)
    with run_lock(folder):  # from before the checkpoint is chosen: nobody trains on meanwhile
        return probe(args, folder)


def probe(args: Namespace, folder: Path) -> int:
    import torch

    from depthbench.probes import runner
    from depthbench.probes.progress import shown
    from depthbench.probes.windows import windows
    from depthbench.store.writer import RunWriter
    from depthbench.training.interruption import Interrupted, stopped_at_once
    from depthbench.training.runs import load_run

    names, device = runner.chosen(args.probes), torch_device(args.device)
    positive("--micro-batch", args.micro_batch)
    loaded = load_run(folder.name, runs=folder.parent, step=args.step)
    tokens = windows(loaded.held_out, args.windows, length=args.length)
    subject = runner.Subject(folder, loaded.model.to(device), tokens, loaded.step, loaded.step * int(loaded.row["batch_tokens"]))
    wanted = runner.measurements(subject.model, names, args.skip_rule)
    there = () if args.fresh else runner.found(subject).keys()
    missing = [measurement for measurement in wanted if measurement not in there]
    shape = f"{len(tokens)} x {tokens.shape[1] - 1} held-out tokens"
    print(f"{loaded.run_id}, step {loaded.step}: {shape}, on {device.type}", flush=True)
    if len(missing) < len(wanted):
        print(f"already there: {', '.join(str(one) for one in wanted if one in there)} (--fresh measures again)", flush=True)
    try:
        if missing:
            with RunWriter(folder) as writer, stopped_at_once():
                runner.measure(writer, subject, missing, micro_batch=args.micro_batch, show=shown)
    except torch.cuda.OutOfMemoryError as error:
        raise UserError(f"the GPU does not hold {args.micro_batch} windows at a time: repeat with a smaller --micro-batch") from error
    except Interrupted as stop:
        print("\nInterrupted. What was measured is kept; the same command goes on with the rest.", flush=True)
        return stop.exit_code
    print("\n" + runner.summary(subject, wanted))
    return 0


def torch_device(name: str):
    """The device that ``--device`` names. Raises UserError where there is none such."""
    import torch

    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here; use --device cpu, or look at the driver")
    return torch.device("cuda" if name == "auto" and torch.cuda.is_available() else name.replace("auto", "cpu"))
