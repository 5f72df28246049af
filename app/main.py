"""The dashboard's router: `depthbench app`, or `streamlit run app/main.py -- --runs DIR`.

Every file in views/ is a page. It says where it belongs in a literal ``PAGE = {"title", "icon", "order"}``, so a new page is one new file.
The folder is not called pages/: Streamlit takes one of that name for its older kind of app, whose first visitor comes past the router.
"""

from __future__ import annotations

import ast
from pathlib import Path

import streamlit as st
from parts import data

HERE = Path(__file__).parent


def pages() -> list[st.Page]:
    """The pages of views/ in their order; PAGE is read without running the page."""
    found = []
    for path in (HERE / "views").glob("[!_]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PAGE":
                page = ast.literal_eval(node.value)
                found.append((page["order"], path, page))
    (_, first, front), *others = sorted(found, key=lambda entry: entry[0])
    return [
        st.Page(first, title=front["title"], icon=front["icon"], url_path="home", default=True),
        *(st.Page(path, title=page["title"], icon=page["icon"], url_path=path.stem) for _, path, page in others),
        # The default page is served at / alone: under its own name it is found too.
        st.Page(first, title=front["title"], icon=front["icon"], url_path=first.stem, visibility="hidden"),
    ]


st.set_page_config(page_title="DepthBench", page_icon=HERE / "icon.png", layout="wide")
st.logo(HERE / "logo.svg", size="large")
page = st.navigation(pages())
st.sidebar.caption(f"runs folder `{data.runs_dir().name}`", help=f"`{data.runs_dir().absolute()}`")
page.run()
