"""A folder to one component: its class, its config and its weight files, with no weight byte read.

Only code of these two libraries is ever imported: a
repository's own code (`auto_map`) is not, and there is no switch for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metashard.errors import CheckpointError, ComponentError
from metashard.files import check_inside, file_error, printable, read_json, resolve_error, short, shown_names
from metashard.weight_files import CONFIG, STEMS, choose_files, confusable, read_index

logger = logging.getLogger(__name__)

PIPELINE_INDEX = "model_index.json"
# Keys of a config by which transformers picks an implementation; one with a "/" is code on the hub.
_IMPLEMENTATION = ("attn_implementation", "experts_implementation", "_implementation_internal")
_NO_WEIGHTS = re.compile(
    r"(Scheduler|Tokenizer|TokenizerFast|Processor|ProcessorFast|FeatureExtractor|Guidance|Guider)$"
)


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
                "It is the repository's own code (auto_map), which metashard never runs; there is no trust_remote_code."
                if "auto_map" in self.config
                else f"Is a newer {self.library} needed?"
            )
            name = printable(self.class_name[:100])
            text = f"the installed {self.library} {module.__version__} has no class {name}. {why}"
            raise resolve_error(text, file=self.folder, expected=f"a class of {self.library}", got=name)
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
    try:
        return _resolve(folder, component, variant, allow_pickle)
    except (ComponentError, CheckpointError) as error:
        from metashard.save.stage import interrupted  # nothing of saving is needed where all is well

        for stage in interrupted(folder / (component or "")):
            error.message += (
                f" A save to this folder was interrupted while it renamed files, or still does: what is missing is in "
                f"{stage}. The next save to the folder puts it in order first."
            )
        raise


def _resolve(folder: Path, component: str | None, variant: str | None, allow_pickle: bool) -> Component:
    if not folder.is_dir():
        what, hint = "does not exist", "Give a local folder, or a hub id such as 'org/name'."
        if folder.exists():
            what, hint = "is a file", "Give the folder that holds config.json and the weight files."
        raise resolve_error(f"{folder} {what}. {hint}", file=folder, expected="a folder", got=what)
    place, library, class_name, config = identify(folder, component)
    _refuse_code(config, place / CONFIG)
    if library == "transformers" and "configuration_files" in config:
        text = (
            f"{CONFIG} names other configs, one for each version of transformers (configuration_files), which are not "
            f"followed. Save the right one as {CONFIG}."
        )
        raise resolve_error(text, file=place / CONFIG, key="configuration_files", expected="the config itself")
    names = _listed(place)
    form, index, files = choose_files(names, place, library, config, variant=variant, allow_pickle=allow_pickle)
    weight_map = None
    if index is not None:
        check_inside(place / index, root=folder)
        weight_map = read_index(place / index)
        files = sorted(set(weight_map.values()))
        for name in files:
            if not os.path.exists(place / name):
                text = f"{name}: named by {index}, but not in the folder. Fetch the folder again."
                raise file_error(text, place / name, expected=name, got="no such file", phase="resolve")
    for name in files:
        check_inside(place / name, root=folder)
    stale = [name for name in names if name not in files and confusable(name, STEMS[library][0], variant)]
    if stale and form == "safetensors":
        shown = ", ".join([printable(name) for name in stale[:5]] + ["..."] * (len(stale) > 5))
        logger.warning("%s: %s is what counts; not used: %s", printable(str(place)), index or files[0], shown)
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


def identify(folder: Path, component: str | None) -> tuple[Path, str, str, dict[str, Any]]:
    """Folder, library, class name and config of a component; see `resolve_component`."""
    parts = name_parts(component)
    library = class_name = None
    if os.path.lexists(folder / PIPELINE_INDEX):
        library, class_name = _from_pipeline(folder, component)
    elif component is None and not os.path.lexists(folder / CONFIG):
        _raise_not_a_model(folder)
    place = folder.joinpath(*parts)
    if not os.path.isdir(place):
        text = f"{folder} has no folder {component!r}. There are: {shown_names(_models_in(folder))}."
        if class_name is not None:
            text = (
                f"{PIPELINE_INDEX} lists {component} ({class_name}), but {folder} has no such folder. Was the "
                "checkpoint fetched in part?"
            )
        raise resolve_error(text, file=place, key=component, expected=f"folder {component}", got="not there")
    if not os.path.lexists(place / CONFIG):
        _raise_not_a_model(place)
    check_inside(place / CONFIG, root=folder)
    config = read_json(place / CONFIG, what="config", phase="resolve", error=ComponentError)
    if library is None or class_name is None:
        library, class_name = _from_config(config, place / CONFIG)
    return place, library, class_name, config


def _from_pipeline(folder: Path, component: str | None) -> tuple[str, str]:
    """(library, class name) that model_index.json gives for a component."""
    path = folder / PIPELINE_INDEX
    check_inside(path, root=folder)
    index = read_json(path, what="pipeline index", phase="resolve", error=ComponentError)
    listed = {key: value for key, value in index.items() if not key.startswith("_") and _is_listing(value)}
    known = {key: name for key, (library, name) in listed.items() if library in STEMS and name}
    loadable = sorted(key for key, name in known.items() if not _weightless(name, folder / key))
    there = f"There are: {shown_names(loadable)}."

    def wrong(message: str, got: Any) -> ComponentError:
        return resolve_error(f"{message} {there}", file=path, key=component, expected=loadable, got=got)

    if component is None:
        raise wrong(f"{folder} is a pipeline: say which component to load.", None)
    if component not in listed:
        own = f" The folder {component} is not part of it: to load that, give its own path."
        exists = os.path.isfile(folder / component / CONFIG)
        raise wrong(f"{PIPELINE_INDEX} lists no component {component!r}.{own if exists else ''}", component)
    library, class_name = listed[component]
    if library is None or class_name is None:
        raise wrong(f"{component} is null in {PIPELINE_INDEX}: this pipeline comes without it.", listed[component])
    if library not in STEMS or not class_name.isidentifier():
        what = f"{component} is {short(f'{library}.{class_name}')}, which metashard does not load"
        why = "only classes of diffusers and transformers themselves, never a repository's own code."
        raise wrong(f"{what}: {why}", listed[component])
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
        text = f"{path.name} names no class metashard knows: expected {known}, got {short(got)}"
        raise resolve_error(text, file=path, expected=known, got=short(got))
    if name.endswith("Scheduler"):
        text = f"{name} has no weights to shard; load it with {name}.from_pretrained."
        raise resolve_error(text, file=path, got=name)
    return library, name


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
    return _NO_WEIGHTS.search(class_name) is not None and not os.path.isfile(place / CONFIG)  # never raises


def _refuse_code(config: dict[str, Any], path: Path) -> None:
    """Refuse a config that makes transformers fetch and run code: a kernel named by its hub id, at any depth."""
    for key, value in config.items():
        inner = value if isinstance(value, dict) else {}
        _refuse_code(inner, path)
        named = [name for name in (value, *inner.values()) if isinstance(name, str) and "/" in name]
        if key.endswith(_IMPLEMENTATION) and named:
            text = (
                f"{path.name} asks for {printable(key)} = {short(named[0])}, a kernel that transformers would fetch "
                "from the hub and run. Remove that line; set the backend in `prepare` if you trust one."
            )
            raise resolve_error(text, file=path, key=printable(key), expected="no code", got=short(named[0]))


def _listed(folder: Path) -> list[str]:
    """Names in a folder, sorted."""
    try:
        return sorted(os.listdir(folder))
    except OSError as cause:
        text = f"{folder} cannot be listed: {cause.strerror}"
        raise resolve_error(text, file=folder, expected="a folder", got=cause.strerror) from cause


def _models_in(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))


def _raise_not_a_model(folder: Path) -> None:
    names = _listed(folder)
    inside = _models_in(folder)
    hint = f" Components in it: {shown_names(inside)}." if inside else ""
    if "adapter_config.json" in names:
        hint = " It is an adapter: pass it as `lora=`."
    elif "scheduler_config.json" in names or "tokenizer_config.json" in names:
        hint = " A scheduler or tokenizer has no weights to shard."
    text = f"{folder} has no {PIPELINE_INDEX} and no {CONFIG}, so it is not a model.{hint}"
    raise resolve_error(text, file=folder, expected=f"{PIPELINE_INDEX} or {CONFIG}", got=names[:20])
