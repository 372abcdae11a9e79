"""Data sets through Hugging Face `datasets` (the extra `hub`), for users with internet, or from a local folder.

The library downloads into its own cache. With HF_HUB_OFFLINE=1 it reads the cache alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from maecho.errors import InputError
from maecho.lab.data.dataset import Dataset
from maecho.lab.data.layouts import LAYOUTS, Layout
from maecho.lab.data.places import unchecked
from maecho.lab.data.splits import drawn

if TYPE_CHECKING:
    from pathlib import Path

SEED = "maecho-hub-1"
"""Decides which examples are for the test if the hub has only a train split: a tenth of every group."""
TEST_SHARE = 0.1
_BILINEAR = 2
"""Pillow's number for bilinear resizing."""


def from_hub(
    name: str, source: str | Path | None = None, *, side: int | None = None, most: int | None = None
) -> Dataset:
    """A data set of LAYOUTS, as the data set `hub:name`.

    Args:
        source: another place with the same columns: a name on the hub, or a folder of parquet files.
        side: height and width of the images, in place of the layout's.
        most: the most examples of one class of one group in a split, in place of the layout's; 0 for all.
    """
    if name not in LAYOUTS:
        raise InputError(f"from_hub: no layout {name!r}, known are {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    layout = replace(layout, side=side or layout.side, most=layout.most if most is None else most or None)
    splits = _open(name, layout, str(source or layout.path))
    group_names = _group_names(layout, splits)
    tables = {part: _labels_and_groups(name, layout, split, group_names) for part, split in splits.items()}
    rows = {part: np.flatnonzero(labels < (layout.keep or layout.classes)) for part, (labels, _) in tables.items()}
    parts = [("train", rows["train"]), ("test", rows.get("test", rows["train"]))]
    if "test" not in splits:
        parts = [("train", part) for part in _split(rows["train"], tables["train"][1])]
    inputs, labels, groups = [], [], []
    for part, found in parts:
        kept = _first(found, *tables[part], layout.most)
        inputs.append(layout.scale.standardised(_pixels(name, layout, splits[part], kept)))
        labels.append(torch.from_numpy(tables[part][0][kept]))
        groups.append(torch.from_numpy(tables[part][1][kept]) if layout.group else None)
    return Dataset(
        f"hub:{name}",
        inputs[0],
        labels[0],
        inputs[1],
        labels[1],
        classes=layout.keep or layout.classes,
        groups_train=groups[0],
        groups_test=groups[1],
        group_names=group_names,
        mean=layout.scale.mean,
        std=layout.scale.std,
    )


def _open(name: str, layout: Layout, source: str) -> dict[str, Any]:
    """The splits of the data set by name, with the right columns and numbers of rows."""
    try:
        from datasets import load_dataset  # the only place that needs it
    except ImportError as error:
        raise InputError(f"hub:{name} needs Hugging Face datasets, got none; pip install 'maecho[hub]'") from error
    try:
        found = load_dataset(source)
    except Exception as error:  # every part of that library raises its own kind of error
        raise InputError(
            f"hub:{name}: cannot load {source}, there is no such data set or no way to it "
            f"({type(error).__name__}: {error})"
        ) from error
    for part, rows in layout.rows.items():
        if part not in found:
            raise InputError(f"hub:{name}: {source} must have the split {part}, got {', '.join(found)}")
        columns = [column for column in (layout.image, layout.label, layout.group) if column]
        missing = [column for column in columns if column not in found[part].column_names]
        if missing:
            raise InputError(
                f"hub:{name}: {source} must have the columns {', '.join(columns)}, got "
                f"{', '.join(found[part].column_names)}"
            )
        if len(found[part]) != rows and not unchecked():
            raise InputError(
                f"hub:{name}: {part} of {source} must have {rows} rows, got {len(found[part])}; "
                "MAECHO_DATA_UNCHECKED=1 takes data of your own"
            )
    return {part: found[part] for part in layout.rows}


def _group_names(layout: Layout, splits: dict[str, Any]) -> tuple[str, ...]:
    """The names that the hub gives, or all values in alphabetical order."""
    if layout.group is None:
        return ()
    declared = getattr(splits["train"].features[layout.group], "names", None)
    values = {str(value) for split in splits.values() for value in split.unique(layout.group)}
    return tuple(declared or sorted(values))


def _labels_and_groups(
    name: str, layout: Layout, split: Any, group_names: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Both int64 [rows]; groups are all 0 where there are none."""
    table = split.select_columns([column for column in (layout.label, layout.group) if column])[:]
    labels = np.asarray(table[layout.label])
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0 or labels.max(initial=0) >= layout.classes:
        raise InputError(f"hub:{name}: {layout.label} must be numbers in 0..{layout.classes - 1}, got others")
    if layout.group is None:
        return labels.astype(np.int64), np.zeros(len(labels), np.int64)
    values = table[layout.group]
    if not hasattr(split.features[layout.group], "names"):
        position = {group: k for k, group in enumerate(group_names)}
        values = [position[str(value)] for value in values]
    return labels.astype(np.int64), np.asarray(values, np.int64)


def _split(rows: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and for the test, drawn within every group."""
    test = np.zeros(len(groups), bool)
    order = rows[np.argsort(groups[rows], kind="stable")]
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    for of_group in np.split(order, starts[1:]):
        test[of_group] = drawn([str(row) for row in of_group], TEST_SHARE, SEED)
    return rows[~test[rows]], rows[test[rows]]


def _first(rows: np.ndarray, labels: np.ndarray, groups: np.ndarray, most: int | None) -> np.ndarray:
    """The first `most` rows of every class of every group, in their order."""
    if most is None:
        return rows
    kinds = groups[rows] * (labels.max(initial=0) + 1) + labels[rows]
    order = np.argsort(kinds, kind="stable")
    starts = np.flatnonzero(np.diff(kinds[order], prepend=-1))
    rank = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    return rows[np.sort(order[rank < most])]


def _pixels(name: str, layout: Layout, split: Any, rows: np.ndarray) -> np.ndarray:
    """uint8 [n, side, side] or [n, side, side, 3]."""
    side, grey = layout.side, len(layout.scale.mean) == 1
    found = np.empty((len(rows), side, side, *([] if grey else [3])), np.uint8)
    pictures = iter(split.select_columns([layout.image]).select(rows))
    for k, row in enumerate(rows):
        try:
            picture = next(pictures)[layout.image].convert("L" if grey else "RGB")
        except (OSError, SyntaxError, ValueError, AttributeError) as error:
            raise InputError(f"hub:{name}: row {row} has no readable picture ({error})") from error
        if picture.size != (side, side):
            picture = picture.resize((side, side), _BILINEAR)
        found[k] = np.asarray(picture)
    return found
