"""The first parameter of a handler: a Message, its bytes or text, or a value decoded from JSON by the annotation."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from portalmq.message import Message
from portalmq.worker.outcomes import Reject

# The arguments of a handler's call, from a message. Raises Reject for a payload that is not of the type.
Arguments = Callable[[Message], tuple[Any, ...]]


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return the decoder for a handler `f(message)`, `f(payload: T)` or `f(payload: T, message)`.

    Without an annotation, or with Message, the parameter is the message. `bytes` and `str` are its value; any other
    type is decoded from JSON: dataclasses, msgspec Structs, typed dicts, containers of these, and pydantic models.
    Raises TypeError for a function that cannot be called so.
    """
    name = getattr(function, "__qualname__", repr(function))
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = typing.get_type_hints(_annotated(function), include_extras=True)
    except NameError as unknown:
        raise TypeError(
            f"the annotations of handler {name} cannot be read: {unknown}: define it in the module"
        ) from None
    taken = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    required = [each for each in required if each.kind is not each.VAR_KEYWORD]
    if not taken or len(required) > 2 or any(each.kind is each.KEYWORD_ONLY for each in required):
        raise TypeError(f"handler {name} must take one parameter, or two: the payload and the message")
    first = _decoder(hints.get(taken[0].name, Message), name)
    if len(taken) == 1 or taken[1].default is not inspect.Parameter.empty:
        return lambda message: (first(message),)
    if hints.get(taken[1].name, Message) is not Message:
        raise TypeError(f"the second parameter of handler {name} is the message: annotate it as Message, or not at all")
    return lambda message: (first(message), message)


def _annotated(function: Callable[..., Any]) -> Any:
    """Return the object whose annotations are the parameters': of a callable object, its `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _decoder(kind: Any, name: str) -> Callable[[Message], Any]:
    if kind is Message:
        return lambda message: message
    if kind is bytes:
        return lambda message: message.value
    if kind is str:
        return _refusing(lambda message: message.text, UnicodeDecodeError, "text")
    shown = getattr(kind, "__qualname__", str(kind))
    from_json = getattr(kind, "model_validate_json", None)
    if from_json is not None:  # a pydantic model; its ValidationError is a ValueError
        return _refusing(lambda message: from_json(message.value), ValueError, shown)
    try:
        decode = msgspec.json.Decoder(kind).decode
    except (TypeError, NotImplementedError) as unsupported:
        raise TypeError(f"the payload of handler {name} cannot be decoded as {shown}: {unsupported}") from None
    return _refusing(lambda message: decode(message.value), msgspec.DecodeError, shown)


def _refusing(decode: Callable[[Message], Any], wrong: type[Exception], shown: str) -> Callable[[Message], Any]:
    def decoded(message: Message) -> Any:
        try:
            return decode(message)
        except wrong as error:
            raise Reject(f"the payload is not {shown}: {error}") from error

    return decoded
