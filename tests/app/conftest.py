"""Small runs, written by the product's own writer, and the pages over them."""

from __future__ import annotations

import base64
import json
import math
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from depthbench.resources import resource
from depthbench.store.writer import RunWriter

STEPS = 40


def facts(arch="pre_ln", n_layer=4, d_model=128, seed=42, lr=4e-3, **more) -> dict:
    return {
        "run_id": f"{arch}-nano-L{n_layer}-d{d_model}-lr{lr:g}-s{seed}-0123abcd",
        "created_at": datetime(2026, 3, 1, 9, n_layer, seed % 60),
        "arch": arch,
        "size": "nano",
        "budget": "total",
        "ratio": d_model / n_layer,
        "n_layer": n_layer,
        "d_model": d_model,
        "params_total": 2_000_000,
        "params_backbone": 1_400_000,
        "budget_params": 2_000_000,
        "seq_len": 256,
        "batch_tokens": 1024,
        "tokens_planned": STEPS * 1024,
        "lr": lr,
        "seed": seed,
        "corpus": "embedded",
        "corpus_fingerprint": "9f2c61d07ab3",
        "tokenizer": "bpe-2048",
        "precision": "32-true",
        "config": "{}",
    } | more


def scalar(name: str, step: int, value: float) -> dict:
    return {"step": step, "tokens": step * 1024, "wall_s": step * 0.5, "name": name, "value": value}


def statistic(metric: str, step: int, layer: int, value: float, direction="forward") -> dict:
    where = {"layer": layer, "site": "block_out", "direction": direction, "metric": metric}
    return {"step": step, "tokens": step * 1024, "value": value} | where


def write(root: Path, *, status: str | None = "finished", steps: int = STEPS, loss: float = 3.0, nan: bool = False, **run) -> RunWriter:
    """Record a run of ``steps`` steps that ends at validation loss ``loss``; status None leaves the writer open, as in a live run."""
    row = facts(**run)
    writer = RunWriter(root / row["run_id"], row)
    rows = [scalar("train/loss", s, loss + 5 * math.exp(-s / 8)) for s in range(1, steps + 1)]
    rows += [scalar("val/loss", s, loss + (steps - s) / steps) for s in range(10, steps + 1, 10)]
    rows += [scalar("train/grad_norm", s, 1.0) for s in range(1, steps + 1, 5)]
    writer.add("scalars", rows)
    layers = [(s, layer) for s in range(10, steps + 1, 10) for layer in range(row["n_layer"])]
    norms = [statistic("norm", s, layer, math.nan if nan and layer == 1 else s + layer) for s, layer in layers]
    gradients = [statistic("mean", s, layer, 0.1 * (layer - 1), "backward") for s, layer in layers]
    writer.add("layer_stats", norms + gradients)
    writer.drain()
    if status:
        writer.seal(status)
    return writer


@pytest.fixture(scope="session")
def several(tmp_path_factory) -> Path:
    """Two designs at three shapes, one of them with a second seed, one learning rate more, and a run that failed."""
    root = tmp_path_factory.mktemp("several")
    for n_layer, d_model in ((4, 128), (8, 96), (16, 64)):
        write(root, n_layer=n_layer, d_model=d_model, loss=3.0 + n_layer / 100)
        write(root, arch="hc", n_layer=n_layer, d_model=d_model, loss=3.0 - n_layer / 100, nan=n_layer == 8)
    write(root, seed=43, loss=3.24)
    write(root, lr=1e-3, loss=3.5)
    write(root, arch="keel", status="failed", steps=10)
    return root


@pytest.fixture
def open_app(monkeypatch):
    """Opens a page of the app over a runs folder: ``open_app(runs, "views/scaling.py", loss="last")``; keywords are query parameters."""

    def opened(runs: Path, page: str = "views/runs.py", **query) -> AppTest:
        main = resource("app", "main.py")
        monkeypatch.setattr("sys.argv", [str(main), "--runs", str(runs)])
        app = AppTest.from_file(main, default_timeout=30)
        if page != "views/runs.py":
            app.run()  # registers the pages
            app.switch_page(page)
            app.query_params = {}
        app.query_params.update(query)
        return app.run()

    return opened


def figure(app: AppTest, number: int = 0) -> dict:
    """The ``number``-th Plotly figure of the page as the browser gets it, its arrays as lists."""
    return json.loads(app.get("plotly_chart")[number].proto.spec, object_hook=_plain)


def _plain(node: dict):
    if set(node) - {"shape"} != {"dtype", "bdata"}:
        return node
    array = np.frombuffer(base64.b64decode(node["bdata"]), dtype=np.dtype(node["dtype"]))
    return array.reshape([int(n) for n in node["shape"].split(",")] if "shape" in node else -1).tolist()
