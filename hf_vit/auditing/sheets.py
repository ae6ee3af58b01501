"""audit.html with a contact sheet for each kind of issue, and the same sections in report.html."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.issues import Issue
from ..evaluation.result_page import thumbnail
from ..files.output import write_text
from ..files.pages import render_page

KINDS = {
    "label_error": ("Probable label errors", "Each image with its label and the suggested class."),
    "leak": ("Leaks", "Training images that are also in an evaluation split (the image below)."),
    "exact_duplicate": ("Exact duplicates", "The same file twice; the image below is kept."),
    "near_duplicate": (
        "Near duplicates",
        "The same picture, re-encoded, resized, mirrored or cropped; the image below is kept.",
    ),
    "outlier": ("Outliers", "Images that resemble no other image."),
    "dark": ("Dark images", "Images whose lightest parts are dark."),
    "blurred": ("Blurred images", "Images with far less fine detail than the others."),
    "tiny": ("Tiny images", "Images with far fewer pixels than the others."),
    "odd_shape": ("Odd shapes", "Images that are far longer or wider than the others."),
    "unreadable": ("Unreadable images", "Images that training and evaluation skip."),
}
_SHOWN = 24  # issues of a kind


def write_page(output: Path, issues: Sequence[Issue], files: Mapping[str, dict[str, Any]], dataset: str) -> str:
    """Write audit.html; return the sections of the page as HTML.

    Args:
        files: the images that can be read, {"bytes", "path"} by name.
        dataset: name of the data set.
    """
    sections = []
    for kind, (title, about) in KINDS.items():
        if found := [issue for issue in issues if issue.issue == kind]:
            names = {name for issue in found[:_SHOWN] for name in (issue.image, issue.other) if name in files}
            pictures = {name: thumbnail(files[name]) for name in names}
            about = {"title": title, "about": about, "number": len(found), "pictures": pictures}
            sections.append({**about, "shown": found[:_SHOWN]})
    content = render_page("hf_vit.auditing", "sections.html.jinja", sections=sections, images=len(files))
    page = render_page("hf_vit.auditing", "page.html.jinja", dataset=dataset, sections=content)
    write_text(output / "audit.html", page)
    return content
