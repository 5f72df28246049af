import numpy as np
import pytest

from depthbench.errors import UserError
from depthbench.store.runs import DECIDES, find_run, run_id

FACTS = {
    **{"arch": "pre_ln", "options": {}, "size": "nano", "n_layer": 5, "d_model": 160, "n_head": 2, "n_kv_head": 2, "head_dim": 80},
    **{"d_ff": 432, "vocab_size": 2048, "seq_len": 256, "corpus_fingerprint": "ab12", "lr": 4e-3, "batch_tokens": 1024},
    "recipe": {"betas": (0.9, 0.95), "weight_decay": 0.1, "warmup": 0.1, "clip": 1.0},
    **{"tokens_planned": 1_000_000, "max_steps": None, "seed": 42, "precision": "32-true"},
}


def test_a_run_id_is_readable_and_stays_the_same():
    """The literal is the point: a release that names the same run otherwise no longer finds what it trained before."""
    assert run_id(FACTS) == "pre_ln-nano-L5-d160-lr4e-3-s42-49aea85b"


def test_a_run_id_depends_on_all_that_decides_and_on_nothing_else():
    ids = {run_id(FACTS)}
    for name in DECIDES:
        ids.add(run_id({**FACTS, name: {"other": 1} if isinstance(FACTS[name], dict) else 7 if name != "arch" else "mhc"}))
    assert len(ids) == len(DECIDES) + 1
    assert run_id({**FACTS, "devices": 8, "version": "9", "compile": True, "runs": "/elsewhere"}) == run_id(FACTS)


def test_a_run_id_does_not_depend_on_how_a_value_is_written():
    same = {"lr": np.float64(0.004), "seed": np.int64(42), "tokens_planned": 1e6}
    recipe = {"clip": 1, "warmup": 0.1, "weight_decay": np.float64(0.1), "betas": [0.9, 0.95]}
    assert run_id(dict(reversed({**FACTS, **same, "recipe": recipe}.items()))) == run_id(FACTS)


@pytest.mark.parametrize(("lr", "shown"), [(3.5e-3, "lr3.5e-3"), (1e-4, "lr1e-4"), (1, "lr1e0"), (0.00025, "lr2.5e-4"), (0.0, "lr0e0")])
def test_learning_rates_are_shown_as_people_write_them(lr, shown):
    assert run_id({**FACTS, "lr": lr}).split("-d160-")[1].rsplit("-s42-")[0] == shown


def test_a_users_own_design_makes_a_folder_name():
    assert run_id({**FACTS, "arch": "my/module.My Design", "size": None}).startswith("my_module.My_Design-L5-d160-")


def test_a_missing_fact_is_refused():
    with pytest.raises(ValueError, match="seed"):
        run_id({name: value for name, value in FACTS.items() if name != "seed"})


@pytest.fixture
def runs_dir(tmp_path):
    for name in ("pre_ln-nano-1", "pre_ln-nano-12", "mhc-nano-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.duckdb").touch()
    return tmp_path / "runs"


def test_a_run_is_found_by_id_prefix_and_folder(runs_dir, tmp_path, monkeypatch):
    assert find_run(runs_dir, "pre_ln-nano-1") == runs_dir / "pre_ln-nano-1"  # the id, though another run begins with it
    assert find_run(runs_dir, "mhc") == runs_dir / "mhc-nano-1"
    assert find_run(tmp_path / "elsewhere", str(runs_dir / "mhc-nano-1")) == runs_dir / "mhc-nano-1"
    monkeypatch.chdir(runs_dir / "mhc-nano-1")
    assert find_run(tmp_path / "elsewhere", ".").resolve() == runs_dir / "mhc-nano-1"


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("pre", r"run 'pre' means 2 runs \(pre_ln-nano-1, pre_ln-nano-12\): give more of the id"),
        ("mch-nano-1", "unknown run 'mch-nano-1': did you mean 'mhc-nano-1'"),
        ("", "unknown run ''"),
    ],
)
def test_what_means_no_single_run_is_the_users_error(runs_dir, ref, message):
    with pytest.raises(UserError, match=message):
        find_run(runs_dir, ref)


def test_among_many_runs_the_nearest_are_named(runs_dir):
    for n in range(30):
        (runs_dir / f"other-{n}").mkdir()
        (runs_dir / f"other-{n}" / "metrics.duckdb").touch()
    with pytest.raises(UserError, match=r"no run 'mhc-nano-2' in .*; the nearest: mhc-nano-1, ") as error:
        find_run(runs_dir, "mhc-nano-2")
    assert len(str(error.value)) < 300


def test_no_runs_at_all_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match="depthbench fit --arch pre_ln --ratio 32"):
        find_run(tmp_path, "x")
