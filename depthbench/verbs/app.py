"""`depthbench app`: the dashboard in this process, until Ctrl-C."""

from __future__ import annotations

import argparse
import errno
import socket
from pathlib import Path

from depthbench.errors import UserError
from depthbench.resources import resource

FIRST_PORT, LAST_PORT = 8501, 8520


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", metavar="N", type=int, help=f"the port (default: the first free one from {FIRST_PORT})")
    parser.add_argument(
        "--host", default="localhost", help="the address to listen on; 0.0.0.0 lets other machines in (default: %(default)s)"
    )
    parser.add_argument("--no-browser", action="store_true", help="open no browser, only print the address")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted. Raises UserError when the port cannot be used."""
    port = free_port(args.host) if args.port is None else check_port(args.host, args.port)
    runs = Path(args.runs).expanduser().absolute()
    print(f"DepthBench dashboard of {runs}: http://{args.host}:{port} (Ctrl-C ends it)", flush=True)

    from streamlit.web import cli

    cli.main(prog_name="streamlit", args=streamlit_arguments(args.host, port, runs, browser=not args.no_browser), standalone_mode=False)
    return 0


def streamlit_arguments(host: str, port: int, runs: Path, *, browser: bool) -> list[str]:
    """Arguments of `streamlit`: what a tool that is run by others must not do (ask for an e-mail, send statistics) is switched off."""
    flags = {
        "server.address": host,
        "server.port": port,
        "server.headless": not browser,
        "server.showEmailPrompt": False,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "logger.hideWelcomeMessage": True,
    }
    written = [word for name, value in flags.items() for word in (f"--{name}", str(value).lower())]
    return ["run", str(resource("app", "main.py")), *written, "--", "--runs", str(runs)]


def check_port(host: str, port: int) -> int:
    """``port`` if a server can listen on it; UserError if not."""
    if not 0 < port < 65536:
        raise UserError(f"--port {port} is no port: give one from 1 to 65535")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except PermissionError:
        raise UserError(f"port {port} needs more rights than yours: give one above 1023 with --port N") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use: give another with --port N, or end what listens there") from None
        raise UserError(f"cannot listen on --host {host} ({error}): give an address of this machine, e.g. localhost") from None
    return port


def free_port(host: str) -> int:
    """The first free port of the range that is tried."""
    for port in range(FIRST_PORT, LAST_PORT + 1):
        try:
            return check_port(host, port)
        except UserError as error:
            if "in use" not in str(error):
                raise
    raise UserError(f"ports {FIRST_PORT} to {LAST_PORT} are all in use: give a free one with --port N")
