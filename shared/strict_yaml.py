"""YAML into msgspec structs, strictly: every mistake is a sentence with the key, the rule, the value and the remedy."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import yaml

from shared.errors import ConfigurationError
from shared.names import NAME_PATTERN, NAME_RULE
from shared.redis_address import masked

T = TypeVar("T")

LONGEST_VALUE: Final = 500
"""Characters of a wrong value that are shown."""

_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>[^`]*)`(?: - at `\$(?P<path>[^`]*)`)?")
_PATH_SUFFIX = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_GOT_TYPE = re.compile(r", got `[^`]*`$")
"""What msgspec says of a value that is shown itself."""
_PATH_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: `1e-6` is a number, as everyone who writes a learning rate expects."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789"))


def load_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises: ConfigurationError if there is none."""
    try:
        raw = _parse(path.read_text(), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {os.strerror(error.errno or 0)}; give an existing run file") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigurationError(f"{path} must hold a mapping of sections, got {type(raw).__name__}")
    return raw


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Sets `section.key=value` pairs in `raw`; values are YAML."""
    for override in overrides:
        dotted, separator, value = override.partition("=")
        if not separator or not dotted:
            raise ConfigurationError(f"an override must look like section.key=value, got {masked(repr(override))}")
        set_by_path(raw, dotted, _parse(value, f"the value of {dotted}"))


def _parse(text: str, what: str) -> Any:
    """Raises: ConfigurationError. A date that is none, or an integer of thousands of digits, is a ValueError of PyYAML's."""
    try:
        value = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
        if _contains_itself(value, set(), set()):
            raise ConfigurationError(f"{what} must hold no value that contains itself, by an alias; write it out")
        return value
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{what} is not YAML: {masked(' '.join(str(error).split()))}; quote what is meant as text"
        ) from error


def _contains_itself(value: Any, above: set[int], seen: set[int]) -> bool:
    """Args: above: ids of what holds `value`. seen: of what was looked through."""
    if not isinstance(value, dict | list) or id(value) in seen:
        return id(value) in above
    inner = value.values() if isinstance(value, dict) else value
    seen.add(id(value))
    above.add(id(value))
    found = any(_contains_itself(each, above, seen) for each in inner)
    above.discard(id(value))
    return found


def set_by_path(raw: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets raw["a"]["b"] for dotted "a.b", making the mappings between."""
    *parents, last = dotted.split(".")
    node = raw
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigurationError(f"cannot set {dotted}: {parent} is a value, not a section")
        node = child
    node[last] = value


def decode(raw: Mapping[str, Any], struct: type[T], *, source: str) -> T:
    """`raw` as `struct`. Raises: ConfigurationError that names `source`, the key, the rule and the value."""
    try:
        return msgspec.convert(raw, struct)
    except RecursionError as error:
        raise ConfigurationError(f"{source}: values must be nested less deep than {sys.getrecursionlimit()} levels") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{source}: {_explain(str(error), raw, struct)}") from error


def hint(name: str, known: Iterable[str], *, otherwise: str) -> str:
    """The remedy for a name that is not one of `known`: the one that is nearly it, or all of them behind `otherwise`."""
    names = sorted(known)
    closest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {closest[0]!r}?" if closest else f"{otherwise}: {', '.join(names) or 'none yet'}"


def _explain(message: str, raw: Mapping[str, Any], struct: type) -> str:
    if unknown := _UNKNOWN_FIELD.match(message):
        field, path = unknown["field"], (unknown["path"] or "").lstrip(".")
        remedy = hint(field, _fields_at(struct, path, raw), otherwise="known keys")
        return f"unknown key {_shown(f'{path}.{field}' if path else field)}; {remedy}"
    match = _PATH_SUFFIX.search(message)
    if not match or not match["path"]:
        return message.removesuffix(" - at `$`")
    path, value = match["path"].lstrip("."), _value_at(raw, match["path"])
    rule = _rule(message[: match.start()], struct, path, raw)
    if isinstance(value, Mapping) or (value is None and _GOT_TYPE.search(rule)):
        return f"{path}: {rule}"  # A rule about several keys names those and their values itself.
    return f"{path}: {_GOT_TYPE.sub('', rule)}, got {_shown(value)}"


def _shown(value: object) -> str:
    words = masked(repr(value))
    return words if len(words) <= LONGEST_VALUE else f"{words[:LONGEST_VALUE]}…"


def _rule(rule: str, struct: type, path: str, raw: Any) -> str:
    """msgspec's words for a rule, in ours where its own leave the reader to guess."""
    if NAME_PATTERN in rule:
        return NAME_RULE
    if rule.startswith("Invalid ") and (allowed := _values_at(struct, path, raw)):
        return f"must be one of {', '.join(map(repr, allowed))}"
    return rule


def _value_at(raw: Any, path: str) -> Any:
    node = raw
    for key, index in _PATH_STEP.findall(path):
        try:
            node = node[key] if key else node[int(index)]
        except (KeyError, IndexError, TypeError):
            return None
    return node


def _fields_at(struct: type, path: str, raw: Any) -> list[str]:
    """Names of the struct that `path` leads to, through nested structs and lists of them; of a union's, the one that `raw` says."""
    info = _struct_info(_info_at(struct, path, raw), _value_at(raw, "." + path if path else ""))
    return [field.encode_name for field in info.fields] if info else []


def _values_at(struct: type, path: str, raw: Any) -> list[Any]:
    """What may stand where `path` leads: the values of a literal, or the tags of a union of structs."""
    parent, _, key = path.rpartition(".")
    tagged = [option for option in _options(_info_at(struct, parent, raw)) if getattr(option, "tag_field", None) == key]
    options = _options(_info_at(struct, path, raw))
    literals = [value for option in options if isinstance(option, msgspec.inspect.LiteralType) for value in option.values]
    return sorted([option.tag for option in tagged] or literals)


def _info_at(struct: type, path: str, raw: Any) -> Any:
    info: Any = msgspec.inspect.type_info(struct)
    walked = ""
    for key, index in _PATH_STEP.findall("." + path if path else ""):
        if key:
            found = _struct_info(info, _value_at(raw, walked))
            field = next((field for field in found.fields if field.encode_name == key), None) if found else None
            info = field.type if field else found
        else:
            info = getattr(info, "item_type", info)
        walked += f".{key}" if key else f"[{index}]"
    return info


def _options(info: Any) -> list[Any]:
    return list(getattr(info, "types", (info,)))


def _struct_info(info: Any, raw: Any) -> Any:
    if isinstance(info, msgspec.inspect.StructType):
        return info
    inner = getattr(info, "item_type", None) or getattr(info, "value_type", None)
    if inner is not None:
        return _struct_info(inner, raw)
    found = [option for each in getattr(info, "types", ()) if (option := _struct_info(each, raw)) is not None]
    return next((option for option in found if _is_tagged(option, raw)), found[0] if found else None)


def _is_tagged(info: Any, raw: Any) -> bool:
    """Whether this struct of a union is the one whose tag `raw` has."""
    return isinstance(raw, Mapping) and info.tag_field is not None and raw.get(info.tag_field) == info.tag
