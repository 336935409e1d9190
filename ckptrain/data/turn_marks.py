"""Make a chat template tell where in its text each message is.

The template's own loop over the messages gets a mark where a message begins. Nothing but the mark is added to what it
writes, so the text without marks is the text that the template renders. Marks are lone surrogates, which no text can
contain.
"""

from __future__ import annotations

from jinja2 import Environment, Template, meta, nodes

Span = tuple[int, int]

_TURN_MARK = "\ud800"
_ROLE_END = "\ud801"


def compiled_by_turn(environment: Environment, text: str) -> Template | None:
    """Compile a template that writes a mark and the role where a message begins, and a mark where the last one ends."""
    tree = environment.parse(text)
    return environment.from_string(tree) if _mark_loops(tree.body) else None


def without_marks(marked: str) -> tuple[str, list[Span]]:
    """Take the marks out of a text, and return where each assistant message was written.

    Templates loop over the messages more than once to check or to count them; such a loop writes nothing.
    """
    before, *parts = marked.split(_TURN_MARK)
    pieces, length = [before], len(before)
    turns: list[Span] = []
    turns_of_loop: list[Span] = []
    has_written = False
    for part in parts:
        role, _, body = part.partition(_ROLE_END)
        if role:
            has_written = has_written or not (body == "" or body.isspace())
        else:  # the loop has ended, and this is written behind it
            turns += turns_of_loop if has_written else []
            turns_of_loop, has_written = [], False
        if role == "assistant":
            turns_of_loop.append((length, length + len(body)))
        pieces.append(body)
        length += len(body)
    return "".join(pieces), turns


def has_fixed_generation_prompt(environment: Environment, text: str) -> bool:
    """Tell whether the generation prompt hangs on nothing but roles and what the tokenizer gives."""
    tree = environment.parse(text)
    given = (meta.find_undeclared_variables(tree) - {"messages", "tools"}) | {"loop", "add_generation_prompt"}
    branches: list[nodes.If | nodes.CondExpr] = [*tree.find_all(nodes.If), *tree.find_all(nodes.CondExpr)]
    return all(_names(branch) <= given for branch in branches if "add_generation_prompt" in _names(branch.test))


def _mark_loops(body: list[nodes.Node]) -> bool:
    """Mark the loops over messages that write into the text itself; return whether there are any.

    What is written inside of a macro or a block that is assigned may be changed before it is shown, so only branches
    are looked into.
    """
    is_marked = False
    for index in reversed(range(len(body))):
        node = body[index]
        if isinstance(node, nodes.If):
            branches = [node.body, node.else_, *(branch.body for branch in node.elif_)]
            for branch in branches:
                is_marked |= _mark_loops(branch)
        elif isinstance(node, nodes.For) and (role := _role_in(node)) is not None:
            mark = nodes.Output([nodes.TemplateData(_TURN_MARK), role, nodes.TemplateData(_ROLE_END)])
            end_mark = nodes.Output([nodes.TemplateData(_TURN_MARK + _ROLE_END)])
            node.body.insert(0, mark.set_lineno(node.lineno))
            body.insert(index + 1, end_mark.set_lineno(node.lineno))
            is_marked = True
    return is_marked


def _role_in(loop: nodes.For) -> nodes.Expr | None:
    """Return the expression for the role of a message, None if the loop is not over messages."""
    if not isinstance(loop.target, nodes.Name):
        return None
    name = loop.target.name
    accesses: list[nodes.Getattr | nodes.Getitem] = [*loop.find_all(nodes.Getattr), *loop.find_all(nodes.Getitem)]
    owners = [access.node for access in accesses if _is_role(access)]
    asks_for_role = any(isinstance(owner, nodes.Name) and owner.name == name for owner in owners)
    return nodes.Getattr(nodes.Name(name, "load"), "role", "load") if asks_for_role else None


def _is_role(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "role"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "role"


def _names(node: nodes.Node) -> set[str]:
    """Return the variables that are read in a part of a template, other than for a message's role."""
    if _is_role(node):
        return set()
    if isinstance(node, nodes.Name):
        return {node.name} if node.ctx == "load" else set()
    return {name for child in node.iter_child_nodes() for name in _names(child)}
