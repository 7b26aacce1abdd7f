"""Names of sites: compiled mode asks the policy with the keys that eager mode uses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant
from encke.compiled.names import call_of, root_of
from encke.policies import Comet, Fixed, Policy
from tests.compiled.common import as_inductor_gets_it


class Asked(Policy):
    """Four bits everywhere; remembers for which sites it was asked."""

    def __init__(self) -> None:
        self.sites: dict[Site, Site] = {}

    def choose(self, site: Site) -> Codec:
        self.sites[site] = site
        return GroupQuant(bits=4)


class Repeated(nn.Module):
    """A convolutional network that calls its layers several times and has functions without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(16, 16)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = F.relu(self.norm(self.conv(x)))
        x = self.block(self.block(x))
        x = self.last(self.last(x))
        return (x.tanh() * x.sigmoid() * torch.sigmoid(x + 1)).sum()


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), -1)[..., 0].mean()


def inputs_for(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, Transformer):
        return torch.randint(0, 50, (16, 64), generator=generator)
    return torch.randn(16, 8, 16, 16, generator=generator)


def asked_by(model: nn.Module, backend: str | Callable[..., object] | None) -> dict[Site, Site]:
    """Return the sites for which two training steps ask the policy, without a compiler or with this one."""
    policy, x = Asked(), inputs_for(model)
    torch._dynamo.reset()
    trained = model if backend is None else torch.compile(model, backend=backend)
    handle = encke.attach(trained, policy)
    for _ in range(2):
        trained(x).backward()
    handle.detach()
    return policy.sites


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Repeated, Transformer])
@pytest.mark.parametrize("backend", ["aot_eager", as_inductor_gets_it])
def test_compiled_mode_asks_with_the_keys_of_eager_mode(kind: type[nn.Module], backend) -> None:
    torch.manual_seed(0)
    model = kind()
    eager, compiled = asked_by(copy.deepcopy(model), None), asked_by(model, backend)
    missing = [site.place for site in compiled if site not in eager]
    assert not missing, (missing, [site.place for site in eager])
    assert len(compiled) >= 8
    for site, mine in compiled.items():
        theirs = eager[site]
        assert (mine.place, mine.number, mine.need) == (theirs.place, theirs.number, theirs.need)
        assert (mine.dtype, mine.dimensions) == (theirs.dtype, theirs.dimensions)


def test_names_of_layers_and_operations() -> None:
    node = torch.fx.Graph().placeholder("x")
    for key, path, expected in (
        ("1", "L['self'].blocks.0.norm", ("blocks.0.norm", 0)),
        ("1@2", "L['self']._modules['0']._modules['conv']", ("0.conv", 2)),
        ("1", "L['fn']._orig_mod.module.a[3].b", ("a.3.b", 0)),
        ("", "", ("", 0)),
    ):
        node.meta["nn_module_stack"] = {key: (path, nn.Linear)} if path else {}
        assert call_of(node) == expected
    assert root_of("_native_batch_norm_legit_functional") == root_of("native_batch_norm_backward") == "batch_norm"
    assert root_of("gelu_backward") == root_of("gelu") != root_of("threshold_backward")


@pytest.mark.parametrize("kind", [Repeated, Transformer])
def test_compiled_steps_find_what_collection_steps_decided(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    trained = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = encke.attach(trained, Comet(every=2), optimizer=optimizer)
    policy, asked = handle.policy, []
    assert isinstance(policy, Comet)
    choose = type(policy).choose
    x = inputs_for(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy), "choose", lambda self, site: asked.append(site) or choose(self, site))
        for _ in range(3):
            asked.clear()
            optimizer.zero_grad()
            trained(x).backward()
            optimizer.step()
    # The third step is compiled: none of its sites is a new one for the policy.
    assert all(not site.place_v1 for site in asked)
    places = {site.place for site in asked if site.need == "lossy"}
    assert places and places <= set(policy.settings)


def test_a_state_of_version_1_is_found_by_its_old_keys() -> None:
    model = Repeated()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = encke.attach(model, Comet(every=2), optimizer=optimizer)
    policy = handle.policy
    assert isinstance(policy, Comet)
    for _ in range(2):
        model(inputs_for(model)).backward()
        optimizer.step()
    sites = {facts.site for record in handle._capture.ledger.last for facts in (record.facts, *record.facts.sharers)}
    known = {site: policy.settings[site.place] for site in sites if site.place in policy.settings}
    assert len(known) > 5
    for site in known:
        policy.settings[site.place_v1] = policy.settings.pop(site.place)
    for site, setting in known.items():
        assert policy.choose(site) is setting.codec
    assert set(policy.settings) == {site.place for site in known}


def test_noisy_weights_and_products_of_other_operations_are_not_packed() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(128, 128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(torch.sin(x @ (self.w + torch.ones(128, 128).sin()))).sum(0)

    model = Noisy()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    encke.attach(compiled, Fixed(GroupQuant(2)))
    for _ in range(2):
        mine, theirs = (torch.linspace(-1, 1, 128 * 128).view(128, 128).requires_grad_() for _ in range(2))
        compiled(mine).sum().backward()
        plain(theirs).sum().backward()
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-2)
