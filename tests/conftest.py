import logging
import os
import signal
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from huggingface_hub import close_session
from matplotlib.backend_bases import FigureCanvasBase

from hf_vit.cli import main
from hf_vit.conversion import cache

from . import tiny_models
from .blank_figures import print_blank_figure
from .doc_fixtures import write_documents_folder
from .http_servers import Server
from .local_hub import Clients, LocalHub
from .paths import GOLDENS, SHARED
from .photographs import write_colors
from .processes import ForkServer, stop_server
from .tiny_models import VARIANTS, save_quantized, save_tiny

torch.set_num_threads(1)  # the tests run in two processes; threads that wait for each other cost more than they give

logging.getLogger("hf_vit")  # of the usual class: nncf, which OpenVINO may import, sets another for later ones

# Whoever starts the tests in the background has them ignore Ctrl+C, and with them what they start and end with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def assets_cache(tmp_path_factory):
    """A folder for what `hf_vit.load` converts, instead of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("assets")
        patch.setattr(cache, "cached_assets_path", partial(cache.cached_assets_path, assets_dir=folder))
        yield folder


def pytest_unconfigure():
    stop_server()


def pytest_make_parametrize_id(val):
    """Name a collection of plain values by its content; pytest would number it ("fields0")."""
    if not isinstance(val, dict | list | tuple) or not val:
        return None
    text = ", ".join(f"{name}={value}" for name, value in val.items()) if isinstance(val, dict) else str(val)
    is_plain = len(text) <= 60 and text.isascii() and text.isprintable() and "<" not in text
    return text if is_plain else None


def pytest_collection_modifyitems(items):
    """Begin with training: its tests are the longest, and fork best before other tests load runtimes with threads."""
    items.sort(key=lambda item: "training" not in item.path.parts)


@pytest.fixture(scope="session")
def goldens() -> Path:
    """Small checkpoints and what the original JAX code computes from them; see the README in the folder."""
    return GOLDENS


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real images and weights, which are not part of the project."""
    if not (SHARED / "weights").is_dir():
        pytest.skip("the folder of real images and weights is not next to the checkout")
    return SHARED


@pytest.fixture
def fresh_accelerator(monkeypatch):
    """Accelerate on the CPU, which forgets after the test what it was set to."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def blank_figures(monkeypatch):
    """Runs of training whose figures are not drawn."""
    monkeypatch.setattr(FigureCanvasBase, "print_figure", print_blank_figure)


@pytest.fixture
def run_command(capsys):
    """Runs `hf-vit` with a list of arguments; returns what it printed, on standard error where it is to fail."""

    def run(arguments, status: int = 0) -> str:
        assert main(list(map(str, arguments))) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run


@pytest.fixture(scope="session")
def run_without_hf_vit(tmp_path_factory):
    """Runs code next to a folder, its argument, in a process that has transformers and cannot import hf_vit."""
    home = tmp_path_factory.mktemp("home")
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    server = ForkServer(home / "runs", {**os.environ, **offline}, has_hf_vit=False)

    def run(code: str, folder: Path) -> str:
        modules = folder.parent / "modules"  # where transformers keeps the code of folders
        modules.mkdir()
        prelude = f"""
            import sys
            from transformers import dynamic_module_utils
            sys.modules["hf_vit"], sys.argv = None, ["", {str(folder)!r}]
            dynamic_module_utils.HF_MODULES_CACHE = {str(modules)!r}
        """
        process = server.start(textwrap.dedent(prelude) + textwrap.dedent(code), cwd=folder.parent)
        printed, error = process.wait()
        assert process.status == 0, error
        return printed

    yield run
    server.stop()


@pytest.fixture
def serve(monkeypatch):
    """Starts a server that answers by a function of the request, and that downloads may use; see http_servers.py."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_VIT_ALLOW", "http,private")
    close_session()  # of an earlier test, with its environment
    servers = []

    def start(answer) -> Server:
        servers.append(Server(answer))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,)).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
    close_session()


@pytest.fixture(scope="session")
def quantized(tmp_path_factory) -> Path:
    """A folder of `hf-vit quantize`; the float32 folder and the images are next to it."""
    pytest.importorskip("nncf", reason="nncf (extra quantization) is not installed")
    return save_quantized(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="session")
def timm():
    """timm, which judges what is read from it and written for it; skips the test where it is not installed."""
    return pytest.importorskip("timm", reason="timm is not installed")


@pytest.fixture(scope="session")
def onnxruntime():
    """ONNX Runtime; skips the test where it, or what writes programs for it, is not installed."""
    pytest.importorskip("onnxscript", reason="the extra export is not installed")
    return pytest.importorskip("onnxruntime", reason="the extra export is not installed")


@pytest.fixture
def web_runtime(tmp_path):
    """The npm package that runs programs in a browser, without its content."""
    dist = tmp_path / "onnxruntime-web" / "dist"
    dist.mkdir(parents=True)
    for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"):
        (dist / name).write_text(name)
    return dist.parent


@pytest.fixture(scope="session")
def doc_fixtures(tmp_path_factory) -> Path:
    """Return a folder with the files that the pages use, in `folder`, and with what replaces downloads."""
    root = tmp_path_factory.mktemp("doc_fixtures")
    write_documents_folder(root)
    return root


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny classifier with its image processor."""
    return save_tiny(tmp_path / "folder")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny classifier with a pre-logits layer of 10 and its image processor; not to be changed."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", patch_size=4, representation_size=10)


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS)
def model(request):
    """A tiny classifier of every variant."""
    return tiny_models.tiny(**request.param)


HUB_TOKENS = {
    "hf_alice": {"name": "alice", "orgs": ["acme"]},
    "hf_bob": {"name": "bob"},
    "hf_me": {"name": "me", "orgs": ["google", "ILSVRC", "AI-Lab-Makerere", "timm"]},
    "hf_reader": {"name": "alice", "role": "read"},
}


@pytest.fixture(scope="session")
def _hub_and_clients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    with LocalHub(HUB_TOKENS) as hub:
        clients = Clients(hub, folder / "clients")
        yield hub, clients
        clients.stop()


@pytest.fixture
def hub(_hub_and_clients):
    """A Hub on this machine, with nothing in it; see local_hub.py."""
    hub, _ = _hub_and_clients
    hub.clear()
    return hub


@pytest.fixture
def client(hub, _hub_and_clients):
    """Runs Python code, or `hf-vit` with a list of arguments, as a user of the Hub, with a fresh cache."""
    return _hub_and_clients[1]


@pytest.fixture(scope="session")
def colors(tmp_path_factory) -> Path:
    """Images of three colors: 8 each for training, 5 each for testing; one red test image is broken."""
    root = write_colors(tmp_path_factory.mktemp("colors"), train=8, test=5)
    (root / "test" / "red" / "3.png").write_bytes(b"this is no picture")
    return root
