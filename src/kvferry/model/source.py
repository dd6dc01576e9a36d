"""From what a person has (a config, its file or folder, a shape by hand) to a ModelShape."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvferry.dtypes import float_named
from kvferry.errors import InputError
from kvferry.model.class_defaults import class_defaults
from kvferry.model.draft_count import draft_count
from kvferry.model.families.full import plain
from kvferry.model.fields import MAX_COUNT, Fields
from kvferry.model.guard import check_unread, suspicious_fields
from kvferry.model.registry import FAMILIES, MAX_LAYERS, FamilyShape, Heads, heads_group
from kvferry.model.shape import LayerGroup, LayerKind, ModelShape
from kvferry.model.wrappers import TEXT_CONFIGS, WRAPPERS, check_generates

__all__ = ["language_part", "load_shape", "shape_by_hand", "shape_from_config"]

MAX_CONFIG_NBYTES = 16 * 2**20
"""A config.json is a few KiB; more than this is some other file."""

_SHAPE = re.compile(r"shape:([0-9]+)x([0-9]+)x([0-9]+)")
_SHOWN_LETTERS = 200  # of a name in an error line


def load_shape(model: str, field: str = "model") -> ModelShape:
    """The shape of ``model``: a ``config.json``, a folder with one, or ``shape:LAYERSxKV_HEADSxHEAD_DIM``.

    Raises InputError, one line that begins with ``field``, for a path that is not there and a file
    that is no config.
    """
    if not isinstance(model, str) or not model.strip():
        raise InputError(f"{field}: {model!r} is not the name of a config.json, a folder or a shape")
    if model.startswith("shape:"):
        return shape_by_hand(model)
    try:
        path = Path(model)
        path = path / "config.json" if path.is_dir() else path
        data = _read(path)
    except (OSError, ValueError) as error:  # a ValueError is a zero byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{field}: {model[:_SHOWN_LETTERS]}: {reason}{_hint(model, field)}") from error
    return shape_from_config(_parse(path, data, field))


def _read(path: Path) -> bytes:
    """The file's bytes, at most one more than a config may have; only a regular file is read.

    Opened without blocking: a pipe without a writer would wait for one for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return file.read(MAX_CONFIG_NBYTES + 1)


def _hint(model: str, field: str) -> str:
    """What to give instead: of a draft, and where the name looks like one of a model on a hub."""
    if field == "draft":
        return "; a draft is mtp, eagle, or a config"
    is_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.endswith(".json")
    return "; names of models on a hub are not downloaded: give its config.json" if is_hub_name else ""


def _parse(path: Path, data: bytes, field: str) -> Mapping[str, object]:
    if not data.strip():
        raise InputError(f"{field}: {path} is empty")
    if len(data) > MAX_CONFIG_NBYTES:
        raise InputError(f"{field}: {path} has more than {MAX_CONFIG_NBYTES} bytes; that is no config.json")
    try:
        # The standard library's reader, because published configs hold Infinity (time_step_limit).
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field}: {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{field}: {path} holds a JSON {type(config).__name__}, not an object")
    return config


def shape_by_hand(model: str) -> ModelShape:
    """``shape:80x8x128``: full attention in 80 layers, 8 KV heads of width 128, fp16 by default."""
    match = _SHAPE.fullmatch(model)
    if match is None:
        raise InputError(
            f"model: {model[:_SHOWN_LETTERS]!r} is not shape:LAYERSxKV_HEADSxHEAD_DIM "
            "(for example shape:80x8x128)"
        )
    layers, kv_heads, width = (int(number[:20]) for number in match.groups())
    if min(layers, kv_heads, width) < 1 or max(layers, kv_heads, width) > MAX_COUNT:
        raise InputError(f"model: {model[:_SHOWN_LETTERS]!r}: each number must be from 1 to {MAX_COUNT}")
    group = heads_group(LayerKind.FULL, range(layers), Heads(kv_heads, width, width))
    return ModelShape("shape", layers, (group,), dtype="fp16", draft_layer=_one_draft_layer((group,)))


def shape_from_config(config: Mapping[str, object]) -> ModelShape:
    """See :meth:`kvferry.model.ModelShape.from_config`."""
    if not isinstance(config, Mapping):
        raise InputError(f"config: a {type(config).__name__} is not the object of a config.json")
    outer = Fields(config)
    f, model_type = language_part(outer)
    num_draft_layers = draft_count(f) or draft_count(outer)
    function = FAMILIES.get(model_type)
    if function is None:
        result = _unknown(f, model_type, outer)
    else:
        result = function(f)
        check_unread(f, result.num_layers)
    _check_accounted(f, result)
    _check_wrapper(outer, f, result.num_layers)
    groups = tuple(group for group in result.groups if group.layers)
    if not groups:
        raise f.error("num_hidden_layers", "no layer of this model owns a cache")
    for fields in {f.path: f, outer.path: outer}.values():
        _note_quantised_cache(fields, f.notes)
    if f.defaults:
        defaults = ", ".join(dict.fromkeys(f.defaults))
        f.notes.append(f"not in the config, taken from the model class: {defaults}")
    draft = result.draft_layer or _one_draft_layer(groups)
    return ModelShape(
        model_type=outer.text("model_type") or model_type or "unknown",
        num_layers=result.num_layers,
        groups=groups,
        dtype=_own_dtype(f, outer),
        draft_layer=draft,
        num_draft_layers=num_draft_layers,
        encoder_tokens=result.encoder_tokens,
        vocab_size=f.optional("vocab_size") or outer.optional("vocab_size"),
        warnings=tuple(dict.fromkeys(f.notes)),
    )


def language_part(outer: Fields) -> tuple[Fields, str]:
    """The innermost text config and its model type; notes an unknown wrapper around a known model.

    A text config is written as its difference from the class, so what it leaves out is the class's.
    """
    f = outer
    model_type = f.text("model_type") or ""
    f.class_defaults = class_defaults(model_type, is_nested=False)
    while True:
        name = next((name for name in TEXT_CONFIGS if f.has(name)), None)
        inner = f.nested(name) if name is not None else None
        if inner is None:
            return f, model_type
        inner_type = inner.text("model_type") or WRAPPERS.get(model_type) or f"{model_type}_text"
        if inner_type not in FAMILIES and model_type in FAMILIES:
            inner_type = model_type
        inner.class_defaults = class_defaults(inner_type, is_nested=True)
        if model_type == "paligemma":
            inner.understands("use_bidirectional_attention")  # of the prompt; what follows is causal
        if model_type not in WRAPPERS:
            f.notes.append(
                f"model_type {model_type!r} is not a known wrapper; sized from its {name} "
                f"({inner_type!r}), assuming that its other parts hold no KV"
            )
        f, model_type = inner, inner_type


def _check_wrapper(outer: Fields, f: Fields, num_layers: int) -> None:
    """Of an unknown wrapper, the fields beside the parts are judged too, but for copies of the inner ones."""
    if f is outer or outer.text("model_type") in WRAPPERS:
        return
    beside = {
        name: value
        for name, value in outer.raw.items()
        if not isinstance(value, dict) and f.raw.get(name) != value
    }
    check_unread(Fields(beside), num_layers)


def _check_accounted(f: Fields, result: FamilyShape) -> None:
    """Raise InputError unless each layer owns a cache, or is said to own none.

    This is what keeps a layer from being dropped in silence, whatever a family's function does.
    """
    if result.num_layers > MAX_LAYERS:
        raise f.error("num_hidden_layers", f"{result.num_layers} is more than {MAX_LAYERS}")
    owners: set[int] = set()
    for group in result.groups:
        most = max(Counter(group.layers).values(), default=0)
        if most > result.caches_per_layer:
            raise f.error("num_hidden_layers", f"a layer is counted {most} times for one kind of cache")
        owners.update(group.layers)
    unclear = owners.symmetric_difference(range(result.num_layers)).symmetric_difference(result.cacheless)
    if unclear:
        some = ", ".join(str(layer) for layer in sorted(unclear)[:8])
        raise f.error("num_hidden_layers", f"it is not clear what the layers {some} of this model cache")


def _unknown(f: Fields, model_type: str, outer: Fields) -> FamilyShape:
    """An unknown model with the plain fields only: full attention, said aloud; with others: refused."""
    label = f"unknown model_type {model_type!r}" if model_type else "no model_type"
    check_generates(f, model_type, label, outer)
    result = plain(f)
    names = suspicious_fields(f, result.num_layers)
    if names:
        shown = ", ".join(name[:80] for name in names[:6])
        raise f.error(
            "model_type" if model_type else names[0],
            f"{label}, and its fields {shown} suggest a cache that is not plain attention; "
            "give the shape by hand (shape:LAYERSxKV_HEADSxHEAD_DIM) if it is",
        )
    f.notes.append(f"{label}: assumed full attention with K and V of every KV head in every layer")
    return result


def _own_dtype(f: Fields, outer: Fields) -> str | None:
    for fields in (f, outer):
        for name in ("dtype", "torch_dtype"):
            value = fields.text(name)
            if value is not None and value != "auto":
                return float_named(value, fields.path + name).name
    return None


def _one_draft_layer(groups: tuple[LayerGroup, ...]) -> tuple[LayerGroup, ...]:
    """The attention groups of the last layer that has full attention, else of the last with any."""
    kinds = {LayerKind.FULL, LayerKind.MLA}
    attention_groups = [
        group for group in groups if group.kind in kinds | {LayerKind.INDEXER, LayerKind.WINDOW}
    ]
    candidates = [group for group in attention_groups if group.kind in kinds] or attention_groups
    if not candidates:
        return ()
    last = max(group.layers[-1] for group in candidates)
    one = [group for group in attention_groups if last in group.layers]
    return tuple(msgspec.structs.replace(group, layers=(0,)) for group in one)


def _note_quantised_cache(fields: Fields, notes: list[str]) -> None:
    """Checkpoints that ask for a quantised KV cache: the config's dtype is then not what engines store."""
    quantisation = fields.raw.get("quantization_config")
    scheme = quantisation.get("kv_cache_scheme") if isinstance(quantisation, dict) else None
    if scheme:
        notes.append(
            "quantization_config.kv_cache_scheme asks for a quantised KV cache; say which with --kv-dtype"
        )
