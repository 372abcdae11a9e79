"""Networks that people bring, none written for maecho: from transformers (without a download) and in plain torch.

`ZOO` has a small one of each, with a task that it learns in a second. `checks` merges them. Tests and docs/models.md
use both.
"""

from __future__ import annotations

from support.zoo.entry import Entry
from support.zoo.images import IMAGES
from support.zoo.plain_torch import PLAIN_TORCH
from support.zoo.text import TEXT

ZOO: dict[str, Entry] = {**TEXT, **IMAGES, **PLAIN_TORCH}
