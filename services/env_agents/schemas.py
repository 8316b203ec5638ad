"""JSON schemas of msgspec types, each field with the words that stand below it in the source.

The decoder and the documentation read the same types, so neither can say what the other does not.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

REFERENCE: Final = "#/components/schemas/{name}"


def reference(of: type) -> dict[str, str]:
    return {"$ref": REFERENCE.format(name=of.__name__)}


def components(types: Sequence[type]) -> dict[str, Any]:
    """Schemas by class name: of `types` and of whatever their fields hold."""
    _, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE)
    for found in _classes(msgspec.inspect.multi_type_info(types)):
        schema = schemas[found.__name__]
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
        for name, words in field_descriptions(found).items():
            schema["properties"][name]["description"] = words
    return dict(sorted(schemas.items()))


def field_descriptions(of: type) -> dict[str, str]:
    """What the string below each field of a class says, its bases' fields first."""
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        for field, below in pairwise(_body(base)):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found[name] = inspect.cleandoc(words)
    return found


def _body(of: type) -> list[ast.stmt]:
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    except (OSError, TypeError):  # Built in, or installed without its source.
        return []
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _classes(infos: Sequence[Any]) -> Iterator[type]:
    """Structs and dataclasses in these types, at any depth. The wire types hold no type that holds itself."""
    for info in infos:
        if isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            yield info.cls
            yield from _classes([field.type for field in info.fields])
        inner = [getattr(info, name, None) for name in ("item_type", "value_type")]
        yield from _classes([held for held in (*inner, *getattr(info, "types", ())) if held is not None])
