"""Train a Hugging Face model with Trainer, and offload its activations.

pip install 'tba-offload[transformers]'
python examples/train_huggingface.py                     # a tiny Llama with random weights
python examples/train_huggingface.py --placement keep    # to compare: equal losses, higher peak
python examples/train_huggingface.py --model Qwen/Qwen3-0.6B --placement policy.yaml
torchrun --nproc-per-node 2 examples/train_huggingface.py --deepspeed zero.json

TRL's trainers accept the same callback.
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

from tba_offload.integrations.transformers import OffloadCallback

TINY = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=8,
    num_attention_heads=4,
    max_position_embeddings=128,
)


def policy(placement: str) -> dict[str, object] | str:
    """Return a policy with this placement and a small in-flight window, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    return {"default": placement, "budget": {"in_flight_bytes": "4MiB"}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="name of a model on the Hub, or its directory")
parser.add_argument("--placement", default="offload", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--deepspeed", help="configuration file of DeepSpeed")
arguments = parser.parse_args()

set_seed(0)
if arguments.model is None:
    model = AutoModelForCausalLM.from_config(TINY)
else:
    model = AutoModelForCausalLM.from_pretrained(arguments.model)

texts = torch.randint(model.config.vocab_size, (64, 128))  # put your own dataset here
callback = OffloadCallback(policy(arguments.placement))

with tempfile.TemporaryDirectory() as directory:
    trainer = Trainer(
        model,
        TrainingArguments(
            directory,
            max_steps=arguments.steps,
            per_device_train_batch_size=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            deepspeed=arguments.deepspeed,
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[callback],
    )
    trainer.train()

for logged in trainer.state.log_history:
    if "loss" in logged:
        peak = logged.get("tba-offload/activation_peak_gib", 0) * 2**10
        print(f"step {logged['step']}: loss {logged['loss']!r}, activation peak {peak:.1f} MiB")
