"""`hf-vit demo FOLDER`: a page that classifies a picture and shows where the model looks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..analysis import attention_rollout
from ..analysis.inspection import visible_image
from ..analysis.observing import as_images
from ..models.loading import load
from ..models.prediction import most_likely

_TOP_K = 5
_SHOWN_SIZE = 448  # pixels of the shorter side, at least
_DARKEST = 0.15  # of the brightness, where the model does not look


class Demo:
    """A classifier and its image processor.

    Args:
        folder: of `save_pretrained`, or a name on the Hub.

    Raises:
        ValueError: the folder holds no classifier, a ResNet, or a model that names a class for every patch.
    """

    def __init__(self, folder: str | Path):
        self._model, self._processor = load(folder)
        if not hasattr(self._model, "classifier"):
            raise ValueError(f"{folder} holds {type(self._model).__name__}, which names no classes")
        if not hasattr(self._model.config, "pooling"):
            raise ValueError(f"{folder} holds a ResNet, which has no attention to show")
        if self._model.config.pooling == "none":
            raise ValueError(f"{folder} classifies every patch, not the picture; a demo needs another pooling")

    @torch.inference_mode()
    def look(self, picture: str | Path) -> tuple[dict[str, float], Image.Image]:
        """The most likely classes with their probabilities, and what the model saw, bright where it looks."""
        pixel_values = as_images(self._processor(str(picture), return_tensors="pt"), self._model.config)
        seen = visible_image(pixel_values[0], self._processor)
        shown = highlight(seen, attention_rollout(self._model, pixel_values)[0])
        return self._top_classes(self._model(pixel_values, interpolate_pos_encoding=True).logits), shown

    def _top_classes(self, logits: torch.Tensor) -> dict[str, float]:
        """(1, num_labels) -> the likeliest labels, most likely first; ImageNet has two cranes"""
        labels = self._model.config.id2label or {}
        numbered = {int(index): f"{label} (class {index})" for index, label in labels.items()}
        found: dict[str, float] = {}
        for label, score in most_likely(logits, numbered, _TOP_K)[0]:
            plain = label.rpartition(" (class ")[0]
            found[label if plain in found else plain] = score
        return found


def highlight(seen: np.ndarray, attention: np.ndarray) -> Image.Image:
    """A picture that is dark where the model does not look.

    Args:
        seen: (height, width, 3) or (height, width), in [0, 1].
        attention: (rows, columns); the patch with the least is darkest, the one with the most as bright as it is.
    """
    height, width = seen.shape[:2]
    least, most = attention.min(), attention.max()
    attention = (attention - least) / (most - least) if most > least else np.ones_like(attention)
    factor = max(1, round(_SHOWN_SIZE / min(height, width)))
    size = (width * factor, height * factor)
    picture = Image.fromarray((seen * 255).round().astype(np.uint8)).convert("RGB").resize(size)
    light = Image.fromarray(attention.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    brightness = _DARKEST + (1 - _DARKEST) * np.asarray(light).clip(0, 1)[..., None]
    return Image.fromarray((np.asarray(picture) * brightness).round().astype(np.uint8))


def _build_page(folder: str | Path) -> Any:
    """The page, a `gradio.Interface`.

    Raises:
        ImportError: gradio is not installed.
    """
    try:
        import gradio
    except ImportError as error:
        raise ImportError("gradio is not installed: pip install 'hf_vit[demo]'") from error

    demo = Demo(folder)

    def look(picture: str | None):
        if picture is None:
            return None, None
        try:
            return demo.look(picture)
        except ValueError as error:
            raise gradio.Error(str(error)) from error

    return gradio.Interface(
        look,
        inputs=gradio.Image(type="filepath", image_mode=None, label="Picture"),
        outputs=[
            gradio.Label(num_top_classes=_TOP_K, label="Classes"),
            gradio.Image(format="png", label="Where the model looks", buttons=["download", "fullscreen"]),
        ],
        title=Path(folder).name,
        live=True,  # as soon as a picture is there
        flagging_mode="never",
        analytics_enabled=False,
    )


def serve(folder: str | Path, host: str = "127.0.0.1", port: int | None = None, open_browser: bool = False) -> None:
    """Show the page until interrupted.

    Args:
        host: "0.0.0.0" lets other machines see it too.
        port: the first free one from 7860 by default.
    """
    page = _build_page(folder)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
        share=False,
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
    )
    print(f"{folder} is shown at {address} (Ctrl+C ends it)", flush=True)
    page.block_thread()
