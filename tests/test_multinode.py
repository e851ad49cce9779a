"""Two nodes: `torchrun --nnodes 2` with two agents of two ranks each, and what each node has on its own disk."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests import zoo
from tests.nodes import NAME
from tests.test_component import hub_cache


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank has seen, and under "downloads" who has downloaded on its node."""
    work = tmp_path_factory.mktemp("nodes")
    model = zoo.CASES[NAME].build()
    for folder in ("reference", "node0/both", "node1/both", "node0/first", "source/transformer"):
        model.save_pretrained(work / folder)
    index = {"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", NAME]}
    (work / "source" / "model_index.json").write_text(json.dumps(index))
    hub_cache(work / "hub", work / "source")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in names}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(
            [*launcher, "--node-rank", str(node), "-m", "tests.nodes", str(work)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    made = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(4)]
    for rank in made:
        rank["downloads"] = (work / f"node{rank['node']}" / "downloads").read_text().split()
    return made


def test_each_node_has_a_leader(told):
    assert [(rank["node"], rank["leader"]) for rank in told] == [(0, True), (0, False), (1, True), (1, False)]


def test_files_on_both_nodes_are_read_by_every_rank(told):
    for rank in told:
        assert rank["both"]["found"] == []
        assert rank["both"]["strategy"] == "direct"
        assert all(rank["both"]["read"])


def test_files_on_the_first_node_only_go_to_the_other_by_stream(told):
    for rank in told:
        assert rank["first"]["found"] == []
        assert rank["first"]["strategy"] == "stream"
        assert rank["first"]["reason"] == "ranks 2, 3 do not see the files"
        assert [bool(n) for n in rank["first"]["read"]] == [True, False, False, False]
        assert [bool(n) for n in rank["first"]["sent"]] == [True, False, False, False]


def test_a_hub_id_is_downloaded_once_a_node(told):
    for rank in told:
        assert rank["hub"]["found"] == []
        assert rank["hub"]["strategy"] == "direct"
        assert set(rank["downloads"]) == {str(2 * rank["node"])}
