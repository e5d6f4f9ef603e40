"""What people train on a GPU: optimizer states, frozen weights, models of Hugging Face's, graphs."""

from __future__ import annotations

import copy
import gc
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import harness
import pytest
import torch
from later import Later
from models import VOCAB, assert_same_tensors, loss_of, make_model, make_tokens, same_bits
from optimizers import MAKERS, Given, assert_same, go_on_from, pair, policy, train
from torch import Tensor, nn

import tba_offload as tba
from tba_offload.errors import UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

transformers = Later("transformers")

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

PLACEMENTS = tuple(name for name in harness.PLACEMENTS if name != "keep")
WHERE = "cuda"
ON_CPU_ONLY = {"adagrad-fused"}


def settings(directory: Path, **others: Any) -> dict[str, Any]:
    return {
        "min_tensor_bytes": "1KiB",
        "budget": {"in_flight_bytes": "1MiB"},
        "store": {"kind": "file", "directories": [str(directory)]},
    } | others


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(7)
    losses = []
    for number in range(4):
        loss = loss_of(model, make_tokens(number).to(WHERE))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# Optimizer states


@pytest.mark.parametrize("kind", ["file", "host"])
@pytest.mark.parametrize("when", ["step", "backward"])
@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ON_CPU_ONLY])
def test_states_give_the_bits_of_the_optimizer(name: str, when: str, kind: str, tmp_path: Path) -> None:
    found, expected = pair(name, device=WHERE)
    chosen = policy(tmp_path, kind, states={"when": when})
    with tba.offload_optimizer(found.optimizer, chosen, model=found.model):
        train(found, expected, *range(4))
        assert_same(found, expected)
    states = (training.optimizer.state_dict()["state"] for training in (found, expected))
    devices = [[value.device for entry in each.values() for value in entry.values()] for each in states]
    assert devices[0] == devices[1]  # they came back to where they were
    train(found, expected, 9)
    assert_same(found, expected)


@pytest.mark.parametrize("kind", ["file", "host"])
@pytest.mark.parametrize("fused", [None, True])
def test_what_the_processor_updates_has_the_bits_of_a_cpu(
    fused: bool | None, kind: str, tmp_path: Path
) -> None:
    found = Given(lambda parameters: torch.optim.AdamW(parameters, fused=fused), device=WHERE)
    expected = Given(lambda parameters: torch.optim.AdamW(parameters, fused=True))
    chosen = policy(tmp_path, kind, states={"update": "host"})
    with tba.offload_optimizer(found.optimizer, chosen) as states:
        for seed in range(4):
            found.step(seed)
            expected.step(seed)
            if seed == 0:  # states come into being on the device, by its kernels
                go_on_from(found, expected)
        assert states.records[-1].on_host == states.records[-1].sub_groups - 1  # that of one number stays
        whole = [name for name, each in found.model.named_parameters() if each.numel() > 1]
        assert all(same_bits(found.parameter(name), expected.parameter(name)) for name in whole)
    for entry in found.optimizer.state_dict()["state"].values():
        assert entry["exp_avg"].device.type == WHERE


def test_states_and_activations_share_a_budget_of_the_device(tmp_path: Path) -> None:
    def trained(**chosen: Any) -> tuple[list[int], list[str], list[int]]:
        gc.collect()
        torch.manual_seed(0)
        block = (nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU())
        model = nn.Sequential(*(nn.Sequential(*copy.deepcopy(block)) for _ in range(8))).to(WHERE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        chosen["store"] = {"kind": "host"}
        with tba.attach(model, chosen, optimizer=optimizer, layers=list(model)) as session:
            for number in range(12):
                torch.manual_seed(number)
                with session.step():
                    model(torch.randn(1024, 1024, device=WHERE)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            peaks = [record.device_peak_bytes or 0 for record in session.records]
            travelling = [each.records[-1].sub_groups - each.records[-1].staying for each in session.states]
        weights = [sha256(parameter.detach().cpu().numpy()).hexdigest() for parameter in model.parameters()]
        return peaks, weights, travelling

    kept, expected, _ = trained(default="keep")
    gc.collect()
    others = torch.cuda.memory_allocated()  # as workspaces of cuBLAS, and what other tests have left
    budget = others + int(0.6 * (max(kept) - others))  # less than weights, gradients and all states take
    states = {"default": "auto", "sub_group_bytes": "16MiB"}
    found, weights, travelling = trained(default="auto", budget={"device_bytes": budget}, states=states)
    assert weights == expected
    assert max(found[-3:]) <= budget, (kept, found)
    assert travelling[0] > 0


# Frozen weights


@pytest.mark.parametrize("placement", ["keep", *PLACEMENTS])
def test_frozen_weights(placement: str, tmp_path: Path) -> None:
    def trained(*, offloads: bool) -> list[Tensor]:
        model = make_model(layers=3, dropout=0.1).to(WHERE)
        for layer in model.layers:
            for part in (layer.qkv, layer.out, layer.up, layer.down):
                part.requires_grad_(requires_grad=False)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        chosen = settings(tmp_path, default=placement, weights={"frozen": "offload"})
        session = tba.attach(model, chosen) if offloads else None
        losses = losses_of(model, optimizer)
        if session is not None:
            assert session.weights is not None
            assert session.weights.nbytes > 0
            session.close()
        return losses + [parameter.detach() for parameter in model.parameters()]

    assert_same_tensors(trained(offloads=True), trained(offloads=False))


# Models of Hugging Face's, whose attention is a kernel of its own on a GPU, with its own random numbers


SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", SIZES | {"num_key_value_heads": 2, "attention_dropout": 0.1}),
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": 256, "n_layer": 3, "n_head": 4}),
    "bert": ("Bert", "ForMaskedLM", SIZES),
}
"""Family, task and sizes."""


def model_of(kind: str) -> Any:
    family, task, sizes = MODELS[kind]
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=VOCAB)
    return getattr(transformers, family + task)(config).train()


@pytest.mark.filterwarnings("ignore:the model fills a cache")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast", "scaled"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_hugging_face(kind: str, placement: str, precision: str, tmp_path: Path) -> None:
    def trained(*, offloads: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = model_of(kind).to(WHERE, torch.bfloat16 if precision == "bf16" else torch.float32)
        model.config.use_cache = False
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler(WHERE, enabled=precision == "scaled")
        lower = torch.float16 if precision == "scaled" else torch.bfloat16
        session = tba.attach(model, settings(tmp_path, default=placement)) if offloads else None
        torch.manual_seed(7)
        losses = []
        for number in range(4):
            tokens = make_tokens(number).to(WHERE)
            with torch.autocast(WHERE, dtype=lower, enabled=precision in {"autocast", "scaled"}):
                loss = model(input_ids=tokens, labels=tokens).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if session is not None:
            report = session.records
            assert len(report) == 4
            session.close()
            if "offload" in placement:
                assert all(record.offloaded_bytes + record.forwarded_bytes for record in report)
        state = torch.get_device_module(WHERE).get_rng_state()
        return [*losses, *(parameter.detach() for parameter in model.parameters()), state]

    assert_same_tensors(trained(offloads=True), trained(offloads=False))


# CUDA graphs


def test_a_graph_that_is_captured_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(WHERE)
    x = torch.randn(256, 256, device=WHERE)
    scratch = torch.zeros(1, device=WHERE)
    with tba.attach(model, settings(tmp_path), layers=list(model)) as session:
        torch.cuda.synchronize()
        with pytest.raises(UnsupportedError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            scratch += 1  # PyTorch warns of a graph that is empty
            with session.step():
                model(x).sum().backward()
        with session.step():
            model(x).sum().backward()
