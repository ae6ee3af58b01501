"""Folders that tests read."""

import json
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDENS = ROOT / "tests" / "goldens"
MORE = GOLDENS / "more"
PEERS = ROOT / "tests" / "goldens_peers"
RECIPES = ROOT / "training" / "recipes"
# Real images and weights, which are not part of the project
SHARED = Path(os.environ.get("HF_VIT_SHARED", ROOT.parent / "shared"))
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


def golden_runs(*families: str, folder: Path = GOLDENS) -> list[dict]:
    """The runs of a folder's index.json (goldens/, goldens/more/) that belong to a model family."""
    runs = json.loads((folder / "index.json").read_text())
    return [run for run in runs if run["family"] in families]
