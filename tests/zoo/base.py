"""The machinery of the model zoo: what a case is, how a small model is filled, how a forward is run."""

from __future__ import annotations

import dataclasses
import importlib
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

FP32 = (torch.float32,)
FP32_BF16 = (torch.float32, torch.bfloat16)

CASES: dict[str, Case] = {}
EXCLUDED: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One small model and, where there is a simple one, its forward.

    Attributes:
        name: the class name, or the class name with a suffix for a variant; the key in `CASES`.
        library: "diffusers" or "transformers".
        cls_name: the class as the library exports it; `type(case.build()).__name__`.
        build: makes the model: seeded values in every parameter and persistent buffer, fp32, eval mode.
        inputs: makes forward inputs in a floating dtype (int and bool inputs stay); None without a simple forward.
        dtypes: the dtypes in which the single-process reference's own forward works on CPU.
        forward: the method that is the forward, "forward" for nearly all.
    """

    name: str
    library: str
    cls_name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], dict | tuple] | None
    dtypes: tuple[torch.dtype, ...] = FP32_BF16
    forward: str = "forward"

    @property
    def cls(self) -> type:
        return getattr(importlib.import_module(self.library), self.cls_name)

    def load(self, folder: str | Path, dtype: torch.dtype) -> nn.Module:
        """The reference: the library's own `from_pretrained`, in one process."""
        name = "dtype" if self.library == "transformers" else "torch_dtype"
        return self.cls.from_pretrained(folder, **{name: dtype})


class Draw:
    """Deterministic inputs: `draw(2, 8)` is a normal tensor in the asked dtype; integers and constants have names."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(20)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def unit(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator).to(self.dtype)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def grid(self, high: int, *shape: int) -> torch.Tensor:
        """Whole numbers in the floating dtype: position ids of the rotary kind."""
        return self.ids(high, *shape).to(self.dtype)

    def full(self, value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype)


def fill(module: nn.Module) -> nn.Module:
    """Gives every parameter and persistent buffer seeded values that depend on its name and shape only.

    Scales are such that a forward stays finite in bf16: matrices by 1/sqrt(fan-in), vectors that scale near 1,
    other vectors near 0. Integer and bool tensors stay as they are, and so do buffers outside the state dict.
    """
    persistent = module.state_dict(keep_vars=True).keys()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.copy_(_parameter_values(name, parameter))
        for name, buffer in module.named_buffers():
            if name in persistent and buffer.is_floating_point():
                buffer.copy_(_buffer_values(name, buffer))
    return module.eval()


_SCALES = ("weight", "scale", "alpha", "beta", "gamma", "weight_g", "original0", "mean_scale")


def _normal(name: str, tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tensor.shape, generator=generator)


def _parameter_values(name: str, parameter: torch.Tensor) -> torch.Tensor:
    values = _normal(name, parameter)
    leaf = name.rsplit(".", 1)[-1]
    if max(parameter.shape, default=1) == parameter.numel():  # a vector, whatever its padding dims, or a scalar
        return 1 + 0.1 * values if leaf in _SCALES else 0.1 * values
    return values / max(1, parameter.numel() / max(1, parameter.shape[0])) ** 0.5


def _buffer_values(name: str, buffer: torch.Tensor) -> torch.Tensor:
    values = _normal(name, buffer)
    if "var" in name or "std" in name:
        return 0.5 + values.abs()
    if buffer.numel() and bool(torch.isfinite(buffer).all()):
        return buffer.float() + 0.1 * values  # a computed table keeps its kind of values, but not its values
    return 0.1 * values


def add(
    cls_name: str,
    config: Mapping[str, Any] | Callable[[], nn.Module],
    inputs: Callable[[Draw], dict | tuple] | None,
    *,
    suffix: str = "",
    library: str = "diffusers",
    dtypes: tuple[torch.dtype, ...] = FP32_BF16,
    forward: str = "forward",
) -> None:
    """Adds one case; `config` holds the constructor's keywords, or is a function that constructs the model."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        construct = (
            config if callable(config) else partial(getattr(importlib.import_module(library), cls_name), **config)
        )
        return fill(construct())

    name = cls_name + (f"-{suffix}" if suffix else "")
    assert name not in CASES, name
    CASES[name] = Case(
        name=name,
        library=library,
        cls_name=cls_name,
        build=build,
        inputs=None if inputs is None else (lambda dtype: inputs(Draw(dtype))),
        dtypes=dtypes,
        forward=forward,
    )


def exclude(cls_name: str, reason: str) -> None:
    EXCLUDED[cls_name] = reason


def run_forward(case: Case, model: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
    """Runs the case's forward without gradients and returns its tensors in a fixed order.

    Seeded before the call, so that models which sample inside their forward do it alike. `model` may be a copy of
    the reference under FSDP; inputs go to the device of its first parameter.
    """
    assert case.inputs is not None, f"{case.name} has no simple forward"
    device = next(model.parameters()).device
    inputs = _to(case.inputs(dtype), device)
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    call = model if case.forward == "forward" else getattr(model, case.forward)
    torch.manual_seed(0)
    with torch.no_grad():
        output = call(*args, **kwargs)
    tensors: list[torch.Tensor] = []
    _collect(output, tensors)
    return tensors


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _to(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to(item, device) for item in value)
    return value


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        into.append(value)
    elif isinstance(value, Mapping):  # library output objects are ordered dicts: field order is the class's
        for item in value.values():
            _collect(item, into)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, into)
    elif hasattr(value, "mode") and hasattr(value, "parameters"):  # a DiagonalGaussianDistribution
        _collect(value.parameters, into)
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        for _, item in sorted(vars(value).items()):
            _collect(item, into)
