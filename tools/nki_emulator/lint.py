"""A linter for the language that both of NKI's front ends, the parser and the tracer, accept.

The emulator runs any Python, and so does AWS's simulator; the compiler does not. `lint(source)`
names each line of a kernel file that one of the front ends is documented to refuse, and each call
that does not fit the documented signature.
"""

import ast
import inspect
from collections.abc import Iterator

from nki_emulator import language
from nki_emulator.signatures import ISA, LANGUAGE, METHODS, NEWER, signature

ENUMS = {"dge_mode", "engine", "matmul_perf_mode", "nc_version", "oob_mode", "reduce_cmd"}
TILES = "nl.ndarray", "nl.shared_identity_matrix"
REGISTERS = ("nisa.register_alloc",)
BUILTINS = {"float", "int", "len", "max", "min", "range"}

REFUSED: dict[type[ast.AST], str] = {
    ast.Is: "`is`; compare with ==",
    ast.IsNot: "`is not`; compare with !=",
    ast.JoinedStr: "an f-string",
    ast.Lambda: "a lambda",
    ast.ClassDef: "a class",
    ast.Try: "try",
    ast.With: "with",
    ast.While: "while; use nl.fori_loop",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.NamedExpr: "an assignment expression",
    ast.Starred: "an unpacked argument",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator",
    ast.Yield: "yield",
    ast.Raise: "raise",
    ast.AugAssign: "an augmented assignment",
}


def lint(source: str) -> list[str]:
    """One line for each fault, `line: what`."""
    tree = ast.parse(source)
    callees = {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and ".kernels." in (node.module or ""):
            callees |= {alias.name for alias in node.names}
    faults: list[tuple[int, str]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            faults += _lint(node, callees)
        elif isinstance(node, ast.ClassDef):
            faults += _lint_class(node)
    return [f"{line}: {what}" for line, what in sorted(set(faults))]


def _lint_class(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Faults of a class, as (line, what): a group is a plain dataclass of fields."""
    if [ast.unparse(base) for base in node.bases] != ["nl.NKIObject"] or node.keywords:
        yield node.lineno, f"class {node.name} derives from something else than nl.NKIObject"
    if [ast.unparse(decorator) for decorator in node.decorator_list] != ["dataclass"]:
        yield node.lineno, f"class {node.name} is no plain @dataclass"
    for statement in node.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_docstring and not isinstance(statement, ast.AnnAssign):
            yield statement.lineno, f"class {node.name} has something else than fields"


def _lint(function: ast.FunctionDef, callees: set[str]) -> Iterator[tuple[int, str]]:
    """Faults of a function and of those in it; `callees` are the functions that it may call."""
    tiles = _made_by(function, TILES)
    on_chip = tiles | _made_by(function, REGISTERS) | _loop_numbers(function)
    bodies = _loop_bodies(function)
    for node in ast.walk(function):
        line = getattr(node, "lineno", function.lineno)
        if type(node) in REFUSED:
            yield line, REFUSED[type(node)]
        elif isinstance(node, ast.Compare):
            for op in node.ops:
                if type(op) in REFUSED:
                    yield line, REFUSED[type(op)]
        if isinstance(node, ast.FunctionDef):
            yield from _lint_arguments(node)
            if node is not function:
                for name in sorted(_bound(node) & _bound(function, inner=False)):
                    yield node.lineno, f"{node.name} rebinds {name} of the function around it"
                if node.name not in bodies and _read(node) & tiles:
                    yield node.lineno, f"{node.name} closes over a tile, and is no loop's body"
        elif isinstance(node, ast.If | ast.IfExp | ast.Assert):
            for name in sorted(_tested(node.test) & on_chip):
                yield line, f"a branch on {name}, which is known on the chip alone"
        elif isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare):
            operands = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
            if any(_root(operand) in tiles for operand in operands):
                yield line, "an operator on a tile"
            elif any(_root(operand) in on_chip for operand in operands):
                yield line, "an operator on a register"
        elif isinstance(node, ast.For) and not _is_call(node.iter, "range"):
            yield line, "a loop over something else than range"
        elif isinstance(node, ast.Attribute):
            yield from _lint_name(node)
        elif isinstance(node, ast.Call):
            yield from _lint_call(node, callees)


def _lint_arguments(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Parameters are given by place or name, and there is no `*` or `/`."""
    arguments = function.args
    if arguments.kwonlyargs or arguments.vararg or arguments.kwarg or arguments.posonlyargs:
        yield function.lineno, "a parameter that is not plain"


def _lint_name(node: ast.Attribute) -> Iterator[tuple[int, str]]:
    """Names of `nisa` and `nl` are in the tables."""
    if isinstance(node.value, ast.Name):
        if node.value.id == "nisa" and node.attr not in ISA.keys() | ENUMS:
            yield node.lineno, f"nisa.{node.attr} is not in the table of signatures"
        if node.value.id == "nl" and node.attr not in language.__all__:
            yield node.lineno, f"nl.{node.attr} is not in the table of names"


def _lint_call(call: ast.Call, callees: set[str]) -> Iterator[tuple[int, str]]:
    """A call is of a kernel's function, or fits the documented signature in every release."""
    name = ast.unparse(call.func)
    owner, _, attribute = name.rpartition(".")
    if isinstance(call.func, ast.Name):
        if name not in BUILTINS and name not in callees:
            yield call.lineno, f"a call of {name}, which no kernel file defines"
        return
    table = {"nisa": ISA, "nl": LANGUAGE}.get(owner, METHODS)
    if attribute not in table:
        yield call.lineno, f"a call of {name}, which has no documented signature"
        return
    keywords = {k.arg or "**": None for k in call.keywords}
    newer = [NEWER[attribute]] if table is ISA and attribute in NEWER else []
    for parameters in (table[attribute], *newer):
        bound: inspect.Signature = signature(parameters)
        try:
            bound.bind(*[None] * len(call.args), **keywords)
        except TypeError as error:
            yield call.lineno, f"{name}: {error}"


def _is_call(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _made_by(function: ast.FunctionDef, makers: tuple[str, ...]) -> set[str]:
    """Names that hold what one of these calls returns."""
    return {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(_is_call(node.value, m) for m in makers)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _loop_bodies(function: ast.FunctionDef) -> set[str]:
    """Names of the functions that `nl.fori_loop` takes."""
    return {
        node.args[2].id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _is_call(node, "nl.fori_loop")
        if len(node.args) > 2 and isinstance(node.args[2], ast.Name)
    }


def _loop_numbers(function: ast.FunctionDef) -> set[str]:
    """The parameter of each loop body: a register."""
    bodies = _loop_bodies(function)
    return {
        argument.arg
        for node in ast.walk(function)
        if isinstance(node, ast.FunctionDef) and node.name in bodies
        for argument in node.args.args
    }


def _read(function: ast.FunctionDef) -> set[str]:
    """Names that a function reads."""
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Load)}


def _tested(test: ast.expr) -> set[str]:
    """Names whose value decides a test: not those of which it asks for a shape or a dtype."""
    if isinstance(test, ast.Attribute):
        return set()
    if isinstance(test, ast.Name):
        return {test.id}
    return {name for node in ast.iter_child_nodes(test) for name in _tested_of(node)}


def _tested_of(node: ast.AST) -> set[str]:
    return _tested(node) if isinstance(node, ast.expr) else set()


def _root(node: ast.expr) -> str:
    """The variable that a chain of subscripts starts from."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _bound(function: ast.FunctionDef, inner: bool = True) -> set[str]:
    """Names that a function assigns, with or without the functions inside it."""
    names: set[str] = set()
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef) and not inner:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return names
