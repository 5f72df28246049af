"""The command line of ``depthbench fit``: LightningCLI with the experiment's keys at the top and Lightning's under ``trainer``."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any, NoReturn

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from depthbench.errors import UserError, unknown
from depthbench.quantities import whole_number
from depthbench.training.plan import Experiment

# Trainer arguments that the plan decides, and the key a user should turn instead.
OWNED_BY_THE_PLAN = {
    "accumulate_grad_batches": "micro_batch",
    "max_epochs": "tokens",
    "min_epochs": "tokens",
    "min_steps": "tokens",
    "gradient_clip_val": "recipe",
    "gradient_clip_algorithm": "recipe",
    "val_check_interval": "validations",
    "check_val_every_n_epoch": "validations",
    "use_distributed_sampler": "seed",
    "reload_dataloaders_every_n_epochs": "seed",
    "enable_checkpointing": "runs",
    "default_root_dir": "runs",
    "num_sanity_val_steps": "validations",
    "barebones": "layer_stats_every",
    "limit_train_batches": "trainer.max_steps",
    "overfit_batches": "tokens",
    "model_registry": "runs",
    "limit_val_batches": "validations",
    "fast_dev_run": "trainer.max_steps",
}
TRAINER_DEFAULTS = {
    "trainer.log_every_n_steps": 1,
    "trainer.enable_model_summary": False,
    "trainer.max_steps": -1,
    "trainer.devices": 1,
}


class Count:
    """jsonargparse's type of whole numbers such as 2M; an object, so that ``--help`` can say what it is."""

    def __init__(self, key: str):
        self.key = key

    def __call__(self, text: str | int | float) -> int:
        return whole_number(text, f"--{self.key}")

    def __repr__(self) -> str:
        return "whole number, as 2M"


HELP = {
    "arch": ("residual design: a name, or an importable class as my_module.MyDesign", str),
    "options": ("options of the design, one by one as --arch.NAME VALUE (see `depthbench archs`)", dict[str, Any]),
    "size": ("parameter budget and its recipe (see `depthbench shapes`)", str),
    "ratio": ("aspect ratio d_model / n_layer (default: the size's)", float | None),
    "budget": ("what the size's budget counts: total or backbone parameters", str),
    "tokens": ("training tokens, for example 2M; re-plans the schedule (default: the size's)", Count("tokens")),
    "lr": ("peak learning rate (default: the recipe's for this design and size)", float | None),
    "seed": ("seed of initialisation and data order", int),
    "seq_len": ("tokens predicted per sequence (default: the size's)", Count("seq-len")),
    "batch_tokens": ("tokens per optimizer step (default: the size's)", Count("batch-tokens")),
    "micro_batch": ("sequences per forward pass; the rest of a step is accumulated (default: at most the size's)", int | None),
    "corpus": ("embedded, fineweb-edu, or the folder of a prepared corpus (default: the size's)", str | None),
    "tokenizer": ("tokenizer the corpus is made with: bpe-N, olmo, or the path of a tokenizer.json (default: the size's)", str | None),
    "validations": ("validations and checkpoints per run, evenly spaced, the last at the end", int),
    "count_extras": ("solve the shape with the design's own parameters counted (default: Pre-LN's count, as in the paper)", bool),
    "recipe": ("optimizer and schedule", str),
    "compile": ("torch.compile the sublayers, region by region", bool),
    "workers": ("data loader processes", int),
    "loader_timeout": ("seconds without a batch after which a run stops, naming the chunk; 0 waits for ever", int),
    "layer_stats_every": ("record layer statistics every so many steps; 0 records none", int),
    "probes": ("layer probes that the run ends with: auto (cheap ones at pico and nano), none, all, or names", str),
    "runs": ("folder of all runs", str),
}

ACCEPTED = {
    int: "a whole number",
    int | None: "a whole number",
    float | None: "a number",
    bool: "true or false",
    dict[str, Any]: "names with values",
    str: "a name",
    str | None: "a name",
}
NOT_KEYS = ("help", "config", "print_config", "print_shtab", "seed_everything")
LONGEST_MESSAGE = 300


class OneLineErrors(LightningArgumentParser):
    """A parser whose complaints are one UserError that names the key, the value and the nearest known key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise self._explained(str(ex or message)) from ex

    def _explained(self, message: str) -> UserError:
        if match := re.search(r"unrecognized arguments: -*([\w.-]+)", message, re.IGNORECASE):
            return self._unknown_key(match[1])
        if match := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
            return self._unknown_key(f"{match[1]}.{match[2]}")
        if match := re.search(r"(?:Key|Option) '([\w.-]+)' is not (?:expected|accepted)", message):
            return self._unknown_key(match[1])
        key = re.search(r"(?:Parser key \"|argument --)([\w.]+)", message)
        value = re.search(r"(?:Given value: |value: )(.*)", message)
        if key and value and key[1] in HELP:
            text, kind = HELP[key[1]]
            return UserError(f"--{key[1].replace('_', '-')} cannot be {value[1].strip()}: give {ACCEPTED[kind]} ({text})")
        if key and value:
            return UserError(f"--{key[1]} cannot be {value[1].strip()}: see `depthbench fit --help` for what it accepts")
        return UserError(" ".join(message.split())[:LONGEST_MESSAGE])

    def _unknown_key(self, key: str) -> UserError:
        instead = OWNED_BY_THE_PLAN.get(key.removeprefix("trainer."))
        if key.startswith("trainer.") and instead:
            return UserError(f"--{key} is decided by the plan: use --{instead.replace('_', '-')} instead")
        known = [action.dest for action in self._actions if action.dest not in NOT_KEYS and not action.dest.endswith(".help")]
        key, group = key.replace("-", "_"), key.rpartition(".")[0]
        return unknown("key", key, [name for name in known if name.rpartition(".")[0] == group] or known)


class ExperimentCLI(LightningCLI):
    """Parses an Experiment and Lightning's trainer arguments; building and running is training.runs.fit's part."""

    def __init__(self, args: list[str]):
        super().__init__(
            run=False,
            args=args,
            save_config_callback=None,
            auto_configure_optimizers=False,
            parser_class=OneLineErrors,
            parser_kwargs={
                "prog": "depthbench fit",
                "description": "Train one run and record it. Keys may be written with dashes too: --seq-len.",
            },
        )

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        defaults = Experiment()
        for key, (text, kind) in HELP.items():
            parser.add_argument(f"--{key}", type=kind, default=getattr(defaults, key), help=text)
        parser.add_argument("--fresh", action="store_true", help="start over; an existing run folder is kept aside")
        parser.link_arguments("seed", "seed_everything")
        parser.add_class_arguments(Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True, skip=set(OWNED_BY_THE_PLAN))
        parser.set_defaults(TRAINER_DEFAULTS)

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        self.config = parser.parse_args(args)

    def _set_seed(self) -> None:
        """Seeding is training's first act, so that parsing a command says nothing and changes nothing."""

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate(self.config)
        self.experiment = Experiment(**{f.name: self.config[f.name] for f in fields(Experiment)})

    def resolved_config(self, **resolved) -> str:
        """YAML with which ``--config`` repeats this run, with what the plan ``resolved`` in place of what was left open."""
        config = self.config.clone()
        for key in ("config", "fresh", "seed_everything"):
            config.pop(key, None)
        for key, value in resolved.items():
            config[key] = value
        return self.parser.dump(config, skip_unset=True, skip_validation=True)


def parse(args: list[str]) -> ExperimentCLI:
    """Parse ``depthbench fit``'s arguments; ``--seq-len`` and ``--seq_len`` are the same key. Raises UserError in one line."""
    try:
        cli = ExperimentCLI([underscored(arg) for arg in args])
    except UnicodeDecodeError as error:
        raise UserError("--config is no text in UTF-8: give a YAML file, such as a run's config.yaml") from error
    except ImportError as error:
        raise UserError(f"a class that the command names cannot be loaded: {first_line(error)}") from error
    if cli.config.trainer is None or not isinstance(cli.config.fresh, bool):
        raise UserError("in YAML, trainer is a group of keys and fresh is true or false")
    return cli


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def underscored(arg: str) -> str:
    """``--seq-len`` as the parser's ``--seq_len``, and ``--arch.NAME``, an option of the design, as its ``--options.NAME``."""
    flag, equals, value = arg.partition("=")
    if not flag.startswith("--"):
        return arg
    return flag.replace("-", "_").replace("__", "--", 1).replace("--arch.", "--options.", 1) + equals + value
