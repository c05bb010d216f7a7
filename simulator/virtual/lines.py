"""Scheduling points between the lines of chosen modules, so that data races without any lock are met too.

While `preemptible` is entered, every Python function of the modules runs code compiled from its own source with a
scheduling point before each statement, and inside ``x += 1`` between the reading and the writing. The functions stay
the same objects; only their ``__code__`` is exchanged. Not reached: functions whose source is not at hand, that were
made by `exec`, or that only a closure made before the run still holds.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from .primitives import running

_POINT = "__deltaproof_point__"


def _point(value: Any = None) -> Any:
    scheduler = running()
    if scheduler is not None:
        scheduler.point()
    return value


class _Points(ast.NodeTransformer):
    """Puts a call before each statement of a function's body."""

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and not isinstance(node, ast.Module | ast.ClassDef):
                setattr(node, name, [part for statement in statements for part in self._with_point(statement)])
        if isinstance(node, ast.AugAssign):
            return self._split(node)
        return node

    @staticmethod
    def _with_point(statement: ast.stmt) -> list[ast.stmt]:
        # Declarations must stay first, and a docstring is not a statement that anybody could interrupt.
        if isinstance(statement, ast.Global | ast.Nonlocal | ast.Import | ast.ImportFrom):
            return [statement]
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]
        call = ast.Expr(ast.Call(ast.Name(_POINT, ast.Load()), [], []))
        return [ast.copy_location(call, statement), statement]

    @staticmethod
    def _split(node: ast.AugAssign) -> ast.stmt:
        """``x += 1`` as ``x = point(x) + 1``, where that means the same: simple targets and numbers."""
        target = node.target
        simple = isinstance(target, ast.Name) or (
            isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
        )
        if not simple or not isinstance(node.value, ast.Constant) or not isinstance(node.value.value, int | float):
            return node
        read = ast.parse(ast.unparse(target), mode="eval").body
        call = ast.Call(ast.Name(_POINT, ast.Load()), [read], [])
        return ast.copy_location(ast.Assign([target], ast.BinOp(call, node.op, node.value)), node)


def _compiled(module: types.ModuleType) -> dict[tuple[str, int], types.CodeType]:
    """(qualified name, first line) -> code with points, of every function in the module's source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}
    tree = ast.fix_missing_locations(_Points().visit(tree))
    # The file's own name, so that tracebacks show the lines that a person can read.
    code = compile(tree, getattr(module, "__file__", None) or "<target>", "exec", dont_inherit=True)
    found: dict[tuple[str, int], types.CodeType] = {}
    rest = [code]
    while rest:
        for constant in rest.pop().co_consts:
            if isinstance(constant, types.CodeType):
                found[constant.co_qualname, constant.co_firstlineno] = constant
                rest.append(constant)
    return found


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Functions defined in a module: its own, those of its classes, those behind decorators."""
    seen: set[int] = set()
    rest: list[Any] = list(vars(module).values())
    while rest:
        value = rest.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            if value.__code__.co_filename == getattr(module, "__file__", None):
                yield value
            rest.append(getattr(value, "__wrapped__", None))
            rest += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        elif isinstance(value, type) and value.__module__ == module.__name__:
            rest += vars(value).values()
        elif isinstance(value, classmethod | staticmethod):
            rest.append(value.__func__)
        elif isinstance(value, property):
            rest += [value.fget, value.fset, value.fdel]


def _filled(cell: types.CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, types.FunctionType)
    except ValueError:
        return False


_prepared: dict[types.ModuleType, list[tuple[types.FunctionType, types.CodeType, types.CodeType]]] = {}


def _exchanges(module: types.ModuleType) -> list[tuple[types.FunctionType, types.CodeType, types.CodeType]]:
    if module not in _prepared:
        compiled = _compiled(module)
        pairs = []
        for function in _functions(module):
            old = function.__code__
            new = compiled.get((old.co_qualname, old.co_firstlineno))
            if new is not None and new.co_freevars == old.co_freevars:
                pairs.append((function, old, new))
        _prepared[module] = pairs
    return _prepared[module]


@contextlib.contextmanager
def preemptible(names: Iterable[str]) -> Iterator[None]:
    """Inside, the functions of all imported modules whose name is, or lies under, one of ``names`` have points."""
    wanted = tuple(names)
    if not wanted:
        yield
        return
    modules = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and any(name == one or name.startswith(one + ".") for one in wanted)
    ]
    exchanges = [exchange for module in modules for exchange in _exchanges(module)]
    for module in modules:
        vars(module)[_POINT] = _point
    for function, _, new in exchanges:
        function.__code__ = new
    try:
        yield
    finally:
        for function, old, _ in exchanges:
            function.__code__ = old
        for module in modules:
            vars(module).pop(_POINT, None)
