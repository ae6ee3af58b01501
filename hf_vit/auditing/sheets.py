"""Contact sheet for each kind of issue, audit.html, and the same sections in report.html."""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..data.issues import Issue
from ..files.output import new_file, write_text
from ..files.pages import data_uri, page_color, render_page
from ..models.image_reading import ImageReadingError, read_for_display

KINDS = {
    "label_error": ("Probable label errors", "Each image with its label and the suggested class."),
    "leak": ("Leaks", "Training images that are also in an evaluation split (the image on the right)."),
    "exact_duplicate": ("Exact duplicates", "The same file twice; the image on the right is kept."),
    "near_duplicate": (
        "Near duplicates",
        "The same picture, re-encoded, resized, mirrored or cropped; the image on the right is kept.",
    ),
    "outlier": ("Outliers", "Images that resemble no other image."),
    "dark": ("Dark images", "Images whose lightest parts are dark."),
    "blurred": ("Blurred images", "Images with far less fine detail than the others."),
    "tiny": ("Tiny images", "Images with far fewer pixels than the others."),
    "odd_shape": ("Odd shapes", "Images that are far longer or wider than the others."),
    "unreadable": ("Unreadable images", "Images that training and evaluation skip."),
}
_SHOWN = 24  # issues on a contact sheet
_TILE, _GAP, _LINE = 144, 12, 16  # pixels of an image, between two, and of a line of text
_COLUMNS = 6  # images in a row
_MAX_LENGTH = 24  # characters of a line


def write_pages(output: Path, issues: Sequence[Issue], files: Mapping[str, dict[str, Any]], dataset: str) -> str:
    """Write a contact sheet for each kind, KIND.png, and audit.html; return the sections of the page as HTML.

    Args:
        files: the images that can be read, {"bytes", "path"} by name.
        dataset: name of the data set.
    """
    sections = []
    for kind, (title, about) in KINDS.items():
        found = [issue for issue in issues if issue.issue == kind]
        if not found:
            continue
        picture = ""
        if kind != "unreadable":
            content = io.BytesIO()
            draw_sheet(found[:_SHOWN], files).save(content, "PNG")
            with new_file(output / f"{kind}.png", overwrite=True) as file:
                file.write_bytes(content.getvalue())
            picture = data_uri("png", content.getvalue())
        sections.append({"title": title, "about": about, "picture": picture, "issues": found, "shown": found[:_SHOWN]})
    content = render_page("hf_vit.auditing", "sections.html.jinja", sections=sections, images=len(files))
    write_text(
        output / "audit.html", render_page("hf_vit.auditing", "page.html.jinja", dataset=dataset, sections=content)
    )
    return content


def draw_sheet(issues: Sequence[Issue], files: Mapping[str, dict[str, Any]]) -> Image.Image:
    """Draw the images of issues with their names and labels; the image that one repeats is next to it."""
    tiles = 2 if any(issue.other for issue in issues) else 1
    columns = min(_COLUMNS // tiles, len(issues))
    width, height = tiles * (_TILE + 2) + _GAP, _TILE + 3 * _LINE + _GAP
    size = columns * width + _GAP, -(-len(issues) // columns) * height + _GAP
    sheet = Image.new("RGB", size, page_color("paper"))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for number, issue in enumerate(issues):
        left, top = number % columns * width + _GAP, number // columns * height + _GAP
        for column, name in enumerate((issue.image, issue.other)[:tiles]):
            x = left + column * (_TILE + 2)
            if name in files:
                with suppress(ImageReadingError):
                    sheet.paste(_thumbnail(files[name]), (x, top))
            draw.text((x, top + _TILE + 2), name[-_MAX_LENGTH:], page_color("ink"), font)
        lines = issue.label, f"→ {issue.suggested}" if issue.suggested else f"{issue.score:.3f}"
        text = "\n".join(line[:_MAX_LENGTH] for line in lines)
        draw.multiline_text((left, top + _TILE + 2 + _LINE), text, page_color("ink"), font)
    return sheet


def _thumbnail(file: dict[str, Any]) -> Image.Image:
    """Read an image as a tile, with its aspect ratio; small images are enlarged without smoothing."""
    image = read_for_display(file, _TILE)
    scale = _TILE / max(image.size)
    size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)
