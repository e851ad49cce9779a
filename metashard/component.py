"""A folder to one component: its class, its config and its weight files, with no weight byte read.

Which file is loaded follows the component's own library, variant by variant (diffusers 0.42
`ModelMixin.from_pretrained`, transformers 5.24 `_get_resolved_checkpoint_files`): diffusers prefers the index to a
single file, transformers the single file to the index. Only code of these two libraries is ever imported: a
repository's own code (`auto_map`) is not.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metashard.checkpoint import check_file_name, read_json
from metashard.errors import CheckpointError, ComponentError

logger = logging.getLogger(__name__)

PIPELINE_INDEX = "model_index.json"
CONFIG = "config.json"
# library -> (stem of safetensors files, stem of pickles)
_STEMS = {
    "diffusers": ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    "transformers": ("model", "pytorch_model"),
}
_NO_WEIGHTS = re.compile(
    r"(Scheduler|Tokenizer|TokenizerFast|Processor|ProcessorFast|FeatureExtractor|Guidance|Guider)$"
)
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx", ".flashpack"}


@dataclass(frozen=True)
class Component:
    """One named part of a pipeline folder, or a folder that is one model. Holds names only, so it pickles.

    Attributes:
        folder: Folder with config.json and the weight files.
        name: Name of the component; None where the folder given is one model.
        library: "diffusers" or "transformers".
        class_name: Name of the class in that library.
        config: config.json, parsed.
        files: Weight files, plain names inside `folder`, sorted.
        weight_map: The index's map from key to file; None for a single file.
        format: "safetensors" or "pickle".
        variant: Variant of the weight files, such as "fp16"; None for the plain ones.
    """

    folder: Path
    name: str | None
    library: str
    class_name: str
    config: dict[str, Any]
    files: tuple[str, ...]
    weight_map: dict[str, str] | None
    format: str
    variant: str | None = None

    @property
    def cls(self) -> type[Any]:
        """The class, imported from its library on first use.

        Raises:
            ComponentError: The installed library has no such class, or it is not a torch module with
                `from_pretrained`.
        """
        import torch

        try:
            module = importlib.import_module(self.library)
            found = getattr(module, self.class_name, None)
        except ImportError as cause:
            raise resolve_error(
                f"{self.library}.{self.class_name} cannot be imported: {cause}", file=self.folder
            ) from cause
        if found is None:
            why = (
                "It is the repository's own code (auto_map), which metashard never runs."
                if "auto_map" in self.config
                else f"Is a newer {self.library} needed?"
            )
            text = f"the installed {self.library} {module.__version__} has no class {self.class_name}. {why}"
            raise resolve_error(text, file=self.folder, expected=f"a class of {self.library}", got=self.class_name)
        if not (isinstance(found, type) and issubclass(found, torch.nn.Module) and hasattr(found, "from_pretrained")):
            text = f"{self.library}.{self.class_name} is not a model with weights"
            raise resolve_error(text, file=self.folder, expected="a module with from_pretrained", got=self.class_name)
        return found

    @property
    def quantization(self) -> str | None:
        """Name of the quantisation method in the config ("bitsandbytes", "gptq", ...); None where there is none."""
        nested = self.config.get("text_config")
        for config in (self.config, nested if isinstance(nested, dict) else {}):
            for field in ("quantization_config", "compression_config"):
                settings = config.get(field)
                if settings is None:
                    continue
                method = settings.get("quant_method") if isinstance(settings, dict) else None
                if method is None and isinstance(settings, dict) and {"load_in_4bit", "load_in_8bit"} & set(settings):
                    method = "bitsandbytes"
                return str(method or "unknown")
        return None


def resolve_component(
    folder: Path, component: str | None = None, *, variant: str | None = None, allow_pickle: bool = False
) -> Component:
    """Find one component in a local folder.

    Args:
        folder: A pipeline folder (model_index.json), a folder that is one model (config.json), or a folder whose
            subfolders are models.
        component: Name in model_index.json, or, where there is none, a subfolder ("text_encoder", "a/b"). May be None
            only if `folder` is one model.
        variant: Variant of the weight files, such as "fp16".
        allow_pickle: Whether weights that exist as pickles only may be used.

    Returns:
        The component. Bytes read: the JSON files only.

    Raises:
        ComponentError: No such component, a null one, one without weights, an unknown class, no weight files, pickles
            only, or no such variant.
        CheckpointError: The index is not valid, names a file that is missing or outside the folder, or a weight file
            is a link that leads out of the folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what, hint = "does not exist", "Give a local folder, or a hub id such as 'org/name'."
        if folder.exists():
            what, hint = "is a file", "Give the folder that holds config.json and the weight files."
        raise resolve_error(f"{folder} {what}. {hint}", file=folder, expected="a folder", got=what)
    place, library, class_name, config = identify(folder, component)
    names = sorted(os.listdir(place))
    form, index, files = choose_files(names, place, library, config, variant=variant, allow_pickle=allow_pickle)
    weight_map = None
    if index is not None:
        _check_inside(place / index, root=folder)
        weight_map = read_index(place / index)
        files = sorted(set(weight_map.values()))
        for name in files:
            if not os.path.exists(place / name):
                text = f"{name}: named by {index}, but not in the folder. Fetch the folder again."
                raise _damaged(text, place / name, expected=name, got="no such file")
    for name in files:
        _check_inside(place / name, root=folder)
    stale = [name for name in names if name not in files and _confusable(name, _STEMS[library][0], variant)]
    if stale and form == "safetensors":
        used = index or files[0]
        logger.warning(
            "%s: %s is what counts; not used: %s", place, used, ", ".join(stale[:5] + ["..."] * (len(stale) > 5))
        )
    return Component(
        folder=place,
        name=component,
        library=library,
        class_name=class_name,
        config=config,
        files=tuple(files),
        weight_map=weight_map,
        format=form,
        variant=variant,
    )


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
        raise _damaged(text, path, expected="weight_map: key -> file name", got=got)
    for name in set(weight_map.values()):
        check_file_name(name, source=str(path), phase="resolve")
    return dict(weight_map)


def identify(folder: Path, component: str | None) -> tuple[Path, str, str, dict[str, Any]]:
    """Folder, library, class name and config of a component; see `resolve_component`."""
    parts = name_parts(component)
    library = class_name = None
    if os.path.lexists(folder / PIPELINE_INDEX):
        library, class_name = _from_pipeline(folder, component)
    elif component is None and not os.path.lexists(folder / CONFIG):
        _raise_not_a_model(folder)
    place = folder.joinpath(*parts)
    if not place.is_dir():
        text = f"{folder} has no folder {component!r}. There are: {_names(_models_in(folder))}."
        if class_name is not None:
            text = (
                f"{PIPELINE_INDEX} lists {component} ({class_name}), but {folder} has no such folder. Was the "
                "checkpoint fetched in part?"
            )
        raise resolve_error(text, file=place, key=component, expected=f"folder {component}", got="not there")
    if not os.path.lexists(place / CONFIG):
        _raise_not_a_model(place)
    _check_inside(place / CONFIG, root=folder)
    config = read_json(place / CONFIG, what="config", phase="resolve", error=ComponentError)
    if library is None or class_name is None:
        library, class_name = _from_config(config, place / CONFIG)
    return place, library, class_name, config


def _from_pipeline(folder: Path, component: str | None) -> tuple[str, str]:
    """(library, class name) that model_index.json gives for a component."""
    path = folder / PIPELINE_INDEX
    _check_inside(path, root=folder)
    index = read_json(path, what="pipeline index", phase="resolve", error=ComponentError)
    listed = {key: value for key, value in index.items() if not key.startswith("_") and _is_listing(value)}
    known = {key: name for key, (library, name) in listed.items() if library in _STEMS and name}
    loadable = sorted(key for key, name in known.items() if not _weightless(name, folder / key))
    there = f"There are: {_names(loadable)}."

    def wrong(message: str, got: Any) -> ComponentError:
        return resolve_error(f"{message} {there}", file=path, key=component, expected=loadable, got=got)

    if component is None:
        raise wrong(f"{folder} is a pipeline: say which component to load.", None)
    if component not in listed:
        own = f" The folder {component} is not part of it: to load that, give its own path."
        exists = (folder / component / CONFIG).is_file()
        raise wrong(f"{PIPELINE_INDEX} lists no component {component!r}.{own if exists else ''}", component)
    library, class_name = listed[component]
    if library is None or class_name is None:
        raise wrong(f"{component} is null in {PIPELINE_INDEX}: this pipeline comes without it.", listed[component])
    if library not in _STEMS or not class_name.isidentifier():
        what = f"{component} is {library}.{class_name}, which metashard does not load"
        raise wrong(f"{what}: only classes of diffusers and transformers themselves.", listed[component])
    if _weightless(class_name, folder / component):
        how = f"load it with {class_name}.from_pretrained"
        raise wrong(f"{component} ({class_name}) has no weights to shard; {how}.", class_name)
    return library, class_name


def _from_config(config: dict[str, Any], path: Path) -> tuple[str, str]:
    """(library, class name) of a folder that is one model, from its config.json."""
    architectures = config.get("architectures")
    library, name = "diffusers", config.get("_class_name")
    if name is None and isinstance(architectures, list) and architectures:
        library, name = "transformers", architectures[0]
    if name is None and isinstance(config.get("model_type"), str):
        auto = importlib.import_module("transformers.models.auto.modeling_auto")
        library, name = "transformers", auto.MODEL_MAPPING_NAMES.get(config["model_type"])
        if isinstance(name, (tuple, list)):
            name = name[0]
    if not isinstance(name, str) or not name.isidentifier():
        got = name or config.get("model_type")
        known = "`_class_name` (diffusers), or `architectures` or a known `model_type` (transformers)"
        text = f"{path.name} names no class metashard knows: expected {known}, got {got!r}"
        raise resolve_error(text, file=path, expected=known, got=got)
    if name.endswith("Scheduler"):
        text = f"{name} has no weights to shard; load it with {name}.from_pretrained."
        raise resolve_error(text, file=path, got=name)
    return library, name


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
    if variant is not None and not re.fullmatch(r"[\w.\-]+", variant):
        raise resolve_error(
            f"variant {variant!r} is not part of a file name", file=place, expected="such as fp16", got=variant
        )
    explicit = config.get("transformers_weights") if library == "transformers" else None
    if isinstance(explicit, str):
        check_file_name(explicit, source=str(place / CONFIG), phase="resolve")
        if explicit not in names or not explicit.endswith((".safetensors", ".safetensors.index.json")):
            text = f"{CONFIG} says transformers_weights = {explicit!r}, which is no safetensors file in {place}"
            raise resolve_error(text, file=place / CONFIG, expected="a safetensors file or its index", got=explicit)
        return ("safetensors", explicit, []) if explicit.endswith(".json") else ("safetensors", None, [explicit])
    safe, pickle = _STEMS[library]
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
        text = f"{place} has no weights {plain}: neither {single} nor its index. Variants there: {_names(there)}."
        raise resolve_error(text, file=place, expected=single, got=there)
    weights = sorted(name for name in names if Path(name).suffix in _WEIGHT_SUFFIXES)
    adapter = " It is an adapter: pass it as `lora=`." if "adapter_config.json" in names else ""
    text = f"{place} has no weights that {library} would load: expected {single} or its index, got {_names(weights)}."
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


def _confusable(name: str, stem: str, variant: str | None) -> bool:
    """Whether a file that is not loaded could be taken for one that is: safetensors, and not of another variant."""
    if not name.endswith(".safetensors"):
        return False
    of = _variants([name], [stem])
    return not of or of == {variant}


def _check_inside(path: Path, *, root: Path) -> None:
    """Refuse a link that leads out of the folder that was given, or the `blobs` of the hub cache it lies in."""
    base = Path(os.path.realpath(root))
    allowed = [base]
    for parent in (base, *base.parents):
        if parent.parent.name == "snapshots" and parent.parent.parent.name.startswith("models--"):
            allowed += [parent, Path(os.path.realpath(parent.parent.parent / "blobs"))]
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(place) for place in allowed):
        text = (
            f"{path.name}: a link that leads out of the folder, to {target}. Put the file itself there, or give the "
            "folder the link leads to."
        )
        raise _damaged(text, path, expected=f"a file inside {root}", got=str(target))


def name_parts(component: str | None) -> tuple[str, ...]:
    """Folder names in a component's name; refuses names that lead out of the folder."""
    if component is None:
        return ()
    parts = tuple(component.strip("/").split("/")) if not component.startswith("/") else ("",)
    if any(part in {"", ".", ".."} or "\\" in part or "\0" in part for part in parts):
        text = f"component {component!r} is not a name inside the folder"
        raise resolve_error(text, key=component, expected="such as transformer", got=component)
    return parts


def _is_listing(value: Any) -> bool:
    """Whether an item of model_index.json is a component ([library, class] or nulls) and not a setting."""
    return isinstance(value, list) and len(value) == 2 and all(item is None or isinstance(item, str) for item in value)


def _weightless(class_name: str, place: Path) -> bool:
    """Told by name: schedulers, tokenizers and processors have no config.json, as models do."""
    return _NO_WEIGHTS.search(class_name) is not None and not (place / CONFIG).is_file()


def _models_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))


def _raise_not_a_model(folder: Path) -> None:
    names = sorted(os.listdir(folder))
    inside = _models_in(folder)
    hint = f" Components in it: {_names(inside)}." if inside else ""
    if "adapter_config.json" in names:
        hint = " It is an adapter: pass it as `lora=`."
    elif "scheduler_config.json" in names or "tokenizer_config.json" in names:
        hint = " A scheduler or tokenizer has no weights to shard."
    text = f"{folder} has no {PIPELINE_INDEX} and no {CONFIG}, so it is not a model.{hint}"
    raise resolve_error(text, file=folder, expected=f"{PIPELINE_INDEX} or {CONFIG}", got=names[:20])


def _names(names: Collection[str]) -> str:
    return ", ".join(list(names)[:20]) if names else "none"


def resolve_error(
    message: str, *, file: Path | str | None = None, key: str | None = None, expected: Any = None, got: Any = None
) -> ComponentError:
    name = None if file is None else str(file)
    return ComponentError(message, file=name, key=key, expected=expected, got=got, phase="resolve")


def _damaged(message: str, path: Path, *, expected: Any, got: Any) -> CheckpointError:
    return CheckpointError(message, file=str(path), expected=expected, got=got, phase="resolve")
