"""The reward of a response that is to be JSON of a certain form: 1 if it is valid, 0 if not."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from data_tools.errors import ConfigError, DataError, MissingExtra
from data_tools.rewards.reward import Columns, NotJudged, Rule

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n?[ \t]*```", re.DOTALL | re.IGNORECASE)


def json_schema(
    schema: str | dict[str, Any] | bool | None = None, file: str | None = None, column: str | None = None
) -> Rule:
    """1 if the response is JSON that a JSON schema allows; 0 if it is no JSON, or not allowed.

    The schema is given as such (or as its JSON text), by a `file`, or for each response by a `column`. The
    JSON is the whole response, or else the last block of it fenced by three backticks. A row without a
    schema, or with a broken one, is not judged. No reference in a schema is fetched from anywhere.
    Raises ConfigError if not exactly one schema is given, or it is broken; MissingExtra without `jsonschema`.
    """
    if sum(given is not None for given in (schema, file, column)) != 1:
        raise ConfigError("reward json-schema needs one of schema, file and column")
    if column is None:
        given = _read(file) if file is not None else schema
        try:
            validate = _validator(given)
        except NotJudged as error:
            raise ConfigError(
                f"reward json-schema: {error}", "json-schema.org tells how to write one"
            ) from None
        return lambda responses, _: [_verdict(text, validate) for text in responses]
    name = column

    def judge(responses: list[str], columns: Columns) -> Sequence[Any]:
        if name not in columns:
            raise ConfigError(
                f"reward json-schema: no column {name!r}; given: {', '.join(columns) or 'none'}"
            )
        known: dict[str, Callable[[Any], bool] | NotJudged] = {}
        return [
            None if schema is None else _verdict(text, _known(schema, known))
            for text, schema in zip(responses, columns[name], strict=True)
        ]

    return judge


def _known(
    schema: Any, known: dict[str, Callable[[Any], bool] | NotJudged]
) -> Callable[[Any], bool] | NotJudged:
    """The validator of a schema, made once for rows that share it."""
    key = schema if isinstance(schema, str) else orjson.dumps(schema, default=str).decode()
    if key not in known:
        try:
            known[key] = _validator(schema)
        except NotJudged as error:
            known[key] = error
    return known[key]


def _validator(schema: Any) -> Callable[[Any], bool]:
    """What tells whether a value is valid; NotJudged for a schema that is none."""
    try:
        import jsonschema
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise MissingExtra("jsonschema", "json-schema") from error
    if isinstance(schema, str | bytes):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise NotJudged(f"the schema is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise NotJudged(f"the schema is a {type(schema).__name__}, not an object")
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise NotJudged(f"the schema is broken: {error.message[:200]}") from error
    # An empty registry: left to itself, the library would fetch references from the network.
    valid: Callable[[Any], bool] = kind(schema, registry=Registry()).is_valid
    return valid


def _verdict(text: str, validate: Callable[[Any], bool] | NotJudged) -> Any:
    if isinstance(validate, NotJudged):
        return validate
    found = _parsed(text)
    if not found:
        return 0.0
    try:
        return float(validate(found[0]))
    except Exception as error:  # a reference that leads nowhere, a pattern that is none, endless recursion
        return NotJudged(f"the schema cannot be applied: {type(error).__name__}: {str(error)[:200]}")


def _parsed(text: str) -> list[Any]:
    """The JSON value of a response in a list; an empty list if there is none."""
    for part in (text, *_FENCED.findall(text)[-1:]):
        try:
            return [orjson.loads(part.strip())]
        except orjson.JSONDecodeError:
            continue
    return []


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}", "name a file with a JSON schema"
        ) from error
