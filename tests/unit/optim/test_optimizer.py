"""Groups, AdamW by name, and its state."""

import copy

import pytest
import torch
from torch import nn

from llmtrain.config.typed import AdamWConfig
from llmtrain.optim.build import MOMENTS, build_optimizer
from llmtrain.optim.groups import decay_groups

CONFIG = AdamWConfig(lr=0.1, weight_decay=0.1, clip_norm=None, beta1=0.9, beta2=0.95, eps=1e-8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        return self.head(self.gain * self.up(self.norm(self.embed(ids))))


def steps(net, optimizer, count, start=0):
    for index in range(start, start + count):
        ids = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(index))
        net(ids).square().mean().backward()
        optimizer.step(0.01)
        optimizer.zero_grad()


def identities(parameters):
    return sorted(id(parameter) for parameter in parameters)


def test_b21_one_step_on_zero_gradients_decays_matrices_and_nothing_else():
    net = Net()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(CONFIG, net.named_parameters()).step(0.1)
    decayed = {"embed.weight", "up.weight", "head.weight"}
    for name, parameter in net.named_parameters():
        if name in decayed:
            assert torch.allclose(parameter, before[name] * 0.99, rtol=1e-6, atol=0), name
        else:
            assert torch.equal(parameter, before[name]), name


def test_b21_a_tied_weight_is_in_one_group_once():
    net = Net()
    net.head.weight = net.embed.weight
    decayed, kept = decay_groups(net.named_parameters())
    assert identities(decayed.parameters) == identities([net.embed.weight, net.up.weight])
    assert identities(kept.parameters) == identities([net.norm.weight, net.norm.bias, net.up.bias, net.gain])
    with pytest.raises(AssertionError, match="twice"):
        decay_groups([("a", net.up.weight), ("b", net.up.weight)])


def test_b42_state_goes_to_its_parameter_by_name_whatever_the_order():
    torch.manual_seed(0)
    net = Net()
    optimizer = build_optimizer(CONFIG, net.named_parameters())
    steps(net, optimizer, 5)
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert set(saved) == {f"{moment}/{name}" for moment in MOMENTS for name, _ in net.named_parameters()}

    twin = copy.deepcopy(net)
    steps(twin, build_optimizer(CONFIG, twin.named_parameters()), 0)
    twin(torch.tensor([1, 2])).sum().backward()  # gradients are set when the state is loaded
    other = build_optimizer(CONFIG, reversed(list(twin.named_parameters())))
    for name, tensor in other.state().items():
        tensor.copy_(saved[name])
    other.zero_grad()
    steps(net, optimizer, 3, start=5)
    steps(twin, other, 3, start=5)
    for (name, ours), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    for name, tensor in other.state().items():
        assert torch.equal(tensor, optimizer.state()[name]), name


def test_state_exists_before_the_first_update():
    state = build_optimizer(CONFIG, Net().named_parameters()).state()
    assert all(tensor.count_nonzero() == 0 for tensor in state.values())


def test_learning_rate_of_the_update_is_the_one_passed():
    net = nn.Linear(1, 1, bias=False)
    config = AdamWConfig(lr=1.0, weight_decay=0.0, clip_norm=None, beta1=0.9, beta2=0.95, eps=1e-12)
    optimizer = build_optimizer(config, net.named_parameters())
    for lr in (0.5, 0.25):
        before = net.weight.item()
        net.weight.grad = torch.ones_like(net.weight)
        optimizer.step(lr)
        assert before - net.weight.item() == pytest.approx(lr, rel=1e-5)
