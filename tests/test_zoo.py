"""The zoo itself: every exported model class has a case or a reason, and cases are the same each time they are made."""

import diffusers
import pytest
import torch

from .zoo import CASES, CORE, EXCLUDED, run_forward


def exported_model_classes() -> dict[str, type]:
    classes = {}
    for name in sorted(dir(diffusers)):
        if name.endswith(("Pipeline", "Scheduler", "Blocks")):  # never models, and slow to import
            continue
        value = getattr(diffusers, name)
        if isinstance(value, type) and issubclass(value, diffusers.ModelMixin) and value is not diffusers.ModelMixin:
            classes[name] = value
    return classes


def test_every_exported_class_has_a_case_or_a_reason():
    exported = set(exported_model_classes())
    covered = {case.cls_name for case in CASES.values() if case.library == "diffusers"}
    assert sorted(exported - covered - EXCLUDED.keys()) == []
    assert sorted(covered & EXCLUDED.keys()) == []
    assert sorted((covered | EXCLUDED.keys()) - exported) == []
    assert all(reason for reason in EXCLUDED.values())


def test_core_names_cases():
    assert [name for name in CORE if name not in CASES] == []


@pytest.mark.parametrize("name", CORE)
def test_a_case_is_the_same_each_time(name, tmp_path):
    case = CASES[name]
    first, second = case.build(), case.build()
    assert type(first).__name__ == case.cls_name
    assert not first.training
    assert first.state_dict().keys() == second.state_dict().keys()
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
        assert not value.is_floating_point() or torch.isfinite(value).all(), key

    first.save_pretrained(tmp_path)
    for dtype in case.dtypes:
        model = case.load(tmp_path, dtype)
        outputs, again = run_forward(case, model, dtype), run_forward(case, model, dtype)
        assert outputs
        for one, other in zip(outputs, again, strict=True):
            assert torch.equal(one, other)
            assert torch.isfinite(one).all()
