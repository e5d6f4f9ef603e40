"""Fine-tune a Hugging Face model with TRL's SFTTrainer and PEFT's LoRA, and offload its activations.

pip install 'tba-offload[frameworks]'
python examples/train_trl.py                     # a tiny Llama with random weights
python examples/train_trl.py --placement keep    # to compare: equal losses
"""

import argparse
import tempfile

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

from tba_offload.integrations.transformers import OffloadCallback

TEXTS = [f"{who} sat on a {what} " * 25 for who in ("cat", "dog", "fox") for what in ("mat", "log", "box")]
WORDS = {"<pad>": 0, "</s>": 1} | {word: n for n, word in enumerate(sorted({*" ".join(TEXTS).split()}), 2)}
TINY = LlamaConfig(
    vocab_size=len(WORDS),
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
parser.add_argument("--placement", default="offload", help="keep, offload, recompute, … or a policy file")
parser.add_argument("--steps", type=int, default=4)
arguments = parser.parse_args()

set_seed(0)
model = AutoModelForCausalLM.from_config(TINY)  # or from_pretrained, with your own tokenizer and texts
words = Tokenizer(WordLevel(WORDS, unk_token="<pad>"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
callback = OffloadCallback(policy(arguments.placement))

with tempfile.TemporaryDirectory() as directory:
    trainer = SFTTrainer(
        model,
        SFTConfig(
            directory,
            max_steps=arguments.steps,
            per_device_train_batch_size=2,
            max_length=128,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        callbacks=[callback],
    )
    trainer.train()

for logged in trainer.state.log_history:
    if "train_runtime" not in logged:
        peak = logged.get("tba-offload/activation_peak_gib", 0) * 2**10
        print(f"step {logged['step']}: loss {logged['loss']!r}, activation peak {peak:.1f} MiB")
