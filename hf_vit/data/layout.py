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
    """Return the split of a dataset that a name means: "validation" for "val"; an unknown one is returned as is.

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
        path: relative to the folder of the dataset, with a slash at its end; "" for that folder itself.
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

    @property
    def own_files(self) -> list[str]:
        """Return the paths of the images directly in it."""
        return [self.path + image for image in self.images]

    @property
    def has_only_classes(self) -> bool:
        """Return whether its folders have images and no folders of their own."""
        return bool(self.folders) and all(inner.images and not inner.folders for inner in self.folders)

    def below(self) -> list["Folder"]:
        """Return this folder and all folders in it that have images directly, sorted by path."""
        found = [inner for folder in self.folders for inner in folder.below()]
        return [self, *found] if self.images else found

    def files(self) -> list[str]:
        """Return the paths of all images in it, at any depth."""
        return [file for folder in self.below() for file in folder.own_files]


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

    @property
    def has_classes(self) -> bool:
        """Return whether a split has two classes or more."""
        return any(len(classes) > 1 for classes in self.splits.values())

    def add(self, split: str, classes: dict[str | None, list[Folder]], source: Folder) -> None:
        """Add a split, or classes to it."""
        self.splits.setdefault(split, {}).update(classes)
        self.sources.setdefault(split, []).append(source.path)

    def leave_stray(self, folder: Folder) -> None:
        """Note that the images directly in a folder are not used."""
        self.unused[STRAY] += folder.own_files


def arrange(root: Folder, title: str, layout: str | None = None) -> Arrangement:
    """Find the splits and the classes of a folder of images.

    Args:
        root: the folder of the dataset; not empty.
        title: its name, for messages.
        layout: "class" or "split/class"; by default it is found.

    Raises:
        ValueError: the folder can be read in two ways, or has no known layout; the message names the user's folders.
    """
    found = Arrangement()
    if layout == "class":
        _add_one_split(found, root)
    else:
        while layout is None and _is_wrapper(root):
            found.leave_stray(root)
            (root,) = root.folders
        named = root.folders
        if layout is None:
            named = [folder for folder in root.folders if split_named(folder.name)]
        others = [folder for folder in root.folders if folder not in named]
        if named:
            _check_names(root, named, others, title)
            _add_splits(found, root, named, others, title)
        elif not _add_splits_of_classes(found, root, title):
            found.add("train", _classes(found, root, title), root)
    for classes in found.splits.values():
        _name_equal_classes(found, classes)
    return found


def _add_one_split(found: Arrangement, root: Folder) -> None:
    """Add the layout CLASS/.../IMAGE, in which no name is a split."""
    if not root.folders:
        found.add("train", {None: [root]}, root)
        return
    found.leave_stray(root)
    found.add("train", {folder.name: folder.below() for folder in root.folders}, root)


def _is_wrapper(root: Folder) -> bool:
    """Return whether a folder only wraps another one, as unpacked archives do."""
    if len(root.folders) != 1 or split_named(root.folders[0].name):
        return False
    (inner,) = root.folders
    return len(inner.folders) > 1 or (len(inner.folders) == 1 and not inner.images and not root.images)


def _check_names(root: Folder, named: list[Folder], others: list[Folder], title: str) -> None:
    """Raise ValueError if folders that are called like splits may be classes.

    Args:
        root: the folder that has them.
        named: those whose names are splits.
        others: those beside them.
    """
    if others and not _are_splits(named, others):
        several = "splits" if len(named) > 1 else "a split"
        raise ValueError(
            f"{title} can be read in two ways: {_paths(named)} may be {several} or, like {_paths(others)}, classes "
            f"({_OPTION})"
        )
    inner = named[0].folders
    if len(root.folders) == 1 and inner and all(split_named(folder.name) for folder in inner):
        raise ValueError(
            f"{title} can be read in two ways: {_paths(inner)} may be splits or classes: choose the folder of the "
            f"splits with --dataset {title}/{named[0].path.rstrip('/')}, or name the layout ({_OPTION})"
        )


def _are_splits(named: list[Folder], others: list[Folder]) -> bool:
    """Return whether folders that are called like splits are splits, though there are others beside them."""
    classes = {inner.name for folder in named for inner in folder.folders}
    if not classes:
        return False
    return len(named) > 1 or all(classes & {inner.name for inner in folder.folders} for folder in others)


def _add_splits(found: Arrangement, root: Folder, named: list[Folder], others: list[Folder], title: str) -> None:
    """Add the layout SPLIT/CLASS/IMAGE, or SPLIT/IMAGE."""
    with_classes = [folder for folder in named if folder.folders]
    if with_classes:
        without = [folder for folder in named if not folder.folders]
        _leave_without_classes(found, without, with_classes, title)
    splits = with_classes or named
    keys = _keys(splits, title)
    for folder in splits:
        found.add(keys[folder.path], _classes(found, folder, title), folder)
    if root.images and not with_classes and "train" not in found.splits:
        found.add("train", {None: [Folder(root.path, root.images)]}, root)
    else:
        found.leave_stray(root)
    for folder in others:  # they can be named, as --eval-split valid_2024
        key = split_key(folder.name)
        if key in found.splits or not folder.has_only_classes:
            found.unused[NO_SPLIT] += folder.files()
            continue
        found.leave_stray(folder)
        found.add(key, {inner.name: [inner] for inner in folder.folders}, folder)


def _leave_without_classes(found: Arrangement, without: list[Folder], with_classes: list[Folder], title: str) -> None:
    """Note the splits that have no class folders, unlike others, as not used.

    Raises:
        ValueError: one of them is the training split.
    """
    for folder in without:
        if split_named(folder.name) == "train":
            raise ValueError(
                f"{folder.path} of {title} has images but no class folders, while {_paths(with_classes)} has class "
                "folders"
            )
        found.unused[NO_CLASSES] += folder.files()


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
    found.leave_stray(root)
    return True


def _classes(found: Arrangement, folder: Folder, title: str) -> dict[str | None, list[Folder]]:
    """Return the classes of a split: its folders, with the images directly in them."""
    if _is_wrapper_of_classes(folder):
        return _classes(found, folder.folders[0], title)
    holding = [inner for inner in folder.folders if inner.images]
    outer = [inner for inner in folder.folders if not inner.images]  # which have folders of images
    if not folder.folders or (folder.images and len(folder.folders) == 1):
        return {None: _without_classes(folder, title)}
    if holding and outer:
        option = "" if split_named(folder.name) else ", or take all images below a class with --layout class"
        raise ValueError(
            f"{_paths(outer)} of {title} have images one folder too deep, such as {outer[0].files()[0]}, and "
            f"{_paths(holding)} have not: move them{option}"
        )
    found.leave_stray(folder)
    classes: dict[str | None, list[Folder]]
    if holding:
        classes = {inner.name: [inner] for inner in holding}
    elif _wrap_images(outer):
        classes = {group.name: group.folders for group in outer}
    else:
        classes = _inner_classes(outer, title)
    _check_depth(found, classes, title)
    return classes


def _is_wrapper_of_classes(folder: Folder) -> bool:
    """Return whether a split has one folder only, which is not a class but holds the classes."""
    if folder.images or len(folder.folders) != 1:
        return False
    (inner,) = folder.folders
    return not inner.images and not split_named(inner.name)


def _check_depth(found: Arrangement, classes: dict[str | None, list[Folder]], title: str) -> None:
    """Note the images in folders below those of the classes as not used.

    Raises:
        ValueError: a class has only such images.
    """
    for (folder,) in classes.values():
        if not folder.images:
            raise ValueError(
                f"{folder.files()[0]} of {title} is deeper than SPLIT/CLASS/IMAGE: choose a folder inside with "
                "--dataset, or take all images below a class with --layout class"
            )
        for deeper in folder.folders:
            found.unused[TOO_DEEP] += deeper.files()


def _wrap_images(groups: list[Folder]) -> bool:
    """Return whether folders are classes whose images lie in a folder of one name, as Tiny ImageNet's CLASS/images."""
    names = {inner.name for group in groups for inner in group.folders}
    return len(groups) > 1 and len(names) == 1


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
    """Note the classes whose names differ by case only."""
    spellings = defaultdict(list)
    for name in classes:
        spellings[str(name).lower()].append(str(name))
    noted = found.unused[EQUAL_NAMES]
    for names in spellings.values():
        if len(names) > 1:
            noted += [name for name in names if name not in noted]


def _paths(folders: Sequence[Folder]) -> str:
    return join_names([folder.path.rstrip("/") for folder in folders], 3)


@dataclass
class _File:
    """A Parquet or tar file.

    Args:
        stem: its name without its suffix and the numbers at its end.
        parent: name of its folder.
        folder_split, name_split: the splits that a folder of its path and its name mean; None: they mean none.
    """

    path: str
    stem: str
    parent: str
    folder_split: str | None
    name_split: str | None

    @classmethod
    def at(cls, path: str, title: str) -> "_File":
        """Return the file of a path of the dataset `title`."""
        folder, _, name = path.rpartition("/")
        stem = _NUMBERING.sub("", os.path.splitext(name)[0])
        return cls(path, stem, os.path.basename(folder), _split_of_folders(path, title), split_named(stem))

    @property
    def word_splits(self) -> list[str | None]:
        """Return what each word of its name means."""
        return [split_named(word) for word in re.split(r"[-_. ]+", self.stem)]


def arrange_files(paths: Sequence[str], title: str, layout: str | None = None) -> dict[str, list[int]]:
    """Sort Parquet or tar files into splits, by the whole name of a folder or of the file without its numbers.

    Files whose names all begin, or all end, with a split (imagenet-train-0001.tar, imagenet-val-0001.tar) are sorted by
    it. If no name is a split, all files are training data. If some are, the others are splits of their own names.

    Args:
        paths: relative to the folder of the dataset.

    Returns:
        The indices of the files by split.

    Raises:
        ValueError: a name can be read in two ways.
    """
    if layout == "class":
        return {"train": list(range(len(paths)))}
    files = [_File.at(path, title) for path in paths]
    _name_by_words([file for file in files if not file.folder_split], title)
    splits: dict[str, list[int]] = defaultdict(list)
    unnamed: list[int] = []
    for index, file in enumerate(files):
        split = file.folder_split or file.name_split
        if split is None:
            unnamed.append(index)
            continue
        if file.name_split not in (None, split):
            raise ValueError(
                f"{file.path} of {title} can be read in two ways, as {file.folder_split} or as {file.name_split}: "
                "rename it"
            )
        splits[split].append(index)
    if not splits:
        return {"train": unnamed}
    for index in unnamed:
        splits[split_key(files[index].stem or files[index].parent)].append(index)
    return dict(splits)


def _name_by_words(files: list[_File], title: str) -> None:
    """Set the split of files by the first or last word of their names, if the names of all have one there.

    Raises:
        ValueError: a word of a name means a split, and the names of the others have none at that place.
    """
    unclear = [file for file in files if file.name_split is None and any(file.word_splits)]
    if not unclear:
        return
    first = [file.word_splits[0] for file in files]
    last = [file.word_splits[-1] for file in files]
    readings = [splits for splits in (first, last) if all(splits)]
    if not readings or readings[0] != readings[-1]:
        raise ValueError(
            f"{unclear[0].path} of {title} can be read in two ways: as the split that a word of its name means, or as "
            "training data: rename it, or take all files for training data with --layout class"
        )
    for file, split in zip(files, readings[0], strict=True):
        file.name_split = file.name_split or split


def _split_of_folders(path: str, title: str) -> str | None:
    """Return the split that the name of one of the folders of a path means."""
    meanings = [split_named(folder) for folder in path.split("/")[:-1]]
    found = sorted(set(filter(None, meanings)))
    if len(found) > 1:
        raise ValueError(f"{path} of {title} can be read in two ways, as {' or as '.join(found)}: rename it")
    return found[0] if found else None


def arrange_images(paths: Sequence[str], layout: str | None = None) -> list[str]:
    """Return the split of each image of a table.

    It is that of the outermost folder whose name is a split. Other images are training data, except those in folders
    beside one that is called train: each of these folders is a split of its own name.
    """
    if layout == "class":
        return ["train"] * len(paths)
    splits: list[str | None] = []
    for path in paths:
        meanings = [split_named(folder) for folder in path.split("/")[:-1]]
        splits.append(next(filter(None, meanings), None))
    if "train" in splits:
        for index, path in enumerate(paths):
            if splits[index] is None and "/" in path:
                splits[index] = split_key(path.partition("/")[0])
    return [split or "train" for split in splits]
