"""Which weight files of a folder a library would load.

This follows the component's own library, variant by variant (diffusers 0.42 `ModelMixin.from_pretrained`, transformers
5.24 `_get_resolved_checkpoint_files`): diffusers prefers the index to a single file, transformers the single file to
the index. Names only: no weight byte is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from metashard.errors import CheckpointError
from metashard.files import check_file_name, file_error, read_json, resolve_error, short, shown_names

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"  # of transformers models that generate
# library -> (stem of safetensors files, stem of pickles)
STEMS = {
    "diffusers": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "transformers": ("model", "pytorch_model"),
}
VARIANT = re.compile(r"[\w.\-]+")  # what may stand in a file name
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".flashpack"}


def choose_files(
    names: Collection[str],
    place: Path,
    library: str,
    config: dict[str, Any],
    *,
    variant: str | None,
    allow_pickle: bool,
) -> tuple[str, str | None, list[str]]:
    """(format, index file or None, single file or nothing) that the library would load from a folder of these names."""
    if variant is not None and not VARIANT.fullmatch(variant):
        raise resolve_error(
            f"variant {variant!r} is not part of a file name", file=place, expected="such as fp16", got=variant
        )
    explicit = config.get("transformers_weights") if library == "transformers" else None
    if isinstance(explicit, str):
        check_file_name(explicit, source=str(place / CONFIG), phase="resolve")
        if explicit not in names or not explicit.endswith((".safetensors", ".safetensors.index.json")):
            text = f"{CONFIG} says transformers_weights = {short(explicit)}, which is no safetensors file in {place}"
            raise resolve_error(text, file=place / CONFIG, expected="a safetensors file or its index", got=explicit)
        return ("safetensors", explicit, []) if explicit.endswith(".json") else ("safetensors", None, [explicit])
    safe, pickle = STEMS[library]
    mark = f".{variant}" if variant else ""
    single = f"{safe}{mark}.safetensors"
    indexes = [name for name in _index_names(safe, "safetensors", variant) if name in names]
    if indexes and not (library == "transformers" and single in names):
        return "safetensors", indexes[0], []
    if single in names:
        return "safetensors", None, [single]
    single_pickle = f"{pickle}{mark}.bin"
    pickled = [name for name in (single_pickle, *_index_names(pickle, "bin", variant)) if name in names]
    if pickled and not allow_pickle:
        text = (
            f"{place} has its weights as pickles only ({pickled[0]}). A pickle can run code when it is loaded: convert "
            "it (from_pretrained, then save_pretrained), or pass allow_pickle=True if you trust where it comes from."
        )
        raise resolve_error(text, file=place / pickled[0], expected=single, got=pickled[0])
    if pickled:
        is_single = pickled[0] == single_pickle
        return "pickle", None if is_single else pickled[0], [single_pickle] if is_single else []
    variants = _variants(names, (safe, pickle))
    if variants:
        plain = "without a variant" if variant is None else f"of variant {variant!r}"
        there = sorted(repr(v) if v else "None (the plain weights)" for v in variants)
        text = f"{place} has no weights {plain}: neither {single} nor its index. Variants there: {shown_names(there)}."
        raise resolve_error(text, file=place, expected=single, got=there)
    weights = sorted(name for name in names if Path(name).suffix in _WEIGHT_SUFFIXES)
    adapter = " It is an adapter: pass it as `lora=`." if "adapter_config.json" in names else ""
    text = (
        f"{place} has no weights that {library} would load: expected {single} or its index, got {shown_names(weights)}."
    )
    raise resolve_error(text + adapter, file=place, expected=single, got=weights)


def _index_names(stem: str, suffix: str, variant: str | None) -> tuple[str, ...]:
    """Names an index can have, in the order in which diffusers looks; the second is from before diffusers 0.31."""
    if variant is None:
        return (f"{stem}.{suffix}.index.json",)
    return (f"{stem}.{suffix}.index.{variant}.json", f"{stem}.{suffix}.{variant}.index.json")


def _variants(names: Iterable[str], stems: Iterable[str]) -> set[str | None]:
    """Variants for which a folder with these names has weights; None stands for the plain ones."""
    one_of = "|".join(re.escape(stem) for stem in stems)
    number = r"-\d+-of-\d+"
    pattern = re.compile(
        rf"(?:{one_of})(?:\.(?P<a>[^.]+?))??(?:{number}(?:\.(?P<b>[^.]+))?)?\.(?:safetensors|bin)"
        r"(?:\.index(?:\.(?P<c>[^.]+))?\.json|\.(?P<d>[^.]+)\.index\.json)?"
    )
    found = (pattern.fullmatch(name) for name in names)
    return {next(filter(None, match.groups()), None) for match in found if match}


def is_weights(name: str, stem: str, variant: str | None) -> bool:
    """Whether a loader would take a safetensors file, or an index, of this name for weights of a stem and variant."""
    return ".safetensors" in name and _variants([name], [stem]) == {variant}


def confusable(name: str, stem: str, variant: str | None) -> bool:
    """Whether a file that is not loaded could be taken for one that is: safetensors, and not of another variant."""
    if not name.endswith(".safetensors"):
        return False
    of = _variants([name], [stem])
    return not of or of == {variant}


def read_index(path: Path) -> dict[str, str]:
    """The `weight_map` of an index file: key to file name.

    Raises:
        CheckpointError: Not a JSON object with a map of strings, a key given twice, an empty map, or a file name that
            is not a plain name inside the folder.
    """
    index = read_json(path, what="index", phase="resolve", error=CheckpointError, unique=True)
    weight_map = index.get("weight_map")
    well_formed = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not weight_map or not well_formed:
        text = f"{path.name}: no `weight_map` that maps keys to file names. Fetch the index again."
        got = type(weight_map).__name__ if weight_map != {} else "empty"
        raise file_error(text, path, expected="weight_map: key -> file name", got=got, phase="resolve")
    for name in set(weight_map.values()):
        check_file_name(name, source=str(path), phase="resolve")
    return dict(weight_map)
