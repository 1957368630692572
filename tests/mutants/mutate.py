"""The mutants of a module: each is its text with one small change. Deterministic; standard library only.

| what | becomes |
|---|---|
| a comparison | its opposite, or the same with or without equality |
| `a and b`, `a or b`, `a if c else b`, `where(c, a, b)` | `a`, `b` |
| `not a`, `-a`, `x.method(...)`, `f(x, ...)` | `a`, `a`, `x`, `x` |
| arithmetic | the opposite operation |
| an integer, a float, True | one more, twice (0.0: 1.0), False |
| `f(..., name=...)` | without the keyword argument |
| `if c:` that leaves the function or loop | never |
| `if c:` of any other kind, `while c` | `if not c:` |
| a call whose result is not used | nothing |

Annotations, decorators, messages of errors and docstrings are left alone.
"""

import ast
import builtins
import collections
import copy
import dataclasses
import difflib
from collections.abc import Iterator

_COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LEFT_ALONE = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)
_WIDTH = 80  # of an expression in a mutant's name


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed text.

    Attributes:
      name: unique in the module; it has the function and the expression, so it outlives changes elsewhere.
      line: where the change begins.
      text: of the module.
    """

    name: str
    line: int
    text: str

    def diff(self, original: str) -> str:
        lines = difflib.unified_diff(
            original.splitlines(), self.text.splitlines(), n=0, lineterm=""
        )
        return "\n".join(line for line in lines if line[:3] not in ("---", "+++", "@@ "))


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module's text, in its order."""
    tree = ast.parse(source)
    modules = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found, seen = [], collections.Counter()
    for function, node, new, said in _changes(tree, "", modules):
        name = f"{function or 'module'}: {said}"
        seen[name] += 1
        name += f" ({seen[name]})" if seen[name] > 1 else ""
        found.append(Mutant(name, node.lineno, _replaced(source, node, new)))
    return found


def _replaced(source: str, node: ast.AST, new: ast.AST) -> str:
    """The text with `new` where `node` stands; columns count bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    text = ast.unparse(new)
    text = text if isinstance(new, ast.stmt) else f"({text})"
    first, last = node.lineno - 1, node.end_lineno - 1
    changed = lines[first][: node.col_offset] + text.encode() + lines[last][node.end_col_offset :]
    return b"".join([*lines[:first], changed, *lines[last + 1 :]]).decode()


def _changes(node: ast.AST, function: str, modules) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    """(function, node, what replaces it, in words) of `node` and all below it."""
    if isinstance(node, _LEFT_ALONE) or _is_type(node, function):
        return
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    for new in _replacements(node, modules):
        changed = node.test if isinstance(node, ast.If | ast.While) else node
        yield function, changed, new, f"{_short(node)} -> {_short(new)}"
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict"):  # the latter checks what holds
                rest = [k for j, k in enumerate(node.keywords) if j != i]
                said = f"{_short(node.func)}() without {keyword.arg}"
                yield function, node, ast.Call(node.func, node.args, rest), said
    for child in _children(node):
        yield from _changes(child, function, modules)


def _is_type(node: ast.AST, function: str) -> bool:
    """A union of types, as an alias or the second argument of isinstance."""
    union = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)
    parts = (node.left, node.right) if union else ()
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return union and not function or any(name in dir(builtins) for name in names)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node = node.value  # gone as a whole
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue
        yield from (
            child
            for child in (value if isinstance(value, list) else [value])
            if isinstance(child, ast.AST)
        )


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.If | ast.While):
        return f"{type(node).__name__.lower()} {_short(node.test)}"
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _replacements(node: ast.AST, modules) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]):
            changed = copy.copy(node)
            changed.ops = [_COMPARISONS[type(op)]()]
            yield changed
        case ast.BoolOp(op=op, values=values):
            for i in range(len(values)):
                rest = [value for j, value in enumerate(values) if j != i]
                yield rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            yield ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(2 * value or 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Call():
            yield from _operands(node, modules)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.If(test=test, body=body) | ast.While(test=test, body=body):
            never = isinstance(body[-1], _LEAVES)
            yield ast.Constant(False) if never else ast.UnaryOp(ast.Not(), test)


def _operands(call: ast.Call, modules) -> Iterator[ast.AST]:
    """What a call may be replaced by: the values that it selects from, or what it is applied to.

    Not where a class or a builtin is called: what is missing then ends in an error, mostly.
    """
    func, args = call.func, [arg for arg in call.args if not isinstance(arg, ast.Starred)]
    if isinstance(func, ast.Attribute) and func.attr == "where" and len(args) == 3:
        yield from args[1:]
    elif isinstance(func, ast.Attribute) and _root(func.value) not in modules:
        yield func.value
    elif args and not _is_type_or_builtin(func):
        yield args[0]


def _is_type_or_builtin(func: ast.AST) -> bool:
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name[:1].isupper() or isinstance(func, ast.Name) and hasattr(builtins, name)


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
