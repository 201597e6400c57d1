"""LoRA by peft and transformers: the parameter server has the adapters alone.

pip install "distbelief[lora]" && python -m experiments.examples.lora adapter
"""

import sys

import peft
import torch
import transformers

import distbelief


def model() -> peft.PeftModel:
    """Return a small language model with adapters; yours comes from `from_pretrained`."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2)
    lora = peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)


def train(net: peft.PeftModel, optimizer: torch.optim.Optimizer, n_steps: int) -> float:
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 10, n_steps)
    loss = torch.zeros(())
    for _ in range(n_steps):
        words = (torch.randint(64, (16, 1)) + torch.arange(16)) % 64  # it learns to count
        optimizer.zero_grad()
        loss = net(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


if __name__ == "__main__":
    net = model()
    adapters = [(name, one) for name, one in net.named_parameters() if one.requires_grad]
    rule = {"name": "AdamW", "lr": 1e-2}
    with distbelief.ParameterServer(adapters, rule=rule) as server:
        optimizer = distbelief.DownpourSGD(adapters, server=server.address, lr=3e-2, blocking=True)
        print(train(net, optimizer, n_steps=100))
        optimizer.close()
    net.save_pretrained(sys.argv[1])
