"""``tba-offload estimate``: what it computes before any run is what runs measure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from commands import call
from exact_memory import exact_memory
from harness import made

import tba_offload as tba

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

BATCH, SEQUENCE = 4, 192
SIZES = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "vocab_size": 512}
MODELS: dict[str, Any] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=512),
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(n_embd=192, n_layer=6, n_head=3, vocab_size=512),
    "MixtralForCausalLM": lambda: transformers.MixtralConfig(
        **SIZES, intermediate_size=512, num_key_value_heads=3, num_local_experts=4
    ),
    "Qwen3ForCausalLM": lambda: transformers.Qwen3Config(
        **SIZES, intermediate_size=512, num_key_value_heads=3, head_dim=64
    ),
    "BertForMaskedLM": lambda: transformers.BertConfig(**SIZES, intermediate_size=768),
}
WAYS = "keep", "offload", "offload-remat", "recompute", "recompute-offload"


def estimate(*arguments: object) -> Any:
    result = call("estimate", "--flops", "20G", "--write", "1GB/s", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def measured(name: str, config: Any, dtype: torch.dtype, way: str, policy: Any) -> tuple[int, int]:
    torch.manual_seed(1)
    model = getattr(transformers, name)._from_config(config, dtype=dtype).train()
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE))
    # PyTorch's allocator counts: on a busy machine, samples of malloc miss peaks.
    with (
        exact_memory(slots_too=True),
        tba.attach(model, {"default": way, **policy}, measure_memory=True) as session,
    ):
        for _ in range(5):
            with session.step():
                model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
        records = session.records[1:]
    peaks = (each.activation_peak_bytes or each.sampled_peak_bytes or 0 for each in records)
    return max(peaks), max(each.offloaded_bytes + each.forwarded_bytes for each in records)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("LlamaForCausalLM", "bf16"),
        ("MixtralForCausalLM", "bf16"),
        ("GPT2LMHeadModel", "fp32"),
        ("Qwen3ForCausalLM", "fp32"),
        ("BertForMaskedLM", "bf16"),
    ],
)
def test_it_foretells_what_runs_measure(name: str, dtype: str, tmp_path: Path) -> None:
    config = MODELS[name]()
    config.architectures, config.use_cache = [name], False
    config.save_pretrained(tmp_path)
    found = estimate("--config", tmp_path, "--sequence", SEQUENCE, "--batch", BATCH, "--dtype", dtype)
    assert [row["placement"] for row in found["placements"]] == list(WAYS)
    drive = {"directories": [str(made(tmp_path / "drive"))]}
    policy = {"budget": {"in_flight_bytes": found["in_flight_bytes"]}, "store": drive}
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    for row in found["placements"]:
        peak, sent = measured(name, config, kind, row["placement"], policy)
        assert row["activation_peak_bytes"] == pytest.approx(peak, rel=0.1), row["placement"]
        assert row["written_bytes"] == pytest.approx(sent, rel=0.05), row["placement"]


def test_without_a_file_it_takes_the_sizes_of_a_llama() -> None:
    sizes = "--layers", 4, "--hidden", 128, "--heads", 2, "--vocab", 256, "--sequence", 64
    found = estimate(*sizes, "--device-bytes", "60MiB", "--rated", "600TB")
    assert found["layers"] == [f"model.layers.{layer}" for layer in range(4)]
    keep, offload, *_, fit = found["placements"]
    assert (keep["written_bytes"], keep["drives_need"], keep["times_keep"]) == (0, None, 1)
    assert fit["placement"] == "fit"
    assert offload["years"] == pytest.approx(600e12 / offload["written_bytes_per_day"] / 365)
    assert offload["activation_peak_bytes"] < keep["activation_peak_bytes"]
    assert fit["fits"]
    long = "--layers", 4, "--hidden", 2048, "--heads", 16, "--vocab", 256, "--sequence", 65536
    found = estimate(*long)
    inputs, needed = (found["placements"][-1][name] for name in ("written_bytes", "drives_need"))
    beyond = inputs - found["in_flight_bytes"]
    needed *= beyond / inputs
    slow = *long, "--flops", "20G", "--write", f"{needed * 1.01:.0f}B/s"
    answer = "these drives do not delay recompute-offload: 65,536 tokens."
    assert answer in call("estimate", *slow).stdout
    # Backward takes three times as long.
    assert estimate(*slow, "--read", f"{needed / 5:.0f}B/s")["carried_from"] > 65536
    assert estimate(*slow, "--host-capacity", f"{20 * beyond}B")["carried_from"] == 128
    _, spared, *_ = estimate(*sizes, "--host-capacity", "256KiB")["placements"]
    assert spared["written_bytes"] == pytest.approx(offload["written_bytes"] - 2**18, rel=0.02)
    shown = call("estimate", *sizes, "--flops", "20G", "--write", "1GB/s", "--read", "2GB/s").stdout
    assert "4 layers" in shown
    assert re.search(r"^\| offload-remat +\| +\S+ [KM]iB \|", shown, re.MULTILINE)
    assert "Fits" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--flops", "20G", "--write", "1GB/s"), "Pass --config, or --layers"),
        (
            ("--flops", "20G", "--layers", 2),
            "the drive rates are unknown. Pass --write and --read, or pass --dir",
        ),
        (("--flops", "fast", "--write", "1GB/s"), "'fast' must be a number of FLOPs per second"),
        (("--write", "1GB/s"), "Missing option '--flops'"),
    ],
)
def test_a_wrong_command_line_has_exit_status_2(arguments: tuple[object, ...], message: str) -> None:
    result = call("estimate", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_causal_attention_computes_half_of_the_scores() -> None:
    sizes = "--layers", 1, "--hidden", 64, "--heads", 1, "--vocab", 64
    keep, *_ = estimate(*sizes, "--sequence", 8192)["placements"]
    scores = 3.5 * 4 * 8192**2 * 64  # forward and backward of the whole square
    assert 0.5 * scores < 20e9 * keep["seconds"] < 0.6 * scores


def test_a_configuration_that_names_no_model_is_refused(tmp_path: Path) -> None:
    drives = "--flops", "20G", "--write", "1GB/s"
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    result = call("estimate", "--config", tmp_path, *drives)
    assert result.exit_code == 1
    assert (
        'must be a language model with one stack of layers, such as "architectures": ["LlamaForCausalLM"]'
        in result.stderr
    )
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    long = call("estimate", "--config", tmp_path, "--sequence", 2048, *drives)
    assert "--sequence 2048: GPT2LMHeadModel has 1024 positions (n_positions)" in long.stderr
    (tmp_path / "config.json").write_text("{}")
    assert "not a configuration of transformers" in call("estimate", "--config", tmp_path, *drives).stderr


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in peft
def test_it_foretells_lora_on_a_base_in_few_bits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = MODELS["LlamaForCausalLM"]()
    config.architectures, config.use_cache = ["LlamaForCausalLM"], False
    config.save_pretrained(tmp_path)
    sizes = "--config", tmp_path, "--sequence", SEQUENCE, "--batch", BATCH, "--dtype", "fp32", "--lora", 8
    found = estimate(*sizes)
    model = transformers.LlamaForCausalLM(config).train()
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
    tokens = torch.randint(0, 512, (BATCH, SEQUENCE))
    drive = {"directories": [str(made(tmp_path / "drive"))]}
    policy = {"default": "keep", "min_tensor_bytes": 0, "weights": {"frozen": "offload"}, "store": drive}
    with exact_memory(slots_too=True), tba.attach(model, policy, measure_memory=True) as session:
        for _ in range(4):
            with session.step():
                model(input_ids=tokens, labels=tokens).loss.backward()
            model.zero_grad()
        peaks = [each.activation_peak_bytes or each.sampled_peak_bytes or 0 for each in session.records[1:]]
        assert session.weights is not None
        assert found["frozen_bytes"] == session.weights.nbytes
        read = session.records[-1].weights_read_bytes
    assert read == pytest.approx(2 * found["frozen_bytes"], rel=0.4)  # some layers are read once
    assert found["placements"][0]["activation_peak_bytes"] == pytest.approx(max(peaks), rel=0.1)
    in_4_bits = estimate(*sizes, "--base-bits", 4)["frozen_bytes"]
    assert in_4_bits / found["frozen_bytes"] == pytest.approx(4.5 / 32, rel=1e-3)
    shown = call("estimate", "--flops", "20G", "--write", "1GB/s", "--device-bytes", "8MiB", *sizes)
    assert (
        "The frozen weights do not fit into the memory of the device, so they are offloaded." in shown.stdout
    ), shown.output
    assert "--base-bits needs --lora" in call("estimate", "--flops", "1G", "--base-bits", 4).stderr
