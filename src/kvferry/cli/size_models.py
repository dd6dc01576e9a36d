"""The models of ``kvferry size``, each with the options that concern it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvferry.cli.streams import printable
from kvferry.errors import InputError
from kvferry.model import LayerKind, ModelShape, load_shape, with_draft
from kvferry.size import KVSize

if TYPE_CHECKING:
    from kvferry.cli.size import SizeOptions

__all__ = ["SizedModel", "short_names", "size_models"]


@dataclasses.dataclass(frozen=True, slots=True)
class SizedModel:
    """One model of the command line: as given, its short name, what was asked of it, and its size."""

    model: str
    name: str
    shape: ModelShape
    options: SizeOptions
    size: KVSize


def size_models(models: Sequence[str], options: SizeOptions) -> list[SizedModel]:
    """The size of each model.

    An option that concerns some of the models only is ignored for the others, with a warning that
    says so; one that concerns none is refused. Raises InputError, which names the model where
    there are several.
    """
    names = short_names(models)
    notes: list[list[str]] = [[] for _ in models]
    shapes = _each(names, models, load_shape)
    if options.draft is not None:
        takes = [_takes_draft(shape, options) for shape in shapes]
        shapes = [
            _with_draft(name, shape, options, len(models) > 1) if is_taken or not any(takes) else shape
            for name, shape, is_taken in zip(names, shapes, takes, strict=True)
        ]
        _note(notes, takes, f"draft: this model has none for {options.draft}; ignored")
    crosses = [any(group.kind is LayerKind.CROSS for group in shape.groups) for shape in shapes]
    if options.encoder_tokens is not None:
        _note(notes, crosses, "encoder_tokens: this model has no cross attention; ignored")
    sized = []
    for i, shape in enumerate(shapes):
        own = options if crosses[i] or not any(crosses) else dataclasses.replace(options, encoder_tokens=None)
        with _blamed_on(names[i], len(models) > 1):
            size = own.size_of(shape)
        size = msgspec.structs.replace(size, warnings=size.warnings + tuple(notes[i]))
        sized.append(SizedModel(models[i], names[i], shape, own, size))
    return sized


def _each(names: Sequence[str], models: Sequence[str], load: Callable[[str], ModelShape]) -> list[ModelShape]:
    shapes = []
    for name, model in zip(names, models, strict=True):
        with _blamed_on(name, len(models) > 1):
            shapes.append(load(model))
    return shapes


def _takes_draft(shape: ModelShape, options: SizeOptions) -> bool:
    """Whether the draft that was asked for can be added to this model."""
    if options.draft not in {"mtp", "eagle"}:
        return True
    is_declared = options.draft == "eagle" or options.draft_layers is not None or shape.num_draft_layers > 0
    return bool(shape.draft_layer) and is_declared


def _with_draft(name: str, shape: ModelShape, options: SizeOptions, is_several: bool) -> ModelShape:
    with _blamed_on(name, is_several):
        return with_draft(shape, options.draft or "", options.draft_layers)


def _note(notes: list[list[str]], concerned: Sequence[bool], text: str) -> None:
    """Note it for each model that is not concerned, if any other is."""
    for own, is_concerned in zip(notes, concerned, strict=True):
        if any(concerned) and not is_concerned:
            own.append(text)


@contextmanager
def _blamed_on(name: str, is_several: bool) -> Iterator[None]:
    """Where there are several models, errors inside say of which one they speak."""
    try:
        yield
    except InputError as error:
        if not is_several:
            raise
        raise InputError(f"{name}: {error}") from error


def short_names(models: Sequence[str]) -> list[str]:
    """Short names: a file's folder for a config.json; the arguments themselves where two would be alike."""
    short = []
    for model in models:
        path = Path(model)
        named = path.parent if path.name == "config.json" else path
        short.append(model if model.startswith("shape:") else named.name or model)
    return [printable(name) for name in (short if len(set(short)) == len(short) else models)]
