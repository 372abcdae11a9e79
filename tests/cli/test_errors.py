"""Errors of the command line: one line, exit code 2, and nothing is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from maecho import Upload, aggregate
from maecho.upload import storage as files
from support.damage import forged
from support.tiny import cases, upload, with_statistics

Run = Callable[..., Any]

UPLOAD = "upload --client ann --out new.safetensors"
EVALUATE = "evaluate --data MODULE:ann"
AGGREGATE = "aggregate ann.safetensors bob.safetensors --out new.safetensors"
ERRORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no colon": (f"{UPLOAD} --model MODULE --data MODULE:ann", ("model", "package.module:factory", "clinic_")),
    "no factory": (f"{UPLOAD} --model MODULE: --data MODULE:ann", ("model", "package.module:factory")),
    "no module": (f"{UPLOAD} --model nowhere:network --data MODULE:ann", ("model", "cannot import 'nowhere'")),
    "relative module": (f"{UPLOAD} --model .MODULE:network --data MODULE:ann", ("model", "'.clinic_")),
    "no attribute": (f"{UPLOAD} --model MODULE:other --data MODULE:ann", ("model", "function 'other'", "got none")),
    "no function": (f"{UPLOAD} --model MODULE:constant --data MODULE:ann", ("model", "function 'constant'")),
    "factory with arguments": (f"{UPLOAD} --model MODULE:needs --data MODULE:ann", ("model", "needs", "argument")),
    "no model": (f"{UPLOAD} --model MODULE:number --data MODULE:ann", ("model", "torch.nn.Module", "got int")),
    "no batches": (f"{UPLOAD} --model MODULE:network --data MODULE:number", ("data", "batches", "got int")),
    "no examples": (f"{UPLOAD} --model MODULE:network --data MODULE:nothing", ("ann", "at least one example")),
    "data of another width": (f"{UPLOAD} --model MODULE:network --data MODULE:narrow", ("ann", "4", "3")),
    "bad rank": (f"{UPLOAD} --model MODULE:network --data MODULE:ann --rank '3 apples'", ("rank", "3 apples")),
    "unknown statistic": (f"{UPLOAD} --model MODULE:network --data MODULE:ann --statistics hessian", ("hessian",)),
    "pickled weights": (
        f"{EVALUATE} --model MODULE:network --weights ann.pt",
        ("safetensors", "ann.pt", "torch.save", "got neither"),
    ),
    "other weights": (f"{EVALUATE} --model MODULE:wide --weights ann.safetensors", ("ann.safetensors", "0.weight")),
    "weights of the future": (f"{EVALUATE} --model MODULE:network --weights newer", ("newer", "newer maecho")),
    "missing weights": (f"{EVALUATE} --model MODULE:network --weights no.safetensors", ("no.safetensors", "nothing")),
    "class-aware without counts": (
        f"{EVALUATE} --model MODULE:network --weights ann-weights --weights bob-weights --by class-aware",
        ("ann-weights", "maecho upload"),
    ),
    "missing upload": (f"{AGGREGATE} no.safetensors", ("no.safetensors must be a file", "got nothing")),
    "a client twice": (f"{AGGREGATE} ann.safetensors", ("ann", "once", "twice")),
    "unknown method": (f"{AGGREGATE} --method best", ("fedavg, ma-echo", "regmean", "'best'")),
    "set without a value": (f"{AGGREGATE} --set steps", ("--set", "name=value", "'steps'")),
    "set what is not there": (f"{AGGREGATE} --set stepz=3", ("ma-echo", "steps", "'stepz'")),
    "set out of range": (f"{AGGREGATE} --set steps=-3", ("steps", "at least 0", "-3")),
    "set to text": (f"{AGGREGATE} --set steps=many", ("steps", "many")),
    "set to infinity": (f"{AGGREGATE} --set step_size=Infinity", ("step_size", "inf")),
    "set the method": (f"{AGGREGATE} --set method=fedavg", ("ma-echo", "'method'")),
    "out is a folder": ("aggregate ann.safetensors --out .", ("cannot write",)),
    "inspect a script": ("inspect MODULE.py", ("MODULE.py", "safetensors")),
    "unknown experiment": ("reproduce table-99", ("table-1", "'table-99'")),
    "no data": ("reproduce table-1 --out new", ("mnist", "MAECHO_DATA")),
    "unknown column": ("reproduce table-1 --quick --out new --columns ma-ecco", ("ma-echo", "'ma-ecco'")),
    "no column": ("reproduce table-1 --quick --out new --columns ,", ("ma-echo", "got ''")),
    "no picture": ("reproduce table-1 --quick --out new --picture a.gif", (".svg", "'a.gif'")),
    "show and do": ("reproduce table-1 --quick --out new --columns local --show", ("--show", "--columns")),
    "all and one": ("reproduce table-1 --all", ("--all", "a name")),
    "all and a column": ("reproduce --all --columns local", ("--all", "--columns")),
    "no such device": ("reproduce table-1 --quick --out new --device abacus", ("abacus",)),
    "no permissions": (f"{UPLOAD} --model MODULE:network --data MODULE:ann --mode 777", ("--mode", "640", "'777'")),
    "out is there": ("aggregate ann.safetensors --out bob.safetensors", ("bob.safetensors", "a new file", "--force")),
    "out is an input": ("aggregate ann.safetensors --out ann.safetensors --force", ("not be one of the inputs",)),
    "out is an input by a link": (
        "aggregate linked --out ann.safetensors --force",
        ("ann.safetensors, which is linked",),
    ),
    "out is an input by another name": ("aggregate ann.safetensors --out hard --force", ("one of the inputs", "hard")),
    "out is a link": ("aggregate bob.safetensors --out linked --force", ("cannot write linked", "got a link")),
    "out is a device": (
        "aggregate bob.safetensors --out /dev/null --force",
        ("cannot write /dev/null", "regular file, got a device"),
    ),
    "out is the weights": (
        "upload --client ann --model MODULE:network --data MODULE:ann --weights ann-weights --out ann-weights --force",
        ("one of the inputs", "ann-weights"),
    ),
    "out is the model": (
        "aggregate ann.safetensors --method dense --model MODULE:network --out MODULE.py --force",
        ("--out must not be one of the inputs, got MODULE.py, which is",),
    ),
    "out is the module of the upload": (
        "upload --client ann --model MODULE:network --data MODULE:ann --out MODULE.py --force",
        ("--out must not be one of the inputs, got MODULE.py, which is",),
    ),
    "out is the module of the data": (
        "upload --client ann --model MODULE:network --data notes.data:ann --out notes/data.py --force",
        ("--out must not be one of the inputs, got notes/data.py, which is",),
    ),
    "upload is there": (
        "upload --client ann --model MODULE:network --data MODULE:ann --out ann.safetensors",
        ("a new file", "--force"),
    ),
    "picture is there": ("reproduce table-1 --quick --out new --picture there.svg", ("there.svg", "--force")),
    "demo over another upload": ("demo --out others", ("client-0.safetensors must be free", "got a file of 'ann'")),
    "demo over another file": ("demo --out notes", ("merged-fedavg.safetensors must be free", "got another file")),
    "demo over an upload of a client-0": (
        "demo --out own",
        ("own/client-0.safetensors must be free or hold what an earlier demo wrote, got a file of 'client-0'",),
    ),
    "demo over a merged model": (
        "demo --out merged",
        ("merged-fedavg.safetensors must be free", "got a file of a model that was merged without it"),
    ),
    "demo over another page": ("demo --out pages", ("report.html must be free or hold", "got another file")),
    "demo over a folder": ("demo --out pages/other", ("report.html must be a file, got a folder",)),
    "limit of files": ("inspect large", ("of at most 4294967296 bytes", "MAECHO_MAX_FILE")),
    "inspect a pipe": ("inspect pipe", ("pipe must be a file, got a pipe",)),
    "bad beta": ("demo --out new --beta -1", ("beta", "positive", "-1")),
}


@pytest.mark.parametrize(("line", "parts"), **cases(ERRORS))
def test_an_error_is_one_line_and_nothing_is_written(
    module: str, uploads: list[Path], run: Run, monkeypatch: pytest.MonkeyPatch, line: str, parts: tuple[str, ...]
) -> None:
    about = files.read_about(uploads[0], "upload") | {"version": files.VERSION + 1}
    forged(Path("newer"), load_file(uploads[0]), about)
    Path("ann.pt").write_bytes(b"pickle")
    Path("linked").symlink_to("ann.safetensors")
    Path("hard").hardlink_to("ann.safetensors")
    Path("there.svg").write_text("a picture")
    Path("pages/other/report.html").mkdir(parents=True)
    for folder, name in (
        ("others", "client-0.safetensors"),
        ("notes", "merged-fedavg.safetensors"),
        ("pages", "report.html"),
    ):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, name).write_bytes(uploads[0].read_bytes() if folder == "others" else b"notes")
    Path("notes", "data.py").write_text("def ann(): ...")
    Path("own").mkdir()
    replace(Upload.load("ann.safetensors"), client="client-0").save("own/client-0.safetensors")
    aggregate(uploads, "fedavg").save("merged/merged-fedavg.safetensors")
    os.mkfifo("pipe")
    with Path("large").open("wb") as file:
        file.truncate(20 * 10**9)
    monkeypatch.setenv("MAECHO_DATA", "nowhere")

    def here() -> dict[str, bytes]:
        return {str(p): p.read_bytes() if p.stat().st_size < 10**9 else b"" for p in Path().rglob("*") if p.is_file()}

    before = here()
    said = run(line.replace("MODULE", module))
    assert said.code == 2
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    for part in parts:
        assert part.replace("MODULE", module) in said.err
    assert here() == before


def test_numbers_that_no_equation_can_hold(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may hold any finite numbers, so products of them may overflow."""
    monkeypatch.chdir(tmp_path)
    for client, factor in (("ann", 1e300), ("bob", 1.0)):
        made = upload(client)
        huge = {
            statistic: {name: one.map(lambda s, f=factor: s * f) for name, one in made.statistics[statistic].items()}
            for statistic in ("gram", "gradients")
        }
        with_statistics(made, **huge).save(f"huge-{client}")
    said = run("aggregate huge-ann huge-bob --method kronecker --out new.safetensors")
    assert said.code == 2
    assert said.err.startswith("error: the uploads hold numbers that are too large or too small to compute with: ")
    assert said.err.count("\n") == 1
    assert not Path("new.safetensors").exists()
