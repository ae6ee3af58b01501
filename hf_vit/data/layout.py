"""The rule by which folders and files become splits and classes.

A split is the whole name of a folder, or of a Parquet or tar file, in any case: train, training; val, valid,
validation, dev, eval; test, testing; holdout. A word inside the name of a class or of an image means nothing. Three
layouts of images are known: CLASS/IMAGE, SPLIT/CLASS/IMAGE and CLASS/SPLIT/IMAGE. A folder that can be read in two ways
is an error, and `layout` chooses: "class" (no name is a split) or "split/class" (every folder at the top is one). What
is not used is named.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from ..files.messages import join_names

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev", "eval"),
    "test": ("test", "testing"),
    "holdout": ("holdout",),
}
EVALUATION_SPLITS = ("validation", "test", "holdout")  # the first existing one is used
_SPLIT_OF = {name: split for split, names in SPLIT_NAMES.items() for name in names}
_NUMBERING = re.compile(r"([-_. ]*(\d+|of))+$")  # the end of train-00000-of-00010
_OPTION = "--layout class takes no name for a split, --layout split/class takes each folder at the top for one"

# Reasons for which something is not used, or needs a look
TOO_DEEP = "not used, images one folder too deep"
STRAY = "not used, images beside the folders"
NO_SPLIT = "not used, images of folders whose name is no split"
NO_CLASSES = "not used, images of a split without class folders"
EQUAL_NAMES = "classes whose names differ by case only"


def split_named(name: str) -> str | None:
    """Return the split that a whole name means, in any case: "Val" is "validation"; None: it means none."""
    return _SPLIT_OF.get(name.strip().lower())


def resolve_split(wanted: str, names: Iterable[str]) -> str:
    """Return the split of a data set that a name means: "validation" for "val"; an unknown one is returned as is.

    Raises:
        ValueError: it means several.
    """
    names = list(names)
    meaning = split_named(wanted)
    found = [name for name in names if split_named(name) == meaning]
    if wanted in names or meaning is None or not found:
        return wanted
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} both name the split {meaning}: choose one by its own name, such as "
            f"--eval-split {found[0]}"
        )
    return found[0]


@dataclass
class Folder:
    """A folder with images, at any depth.

    Args:
        path: relative to the folder of the data set, with a slash at its end; "" for that folder itself.
        images: names of the images directly in it.
        folders: those of its folders that have images, sorted.
    """

    path: str
    images: list[str] = field(default_factory=list)
    folders: list["Folder"] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    def below(self) -> list["Folder"]:
        """Return this folder and all folders in it that have images directly, sorted by path."""
        found = [self] if self.images else []
        return found + [inner for folder in self.folders for inner in folder.below()]

    def files(self) -> list[str]:
        """Return the paths of all images in it, at any depth."""
        return [folder.path + image for folder in self.below() for image in folder.images]


@dataclass
class Arrangement:
    """Splits and classes of a folder of images.

    Args:
        splits: for each split the folders of each class, whose images are those directly in them; the class None has
            the images without a class.
        sources: for each split the paths of the user's folders.
        unused: names of what is not used, by reason.
    """

    splits: dict[str, dict[str | None, list[Folder]]] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, split: str, classes: dict[str | None, list[Folder]], source: Folder) -> None:
        """Add a split, or classes to it."""
        self.splits.setdefault(split, {}).update(classes)
        self.sources.setdefault(split, []).append(source.path)


def arrange(root: Folder, title: str, layout: str | None = None) -> Arrangement:
    """Find the splits and the classes of a folder of images.

    Args:
        root: the folder of the data set; not empty.
        title: its name, for messages.
        layout: "class" or "split/class"; by default it is found.

    Raises:
        ValueError: the folder can be read in two ways, or has no known layout; the message names the user's folders.
    """
    found = Arrangement()
    if layout == "class":
        classes: dict[str | None, list[Folder]] = {folder.name: folder.below() for folder in root.folders}
        found.unused[STRAY] += [root.path + image for image in root.images if classes]
        found.add("train", classes or {None: [root]}, root)
        return found
    while layout is None and _is_wrapper(root):
        found.unused[STRAY] += [root.path + image for image in root.images]
        (root,) = root.folders
    named = [folder for folder in root.folders if layout or split_named(folder.name)]
    others = [folder for folder in root.folders if folder not in named]
    if not named:
        if not _add_splits_of_classes(found, root, title):
            found.add("train", _classes(found, root, title), root)
    elif others and not _are_splits(named, others):
        _refuse_mixture(named, others, title)
    elif len(root.folders) == 1 and named[0].folders and all(split_named(inner.name) for inner in named[0].folders):
        raise ValueError(
            f"{title} can be read in two ways: {_paths(named[0].folders)} may be splits or classes: choose the folder "
            f"of the splits with --dataset {title}/{named[0].path.rstrip('/')}, or name the layout ({_OPTION})"
        )
    else:
        _add_splits(found, root, named, others, title)
    for classes in found.splits.values():
        _name_equal_classes(found, classes)
    return found


def _is_wrapper(root: Folder) -> bool:
    """Return whether a folder only wraps another one, as unpacked archives do."""
    if len(root.folders) != 1 or split_named(root.folders[0].name):
        return False
    (inner,) = root.folders
    return len(inner.folders) > 1 or (len(inner.folders) == 1 and not inner.images and not root.images)


def _are_splits(named: list[Folder], others: list[Folder]) -> bool:
    """Return whether folders that are called like splits are splits, though there are others beside them."""
    with_classes = [folder for folder in named if folder.folders]
    if len(named) > 1 and with_classes:
        return True
    names = {inner.name for folder in named for inner in folder.folders}
    return bool(with_classes) and all(names & {inner.name for inner in folder.folders} for folder in others)


def _refuse_mixture(named: list[Folder], others: list[Folder], title: str) -> NoReturn:
    """Raise ValueError for folders that may be splits or classes."""
    several = "splits" if len(named) > 1 else "a split"
    raise ValueError(
        f"{title} can be read in two ways: {_paths(named)} may be {several} or, like {_paths(others)}, classes "
        f"({_OPTION})"
    )


def _add_splits(found: Arrangement, root: Folder, named: list[Folder], others: list[Folder], title: str) -> None:
    """Add the layout SPLIT/CLASS/IMAGE."""
    with_classes = any(folder.folders for folder in named)
    without = [folder for folder in named if with_classes and not folder.folders]
    for folder in without:
        if split_named(folder.name) == "train":
            have = _paths([other for other in named if other.folders])
            raise ValueError(
                f"{folder.path} of {title} has images but no class folders, while {have} has class folders"
            )
        found.unused[NO_CLASSES] += folder.files()
    used = [folder for folder in named if folder not in without]
    keys = _keys(used, title)
    for folder in used:
        found.add(keys[folder.path], _classes(found, folder, title), folder)
    if root.images and not with_classes and "train" not in found.splits:
        found.add("train", {None: [Folder(root.path, root.images)]}, root)
    else:
        found.unused[STRAY] += [root.path + image for image in root.images]
    for folder in others:  # they can be named, as --eval-split valid_2024
        key = split_key(folder.name)
        is_plain = bool(folder.folders) and all(inner.images and not inner.folders for inner in folder.folders)
        if is_plain and key not in found.splits:
            found.unused[STRAY] += [folder.path + image for image in folder.images]
            found.add(key, {inner.name: [inner] for inner in folder.folders}, folder)
        else:
            found.unused[NO_SPLIT] += folder.files()


def split_key(name: str) -> str:
    """Return the split that a name means, or the name itself; `datasets` takes letters, digits and underscores."""
    key = re.sub(r"\W+", "_", name).strip("_") or "others"
    return split_named(name) or (f"{key}_" if split_named(key) else key)


def _own_key(name: str) -> str:
    return re.sub(r"\W+", "_", name).strip("_")


def _keys(folders: list[Folder], title: str) -> dict[str, str]:
    """Return the split of each folder, by its path; two folders of one meaning are called by their own names."""
    meanings = {folder.path: split_key(folder.name) for folder in folders}
    keys = {}
    for folder in folders:
        meaning = meanings[folder.path]
        same = [other for other in folders if meanings[other.path] == meaning]
        keys[folder.path] = meaning if len(same) == 1 else _own_key(folder.name)
        if len(same) > 1 and (meaning == "train" or keys[folder.path] == meaning):
            raise ValueError(
                f"{_paths(same)} of {title} both name the split {meaning}: rename one, or choose one with "
                f"--dataset {title}/{same[0].path.rstrip('/')}"
            )
    return keys


def _add_splits_of_classes(found: Arrangement, root: Folder, title: str) -> bool:
    """Add the layout CLASS/SPLIT/IMAGE; return whether it is that."""
    inner = [folder for folder in root.folders for folder in folder.folders]
    is_class_first = len(root.folders) > 1 and not any(folder.images for folder in root.folders)
    if not is_class_first or not all(split_named(folder.name) and not folder.folders for folder in inner):
        return False
    for folder in root.folders:
        keys = _keys(folder.folders, title)
        for split in folder.folders:
            found.add(keys[split.path], {folder.name: [split]}, split)
    found.unused[STRAY] += [root.path + image for image in root.images]
    return True


def _classes(found: Arrangement, folder: Folder, title: str) -> dict[str | None, list[Folder]]:
    """Return the classes of a split: its folders, with the images directly in them."""
    holding = [inner for inner in folder.folders if inner.images]
    outer = [inner for inner in folder.folders if not inner.images]  # which have folders of images
    if len(outer) == 1 and not holding and not folder.images and not split_named(outer[0].name):
        return _classes(found, outer[0], title)
    if len(folder.folders) < 2 and (folder.images or not folder.folders):
        return {None: _without_classes(folder, title)}
    if holding and outer:
        option = "" if split_named(folder.name) else ", or take all images below a class with --layout class"
        raise ValueError(
            f"{_paths(outer)} of {title} have images one folder too deep, such as {outer[0].files()[0]}, and "
            f"{_paths(holding)} have not: move them{option}"
        )
    found.unused[STRAY] += [folder.path + image for image in folder.images]
    classes: dict[str | None, list[Folder]] = {inner.name: [inner] for inner in holding}
    inner_folders = [inner for group in outer for inner in group.folders]
    if len(outer) > 1 and len(inner_folders) == len(outer) and len({inner.name for inner in inner_folders}) == 1:
        classes = {group.name: group.folders for group in outer}  # CLASS/images/IMAGE, as in Tiny ImageNet
    elif outer:
        classes = _inner_classes(outer, title)
    for (inner,) in classes.values():
        if not inner.images:
            raise ValueError(
                f"{inner.files()[0]} of {title} is deeper than SPLIT/CLASS/IMAGE: choose a folder inside with "
                "--dataset, or take all images below a class with --layout class"
            )
        found.unused[TOO_DEEP] += [file for deeper in inner.folders for file in deeper.files()]
    return classes


def _without_classes(folder: Folder, title: str) -> list[Folder]:
    """Return a folder and those below it, whose images have no classes."""
    below = folder.below()
    for inner in below:
        parts = inner.path.removeprefix(folder.path).split("/")
        if any(map(split_named, parts)):
            raise ValueError(
                f"{title} can be read in two ways: {inner.path.rstrip('/')} may be a split or not: choose a folder "
                f"with --dataset, or name the layout ({_OPTION})"
            )
    return below


def _inner_classes(groups: list[Folder], title: str) -> dict[str | None, list[Folder]]:
    """Return the classes of the layout GROUP/CLASS/IMAGE."""
    owners: dict[str | None, Folder] = {}
    classes: dict[str | None, list[Folder]] = {}
    for group in groups:
        for inner in group.folders:
            if inner.name in classes:
                raise ValueError(
                    f"{_paths([owners[inner.name], group])} of {title} both have the class {inner.name}, and their "
                    f"names are no splits: choose one with --dataset {title}/{group.path.rstrip('/')}, or name the "
                    f"layout ({_OPTION})"
                )
            if split_named(inner.name):
                raise ValueError(
                    f"{title} can be read in two ways: {inner.path.rstrip('/')} may be a split or a class: choose a "
                    f"folder with --dataset, or name the layout ({_OPTION})"
                )
            owners[inner.name] = group
            classes[inner.name] = [inner]
    return classes


def _name_equal_classes(found: Arrangement, classes: dict[str | None, list[Folder]]) -> None:
    spellings = defaultdict(list)
    for name in classes:
        spellings[str(name).lower()].append(str(name))
    known = found.unused[EQUAL_NAMES]
    known += [name for same in spellings.values() if len(same) > 1 for name in same if name not in known]


def _paths(folders: Sequence[Folder]) -> str:
    return join_names([folder.path.rstrip("/") for folder in folders], 3)


def arrange_files(paths: Sequence[str], title: str, layout: str | None = None) -> dict[str, list[int]]:
    """Sort Parquet or tar files into splits, by the whole name of a folder or of the file without its numbers.

    Files whose names all begin, or all end, with a split (imagenet-train-0001.tar, imagenet-val-0001.tar) are sorted by
    it. If no name is a split, all files are training data. If some are, the others are splits of their own names.

    Args:
        paths: relative to the folder of the data set.

    Returns:
        The numbers of the files by split.

    Raises:
        ValueError: a name can be read in two ways.
    """
    if layout == "class":
        return {"train": list(range(len(paths)))}
    stems = [_NUMBERING.sub("", os.path.splitext(path.rpartition("/")[2])[0]) for path in paths]
    by_folder = [_split_of_folders(path.split("/")[:-1], path, title) for path in paths]
    by_name = [split_named(stem) for stem in stems]
    loose = [number for number, split in enumerate(by_folder) if split is None]
    words = {number: re.split(r"[-_. ]+", stems[number].lower()) for number in loose}
    if not all(by_name[number] for number in loose):
        edges = [{number: split_named(words[number][edge]) for number in loose} for edge in (0, -1)]
        whole = [edge for edge in edges if all(edge.values())]
        unclear = [number for number in loose if not by_name[number] and any(map(split_named, words[number]))]
        if unclear and (not whole or any(edge != whole[0] for edge in whole)):
            raise ValueError(
                f"{paths[unclear[0]]} of {title} can be read in two ways: as the split that a word of its name means, "
                "or as training data: rename it, or take all files for training data with --layout class"
            )
        for number in unclear:
            by_name[number] = whole[0][number]
    splits: dict[str, list[int]] = {}
    rest: list[int] = []
    for number, (folder, name) in enumerate(zip(by_folder, by_name, strict=True)):
        if folder and name and folder != name:
            raise ValueError(f"{paths[number]} of {title} can be read in two ways, as {folder} or as {name}: rename it")
        if split := folder or name:
            splits.setdefault(split, []).append(number)
        else:
            rest.append(number)
    if not splits:
        return {"train": rest}
    for number in rest:
        parent = os.path.basename(os.path.dirname(paths[number]))
        splits.setdefault(split_key(stems[number] or parent), []).append(number)
    return splits


def _split_of_folders(folders: list[str], path: str, title: str) -> str | None:
    """Return the split that the name of one of the folders of a path means."""
    found = {split for folder in folders if (split := split_named(folder))}
    if len(found) > 1:
        raise ValueError(f"{path} of {title} can be read in two ways, as {' or as '.join(sorted(found))}: rename it")
    return next(iter(found), None)


def arrange_images(paths: Sequence[str], layout: str | None = None) -> list[str]:
    """Return the split of each image of a table.

    It is that of the outermost folder whose name is a split. Other images are training data, except those in folders
    beside one that is called train: each of these folders is a split of its own name.
    """
    if layout == "class":
        return ["train"] * len(paths)
    named = [next(filter(None, map(split_named, path.split("/")[:-1])), None) for path in paths]
    has_train = "train" in named
    splits = []
    for path, split in zip(paths, named, strict=True):
        if split is None and has_train and "/" in path:
            split = split_key(path.partition("/")[0])
        splits.append(split or "train")
    return splits
