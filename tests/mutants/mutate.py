"""All small mistakes that can be planted in one line of a module."""

from __future__ import annotations

import ast
from typing import Final, NamedTuple

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, tuple[str, ...]]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: Final[dict[type[ast.operator], tuple[str, str]]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
#: Calls that are not mutated: texts for people, hints for mypy, and calls required by Python.
_NOT_MUTATED: Final = ("log.", "warnings.", "assert_never", "super().__init__")


class Mutant(NamedTuple):
    """Replaces bytes `start` to `end` of a line (counted from 1) by `text`."""

    line: int
    start: int
    end: int
    text: str
    description: str

    def apply(self, source: str) -> str:
        lines = source.encode().split(b"\n")
        line = lines[self.line - 1]
        lines[self.line - 1] = line[: self.start] + self.text.encode() + line[self.end :]
        return b"\n".join(lines).decode()


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self._lines = source.encode().split(b"\n")
        self.found: list[Mutant] = []

    def _text(self, line: int, start: int, end: int) -> str:
        return self._lines[line - 1][start:end].decode()

    def _add(self, line: int, start: int, end: int, text: str) -> None:
        description = f"`{self._text(line, start, end)}` -> `{text}`"
        self.found.append(Mutant(line, start, end, text, description))

    def _between(self, left: ast.expr, right: ast.expr, symbol: str, *texts: str) -> None:
        """Replace the operator between two operands, if it is on one line with their ends."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        gap = self._text(right.lineno, left.end_col_offset, right.col_offset)
        at = gap.find(symbol)
        if at < 0 or gap.count(symbol) != 1:
            return
        start = left.end_col_offset + at
        for text in texts:
            self._add(right.lineno, start, start + len(symbol), text)

    def _whole(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Replace a node that is on one line."""
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            self._add(node.lineno, node.col_offset, node.end_col_offset, text)

    # ---- not mutated

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Only the whole statement is mutated: messages are for people."""
        self._whole(node, "pass")

    def visit_Import(self, node: ast.Import) -> None: ...

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)  # type: ignore[arg-type]

    # ---- mutated

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            symbol, texts = _COMPARISONS[type(operator)]
            self._between(left, right, symbol, *texts)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC:
            self._between(node.left, node.right, *_ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        symbol, text = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, symbol, text)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not) and node.lineno == node.operand.lineno:
            self._add(node.lineno, node.col_offset, node.operand.col_offset, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value is True or node.value is False:
            self._whole(node, str(not node.value))
        elif isinstance(node.value, int):
            self._whole(node, str(node.value + 1))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in _ARITHMETIC and node.target.end_col_offset is not None:
            symbol, text = _ARITHMETIC[type(node.op)]
            self._between(node.target, node.value, f"{symbol}=", f"{text}=")
        self._whole(node, "pass")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._whole(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._whole(node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        text = ast.unparse(node.value)
        if text.startswith(_NOT_MUTATED):
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self._whole(node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._whole(node.value, "None")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._whole(node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._whole(node, "continue")

    def _condition(self, test: ast.expr) -> None:
        """Make a condition always true and never true. Comparisons in it are mutated as well."""
        if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
            return
        for text in ("True", "False"):
            self._whole(test, text)

    def visit_If(self, node: ast.If) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._whole(node.test, "False")
        self.generic_visit(node)


def mutants_of(source: str) -> list[Mutant]:
    """All mutants of a source, each once."""
    finder = _Finder(source)
    for statement in ast.parse(source).body:
        # Type aliases have no effect at run time.
        if isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Call):
            continue
        finder.visit(statement)
    return list(dict.fromkeys(finder.found))


def is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True
