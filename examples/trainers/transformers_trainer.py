"""Train with the Trainer of transformers: a tiny GPT-2 without a download.

    torchrun --nproc-per-node=2 examples/trainers/transformers_trainer.py
    torchrun --nproc-per-node=2 examples/trainers/transformers_trainer.py --backend gloo

On GPUs ``TrainingArguments(ddp_backend="gradserver")`` is enough. In the end each rank prints a digest of its weights.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gradserver")
    given = parser.parse_args()

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        dist.init_process_group(given.backend)  # Accelerate, below the Trainer, would refuse the name on CPUs
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=on_cpu,
        ddp_backend=None if on_cpu else given.backend,
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=3,
        seed=0,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 16))]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:8])
    trained, evaluated = trainer.train(), trainer.evaluate()
    weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    figures = f"loss {trained.training_loss:.6f}, evaluated {evaluated['eval_loss']:.6f}"
    digest = hashlib.sha256(weights).hexdigest()
    print(f"rank {arguments.process_index} on {given.backend}: {figures}, weights {digest}", flush=True)


if __name__ == "__main__":
    main()
