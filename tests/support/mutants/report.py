"""What came of the mutants of each package: a table for the documentation, and the survivors of one run."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- mutants: written by make mutants-table -->", "<!-- end -->"


def summary(run: dict[str, Any]) -> str:
    """Every survivor with its diff, and the numbers last."""
    survivors = [f"{r['file']}:{r['line']}\n{r['diff']}\n" for r in run["results"] if r["outcome"] == "survived"]
    counts = Counter(result["outcome"] for result in run["results"])
    said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("killed", "timed out", "survived"))
    return "\n".join([*survivors, f"{run['package']}: {len(run['results'])} mutants of {run['mutants']}: {said}"])


def table(folder: Path) -> str:
    """One row a package. A mutant that makes a test endless counts as found."""
    rows = ["| package | mutants | sample | killed | timed out | survived | found | tests |", "|---" * 8 + "|"]
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        results, counts = run["results"], Counter(result["outcome"] for result in run["results"])
        found = counts["killed"] + counts["timed out"]
        room_only = any(result["outcome"] == "survived" and result["reach"] == "room" for result in results)
        numbers = [run["mutants"], len(results), counts["killed"], counts["timed out"], counts["survived"]]
        share, tests = f"{100 * found / len(results):.0f} %", "its own" if room_only else "all that import it"
        rows.append(f"| {' | '.join(map(str, [f'`{path.stem}`', *numbers, share, tests]))} |")
    return "\n".join(rows)


def write(page: Path, folder: Path) -> None:
    """Put the table between its marks on a page."""
    text = page.read_text(encoding="utf-8")
    changed, count = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{table(folder)}\n{END}", text, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"{page}: one place for the table expected, {count} found")
    page.write_text(changed, encoding="utf-8")
