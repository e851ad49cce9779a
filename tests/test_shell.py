"""Shells: parameters on meta, computed state real, pins and patches put back, and not one byte of weights read."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import metashard
from metashard.layout import named_slots, plain_tensors
from metashard.shell import build_shell, init_context, pins_cleared, shell_context

from . import zoo
from .parity import cpu_mesh, differences, reference
from .ranks import Ranks

NAMES = (
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "QwenImageTransformer2DModel",
    "T5EncoderModel",
    "CLIPTextModel",
)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A zoo case as a folder with its weights, made once."""
    folders: dict[str, str] = {}

    def save(name: str) -> str:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            zoo.CASES[name].build().save_pretrained(folder)
            folders[name] = str(folder)
        return folders[name]

    return save


def dtype_argument(case: zoo.Case) -> dict[str, torch.dtype]:
    return {"torch_dtype" if case.library == "diffusers" else "dtype": BF16}


def built(name: str, folder: str, how: str) -> nn.Module:
    """One way to a model that is real on rank 0 and a shell elsewhere."""
    case = zoo.CASES[name]
    if how == "from_pretrained":
        return metashard.from_pretrained(case.cls, folder, **dtype_argument(case))
    with init_context():
        if how == "its own from_pretrained":
            return case.cls.from_pretrained(folder, **dtype_argument(case))
        if case.library == "diffusers":
            return case.cls.from_config(case.cls.load_config(folder))
        return case.cls(case.cls.config_class.from_pretrained(folder))


def faults_of_roles(name: str, folder: str, how: str) -> list[str]:
    """What is not as it should be: rank 0 as the library gives it, others shells with the same computed state."""
    case, model = zoo.CASES[name], built(name, folder, how)
    expected = reference(case, Path(folder), BF16) if how != "constructor" else built_plainly(case, folder)
    if dist.get_rank() == 0 and how != "constructor":
        return differences(model, expected)
    faults = []
    want = {slot.fqn: (slot, tensor) for slot, tensor in named_slots(expected)}
    got = {slot.fqn: (slot, tensor) for slot, tensor in named_slots(model)}
    if list(want) != list(got):
        faults.append(f"other names or order: {list(want.keys() ^ got.keys())[:3]}")
    for fqn in want.keys() & got.keys():
        (slot, tensor), (other, value) = want[fqn], got[fqn]
        if slot.shape != other.shape or slot.kind != other.kind or slot.persistent != other.persistent:
            faults.append(f"{fqn}: {other}, expected {slot}")
        if value.is_meta != (slot.kind == "parameter" and dist.get_rank() > 0):
            faults.append(f"{fqn}: {slot.kind} on {value.device}")
        if slot.kind != "parameter" and not slot.persistent and not torch.equal(tensor, value):
            faults.append(f"{fqn}: computed value differs")
    if how != "constructor" and model.training:
        faults.append("in training mode")
    return faults


def built_plainly(case: zoo.Case, folder: str) -> nn.Module:
    if case.library == "diffusers":
        return case.cls.from_config(case.cls.load_config(folder))
    return case.cls(case.cls.config_class.from_pretrained(folder))


@pytest.mark.parametrize("how", ["from_pretrained", "its own from_pretrained", "constructor"])
@pytest.mark.parametrize("name", NAMES)
def test_rank_0_is_real_and_the_others_are_shells_with_real_buffers(
    ranks2: Ranks, saved: Callable[[str], str], name: str, how: str
) -> None:
    assert ranks2.run(faults_of_roles, name, saved(name), how) == [[], []]


def wrapped_faults(name: str, folder: str, how: str) -> list[str]:
    case = zoo.CASES[name]
    model = metashard.wrap_model(built(name, folder, how), mesh=cpu_mesh(), load=metashard.LoadPolicy(timeout=30))
    return differences(model, reference(case, Path(folder), BF16))


@pytest.mark.parametrize("how", ["from_pretrained", "its own from_pretrained"])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrapped_shell_equals_from_pretrained(
    ranks2: Ranks, saved: Callable[[str], str], name: str, how: str
) -> None:
    assert ranks2.run(wrapped_faults, name, saved(name), how) == [[], []]


def through_auto_model(folder: str, library: str) -> list[str]:
    import diffusers
    import transformers

    auto = {"diffusers": diffusers, "transformers": transformers}[library].AutoModel
    model = metashard.from_pretrained(auto, folder)
    return sorted({f"{type(model).__name__} {parameter.is_meta}" for parameter in model.parameters()})


@pytest.mark.parametrize(("name", "library"), [("SD3Transformer2DModel", "diffusers"), ("BertModel", "transformers")])
def test_auto_classes_give_shells_too(ranks2: Ranks, saved: Callable[[str], str], name: str, library: str) -> None:
    told = ranks2.run(through_auto_model, saved(name), library)
    assert told == [[f"{name} False"], [f"{name} True"]]


def shell_with_keywords(name: str, folder: str, keywords: dict[str, Any]) -> bool:
    with shell_context():
        model = zoo.CASES[name].cls.from_pretrained(folder, **keywords)
    return all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "keywords"),
    [
        ("SD3Transformer2DModel", {"use_safetensors": True, "local_files_only": True, "disable_mmap": True}),
        ("BertModel", {"use_safetensors": True, "local_files_only": True, "disable_mmap": True}),
        ("BertModel", {"attn_implementation": "eager", "add_pooling_layer": False}),
        ("BertModel", {"trust_remote_code": False, "offload_buffers": False, "use_kernels": False}),
        ("BertModel", {"dtype": "bfloat16"}),
    ],
)
def test_a_shell_takes_the_keywords_of_from_pretrained(
    saved: Callable[[str], str], name: str, keywords: dict[str, Any]
) -> None:
    assert shell_with_keywords(name, saved(name), keywords)


def loading_info(name: str, folder: str) -> tuple[str, str]:
    model, info = metashard.from_pretrained(zoo.CASES[name].cls, folder, output_loading_info=True)
    return type(model).__name__, type(info).__name__


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "T5EncoderModel"])
def test_loading_info_keeps_its_shape_on_shells(ranks2: Ranks, saved: Callable[[str], str], name: str) -> None:
    assert [told[0] for told in ranks2.run(loading_info, name, saved(name))] == [name, name]


# --- pins and patches


class Pinned:
    _keep_in_fp32_modules: ClassVar[Any] = ["norm"]


class Inherits(Pinned):
    pass


class Unpinned:
    pass


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("cls", [Pinned, Inherits, Unpinned])
def test_pins_are_cleared_inside_only_and_come_back_as_they_were(cls: type, fails: bool) -> None:
    before, pins = dict(vars(cls)), getattr(cls, "_keep_in_fp32_modules", None)
    try:
        with pins_cleared(cls):
            assert getattr(cls, "_keep_in_fp32_modules", None) is None
            assert Pinned._keep_in_fp32_modules == (None if cls is Pinned else ["norm"])
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    assert dict(vars(cls)) == before
    assert getattr(cls, "_keep_in_fp32_modules", None) is pins


@pytest.mark.parametrize("fails", [False, True])
def test_the_libraries_from_pretrained_comes_back(fails: bool) -> None:
    from diffusers import ModelMixin, WanTransformer3DModel
    from transformers import PreTrainedModel

    before = [base.__dict__["from_pretrained"] for base in (ModelMixin, PreTrainedModel)]
    register = nn.Module.register_parameter
    try:
        with shell_context(), shell_context():
            assert ModelMixin.__dict__["from_pretrained"] is not before[0]
            assert PreTrainedModel.__dict__["from_pretrained"] is not before[1]
            assert nn.Linear(1, 1).weight.is_meta
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    assert [base.__dict__["from_pretrained"] for base in (ModelMixin, PreTrainedModel)] == before
    assert WanTransformer3DModel.from_pretrained.__func__ is before[0].__func__
    assert nn.Module.register_parameter is register
    assert not nn.Linear(1, 1).weight.is_meta


def own_from_pretrained(folder: str, fails: bool) -> dict[str, Any]:
    """What a class with a `from_pretrained` of its own is given, and what is left afterwards."""
    from diffusers import ModelMixin, WanTransformer3DModel

    seen: dict[str, Any] = {}

    class Own(WanTransformer3DModel):
        @classmethod
        def from_pretrained(cls, path: str, **kwargs: Any) -> Any:
            seen.update(kwargs, pins=cls._keep_in_fp32_modules)
            if fails:
                raise KeyError("own")
            return super().from_pretrained(path, **kwargs)

    pins, base = list(WanTransformer3DModel._keep_in_fp32_modules), ModelMixin.__dict__["from_pretrained"]
    try:
        model = metashard.from_pretrained(Own, folder, torch_dtype=BF16)
    except KeyError:
        assert fails
    else:
        seen["class"] = type(model).__name__
        seen["meta"] = all(parameter.is_meta for parameter in model.parameters())
    seen["restored"] = (
        WanTransformer3DModel._keep_in_fp32_modules == pins
        and "_keep_in_fp32_modules" not in vars(Own)
        and ModelMixin.__dict__["from_pretrained"] is base
    )
    return seen


def test_a_class_with_its_own_from_pretrained_is_called_as_the_mission_says(
    ranks2: Ranks, saved: Callable[[str], str]
) -> None:
    first, second = ranks2.run(own_from_pretrained, saved("WanTransformer3DModel"), False)
    assert first.pop("pins")  # rank 0 honours them
    assert first == {"torch_dtype": BF16, "class": "Own", "meta": False, "restored": True}
    assert second == {
        "torch_dtype": BF16,
        "low_cpu_mem_usage": False,
        "pins": None,
        "class": "Own",
        "meta": True,
        "restored": True,
    }


def test_pins_and_patches_come_back_after_an_exception(ranks2: Ranks, saved: Callable[[str], str]) -> None:
    assert [told["restored"] for told in ranks2.run(own_from_pretrained, saved("WanTransformer3DModel"), True)] == [
        True,
        True,
    ]


def state_after_failure(folder: str) -> str:
    from diffusers import SD3Transformer2DModel

    class Broken(SD3Transformer2DModel):
        def __init__(self, **kwargs: Any) -> None:
            raise KeyError("broken")

    before = torch.get_default_dtype()
    try:
        metashard.from_pretrained(Broken, folder, torch_dtype=BF16)
    except KeyError:
        return f"{torch.get_default_dtype()} {torch.empty(0).device}"
    finally:
        torch.set_default_dtype(before)
    return "no error"


def test_a_failing_constructor_leaves_no_default_dtype_or_device_behind(
    ranks2: Ranks, saved: Callable[[str], str]
) -> None:
    assert ranks2.run(state_after_failure, saved("SD3Transformer2DModel")) == ["torch.float32 cpu"] * 2


# --- no weight bytes, on a cold page cache


def resident_pages(path: Path) -> int:
    """Pages of a file that the kernel holds in memory, by mincore(2); looking does not load them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        states = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        assert libc.mincore(address, size, states) == 0, os.strerror(ctypes.get_errno())
        libc.munmap(address, size)
    finally:
        os.close(descriptor)
    return sum(state & 1 for state in states.raw)


def evict(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if resident_pages(path):
        pytest.skip("this file system keeps its pages in memory whatever it is told")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of about 64 MB, by library."""
    import diffusers
    import transformers

    folder = tmp_path_factory.mktemp("large")
    diffusers.SD3Transformer2DModel(
        sample_size=8, pos_embed_max_size=9, in_channels=4, out_channels=4, num_layers=3, num_attention_heads=9,
        attention_head_dim=64, joint_attention_dim=64, caption_projection_dim=576, pooled_projection_dim=64,
    ).save_pretrained(folder / "diffusers")  # fmt: skip
    config = transformers.T5Config(vocab_size=16000, d_model=512, d_kv=64, d_ff=1024, num_layers=4, num_heads=8)
    transformers.T5EncoderModel(config).save_pretrained(folder / "transformers")
    return {library: folder / library for library in ("diffusers", "transformers")}


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def resident_share(folder: Path) -> float:
    files = weight_files(folder)
    return sum(map(resident_pages, files)) / sum(-(-path.stat().st_size // mmap.PAGESIZE) for path in files)


LARGE_CLASSES = {"diffusers": "SD3Transformer2DModel", "transformers": "T5EncoderModel"}


def build_on_rank_1(library: str, folder: str, how: str) -> int:
    """Rank 1 builds its shell, rank 0 does nothing; the number of parameters on meta."""
    if dist.get_rank() == 0:
        return 0
    import diffusers
    import transformers
    from accelerate import init_empty_weights

    cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], LARGE_CLASSES[library])
    if how == "metashard.from_pretrained":
        model = metashard.from_pretrained(cls, folder)
    elif how == "init_context":
        with init_context():
            model = cls.from_pretrained(folder)
    elif how == "build_shell":
        config = json.loads((Path(folder) / "config.json").read_text())
        model = build_shell(cls, config, library=library, dtype=BF16)
    else:  # what a shell was before
        with init_empty_weights(include_buffers=False):
            model = cls.from_pretrained(folder, low_cpu_mem_usage=False)
    return sum(parameter.is_meta for parameter in model.parameters())


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
@pytest.mark.parametrize("how", ["metashard.from_pretrained", "init_context", "build_shell"])
@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_shells_read_no_weight_bytes(ranks2: Ranks, large: dict[str, Path], library: str, how: str) -> None:
    folder = large[library]
    assert sum(path.stat().st_size for path in weight_files(folder)) > 50 << 20
    for path in weight_files(folder):
        evict(path)
    assert ranks2.run(build_on_rank_1, library, str(folder), how)[1] > 20
    assert resident_share(folder) == 0.0


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="needs posix_fadvise")
@pytest.mark.parametrize("library", ["diffusers", "transformers"])
def test_the_libraries_own_way_reads_them(ranks2: Ranks, large: dict[str, Path], library: str) -> None:
    """So the measurement above can say no."""
    for path in weight_files(large[library]):
        evict(path)
    ranks2.run(build_on_rank_1, library, str(large[library]), "the library's own")
    assert resident_share(large[library]) > 0.3


# --- build_shell


def config_of(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


@pytest.mark.parametrize("name", zoo.CORE)
def test_the_quickest_shell_has_the_names_shapes_ties_and_computed_state_of_the_model(
    saved: Callable[[str], str], name: str
) -> None:
    case, folder = zoo.CASES[name], saved(name)
    shell = build_shell(case.cls, config_of(folder), library=case.library, dtype=BF16)
    assert torch.get_default_dtype() == torch.float32
    expected = reference(case, Path(folder), BF16)
    assert not shell.training
    for (slot, tensor), (other, value) in zip(named_slots(expected), named_slots(shell), strict=True):
        for field in ("fqn", "kind", "shape", "persistent", "tie", "requires_grad"):
            assert getattr(slot, field) == getattr(other, field), slot.fqn
        if slot.kind == "parameter":
            assert value.is_meta, slot.fqn
        elif not slot.persistent:
            assert not value.is_meta, slot.fqn
            assert value.dtype == tensor.dtype, slot.fqn
            assert torch.equal(value, tensor), slot.fqn


def test_the_quick_way_is_taken_only_where_nothing_computed_would_be_lost(saved: Callable[[str], str]) -> None:
    def shell(name: str) -> nn.Module:
        return build_shell(zoo.CASES[name].cls, config_of(saved(name)), library=zoo.CASES[name].library, dtype=BF16)

    # SD3's position table is persistent: the checkpoint holds it, so nobody computes it.
    assert shell("SD3Transformer2DModel").pos_embed.pos_embed.is_meta
    wan = shell("WanTransformer3DModel")
    assert not wan.rope.freqs_cos.is_meta
    assert not wan.rope.freqs_sin.is_meta
    tables = [plain.tensor for plain in plain_tensors(shell("QwenImageTransformer2DModel"))]
    assert [table.dtype for table in tables] == [torch.complex64] * 2
    assert not any(table.is_meta for table in tables)


def test_a_class_that_computes_with_values_while_it_is_built_gets_the_other_way() -> None:
    from diffusers import ModelMixin
    from diffusers.configuration_utils import ConfigMixin, register_to_config

    class Computes(ModelMixin, ConfigMixin):
        @register_to_config
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.linear = nn.Linear(width, int(torch.ones(3).sum().item()))

    shell = build_shell(Computes, {"width": 5}, library="diffusers", dtype=BF16)
    assert shell.linear.weight.is_meta
    assert tuple(shell.linear.weight.shape) == (3, 5)
    assert torch.get_default_dtype() == torch.float32


def test_an_error_of_the_class_is_raised_as_it_is_and_leaves_nothing_behind() -> None:
    from diffusers import SD3Transformer2DModel

    class Broken(SD3Transformer2DModel):
        def __init__(self, **kwargs: Any) -> None:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        build_shell(Broken, {}, library="diffusers", dtype=BF16)
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(1, 1).weight.is_meta
