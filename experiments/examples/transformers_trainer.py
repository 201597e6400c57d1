"""A language model under transformers' Trainer, whose optimizer is a worker of a server."""

import tempfile

import torch
import transformers

import distbelief


words = [(n + torch.arange(16)) % 64 for n in range(512)]  # it learns to count
samples = [{"input_ids": each, "labels": each} for each in words]
size = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2)
model = transformers.GPT2LMHeadModel(size)
with (
    tempfile.TemporaryDirectory() as directory,
    distbelief.ParameterServer(model, rule={"name": "AdamW", "lr": 3e-3}) as server,
):
    optimizer = distbelief.DownpourSGD(
        model.named_parameters(), server=server.address, buffers=model, lr=3e-3
    )
    options = transformers.TrainingArguments(
        directory, per_device_train_batch_size=16, num_train_epochs=4, use_cpu=True, save_steps=50
    )
    trainer = transformers.Trainer(
        model, options, train_dataset=samples, optimizers=(optimizer, None)
    )
    print(trainer.train().metrics["train_loss"])
    optimizer.close()  # push what is left, fetch once more, and leave
    print(f"loss {trainer.evaluate(samples)['eval_loss']:.2f}")
