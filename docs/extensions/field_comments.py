"""For the reference: the fields of dataclasses and named tuples, described by what stands beside them."""

import re
from collections.abc import Iterator

import griffe


class FieldComments(griffe.Extension):
    """Shows named tuples as dataclasses are shown, and lists fields that the code describes as "Attributes".

    A field is described by the comment at the end of its line, or by the words in its default, such as
    `_counter("tokens written")`. A docstring that lists attributes itself is left alone.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        for cls in _classes(pkg):
            named_tuple = any(str(base) == "NamedTuple" for base in cls.bases)
            if named_tuple or "dataclass" in cls.labels:
                fields = [field for field in cls.attributes.values() if "property" not in field.labels]
                if named_tuple:
                    cls.set_member("__init__", _init(fields))
                if cls.docstring is not None:
                    _describe(cls.docstring, fields)


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    yield from module.classes.values()
    for inner in module.modules.values():
        yield from _classes(inner)


def _init(fields: list[griffe.Attribute]) -> griffe.Function:
    kind = griffe.ParameterKind.positional_or_keyword
    parameters = [
        griffe.Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
        for field in fields
    ]
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))


def _describe(docstring: griffe.Docstring, fields: list[griffe.Attribute]) -> None:
    described = [
        griffe.DocstringAttribute(field.name, annotation=field.annotation, description=description)
        for field in fields
        if (description := _description(field))
    ]
    listed = any(isinstance(section, griffe.DocstringSectionAttributes) for section in docstring.parsed)
    if described and not listed:
        docstring.parsed.insert(1, griffe.DocstringSectionAttributes(described))


def _description(field: griffe.Attribute) -> str:
    comment = re.search(r"  # (.*)", field.source)
    words = re.search(r"'([^']+ [^']+)'", str(field.value))
    found = comment or words
    return found[1] if found else ""
