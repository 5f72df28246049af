"""The command line of `fit`: what it accepts, what it prints, and what it says of a mistake."""

import pytest
import yaml

from depthbench.errors import UserError
from depthbench.quantities import whole_number
from depthbench.training.cli import parse


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2000000", 2_000_000),
        ("2e6", 2_000_000),
        ("2M", 2_000_000),
        ("1.5m", 1_500_000),
        ("8B", 8_000_000_000),
        ("4_096", 4096),
        (300, 300),
    ],
)
def test_token_counts(text, count):
    assert whole_number(text, "--tokens") == count


def test_defaults_are_the_main_job():
    asked = parse([]).experiment
    assert (asked.arch, asked.size, asked.budget, asked.seed, asked.ratio) == ("pre_ln", "nano", "total", 42, None)


def test_dashes_and_underscores_are_the_same_key():
    dashed = parse(["--seq-len", "128", "--batch-tokens=4k", "--micro-batch", "2"]).experiment
    assert dashed == parse(["--seq_len=128", "--batch_tokens", "4000", "--micro_batch", "2"]).experiment
    assert (dashed.seq_len, dashed.batch_tokens, dashed.micro_batch) == (128, 4000, 2)


def test_a_config_file_gives_what_flags_give_and_flags_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("arch: pre_ln\nratio: 16\ntokens: 2M\ntrainer:\n  max_steps: 20\n")
    cli = parse(["--config", str(file), "--ratio", "8"])
    assert (cli.experiment.ratio, cli.experiment.tokens, cli.config.trainer.max_steps) == (8.0, 2_000_000, 20)


def test_options_of_the_design_come_one_by_one_or_from_yaml_and_flags_win(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("arch: hc\noptions: {streams: 2, dynamic: false}\n")
    asked = parse(["--config", str(file), "--arch.streams", "3", "--arch.norm-then-sum=true", "--arch.mix_eps", "1e-8"]).experiment
    assert asked.options == {"streams": 3, "dynamic": False, "norm_then_sum": True, "mix_eps": 1e-8}
    assert parse([]).experiment.options == {}


def test_the_resolved_config_repeats_the_command(tmp_path):
    first = parse(["--ratio", "16", "--arch.streams", "2", "--tokens", "3M", "--trainer.max_steps", "7"])
    file = tmp_path / "again.yaml"
    file.write_text(first.resolved_config())
    again = parse(["--config", str(file)])
    assert again.experiment == first.experiment
    assert again.config.trainer.max_steps == 7


def test_print_config_prints_yaml_with_lightnings_keys_under_trainer(capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--ratio", "16", "--print_config"])
    assert left.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["ratio"] == 16 and printed["arch"] == "pre_ln"
    assert {"accelerator", "devices", "strategy", "max_steps", "logger", "callbacks"} <= printed["trainer"].keys()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--raito", "32"], "unknown key 'raito': did you mean 'ratio'?"),
        (["--trainer.max_stepz", "3"], "unknown key 'trainer.max_stepz': did you mean 'trainer.max_steps'?"),
        (["--ratio", "wide"], "--ratio cannot be wide"),
        (["--arch.streams"], "expected one argument"),
        (["--options", "3"], "give names with values"),
        (["--tokens", "many"], "--tokens is 'many', no whole number"),
        (["--trainer.accumulate_grad_batches", "4"], "use --micro-batch instead"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["stray"], "stray"),
    ],
)
def test_mistakes_are_one_line(arguments, says):
    with pytest.raises(UserError) as error:
        parse(arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raito: 32\n", "unknown key 'raito': did you mean 'ratio'?"),
        ("trainer:\n  max_stepz: 3\n", "unknown key 'trainer.max_stepz': did you mean 'trainer.max_steps'?"),
        ("ratio: [1\n", "config"),
        ("trainer:\n  max_steps: some\n", "trainer.max_steps"),
    ],
)
def test_mistakes_in_yaml_are_one_line(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        parse(["--config", str(file)])
    assert says in str(error.value)
    assert "\n" not in str(error.value)
