"""Every small error that can be made in one source file, as a replacement of a few of its characters.

Docstrings, annotations, decorators, messages of errors, f-strings and `__repr__` are left alone.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.MatMult: ("@", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip
COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}  # fmt: skip
PAIRS = (("min", "max"), ("amin", "amax"), ("argmin", "argmax"), ("minimum", "maximum"), ("any", "all"))
FUNCTIONS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
METHODS = FUNCTIONS | {"sum": "mean", "mean": "sum"}
"""A builtin `sum` has no `mean` beside it; the tensor's method has."""
TRANSPOSES = {"T", "mT"}
DIMENSIONS = {"dim", "dim0", "dim1", "axis"}
UNSEEN = {"__repr__", "__str__"}
SILENT = {"repr", "strict"}
"""Arguments by which nothing changes, or only once there is another error: `zip(..., strict=True)`."""
UNORDERED = {"isinstance", "getattr", "hasattr", "cast"}
"""Calls whose swapped arguments say nothing: the type checker or the first call finds them."""


@dataclass(frozen=True)
class Mutant:
    """One small error: bytes `start` to `end` of `file` become `after`."""

    file: str
    scope: str
    kind: str
    line: int
    start: int
    end: int
    before: str
    after: str
    number: int
    """Counts equal changes in one scope."""
    function: int = 0
    """The first line of the function that it is in, decorators included; 0 outside of functions."""

    @property
    def name(self) -> str:
        """Stays the same while lines move, so a sample stays the same."""
        return f"{self.file}:{self.scope}:{self.kind}:{self.before} -> {self.after}#{self.number}"

    def rank(self, seed: int) -> str:
        """The place in a random order; a sample is its beginning."""
        return hashlib.sha256(f"{seed} {self.name}".encode()).hexdigest()

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()

    def diff(self, source: str) -> str:
        """The lines that change, one line of context around them."""
        lines = difflib.unified_diff(source.splitlines(), self.apply(source).splitlines(), lineterm="", n=1)
        return "\n".join(list(lines)[2:])

    def changes(self, source: str) -> bool:
        """Whether the result is a program, and another one."""
        try:
            changed = ast.parse(self.apply(source))
        except SyntaxError:
            return False
        return ast.dump(changed) != ast.dump(ast.parse(source))


def find(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, from top to bottom."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file, self.raw = file, source.encode()
        self.lines = [0]
        for line in self.raw.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.scope: list[str] = []
        self.functions = [0]
        self.found: list[Mutant] = []
        self.counts = Counter[tuple[str, str, str, str]]()

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.raw[self.start(node) : self.end(node)].decode()

    def add(self, kind: str, start: int, end: int, after: str) -> None:
        before, scope = self.raw[start:end].decode(), ".".join(self.scope)
        self.counts[scope, kind, before, after] += 1
        number, line = self.counts[scope, kind, before, after], self.raw[:start].count(b"\n") + 1
        self.found.append(Mutant(self.file, scope, kind, line, start, end, before, after, number, self.functions[-1]))

    def replace(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        self.add(kind, self.start(node), self.end(node), after)

    def between(self, kind: str, left: ast.expr, right: ast.expr, operator: tuple[str, str]) -> None:
        """Change the operator between two operands; brackets around them stay."""
        start, end = self.end(left), self.start(right)
        symbol, other = operator
        pattern = symbol if symbol[0].isalpha() else re.escape(symbol)
        if found := re.search(pattern, self.raw[start:end].decode()):
            self.add(kind, start + found.start(), start + found.end(), other)

    def negate(self, test: ast.expr) -> None:
        """Turn a condition round, unless one changed operator does the same."""
        turned = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            turned = isinstance(test.ops[0], (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot))
        if not turned:
            self.replace("negation", test, f"(not ({self.text(test)}))")

    def inside(self, name: str, nodes: Sequence[ast.AST]) -> None:
        self.scope.append(name)
        for node in nodes:
            self.visit(node)
        self.scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in UNSEEN:
            defaults = [d for d in (*node.args.defaults, *node.args.kw_defaults) if d is not None]
            for default in defaults:
                self.inside(node.name, [default])
            self.functions.append(min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]))
            self.inside(node.name, node.body)
            self.functions.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.inside(node.name, node.body)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement", node, "pass")
        if type(node.op) in OPERATORS:
            self.between("arithmetic", node.target, node.value, OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS:
            self.between("arithmetic", node.left, node.right, OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            self.between("comparison", left, right, COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        symbols = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("logic", left, right, symbols)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self.replace("sign", node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool():
                self.replace("constant", node, str(not node.value))
            case int():
                self.replace("constant", node, {0: "1", 1: "0"}.get(node.value, f"({self.text(node)} + 1)"))
            case float():
                self.replace("constant", node, f"({self.text(node)} * 10)" if node.value else "1.0")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in TRANSPOSES:
            self.replace("transpose", node, f"({self.text(node.value)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.endswith(("Error", "Warning")) or name == "warn":
            return
        functions = METHODS if isinstance(node.func, ast.Attribute) else FUNCTIONS
        if name in functions:
            self.add("function", self.end(node.func) - len(name), self.end(node.func), functions[name])
        for left, right in zip(node.args, node.args[1:], strict=False):
            texts = self.text(left), self.text(right)
            starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
            if name not in UNORDERED and not starred and texts[0] != texts[1]:
                gap = self.raw[self.end(left) : self.start(right)].decode()
                self.add("arguments", self.start(left), self.end(right), f"{texts[1]}{gap}{texts[0]}")
        for keyword in node.keywords:
            if keyword.arg in DIMENSIONS and (value := _integer(keyword.value)) is not None:
                self.replace("dimension", keyword.value, str({0: 1, 1: 0, -1: -2, -2: -1}.get(value, value - 1)))
        for child in (node.func, *node.args):
            self.visit(child)
        for keyword in node.keywords:
            if keyword.arg not in SILENT and (keyword.arg not in DIMENSIONS or _integer(keyword.value) is None):
                self.visit(keyword.value)


def _integer(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, int) else None
