"""`depthbench app`: what is passed to Streamlit, and ports that cannot be had."""

from __future__ import annotations

import argparse
import socket

import pytest
from streamlit.web import cli

from depthbench.errors import UserError
from depthbench.verbs import app


@pytest.fixture
def launched(monkeypatch):
    """The arguments Streamlit would have been started with."""
    calls = []
    monkeypatch.setattr(cli, "main", lambda *, prog_name, args, standalone_mode: calls.append(args))
    return calls


@pytest.fixture
def taken():
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        server.listen()
        yield server.getsockname()[1]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default="runs")
    app.add_arguments(parser)
    return parser.parse_args(words)


def test_it_serves_the_shipped_app_and_asks_no_questions(launched, tmp_path, capsys):
    port = app.free_port("localhost")
    assert app.run(parse("--runs", str(tmp_path), "--port", str(port), "--no-browser")) == 0
    (args,) = launched
    assert args[0] == "run" and args[1].endswith("main.py")
    assert args[-3:] == ["--", "--runs", str(tmp_path)]
    flags = dict(zip(args[2:-3:2], args[3:-3:2], strict=True))
    assert flags["--server.port"] == str(port)
    assert flags["--server.headless"] == "true"
    assert flags["--server.showEmailPrompt"] == flags["--browser.gatherUsageStats"] == "false"
    assert f"http://localhost:{port}" in capsys.readouterr().out


def test_every_flag_is_known_to_streamlit(launched):
    from streamlit import config

    app.run(parse())
    flags = [word.removeprefix("--") for word in launched[0] if word.startswith("--") and word not in ("--", "--runs")]
    assert flags and set(flags) <= set(config.get_config_options())


def test_a_browser_is_opened_unless_refused(launched):
    app.run(parse())
    assert launched[0][launched[0].index("--server.headless") + 1] == "false"


def test_the_runs_folder_is_absolute_because_streamlit_may_not_run_here(launched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app.run(parse("--runs", "elsewhere"))
    assert launched[0][-1] == str(tmp_path / "elsewhere")


def test_a_port_in_use_is_one_line_that_says_how_to_go_on(launched, taken):
    with pytest.raises(UserError, match=f"port {taken} is in use: give another with --port"):
        app.run(parse("--port", str(taken)))
    assert not launched


def test_without_a_port_the_next_free_one_is_taken(launched, taken, monkeypatch):
    monkeypatch.setattr(app, "FIRST_PORT", taken)
    monkeypatch.setattr(app, "LAST_PORT", taken + 20)
    app.run(parse())
    port = int(launched[0][launched[0].index("--server.port") + 1])
    assert taken < port <= taken + 20


def test_when_no_port_is_free_it_says_so(launched, taken, monkeypatch):
    monkeypatch.setattr(app, "FIRST_PORT", taken)
    monkeypatch.setattr(app, "LAST_PORT", taken)
    with pytest.raises(UserError, match="all in use: give a free one with --port"):
        app.run(parse())


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_a_number_that_is_no_port_is_refused(launched, port):
    with pytest.raises(UserError, match="is no port"):
        app.run(parse(f"--port={port}"))


def test_an_address_of_another_machine_is_refused(launched):
    with pytest.raises(UserError, match="cannot listen on --host 192.0.2.1"):
        app.run(parse("--host", "192.0.2.1"))
