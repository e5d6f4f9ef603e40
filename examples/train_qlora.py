"""Fine-tune a 4-bit model with PEFT's LoRA (QLoRA), and offload its frozen weights.

pip install 'tba-offload[frameworks,quantized]'
python examples/train_qlora.py                   # a tiny Llama with random weights
python examples/train_qlora.py --frozen keep     # to compare: equal losses, all weights in memory
python examples/train_qlora.py --model Qwen/Qwen3-0.6B
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tba_offload.integrations.transformers import OffloadCallback

TINY = LlamaConfig(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=128,
)


def policy(placement: str, frozen: str) -> dict[str, object] | str:
    """Return a policy for activations and frozen weights, or the path of a policy file."""
    if placement.endswith((".yaml", ".yml")):
        return placement
    # By default, tensors below 64 KiB stay in memory. Some weights of the tiny model are smaller.
    return {"default": placement, "min_tensor_bytes": "4KiB", "weights": {"frozen": frozen}}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="name of a model on the Hub, or its directory")
parser.add_argument("--placement", default="keep", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--frozen", default="offload", help="keep, offload or offload-N%%")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

set_seed(0)
callback = OffloadCallback(policy(arguments.placement, arguments.frozen))

with tempfile.TemporaryDirectory() as directory:
    if arguments.model is None:
        arguments.model = f"{directory}/tiny"
        AutoModelForCausalLM.from_config(TINY).save_pretrained(arguments.model)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(arguments.model, quantization_config=quantization)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=8, task_type="CAUSAL_LM", target_modules="all-linear"))
    texts = torch.randint(model.config.vocab_size, (64, 32))  # put your own dataset here
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
        ),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
        callbacks=[callback],
    )
    trainer.train()

frozen = {
    name: each for name, each in model.state_dict().items() if ".layers." in name and "lora" not in name
}
needed = 2 * sum(each.nbytes for each in frozen.values())
session = callback.session
for number, logged in enumerate(log for log in trainer.state.log_history if "loss" in log):
    read = 0 if session is None else session.records[number].weights_read_bytes or 0
    print(
        f"step {logged['step']}: loss {logged['loss']!r}, {read / 2**20:.1f} MiB of frozen weights read, "
        f"{needed / 2**20:.1f} MiB if forward and backward read all"
    )
